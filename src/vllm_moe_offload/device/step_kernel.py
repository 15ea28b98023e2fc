"""The Triton program of `DeviceStep`: one layer's decisions of one step, in one block of threads.

The experts are sorted by value once. From then on every rank it needs (of the misses, of the slots
that may be overwritten, of the experts that should stay) is a running count over the sorted ones,
so that a wave costs one such count and one exchange through memory: each slot that is overwritten
writes its number where the expert of the same rank reads it. `tl.debug_barrier` stands between a
store and the load of it by another thread.

The names follow `routing/lanes.py` and `routing/waves.py`, which say what is decided and why.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The sorting key, in bits from the top: value, recency, expert. Ages are counted up to MAX_AGE;
# experts unused for longer (a day at 100 steps/s) are equally old.
EXPERT_BITS = tl.constexpr(9)
EXPERT_MASK = tl.constexpr((1 << 9) - 1)
MAX_AGE = tl.constexpr((1 << 23) - 1)
VALUE_SHIFT = tl.constexpr(9 + 23)
LAST_KEY = tl.constexpr((1 << 63) - (1 << 9))

# A count of up to 512 experts; three of them fit into 32 bits.
COUNT_BITS = tl.constexpr(10)
COUNT_MASK = tl.constexpr((1 << 10) - 1)

# As in routing/policy.py and routing/waves.py.
ONE = tl.constexpr(1 << 16)
DECAY_SHIFT = tl.constexpr(5)
PASSING_SHARE = tl.constexpr(4)

NUM_COUNTERS = tl.constexpr(8)


@triton.jit  # type: ignore[untyped-decorator]
def _observe(  # type: ignore[no-untyped-def]
    ids,
    weights,
    last_used,
    last_heavy,
    now,
    total,
    E: tl.constexpr,
    K: tl.constexpr,
    CACHE_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Date with `now` the experts of this step, and those that a token weighs heavily enough.

    Returns how many rows are tokens.
    """
    tokens = tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < total
        expert = tl.load(ids + place, mask=inside, other=E).to(tl.int32)
        is_expert = (expert >= 0) & (expert < E)
        tokens += (is_expert & (place % K == 0)).to(tl.int32)
        # Loads first: after a store they would wait for what it waits for.
        if CACHE_TOPK < K:
            rank = tl.zeros([BLOCK], tl.int32)
            this = tl.load(weights + place, mask=inside, other=0.0)
            row = place // K * K
            for k in tl.static_range(K):
                other = tl.load(weights + row + k, mask=inside, other=0.0)
                goes_before = (other > this) | ((other == this) & (row + k < place))
                rank += goes_before.to(tl.int32)
            tl.store(last_heavy + expert, now, mask=is_expert & (rank < CACHE_TOPK))
        tl.store(last_used + expert, now, mask=is_expert)
    return tl.sum(tokens, 0)


