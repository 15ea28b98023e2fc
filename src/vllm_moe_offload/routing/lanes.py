"""What one step does when its number of waves is fixed: the rest of the misses is the CPU's.

A captured step cannot take as many waves as it needs, and need not fetch every miss. So each miss
is either *admitted*, fetched into a slot and computed there, or computed by the CPU lane. Some of
the CPU's are *promoted*: fetched meanwhile, for later steps. What is here is plain Python; a device
makes the same decisions on its own (`device/step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_moe_offload.routing.policy import Policy, make_policy
from vllm_moe_offload.routing.table import EMPTY, SlotTable
from vllm_moe_offload.routing.waves import Room, Wave, fill, victims


@dataclass(frozen=True)
class LanePlan:
    """One step of one layer: every expert it uses is in exactly one wave, or in `cpu`.

    `waves`: as many as were asked for, the unused ones empty. `cpu`: ascending. `promoted`: the
    (expert, slot) pairs, of experts in `cpu`, that are copied beside the waves, into slots that
    none of these reads or fills.
    """

    waves: tuple[Wave, ...]
    cpu: tuple[int, ...]
    hits: int
    misses: int
    promoted: tuple[tuple[int, int], ...] = ()

    @property
    def fetched(self) -> int:
        """How many experts are copied into slots and computed there."""
        return sum(wave.fetched for wave in self.waves)


def waves_needed(limits: npt.NDArray[np.integer], num_ids: int, num_slots: int, policy: str) -> int:
    """How many waves hold all that `limits` lets a step of `num_ids` ids fetch, whatever is used.

    limits: [E + 1], as for `plan_lanes`.
    """
    num_experts = len(limits) - 1
    evictable = int(np.count_nonzero(make_policy(policy, num_experts).evictable(num_slots)))
    most = min(num_ids, num_experts)
    # At worst every hit is in the way of a fetch, which then needs a slot of a later wave.
    hits = np.arange(min(evictable, most) + 1)
    misses = np.arange(num_experts + 1)
    fetched = np.maximum.accumulate(np.minimum(limits, misses))
    return max(-(-int((hits + fetched[most - hits]).max()) // evictable), 1)


def plan_lanes(
    table: SlotTable,
    policy: Policy,
    ids: npt.NDArray[np.integer],
    weights: npt.NDArray[np.floating],
    limits: npt.NDArray[np.integer],
    *,
    cache_topk: int,
    num_waves: int,
    promotions: npt.NDArray[np.integer] | None = None,
) -> LanePlan:
    """Decide one step and bring `table` and `policy` to their state after it.

    Args:
        table: At least one slot.
        policy: Is shown the step here.
        ids: [T, K], the experts of each token; any number outside 0..E-1 is no expert (a row of
            padding has the sentinel E throughout).
        weights: [T, K], those of `ids`.
        limits: [E + 1], how many misses are fetched at most, by how many there are in the step.
        cache_topk: A miss is fetched only if it is, for at least one token, one of that token's so
            many heaviest experts; of equal weights the first in the row counts as the heavier.
        num_waves: How many waves there are.
        promotions: [E + 1], how many of the CPU's experts are promoted at most, by how many misses
            there are; None for none.

    Raises ValueError if there is no wave to fetch into.

    Of the misses that may be fetched the most valued are, as many as the limit allows and the
    waves hold: as long as those suffice they pass through as few slots as in `plan_step`, then
    through more. With enough waves the step is the one of `plan_step`. Of those that are left the
    most valued are promoted, into slots that are empty after the waves or hold an expert that this
    step does not use.
    """
    if num_waves < 1:
        raise ValueError(f"{num_waves} waves leave none to fetch into: give 1 or more")
    used = _marked(table.num_experts, ids)
    policy.observe(used)
    place = policy.order()
    is_miss = used & (table.slot_of == EMPTY)
    hits = np.flatnonzero(used & ~is_miss)
    misses = int(is_miss.sum())

    heavy = _marked(table.num_experts, ids[_heaviest(weights, cache_topk)])
    wanted = np.flatnonzero(is_miss & heavy)
    wanted = wanted[np.argsort(place[wanted])]
    admitted = _last(wanted, int(limits[misses]))
    room = Room.of(table, policy, place, used, admitted)
    need = _slots_a_wave(len(admitted), len(room.unused), num_waves)
    room = replace(room, passing=max(room.passing, need))
    admitted = _last(admitted, _capacity(room, table, hits, num_waves))

    waves = fill(table, room, place, hits, admitted)
    cpu = is_miss
    cpu[admitted] = False
    promoted: tuple[tuple[int, int], ...] = ()
    if promotions is not None:
        left = wanted[: len(wanted) - len(admitted)]
        promoted = _promote(table, room, place, used, left, int(promotions[misses]))
    return LanePlan(
        waves=waves + (Wave((), (), 0),) * (num_waves - len(waves)),
        cpu=tuple(np.flatnonzero(cpu).tolist()),
        hits=len(hits),
        misses=misses,
        promoted=promoted,
    )


def _promote(
    table: SlotTable,
    room: Room,
    place: npt.NDArray[np.int64],
    used: npt.NDArray[np.bool_],
    left: npt.NDArray[np.int64],
    most: int,
) -> tuple[tuple[int, int], ...]:
    """Put the most valued of `left` (least valued first) beside what the waves have left.

    Once a wave has filled or read a slot, an expert of this step is in it: the slots of all others
    are nobody's.
    """
    free = victims(table, place, room.evictable, used)
    experts = _last(left, min(most, len(free)))
    pairs = tuple(zip(experts.tolist(), free[: len(experts)].tolist(), strict=True))
    for expert, slot in pairs:
        table.place(expert, slot)
    return pairs


def _marked(num_experts: int, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Bool [E]: the experts that `ids` names."""
    marks = np.zeros(num_experts, np.bool_)
    marks[ids[(ids >= 0) & (ids < num_experts)]] = True
    return marks


def _heaviest(weights: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.bool_]:
    """Bool [T, K]: the `count` heaviest of each row, the first ones of equals."""
    this, other = weights[:, :, None], weights[:, None, :]
    k = np.arange(weights.shape[1])
    goes_before = (other > this) | ((other == this) & (k[None, :] < k[:, None]))
    is_heavy: npt.NDArray[np.bool_] = goes_before.sum(2) < count
    return is_heavy


def _last(experts: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The most valued `count` of experts that are sorted by value."""
    return experts[max(len(experts) - count, 0) :]


def _slots_a_wave(num_admitted: int, unused: int, num_waves: int) -> int:
    """Through how many slots each wave has to pass its experts so that the waves suffice."""
    if num_waves == 1:
        return num_admitted
    alike = -(-num_admitted // num_waves)
    # Where the first wave has fewer slots than that, the later ones take what it leaves.
    return alike if alike <= unused else -(-(num_admitted - unused) // (num_waves - 1))


def _capacity(room: Room, table: SlotTable, hits: npt.NDArray[np.int64], num_waves: int) -> int:
    """How many misses, the least valued of them left out, so many waves hold.

    The first fills the slots it takes from unused experts; each later one takes those of the
    experts that the step has finished with and that are not to stay: the hits among them and what
    the wave before brought.
    """
    first = min(len(room.unused), max(room.passing, room.going(table, room.unused)))
    slots = table.slot_of[hits].astype(np.int64)
    leaving = room.going(table, slots[room.evictable[slots]])
    evictable = int(np.count_nonzero(room.evictable))
    later = min(evictable, max(room.passing, leaving + first))
    return first + (num_waves - 1) * later
