"""Amounts of memory in words."""

from __future__ import annotations

_KIB = 2**10
_MIB = 2**20
_GIB = 2**30


def amount(nbytes: int) -> str:
    """So many bytes for logs and errors, in GiB, or smaller units where these would show little."""
    if nbytes < 0.1 * _MIB:
        return f"{nbytes / _KIB:.1f} KiB"
    if nbytes < 0.1 * _GIB:
        return f"{nbytes / _MIB:.1f} MiB"
    return f"{nbytes / _GIB:.2f} GiB"
