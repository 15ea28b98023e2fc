"""The Triton kernel of `Playback.play`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total"])  # type: ignore[untyped-decorator]
def play_kernel(  # type: ignore[no-untyped-def]
    weights_table,
    ids_table,
    calls,
    weights,
    ids,
    total,
    entries,
    later,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the rows of this call out of the tables [entries, ROWS, K] into [total / K, K].

    `calls` is read here and advanced by the operation after: programs never race for it.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    row = place // K
    entry = (tl.load(calls) + (row // ROWS).to(tl.int64) * later) % entries
    source = (entry * ROWS + row % ROWS) * K + place % K
    tl.store(weights + place, tl.load(weights_table + source, mask=inside), mask=inside)
    tl.store(ids + place, tl.load(ids_table + source, mask=inside), mask=inside)
