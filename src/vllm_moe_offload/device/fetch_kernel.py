"""The Triton program of `ExpertFetch`: experts from memory, read as they lie, into slots."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["pairs", "count", "rows"])  # type: ignore[untyped-decorator]
def fetch_kernel(  # type: ignore[no-untyped-def]
    pairs,
    count,
    rows,
    busy_ns,
    host,
    slots,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    IS_TIMED: tl.constexpr,
):
    """Copy the experts that are listed, in blocks which the programs take in turn.

    `rows`, HAS_ROWS: expert -> its row of `host`, or -1 for those that are not copied. `host` and
    `slots`: one pointer for each tensor, to words of a size of its own; WORDS: how many of them an
    expert has in each tensor. The turns go on from one tensor to the next, so that no
    program has more than one block more than another, whatever the count. The first one has as many
    as any: how long it took is added to `busy_ns`, which launches of one stream share, IS_TIMED.
    """
    num_programs = tl.num_programs(0)
    listed = tl.load(count)
    began = 0
    if IS_TIMED:
        began = globaltimer()
    first = tl.program_id(0)
    for i in tl.static_range(len(WORDS)):
        words = WORDS[i]
        blocks = (words + BLOCK - 1) // BLOCK
        total = listed * blocks
        for block in range(first, total, num_programs):
            pair = pairs + block // blocks * 2
            row = tl.load(pair).to(tl.int64)
            slot = tl.load(pair + 1).to(tl.int64)
            word = block % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = word < words
            if HAS_ROWS:
                row = tl.load(rows + row).to(tl.int64)
                inside = word < tl.where(row >= 0, words, 0)
            copied = tl.load(host[i] + row * words + word, mask=inside)
            tl.store(slots[i] + slot * words + word, copied, mask=inside)
        # The program whose turn it is now is the first one of the next tensor.
        first = (first + num_programs - total % num_programs) % num_programs
    if IS_TIMED:
        counts = (tl.program_id(0) == 0) & (listed > 0)
        tl.store(busy_ns, tl.load(busy_ns) + (globaltimer() - began), mask=counts)
