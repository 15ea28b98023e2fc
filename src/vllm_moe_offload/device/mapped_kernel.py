"""The Triton program of `mapped.add_mapped`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def add_kernel(total, addend, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``total[i] += addend[i]`` for i below ``rows * WIDTH``.

    Triton knows what divides WIDTH, so that of numbers side by side all or none are inside, and a
    load is of 16 bytes. By single numbers the bus carries eight times the bytes of a bf16 sum.
    """
    # 64 bits: a prompt of many tokens has more numbers than 32 of them count.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows.to(tl.int64) * WIDTH
    # Volatile: never from a cache, since the CPU has just written it.
    added = tl.load(addend + place, mask=inside, volatile=True)
    tl.store(total + place, tl.load(total + place, mask=inside) + added, mask=inside)
