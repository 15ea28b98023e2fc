"""Properties of a step, for every policy, capacity and routing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_offload.routing import POLICIES, Residency, SlotTable, StepPlan

EMPTY = -1


def as_mask(num_experts: int, used: set[int]) -> np.ndarray:
    mask = np.zeros(num_experts, np.bool_)
    mask[list(used)] = True
    return mask


def assert_bijection(table: SlotTable) -> None:
    for slot, expert in enumerate(table.expert_of):
        assert expert == EMPTY or table.slot_of[expert] == slot
    for expert, slot in enumerate(table.slot_of):
        assert slot == EMPTY or table.expert_of[slot] == expert


def replay(before: np.ndarray, plan: StepPlan, used: set[int]) -> np.ndarray:
    """Carry the plan out on a plain list of slots, checking every wave; returns the contents."""
    slots = before.copy()
    done: set[int] = set()
    hits = {int(e) for e in before if e in used}
    assert plan.hits == len(hits)
    assert plan.misses == len(used - hits)
    fetched_in_all: list[int] = []
    for number, wave in enumerate(plan.waves):
        assert len(set(wave.slots)) == len(wave.slots), "two experts in one slot"
        for expert, slot in wave.fetches:
            evicted = int(slots[slot])
            assert evicted not in used or evicted in done, "evicted before it was computed"
            slots[slot] = expert
            fetched_in_all.append(expert)
        for expert, slot in zip(wave.experts, wave.slots, strict=True):
            assert slots[slot] == expert, "the expert is not where the wave says"
            assert expert not in done, "computed twice"
        done |= set(wave.experts)
        if number == 0:
            assert hits <= done, "a hit has to be computed before anything can evict it"
    assert done == used, "an expert was dropped"
    assert sorted(fetched_in_all) == sorted(used - hits), "each miss is fetched exactly once"
    return slots


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, int, list[set[int]]]:
    num_experts = draw(st.integers(1, 24))
    num_slots = draw(st.integers(1, num_experts))
    expert = st.integers(0, num_experts - 1)
    steps = draw(st.lists(st.sets(expert, max_size=num_experts), min_size=1, max_size=12))
    return num_experts, num_slots, steps


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=150, deadline=None)
@given(routing=routings())
def test_a_step_computes_every_used_expert_once_and_keeps_the_table(
    policy: str, routing: tuple[int, int, list[set[int]]]
) -> None:
    num_experts, num_slots, steps = routing
    residency = Residency(num_experts, num_slots, policy)
    for used in steps:
        before = residency.table.expert_of.copy()
        plan = residency.step(as_mask(num_experts, used))
        after = replay(before, plan, used)
        np.testing.assert_array_equal(after, residency.table.expert_of)
        assert_bijection(residency.table)


@pytest.mark.parametrize("policy", ["lfru", "lru", "lfu"])
@settings(max_examples=150, deadline=None)
@given(routing=routings())
def test_with_room_for_all_there_is_one_wave_and_no_used_expert_leaves(
    policy: str, routing: tuple[int, int, list[set[int]]]
) -> None:
    num_experts, num_slots, steps = routing
    residency = Residency(num_experts, num_slots, policy)
    for used in steps:
        plan = residency.step(as_mask(num_experts, used))
        if len(used) <= num_slots:
            assert len(plan.waves) == (1 if used else 0)
            assert used <= set(residency.table.expert_of.tolist())
        else:
            passing = max(1, num_slots // 4)
            assert len(plan.waves) <= 1 + -(-plan.misses // passing)


def test_a_step_that_overflows_keeps_the_most_valued() -> None:
    residency = Residency(num_experts=8, num_slots=3, policy="lfu")
    for _ in range(5):
        residency.step(as_mask(8, {0, 1, 2}))
    residency.step(as_mask(8, set(range(8))))
    assert len({0, 1, 2} & set(residency.table.expert_of.tolist())) == 2


def test_a_step_of_every_expert_takes_few_waves() -> None:
    residency = Residency(num_experts=128, num_slots=32, policy="lfru")
    for _ in range(3):
        plan = residency.step(np.ones(128, np.bool_))
        assert len(plan.waves) <= 1 + 128 // 8


def test_resize_starts_empty_and_keeps_what_the_policy_saw() -> None:
    residency = Residency(num_experts=6, num_slots=2, policy="lfu")
    for _ in range(3):
        residency.step(as_mask(6, {0, 1}))  # a policy that had seen nothing would let these go
    residency.resize(3)
    assert residency.table.expert_of.tolist() == [EMPTY] * 3
    residency.step(as_mask(6, {0, 1, 2, 4, 5}))
    assert {0, 1} <= set(residency.table.expert_of.tolist())


def test_invalidate_makes_every_expert_a_miss() -> None:
    residency = Residency(num_experts=4, num_slots=4, policy="lru")
    residency.step(as_mask(4, {0, 1}))
    residency.invalidate()
    assert residency.step(as_mask(4, {0, 1})).misses == 2


@pytest.mark.parametrize("num_slots", [0, -1, 5])
def test_a_number_of_slots_that_cannot_be_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match=r"slots?"):
        Residency(num_experts=4, num_slots=num_slots, policy="lru")
