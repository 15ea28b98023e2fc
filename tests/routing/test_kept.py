"""What a prompt leaves in the slots helps what follows, and what was there is not driven out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_offload.routing import (
    LAST_TOKENS,
    POLICIES,
    LastUses,
    SlotTable,
    make_policy,
    observe_last,
    plan_kept,
    plan_lanes,
)
from vllm_moe_offload.routing.simulate import simulate

E = 10
requests_of_rows = st.lists(
    st.lists(st.sets(st.integers(0, E - 1), max_size=4), max_size=LAST_TOKENS + 5), max_size=4
)


def step_of(requests: list[list[set[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids with the sentinel where a row has fewer than four experts, and the requests' bounds."""
    rows = [[*experts] + [E] * (4 - len(experts)) for rows in requests for experts in rows]
    bounds = np.cumsum([0, *map(len, requests)])
    return np.array(rows, np.int32).reshape(-1, 4), bounds.astype(np.int32)


def state(policy: object) -> tuple[int, list[int], list[int]]:
    return policy.step, policy.last_used.tolist(), policy.value.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=50, deadline=None)
@given(before=requests_of_rows, rows=st.lists(st.sets(st.integers(0, E - 1), max_size=4)))
def test_one_prompt_is_as_if_its_last_tokens_had_been_generated(
    name: str, before: list[list[set[int]]], rows: list[set[int]]
) -> None:
    policy, expected = make_policy(name, E), make_policy(name, E)
    for earlier in before:
        for each in (policy, expected):
            observe_last(each, LastUses.of(*step_of([earlier]), E))
    observe_last(policy, LastUses.of(*step_of([rows]), E))
    for experts in rows[-LAST_TOKENS:]:
        used = np.zeros(E, np.bool_)
        used[[*experts]] = True
        expected.observe(used)
    assert state(policy) == state(expected)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=st.lists(st.lists(st.sets(st.integers(0, E - 1), max_size=4), max_size=4)))
def test_steps_of_a_row_a_request_are_steps_like_any_other(
    name: str, steps: list[list[set[int]]]
) -> None:
    policy, expected = make_policy(name, E), make_policy(name, E)
    for rows in steps:
        observe_last(policy, LastUses.of(*step_of([[experts] for experts in rows]), E))
        used = np.zeros(E, np.bool_)
        for experts in rows:
            used[[*experts]] = True
        if rows:
            expected.observe(used)
    assert state(policy) == state(expected)


@pytest.mark.parametrize("name", POLICIES)
@given(
    steps=st.lists(requests_of_rows, max_size=4),
    at_hand=st.lists(st.booleans(), min_size=E, max_size=E),
    num_slots=st.integers(1, E),
)
def test_what_is_kept_is_used_at_hand_and_more_valued(
    name: str, steps: list[list[list[set[int]]]], at_hand: list[bool], num_slots: int
) -> None:
    table, policy = SlotTable(E, num_slots), make_policy(name, E)
    for requests in steps:
        before = table.expert_of.copy()
        last = LastUses.of(*step_of(requests), E)
        pairs = plan_kept(table, policy, last, np.array(at_hand))
        place = policy.order()
        slots = {slot for _, slot in pairs}
        assert len(slots) == len(pairs)
        for expert, slot in pairs:
            assert last.experts[:, expert].any() and at_hand[expert] and expert not in before
            assert before[slot] < 0 or place[before[slot]] < place[expert]
            before[slot] = expert
        np.testing.assert_array_equal(before, table.expert_of)
        left = [
            e for e in range(E) if at_hand[e] and last.experts[:, e].any() and table.slot_of[e] < 0
        ]
        may_go = table.expert_of[policy.evictable(num_slots)]
        assert not left or (may_go >= 0).all()
        assert all(place[e] < place[may_go].min() for e in left)


EXPERTS, TOP_K, SLOTS, LAYERS = 128, 8, 26, 4
WARM, CHUNKS, CHUNK, DECODED = 150, 4, 256, 10


def hit_rates(policy: str, running: int, keep: bool) -> tuple[float, float]:
    """Section 1's layer: of the ten steps after a prompt, and of the running requests among these.

    Beside `running` decodes a prompt comes in chunks. Without any, another request has ended.
    """
    steps = WARM + CHUNKS * CHUNK + DECODED
    table = simulate(
        "local", steps=steps, layers=LAYERS, rows=running + 2, num_experts=EXPERTS, top_k=TOP_K
    )
    limits = np.arange(EXPERTS + 1)
    counted = np.zeros((2, 2))
    for layer in range(LAYERS):
        prompt, ids = table.ids[:, layer, 0], table.ids[:, layer, 1:]
        slots, seen = SlotTable(EXPERTS, SLOTS), make_policy(policy, EXPERTS)

        def decode(rows: np.ndarray) -> None:
            weights = np.ones(rows.shape, np.float32)
            plan_lanes(slots, seen, rows, weights, limits, cache_topk=TOP_K, num_waves=8)  # noqa: B023

        for now in range(WARM):
            decode(ids[now, : max(running, 1)])
        for chunk in range(CHUNKS):
            rows = prompt[WARM + chunk * CHUNK : WARM + (chunk + 1) * CHUNK]
            bounds = np.array([*range(running + 1), running + CHUNK])
            both = np.concatenate([ids[WARM + chunk, :running], rows])
            if keep:
                last = LastUses.of(both, bounds, EXPERTS)
                plan_kept(slots, seen, last, np.ones(EXPERTS, np.bool_))
        for now in range(DECODED):
            here = ids[WARM + CHUNKS + now, :running]
            all_rows = np.concatenate([here, prompt[None, WARM + CHUNKS * CHUNK + now]])
            for which, rows in enumerate((all_rows, here)):
                used = np.unique(rows)
                counted[which] += (slots.slot_of[used] >= 0).sum(), len(used)
            decode(all_rows)
    (hits, uses), (theirs, of) = counted
    return hits / uses, theirs / max(of, 1)


@pytest.mark.parametrize(("policy", "gain"), [("lfru", 0.1), ("lru", 0.07)])
def test_steps_after_a_prompt_hit_more_often(policy: str, gain: float) -> None:
    with_it, without = (hit_rates(policy, 0, keep)[0] for keep in (True, False))
    print(
        f"\n{policy}: {100 * with_it:.0f} % hits in the ten steps after it, {100 * without:.0f} %"
    )
    assert with_it > without + gain


@pytest.mark.parametrize("policy", ["lfru", "lru"])
@pytest.mark.parametrize("running", [1, 8])
def test_running_requests_keep_their_share(policy: str, running: int) -> None:
    """One of two lets go of some for all to hit more; among eight nothing is to be noticed."""
    kept, without = hit_rates(policy, running, True), hit_rates(policy, running, False)
    print(f"\n{policy}, {running} running: {kept} all and theirs, {without} without")
    assert kept[0] > without[0] - 0.005
    assert kept[1] > without[1] - (0.08 if running == 1 else 0.01)