@triton.jit  # type: ignore[untyped-decorator]
def count_use(value, used, POLICY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the policy counts, after a step that uses the experts marked."""
    if POLICY == "lfru":
        value = value - (value >> DECAY_SHIFT) + tl.where(used, ONE, 0)
    if POLICY == "lfu":
        value = value + used.to(tl.int32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def by_value(expert, value, age, E: tl.constexpr, POLICY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The experts from the least valued one to the most valued one; numbers from E on are last."""
    age = tl.where(age < 0, MAX_AGE, tl.minimum(age, MAX_AGE))  # below zero: wrapped around
    score = tl.zeros_like(expert).to(tl.int64)
    if POLICY == "lfru":
        score = (value // (1 + age)).to(tl.int64)
    if POLICY == "lfu":
        score = value.to(tl.int64)
    recency = (age ^ MAX_AGE).to(tl.int64)  # MAX_AGE - age: MAX_AGE is all ones
    key = (score << VALUE_SHIFT) | (recency << EXPERT_BITS) | expert
    key = tl.sort(tl.where(expert < E, key, key | LAST_KEY))
    return (key & EXPERT_MASK).to(tl.int32)


@triton.jit
def _pack(a, b, c):  # type: ignore[no-untyped-def]
    """Three marks in one number, so that one sum or running sum counts all three."""
    return a.to(tl.int32) | (b.to(tl.int32) << COUNT_BITS) | (c.to(tl.int32) << (2 * COUNT_BITS))


@triton.jit
def _unpack(counts):  # type: ignore[no-untyped-def]
    """The three counts."""
    return (
        counts & COUNT_MASK,
        (counts >> COUNT_BITS) & COUNT_MASK,
        counts >> (2 * COUNT_BITS),
    )


@triton.jit
def fill(  # type: ignore[no-untyped-def]
    pairs, expert, slot, admitted, turn, victims, rank, count, first_empty, num_empty
):
    """List the `count` experts whose turn it is with the slots they get: empty ones, then victims'.

    Returns the experts' slots after it, and which experts are fetched.
    """
    taken = victims & (rank < count)
    tl.store(pairs + rank * 2 + 1, slot, mask=taken)
    tl.debug_barrier()
    fetched = admitted & (turn >= 0) & (turn < count)
    into_empty = turn < num_empty
    into = tl.load(pairs + turn * 2 + 1, mask=fetched & ~into_empty, other=0)
    into = tl.where(into_empty, first_empty + turn, into)
    tl.store(pairs + turn * 2, expert, mask=fetched)
    tl.store(pairs + turn * 2 + 1, into, mask=fetched & into_empty)
    return tl.where(fetched, into, tl.where(taken, -1, slot)), fetched


@triton.jit(do_not_specialize=["total", "num_slots", "num_waves"])  # type: ignore[untyped-decorator]
def step_kernel(  # type: ignore[no-untyped-def]
    ids,
    weights,
    limits,
    step,
    slot_of,
    last_used,
    last_heavy,
    value,
    expert_maps,
    cpu_map,
    fetches,
    fetch_counts,
    promoted,
    promoted_count,
    counters,
    total,
    num_slots,
    num_waves,
    E: tl.constexpr,
    K: tl.constexpr,
    POLICY: tl.constexpr,
    CACHE_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Decide one step. `DeviceStep` describes the arguments; `total` is T * K.

    The slots that are empty are always the last ones. BLOCK: how many ids are read at once; N: a
    power of two, at least E.
    """
    now = tl.load(step) + 1
    counter = tl.arange(0, NUM_COUNTERS)
    counted = tl.load(counters + counter)

    # By the experts' numbers: the state after the step's use of them, and how they are sorted.
    expert = tl.arange(0, N)
    valid = expert < E
    old_value = tl.load(value + expert, mask=valid, other=0)
    slot = tl.load(slot_of + expert, mask=valid, other=-1)
    tokens = _observe(ids, weights, last_used, last_heavy, now, total, E, K, CACHE_TOPK, BLOCK)
    tl.debug_barrier()
    age = now - tl.load(last_used + expert, mask=valid, other=0)
    used = (age == 0) & valid
    marks = _pack(used & (slot >= 0), used & (slot < 0), slot >= 0)
    hits, misses, first_empty = _unpack(tl.sum(marks, 0))
    limit = tl.load(limits + misses)
    most_promoted = tl.load(limits + E + 1 + misses)

    counted_value = count_use(old_value, used, POLICY)
    tl.store(value + expert, counted_value, mask=valid)

    # From here on from the least valued expert to the most valued one.
    expert = by_value(expert, counted_value, age, E, POLICY)
    valid = expert < E
    slot = tl.load(slot_of + expert, mask=valid, other=-1)
    used = (tl.load(last_used + expert, mask=valid, other=0) == now) & valid
    in_slot = slot >= 0
    is_hit = used & in_slot
    is_miss = used & (slot < 0)
    heavy = is_miss
    if CACHE_TOPK < K:
        heavy = is_miss & (tl.load(last_heavy + expert, mask=valid, other=0) == now)

    evictable = num_slots
    passing = tl.maximum(num_slots // PASSING_SHARE, 1)
    if POLICY == "static":
        evictable = passing
    may_leave = in_slot & (slot >= num_slots - evictable)
    victims = may_leave & ~used

    # Of each kind: how many there are, and how many of higher value than this expert.
    marks = _pack(heavy, in_slot, victims)
    counts = tl.sum(marks, 0)
    num_heavy, _, unused = _unpack(counts)
    heavy_above, in_slot_above, victims_above = _unpack(counts - tl.cumsum(marks, 0))
    num_empty = num_slots - first_empty
    num_admitted = tl.minimum(num_heavy, limit)
    rank = num_empty + unused - 1 - victims_above
    unused += num_empty

    # What the waves hold; the rest of the misses is the CPU's, the least valued first.
    room = unused
    capacity = unused
    staying = in_slot
    if num_waves > 1:
        need = (num_admitted + num_waves - 1) // num_waves
        if need > unused:
            need = (num_admitted - unused + num_waves - 2) // (num_waves - 1)
        passing = tl.maximum(passing, need)
        admitted = heavy & (heavy_above < num_admitted)
        higher = in_slot_above + tl.minimum(heavy_above, num_admitted)
        staying = (in_slot | admitted) & (higher < num_slots)
        marks = _pack(victims & ~staying, is_hit & may_leave & ~staying, staying)
        going, leaving, _ = _unpack(tl.sum(marks, 0))
        room = tl.minimum(unused, tl.maximum(passing, num_empty + going))
        later = tl.minimum(evictable, tl.maximum(passing, leaving + room))
        capacity = room + (num_waves - 1) * later
    num_admitted = tl.minimum(num_admitted, capacity)
    room = tl.where(num_admitted > unused, room, unused)
    admitted = heavy & (heavy_above < num_admitted)
    turn = num_admitted - 1 - heavy_above

    count = tl.minimum(num_admitted, room)
    slot, computed = fill(
        fetches, expert, slot, admitted, turn, victims, rank, count, first_empty, num_empty
    )
    tl.store(fetch_counts, count)
    computed |= is_hit
    waves = (hits + count > 0).to(tl.int32)
    filled = tl.minimum(count, num_empty)
    tl.store(expert_maps + expert, tl.where(computed, slot, -1), mask=valid)
    at = count
    for wave in range(1, num_waves):
        # Every resident has been computed by now or is not used by this step.
        victims = (slot >= num_slots - evictable) & (slot >= 0)
        rank = tl.cumsum(victims.to(tl.int32), 0) - 1
        going = tl.sum((victims & ~staying).to(tl.int32), 0)
        room = tl.minimum(evictable, tl.maximum(passing, going))
        count = tl.minimum(num_admitted - at, room)
        pairs = fetches + wave * E * 2
        slot, computed = fill(
            pairs, expert, slot, admitted, turn - at, victims, rank, count, first_empty, 0
        )
        tl.store(fetch_counts + wave, count)
        maps = expert_maps + wave * (E + 1)
        tl.store(maps + expert, tl.where(computed, slot, -1), mask=valid)
        at += count
        waves += (count > 0).to(tl.int32)

    # For later steps. Any slot that a wave has read or filled holds an expert of this step by now.
    count = tl.minimum(num_heavy - num_admitted, most_promoted)
    if count > 0:
        victims = (slot >= num_slots - evictable) & (slot >= 0) & ~used
        left_empty = num_empty - filled
        rank = left_empty + tl.cumsum(victims.to(tl.int32), 0) - 1
        count = tl.minimum(count, left_empty + tl.sum(victims.to(tl.int32), 0))
        turn = num_admitted + count - 1 - heavy_above
        slot, _promoted = fill(
            promoted,
            expert,
            slot,
            heavy,
            turn,
            victims,
            rank,
            count,
            first_empty + filled,
            left_empty,
        )
    tl.store(promoted_count, count)

    tl.store(slot_of + expert, slot, mask=valid)
    on_cpu = is_miss & ~admitted
    tl.store(cpu_map + expert, tl.where(on_cpu, expert, -1), mask=valid)
    counted += tl.where(counter == 0, (tokens > 0).to(tl.int32), 0)
    counted += tl.where(counter == 1, tokens, 0)
    counted += tl.where(counter == 2, hits, 0)
    counted += tl.where(counter == 3, misses, 0)
    counted += tl.where(counter == 4, num_admitted, 0)
    counted += tl.where(counter == 5, misses - num_admitted, 0)
    counted += tl.where(counter == 6, waves, 0)
    counted += tl.where(counter == 7, count, 0)
    tl.store(counters + counter, counted)
    tl.store(step, now)
