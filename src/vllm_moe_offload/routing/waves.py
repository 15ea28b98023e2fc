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
    room = Room.of(table, policy, place, used, misses)
    waves = fill(table, room, place, hits, misses)
    return StepPlan(waves=waves, hits=len(hits), misses=len(misses))


@dataclass(frozen=True)
class Room:
    """What a step finds before its first fetch.

    `evictable`: bool [S]. `unused`: slots that may be overwritten before anything is computed, in
    the order they are taken. `staying`: bool [E + 1], the experts that should be in slots after
    the step; the last entry is for EMPTY. `passing`: how many slots each wave of a step that
    overflows passes its experts through, at least.
    """

    evictable: npt.NDArray[np.bool_]
    unused: npt.NDArray[np.int64]
    staying: npt.NDArray[np.bool_]
    passing: int

    @classmethod
    def of(
        cls,
        table: SlotTable,
        policy: Policy,
        place: npt.NDArray[np.int64],
        used: npt.NDArray[np.bool_],
        misses: npt.NDArray[np.int64],
    ) -> Room:
        """For a step that uses the experts of `used` and fetches those of `misses`."""
        evictable = policy.evictable(table.num_slots)
        return cls(
            evictable=evictable,
            unused=victims(table, place, evictable, used),
            staying=_most_valued(table, place, misses),
            passing=max(1, table.num_slots // PASSING_SHARE),
        )

    def going(self, table: SlotTable, slots: npt.NDArray[np.int64]) -> int:
        """How many of these slots are empty or hold an expert that should not stay."""
        return int(np.count_nonzero(~self.staying[table.expert_of[slots]]))


def fill(
    table: SlotTable,
    room: Room,
    place: npt.NDArray[np.int64],
    hits: npt.NDArray[np.int64],
    misses: npt.NDArray[np.int64],
) -> tuple[Wave, ...]:
    """The waves that compute `hits` and `misses` (least valued first); `table` is brought along."""
    overflows = len(misses) > len(room.unused)
    # After the first wave every resident has been computed or is not used by this step.
    nobody = np.zeros(table.num_experts, np.bool_)

    waves: list[Wave] = []
    ready = hits
    at = 0
    while at < len(misses) or (len(hits) and not waves):
        taken = victims(table, place, room.evictable, nobody) if waves else room.unused
        if overflows:
            taken = taken[: max(room.passing, room.going(table, taken))]
        taken = taken[: len(misses) - at]
        fetched = misses[at : at + len(taken)]
        for expert, slot in zip(fetched, taken, strict=True):
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
        ready = misses[:0]
    return tuple(waves)


def _most_valued(
    table: SlotTable, place: npt.NDArray[np.int64], misses: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Bool [E + 1]: the S most valued of the residents and those fetched; the last is for EMPTY."""
    residents = table.expert_of[table.expert_of != EMPTY]
    candidates = np.concatenate((residents, misses))
    staying = np.zeros(table.num_experts + 1, np.bool_)
    staying[candidates[np.argsort(-place[candidates])][: table.num_slots]] = True
    return staying


def victims(
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
