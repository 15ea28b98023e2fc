"""Python processes of their own, and how they end."""

from __future__ import annotations

import subprocess
import sys


def printed_by(code: str, seconds: float = 60) -> str:
    """What an interpreter printed that ran this to its end; it has to end well and say no more."""
    # From 3.12 on Python warns of a fork beside threads, which is what some of this is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout
