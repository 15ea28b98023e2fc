"""The Triton programs of `CpuRequest`: hand rows to the CPU lane, take its partial sums back."""

from __future__ import annotations

import triton
import triton.language as tl


# The flags of different mailboxes are aligned differently: that is no reason to compile again.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["request", "mail_tokens", "answer", "tokens"]
)
def submit_kernel(  # type: ignore[no-untyped-def]
    x,
    ids,
    weights,
    cpu_map,
    mail_x,
    mail_ids,
    mail_weights,
    mail_map,
    request,
    mail_tokens,
    answer,
    arrived,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    ASKED: tl.constexpr,
    DONE: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Write the step's operands, then ask for it: the GPU's part of doorbell.h's order.

    `arrived` counts the programs that have written their part, and is 0 between launches. N: a
    power of two, at least E.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    expert = tl.arange(0, N)
    mapped = tl.load(cpu_map + expert, mask=expert < E, other=-1)
    if tl.max(mapped, 0) >= 0:
        # All three at once: a load that stands behind a store waits for it.
        for block in range(program, tl.cdiv(tokens * max(H, K), BLOCK), num_programs):
            place = block * BLOCK + tl.arange(0, BLOCK)
            of_x = place < tokens * H
            routed = place < tokens * K
            row = tl.load(x + place, mask=of_x)
            to = tl.load(ids + place, mask=routed)
            weight = tl.load(weights + place, mask=routed)
            tl.store(mail_x + place, row, mask=of_x)
            tl.store(mail_ids + place, to.to(tl.int32), mask=routed)
            tl.store(mail_weights + place, weight.to(tl.float32), mask=routed)
        if program == 0:
            tl.store(mail_map + expert, mapped, mask=expert < E)
            tl.store(mail_tokens, tokens)
            tl.store(answer, 0)
        # After the barrier all threads of this program have written. Counting is one thread's
        # fence towards the whole system, over all that it has seen; so whoever counts last has
        # every program's writes behind it. The flag is a plain store: an atomic operation on
        # memory of the host needs a bus that knows it.
        tl.debug_barrier()
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
        if before == num_programs - 1:
            tl.store(arrived, 0)
            tl.store(request, ASKED)
    else:
        if program == 0:
            tl.store(answer, DONE)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def join_kernel(  # type: ignore[no-untyped-def]
    resident,
    partial,
    cpu_map,
    out,
    tokens,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """`out` = `resident`, plus `partial` where the CPU has an expert in this step."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tokens * H
    value = tl.load(resident + place, mask=inside).to(tl.float32)
    expert = tl.arange(0, N)
    if tl.max(tl.load(cpu_map + expert, mask=expert < E, other=-1), 0) >= 0:
        # Volatile: never from a cache, since the CPU has just written it.
        value += tl.load(partial + place, mask=inside, volatile=True)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
