"""What one step does: which experts are fetched into which slots, and in which order computed.

A *wave* is a set of experts that are in slots at the same time. Experts already in slots are
computed in the first wave. A step that needs more experts than there are slots takes several:
each later wave overwrites slots whose experts this step has finished with. Such a step passes most
of its experts through the slots of the least valued ones, and at least through a quarter of all
slots: fewer would mean more and smaller waves, more would drive out experts that the next step is
likely to use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_moe_offload.routing.policy import Policy
from vllm_moe_offload.routing.table import EMPTY, SlotTable

# A step of more experts than slots passes them through at least 1/PASSING_SHARE of the slots.
PASSING_SHARE = 4


@dataclass(frozen=True)
class Wave:
    """Experts computed together, and what has to be fetched before.

    `experts`: every expert this wave computes. `slots`: where each of them is, in the same order.
    `fetched`: how many of them, the last ones, are copied from host memory first.
    """

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    fetched: int

    @property
    def fetches(self) -> tuple[tuple[int, int], ...]:
        """The (expert, slot) pairs to copy."""
        start = len(self.experts) - self.fetched
        return tuple(zip(self.experts[start:], self.slots[start:], strict=True))


@dataclass(frozen=True)
class StepPlan:
    """One step of one layer: every expert the step uses is in exactly one wave."""

    waves: tuple[Wave, ...]
    hits: int
    misses: int


def plan_step(table: SlotTable, policy: Policy, used: npt.NDArray[np.bool_]) -> StepPlan:
    """Decide one step and bring `table` to its state after it. `used`: bool [E].

    The policy must have observed the step. An expert the step uses is never evicted before it is
    computed, and not at all when the misses fit into empty slots and slots of unused experts.
    Misses go in from the least valued to the most valued, so that the most valued stay.
    """
    place = policy.order()
    needed = np.flatnonzero(used)
    in_slot = table.slot_of[needed] != EMPTY
    hits = needed[in_slot]
    misses = needed[~in_slot]
    misses = misses[np.argsort(place[misses])]
    evictable = policy.evictable(table.num_slots)

    passing = max(1, table.num_slots // PASSING_SHARE)
    staying = _most_valued(table, place, needed)
    overflows = len(misses) > len(_victims(table, place, evictable, used))

    waves: list[Wave] = []
    ready = hits
    busy = used
    at = 0
    while at < len(misses) or (len(hits) and not waves):
        victims = _victims(table, place, evictable, busy)
        if overflows:
            going = np.count_nonzero(~staying[table.expert_of[victims]])
            victims = victims[: max(passing, going)]
        victims = victims[: len(misses) - at]
        fetched = misses[at : at + len(victims)]
        for expert, slot in zip(fetched, victims, strict=True):
            table.place(int(expert), int(slot))
        experts = np.concatenate((ready, fetched))
        waves.append(
            Wave(
                experts=tuple(experts.tolist()),
                slots=tuple(table.slot_of[experts].tolist()),
                fetched=len(fetched),
            )
        )
        at += len(fetched)
        # From the second wave on every resident has been computed or is not used by this step.
        ready = misses[:0]
        busy = np.zeros_like(used)
    return StepPlan(waves=tuple(waves), hits=len(hits), misses=len(misses))


def _most_valued(
    table: SlotTable, place: npt.NDArray[np.int64], needed: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Bool [E + 1]: those that should be in slots after the step; the last entry is for EMPTY."""
    residents = table.expert_of[table.expert_of != EMPTY]
    candidates = np.union1d(residents, needed)
    staying = np.zeros(table.num_experts + 1, np.bool_)
    staying[candidates[np.argsort(-place[candidates])][: table.num_slots]] = True
    return staying


def _victims(
    table: SlotTable,
    place: npt.NDArray[np.int64],
    evictable: npt.NDArray[np.bool_],
    busy: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Slots that may be overwritten now: the empty ones first, then by the policy's order."""
    empty = np.flatnonzero(table.expert_of == EMPTY)
    taken = np.flatnonzero((table.expert_of != EMPTY) & evictable)
    residents = table.expert_of[taken]
    free = ~busy[residents]
    taken, residents = taken[free], residents[free]
    return np.concatenate((empty, taken[np.argsort(place[residents])]))
