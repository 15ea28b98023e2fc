"""Amounts of memory in words."""

from __future__ import annotations

_MIB = 2**20
_GIB = 2**30


def amount(nbytes: int) -> str:
    """So many bytes for logs and errors: in GiB, or in MiB where that would show little of them."""
    if nbytes < 0.1 * _GIB:
        return f"{nbytes / _MIB:.1f} MiB"
    return f"{nbytes / _GIB:.2f} GiB"
