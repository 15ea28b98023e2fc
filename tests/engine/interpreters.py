"""Python processes of their own, and how they end."""

from __future__ import annotations

import subprocess
import sys


def printed_by(code: str, seconds: float = 60) -> str:
    """What an interpreter printed that ran this to its end; it has to end well and say no more."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout
