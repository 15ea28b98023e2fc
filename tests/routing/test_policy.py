"""One conformance suite over every policy, then what each of them promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_offload.routing import POLICIES, Residency, make_policy

E = 10
steps_of_experts = st.lists(st.sets(st.integers(0, E - 1), max_size=E), max_size=30)


def mask(*used: int) -> np.ndarray:
    out = np.zeros(E, np.bool_)
    out[list(used)] = True
    return out


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(steps=steps_of_experts, num_slots=st.integers(1, E))
def test_every_policy_orders_all_experts_and_lets_some_slot_go(
    name: str, steps: list[set[int]], num_slots: int
) -> None:
    policy, again = make_policy(name, E), make_policy(name, E)
    for used in steps:
        policy.observe(mask(*used))
        again.observe(mask(*used))
    assert sorted(policy.order().tolist()) == list(range(E)), "a permutation: no ties left"
    np.testing.assert_array_equal(policy.order(), again.order())
    evictable = policy.evictable(num_slots)
    assert evictable.shape == (num_slots,)
    assert evictable.any()


@pytest.mark.parametrize("name", POLICIES)
def test_an_expert_never_used_leaves_before_one_just_used(name: str) -> None:
    policy = make_policy(name, E)
    policy.observe(mask(3))
    place = policy.order()
    assert place[3] == E - 1


def test_lru_lets_the_longest_unused_go() -> None:
    policy = make_policy("lru", E)
    for used in (0, 1, 2, 0):
        policy.observe(mask(used))
    place = policy.order()
    assert place[1] < place[2] < place[0]


def test_lfu_lets_the_least_used_go_and_the_longer_unused_of_equals() -> None:
    policy = make_policy("lfu", E)
    for used in (0, 0, 0, 1, 2):
        policy.observe(mask(used))
    place = policy.order()
    assert place[1] < place[2] < place[0]


def test_lfru_is_decayed_frequency_over_age() -> None:
    policy = make_policy("lfru", E)
    uses = {0: [1, 2, 3, 4], 1: [8], 2: [5, 6]}
    frequency = {e: 0.0 for e in uses}
    for step in range(1, 10):
        used = [e for e in uses if step in uses[e]]
        policy.observe(mask(*used))
        for e in uses:
            frequency[e] = frequency[e] * (1 - 1 / 32) + (e in used)
    expected = {e: frequency[e] / (1 + 9 - max(uses[e])) for e in uses}
    got = policy.score() / (1 << 16)
    for e in uses:
        assert got[e] == pytest.approx(expected[e], rel=1e-3)
    place = policy.order()
    assert sorted(uses, key=lambda e: place[e]) == sorted(uses, key=lambda e: expected[e])


def test_lfru_forgets_what_was_hot_long_ago() -> None:
    policy = make_policy("lfru", E)
    for _ in range(50):
        policy.observe(mask(0))
    for _ in range(200):
        policy.observe(mask(1))
    assert policy.order()[0] < policy.order()[1]


def test_static_keeps_the_first_experts_used() -> None:
    residency = Residency(num_experts=E, num_slots=4, policy="static")
    for used in ((0, 1), (2,), (5,), (6,), (7, 8)):
        residency.step(mask(*used))
    assert set(residency.table.expert_of[:3].tolist()) == {0, 1, 2}
    assert int(residency.table.expert_of[3]) == 8


def test_an_unknown_policy_is_refused_with_what_exists() -> None:
    with pytest.raises(ValueError, match=r"'clock'.*lfru, lru, lfu, static"):
        make_policy("clock", E)
