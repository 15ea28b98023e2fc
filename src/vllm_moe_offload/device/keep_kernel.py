"""The Triton program of `DeviceKeep`: what a streamed step leaves in the slots of one layer.

In one block of threads, as `step_kernel`, whose helpers it takes. The names follow
`routing/kept.py`, which says what is decided and why.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_moe_offload.device.step_kernel import PASSING_SHARE, by_value, count_use, fill


@triton.jit  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    ids,
    requests,
    uses,
    turn,
    num_requests,
    E: tl.constexpr,
    K: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Write `turn` where an expert is used: `uses` is [LAST, N]. Returns what has elapsed."""
    shortest = tl.full([BLOCK], LAST, tl.int32)
    is_some = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_requests * LAST * K, BLOCK):
        place = start + tl.arange(0, BLOCK)
        request = place // (LAST * K)
        inside = request < num_requests
        begin = tl.load(requests + request, mask=inside, other=0)
        end = tl.load(requests + request + 1, mask=inside, other=0)
        shortest = tl.where(end > begin, tl.minimum(shortest, end - begin), shortest)
        is_some = tl.where(end > begin, 1, is_some)
        ago = place // K % LAST
        row = end - 1 - ago
        inside = inside & (row >= begin)
        expert = tl.load(ids + row.to(tl.int64) * K + place % K, mask=inside, other=E).to(tl.int32)
        tl.store(uses + ago * N + expert, turn, mask=inside & (expert >= 0) & (expert < E))
    return tl.min(shortest, 0) * tl.max(is_some, 0)


@triton.jit(do_not_specialize=["num_requests", "num_slots"])  # type: ignore[untyped-decorator]
def keep_kernel(  # type: ignore[no-untyped-def]
    ids,
    requests,
    at_hand,
    uses,
    turns,
    step,
    slot_of,
    last_used,
    value,
    pairs,
    count,
    total_count,
    num_requests,
    num_slots,
    E: tl.constexpr,
    K: tl.constexpr,
    POLICY: tl.constexpr,
    ALL_AT_HAND: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Decide what is kept of one step. `DeviceKeep` describes the arguments.

    `turns` makes the marks of this launch differ from those of all before, so that none is cleared.
    """
    turn = tl.load(turns) + 1
    expert = tl.arange(0, N)
    valid = expert < E
    elapsed = _mark(ids, requests, uses, turn, num_requests, E, K, LAST, BLOCK, N)
    tl.debug_barrier()

    # As in `observe_last`: the shared rows on what the policy has counted, all of them on nothing.
    counted = tl.load(value + expert, mask=valid, other=0)
    alone = tl.zeros([N], tl.int32)
    latest = tl.full([N], LAST, tl.int32)
    for back in range(LAST):
        ago = LAST - 1 - back
        used = tl.load(uses + ago * N + expert, mask=valid, other=0) == turn
        latest = tl.where(used, ago, latest)
        alone = count_use(alone, used, POLICY)
        if ago < elapsed:
            counted = count_use(counted, used, POLICY)
    counted = tl.maximum(counted, alone)
    now = tl.load(step) + elapsed
    used_at = tl.load(last_used + expert, mask=valid, other=0)
    used_at = tl.where(latest < LAST, tl.maximum(used_at, now - latest), used_at)
    tl.store(value + expert, counted, mask=valid)
    tl.store(last_used + expert, used_at, mask=valid)
    slot = tl.load(slot_of + expert, mask=valid, other=-1)
    wanted = (latest < LAST) & (slot < 0) & valid
    if not ALL_AT_HAND:
        wanted = wanted & (tl.load(at_hand + expert, mask=valid, other=-1) >= 0)
    # By the experts' numbers, for what follows to read in another order: `uses` is done with.
    tl.debug_barrier()
    tl.store(uses + expert, tl.where(wanted, turn, 0), mask=valid)
    tl.debug_barrier()

    # From here on from the least valued expert to the most valued one.
    expert = by_value(expert, counted, now - used_at, E, POLICY)
    valid = expert < E
    slot = tl.load(slot_of + expert, mask=valid, other=-1)
    wanted = (tl.load(uses + expert, mask=valid, other=0) == turn) & valid
    evictable = num_slots
    if POLICY == "static":
        evictable = tl.maximum(num_slots // PASSING_SHARE, 1)
    victims = (slot >= num_slots - evictable) & (slot >= 0)
    first_empty = tl.sum((slot >= 0).to(tl.int32), 0)
    num_empty = num_slots - first_empty
    rank = num_empty + tl.cumsum(victims.to(tl.int32), 0) - 1
    above = tl.sum(wanted.to(tl.int32), 0) - tl.cumsum(wanted.to(tl.int32), 0)
    # The slot of this expert's turn is empty, or its expert is less valued.
    kept = wanted & (above <= rank)
    num_kept = tl.sum(kept.to(tl.int32), 0)
    slot, _copied = fill(
        pairs, expert, slot, kept, above, victims, rank, num_kept, first_empty, num_empty
    )
    tl.store(slot_of + expert, slot, mask=valid)
    tl.store(count, num_kept)
    tl.store(total_count, tl.load(total_count) + num_kept)
    tl.store(step, now)
    tl.store(turns, turn)
