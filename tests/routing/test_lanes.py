"""Properties of a step of a fixed number of waves, for every policy, capacity and routing."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.routing.steps import Layer, layers, steps, used_by
from tests.routing.test_waves import as_mask, assert_bijection
from tests.routing.test_waves import replay as replay_waves
from vllm_moe_offload.routing import (
    POLICIES,
    LanePlan,
    Residency,
    SlotTable,
    StepPlan,
    make_policy,
    plan_lanes,
    waves_needed,
)

SEED = st.integers(0, 2**32 - 1)


def replay(before: np.ndarray, plan: LanePlan, used: set[int]) -> np.ndarray:
    """Carry the plan out on a plain list of slots, checking everything; returns the contents."""
    assert len(plan.waves) and set(plan.cpu) <= used
    assert len(plan.cpu) == len(set(plan.cpu)) == plan.misses - plan.fetched
    waves = StepPlan(waves=plan.waves, hits=plan.hits, misses=plan.fetched)
    slots = replay_waves(before, waves, used - set(plan.cpu))
    # Copied beside the waves, at any time.
    read_or_filled = {slot for wave in plan.waves for slot in wave.slots}
    assert len({slot for _, slot in plan.promoted}) == len(plan.promoted)
    for expert, slot in plan.promoted:
        assert expert in plan.cpu
        assert slot not in read_or_filled, "promoted into a slot that this step reads or fills"
        slots[slot] = expert
    return slots


def heavy(ids: np.ndarray, weights: np.ndarray, count: int) -> set[int]:
    """By sorting, where `plan_lanes` compares pairs."""
    rows = zip(ids.tolist(), weights.tolist(), strict=True)
    return {row[k] for row, w in rows for k in sorted(range(len(w)), key=lambda k: -w[k])[:count]}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=SEED)
def test_every_used_expert_is_in_one_wave_or_on_the_cpu(
    policy: str, data: st.DataObject, seed: int
) -> None:
    layer = data.draw(layers(policy))
    table = SlotTable(layer.num_experts, layer.num_slots)
    seen = make_policy(policy, layer.num_experts)
    for ids, weights, limits, promotions in steps(layer, np.random.default_rng(seed), 8):
        before = table.expert_of.copy()
        plan = plan_lanes(table, seen, ids, weights, limits, promotions=promotions, **layer.lanes)
        after = replay(before, plan, used_by(ids, layer.num_experts))
        np.testing.assert_array_equal(after, table.expert_of)
        assert_bijection(table)
        assert len(plan.waves) == layer.num_waves
        empty = table.expert_of < 0
        assert not np.any(empty[:-1] & ~empty[1:]), "an empty slot before a filled one"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), seed=SEED)
def test_what_is_fetched_is_heavy_and_the_most_valued_and_as_much_as_there_may_be(
    data: st.DataObject, seed: int
) -> None:
    layer = data.draw(layers())
    table = SlotTable(layer.num_experts, layer.num_slots)
    policy = make_policy(layer.policy, layer.num_experts)
    for ids, weights, limits, _ in steps(layer, np.random.default_rng(seed), 8):
        before = deepcopy((table, policy))
        plan = plan_lanes(table, policy, ids, weights, limits, **layer.lanes)
        fetched = {e for wave in plan.waves for e, _ in wave.fetches}
        missed = fetched | set(plan.cpu)
        may = missed & heavy(ids, weights, layer.cache_topk)
        assert fetched <= may
        assert len(fetched) <= limits[plan.misses]
        place = policy.order()
        assert not fetched or all(place[e] < min(place[list(fetched)]) for e in may - fetched), (
            "a more valued one was left to the CPU"
        )
        if len(fetched) < min(len(may), limits[plan.misses]):
            enough = layer.num_experts + 2
            one_more = np.full(layer.num_experts + 1, len(fetched) + 1)
            lanes = layer.lanes | {"num_waves": enough}
            wider = plan_lanes(*before, ids, weights, one_more, **lanes)
            assert any(w.experts for w in wider.waves[layer.num_waves :]), "one more would fit"


@settings(max_examples=200, deadline=None)
@given(data=st.data(), seed=SEED)
def test_without_limits_it_is_the_eager_step(data: st.DataObject, seed: int) -> None:
    layer = data.draw(layers())
    layer = replace(layer, cache_topk=layer.top_k, num_waves=layer.num_experts + 1)
    eager = Residency(layer.num_experts, layer.num_slots, layer.policy)
    table = SlotTable(layer.num_experts, layer.num_slots)
    policy = make_policy(layer.policy, layer.num_experts)
    limits = np.arange(layer.num_experts + 1)
    for ids, weights, *_ in steps(layer, np.random.default_rng(seed), 8):
        expected = eager.step(as_mask(layer.num_experts, used_by(ids, layer.num_experts)))
        plan = plan_lanes(table, policy, ids, weights, limits, **layer.lanes)
        waves = tuple(wave for wave in plan.waves if wave.experts)
        assert StepPlan(waves=waves, hits=plan.hits, misses=plan.misses) == expected
        assert plan.cpu == ()
        np.testing.assert_array_equal(table.expert_of, eager.table.expert_of)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), seed=SEED)
def test_the_waves_needed_hold_all_that_may_be_fetched(data: st.DataObject, seed: int) -> None:
    layer = data.draw(layers())
    table = SlotTable(layer.num_experts, layer.num_slots)
    policy = make_policy(layer.policy, layer.num_experts)
    for ids, weights, limits, _ in steps(layer, np.random.default_rng(seed), 8):
        waves = waves_needed(limits, ids.size, layer.num_slots, layer.policy)
        plan = plan_lanes(
            table,
            policy,
            ids,
            weights,
            limits,
            cache_topk=layer.top_k,
            num_waves=waves,
        )
        assert plan.fetched == min(limits[plan.misses], plan.misses)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), seed=SEED)
def test_what_is_promoted_is_heavy_and_the_most_valued_of_the_rest(
    data: st.DataObject, seed: int
) -> None:
    """And the waves are those of a step that promotes nothing."""
    layer = data.draw(layers())
    table = SlotTable(layer.num_experts, layer.num_slots)
    policy = make_policy(layer.policy, layer.num_experts)
    for ids, weights, limits, promotions in steps(layer, np.random.default_rng(seed), 8):
        without, seen = deepcopy((table, policy))
        expected = plan_lanes(without, seen, ids, weights, limits, **layer.lanes)
        plan = plan_lanes(table, policy, ids, weights, limits, promotions=promotions, **layer.lanes)
        assert replace(plan, promoted=()) == expected
        place = policy.order()
        promoted = {expert for expert, _ in plan.promoted}
        may = set(plan.cpu) & heavy(ids, weights, layer.cache_topk)
        assert promoted <= may
        assert all(place[e] < min(place[list(promoted)]) for e in may - promoted if promoted)
        # By brute force: the slots that no wave touches, the empty ones and then the least valued.
        touched = {slot for wave in plan.waves for slot in wave.slots}
        free = [s for s in range(layer.num_slots) if s not in touched]
        may_leave = policy.evictable(layer.num_slots)
        free = [s for s in free if without.expert_of[s] < 0 or may_leave[s]]
        free.sort(key=lambda s: -1 if without.expert_of[s] < 0 else place[without.expert_of[s]])
        assert len(promoted) == min(promotions[plan.misses], len(may), len(free))
        assert [slot for _, slot in plan.promoted] == free[: len(promoted)]


def test_what_the_cpu_computed_is_a_hit_from_the_next_step_on() -> None:
    table, policy = SlotTable(8, 4), make_policy("lfru", 8)
    ids, weights = np.array([[5, 2, 7]]), np.full((1, 3), 1 / 3)
    none, one = np.zeros(9, np.int64), np.ones(9, np.int64)
    on_cpu = [
        plan_lanes(table, policy, ids, weights, none, cache_topk=3, num_waves=1, promotions=one).cpu
        for _ in range(5)
    ]
    assert on_cpu == [(2, 5, 7), (2, 5), (2,), (), ()]


@pytest.mark.parametrize(
    ("policy", "limit", "ids", "waves"),
    [
        ("lru", 24, 8, 1),
        ("lru", 24, 9, 2),
        ("lru", 24, 99, 3),
        ("static", 24, 8, 4),
        ("lru", 0, 99, 1),
        ("lru", 4, 99, 2),
        ("lru", 4, 8, 1),
        ("lru", 9, 99, 3),
    ],
)
def test_the_waves_needed_are_as_few_as_can_be(
    policy: str, limit: int, ids: int, waves: int
) -> None:
    """In 8 slots, of 24 experts: at worst 8 are hits, and what is fetched comes after them."""
    assert waves_needed(np.minimum(np.arange(25), limit), ids, 8, policy) == waves


@pytest.mark.parametrize(
    ("num_waves", "fetched"),
    [(1, [8]), (2, [8, 8]), (4, [4, 4, 4, 4]), (8, [2] * 8), (9, [2] * 8 + [0])],
)
def test_a_crowd_passes_through_as_few_slots_as_the_waves_allow(
    num_waves: int, fetched: list[int]
) -> None:
    """Sixteen experts come at once where eight are, each of more value than any of them."""
    table, policy = SlotTable(24, 8), make_policy("lfu", 24)
    experts = np.arange(24).reshape(1, 24)
    for ids in (*[experts[:, :8]] * 4, experts[:, 8:]):
        plan = plan_lanes(
            table, policy, ids, np.ones(ids.shape), np.arange(25), cache_topk=24,
            num_waves=num_waves,
        )  # fmt: skip
    assert [wave.fetched for wave in plan.waves] == fetched


def test_nothing_fetched_leaves_every_miss_to_the_cpu() -> None:
    table, policy = SlotTable(4, 2), make_policy("lru", 4)
    ids, weights = np.array([[1, 3]]), np.array([[0.5, 0.5]])
    none = np.zeros(5, np.int64)
    plan = plan_lanes(table, policy, ids, weights, none, cache_topk=2, num_waves=1)
    assert (plan.cpu, plan.fetched) == ((1, 3), 0)


def test_of_equal_weights_the_first_is_the_heavier() -> None:
    table, policy = SlotTable(4, 2), make_policy("lru", 4)
    ids, weights = np.array([[3, 1], [2, 0]]), np.array([[0.5, 0.5], [0.4, 0.6]])
    plan = plan_lanes(table, policy, ids, weights, np.arange(5), cache_topk=1, num_waves=1)
    assert (plan.cpu, plan.waves[0].experts) == ((1, 2), (0, 3))


def test_no_wave_to_fetch_into_is_refused() -> None:
    layer = Layer(4, 2, "lru", 2, 2, num_waves=0)
    ids, weights = np.array([[1, 3]]), np.array([[0.5, 0.5]])
    with pytest.raises(ValueError, match="waves leave none"):
        plan_lanes(
            SlotTable(4, 2), make_policy("lru", 4), ids, weights, np.arange(5), **layer.lanes
        )
