"""Amounts of memory in words."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context

_KIB = 2**10
_MIB = 2**20
_GIB = 2**30


def amount(nbytes: int, like: int | None = None) -> str:
    """So many bytes for logs and errors, in GiB, or smaller units where these would show little.

    like: another amount, in whose unit it is told.
    """
    shown = nbytes if like is None else like
    if shown < 0.1 * _MIB:
        return f"{nbytes / _KIB:.1f} KiB"
    if shown < 0.1 * _GIB:
        return f"{nbytes / _MIB:.1f} MiB"
    return f"{nbytes / _GIB:.2f} GiB"


def gib_for(nbytes: int) -> str:
    """The number of GiB that holds so many bytes, three digits of it, rounded up."""
    up = Context(prec=3, rounding=ROUND_CEILING)
    return f"{up.create_decimal_from_float(nbytes / _GIB):f}"
