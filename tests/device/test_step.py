"""The device's decisions are the plan's, step by step.

Compiled where there is a CUDA device, elsewhere by Triton's interpreter (see `kernels`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import DEVICE, INTERPRETED, SIZES, marked, run_interpreted
from tests.routing.steps import Layer, Step, layers, steps, used_by
from tests.routing.test_lanes import replay
from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.routing import POLICIES, Residency, SlotTable, make_policy, plan_lanes
from vllm_moe_offload.routing.policy import LFRU
from vllm_moe_offload.routing.simulate import ROUTINGS, simulate

# The interpreter takes 50 ms a step.
EXAMPLES = 12 if INTERPRETED else 300
PLAYED_STEPS = 50 if INTERPRETED else 1000


class Pair:
    """A layer planned in plain Python and on the device."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.table = SlotTable(layer.num_experts, layer.num_slots)
        self.policy = make_policy(layer.policy, layer.num_experts)
        self.limits = np.arange(layer.num_experts + 1)
        self.promotions = np.zeros(layer.num_experts + 1, np.int64)
        self.device = device_step(layer)
        self.counters = dict.fromkeys(self.device.read_counters(), 0)

    def step(
        self,
        ids: np.ndarray,
        weights: np.ndarray,
        limits: np.ndarray,
        promotions: np.ndarray | None = None,
    ) -> None:
        if promotions is None:
            promotions = np.zeros_like(limits)
        tables = limits, promotions
        if not np.array_equal(tables, (self.limits, self.promotions)):
            self.limits, self.promotions = tables
            self.device.set_limits(*tables)
        self.device.launch(torch.from_numpy(ids).to(DEVICE), torch.from_numpy(weights).to(DEVICE))
        self.check(ids, weights)

    def check(self, ids: np.ndarray, weights: np.ndarray) -> None:
        """What the last launch decided is what is planned now."""
        plan = plan_lanes(
            self.table,
            self.policy,
            ids,
            weights,
            self.limits,
            promotions=self.promotions,
            **self.layer.lanes,
        )
        assert self.device.read_plan() == plan
        np.testing.assert_array_equal(self.device.read_table().expert_of, self.table.expert_of)
        np.testing.assert_array_equal(self.device.last_used.cpu(), self.policy.last_used)
        if isinstance(self.policy, LFRU):
            np.testing.assert_array_equal(self.device.value.cpu(), self.policy.value)
        assert self.device.expert_maps[:, -1].tolist() == [-1] * self.layer.num_waves
        assert self.device.cpu_map[-1] == -1
        tokens = int((ids < self.layer.num_experts).any(1).sum())
        for name, count in dict(
            steps=tokens > 0,
            tokens=tokens,
            hits=plan.hits,
            misses=plan.misses,
            fetched=plan.fetched,
            cpu_experts=len(plan.cpu),
            waves=sum(bool(wave.experts) for wave in plan.waves),
            promoted=len(plan.promoted),
        ).items():
            self.counters[name] += count
        assert self.device.read_counters() == self.counters


def device_step(layer: Layer) -> DeviceStep:
    return DeviceStep(
        layer.num_experts,
        layer.num_slots,
        layer.policy,
        top_k=layer.top_k,
        device=DEVICE,
        **layer.lanes,
    )


@marked
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_drawn_steps_are_decided_as_planned(policy: str, data: st.DataObject, seed: int) -> None:
    pair = Pair(data.draw(layers(policy, sizes=SIZES)))
    for step in steps(pair.layer, np.random.default_rng(seed), 6):
        pair.step(*step)


PLAYED = [
    Layer(32, 7, "lfru", top_k=4, cache_topk=2, num_waves=1),
    Layer(32, 12, "lfu", top_k=4, cache_topk=4, num_waves=3),
]


@marked
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("layer", PLAYED, ids=lambda layer: layer.policy)
def test_played_back_routings_are_decided_as_planned(routing: str, layer: Layer) -> None:
    played = simulate(
        routing,
        steps=PLAYED_STEPS,
        layers=1,
        rows=8,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
    )
    pair = Pair(layer)
    misses = np.arange(layer.num_experts + 1)
    for step in range(PLAYED_STEPS):
        rows = 1 if step < PLAYED_STEPS // 2 else 8
        drawn = played.ids[step, 0, :rows], played.weights[step, 0, :rows]
        pair.step(*drawn, np.minimum(misses // 2, 12), (misses + 1) // 3)
    assert pair.counters["promoted"] > 0


@marked
@pytest.mark.parametrize("num_waves", [1, 3, 5, 8])
def test_a_crowded_step_among_valued_experts_is_decided_as_planned(num_waves: int) -> None:
    """Eight experts often used, then sixteen others at once."""
    layer = Layer(24, 8, "lfu", top_k=4, cache_topk=4, num_waves=num_waves)
    pair = Pair(layer)
    experts = np.arange(24, dtype=np.int32).reshape(6, 4)
    for ids in (*[experts[:2]] * 4, experts[2:], experts):
        pair.step(ids, np.ones(ids.shape, np.float32), np.arange(25))


@marked
@pytest.mark.parametrize("num_slots", [1, 101, 512])
def test_the_biggest_layer_is_decided_as_planned(num_slots: int) -> None:
    layer = Layer(512, num_slots, "lfru", top_k=16, cache_topk=5, num_waves=3)
    pair = Pair(layer)
    misses = np.arange(513)
    for ids, weights, *_ in steps(layer, np.random.default_rng(1), 3, max_tokens=64):
        pair.step(ids, weights, misses // 8, misses)
    full = np.arange(1024, dtype=np.int32).reshape(64, 16) % 512
    pair.step(full, np.ones((64, 16), np.float32), misses, misses)
    if num_slots == 101:
        assert pair.counters["promoted"] > 0


@marked
def test_more_ids_than_are_read_at_once() -> None:
    layer = Layer(24, 9, "lru", top_k=8, cache_topk=1, num_waves=2)
    pair = Pair(layer)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(12)[:8] for _ in range(200)]).astype(np.int32)
    ids[190:] += 12  # seen only by those who read on
    pair.step(ids, rng.random((200, 8), np.float32), np.arange(25))


def a_layer(**changes: int) -> Layer:
    return Layer(**dict(
        num_experts=6, num_slots=3, policy="lru", top_k=2, cache_topk=2, num_waves=1,
    ) | changes)  # fmt: skip


def some_steps(layer: Layer, count: int) -> list[Step]:
    return steps(layer, np.random.default_rng(7), count)


@marked
def test_the_host_may_write_in_inference_mode_and_ids_may_be_wide_or_negative() -> None:
    layer = a_layer()
    with torch.inference_mode():
        step = device_step(layer)
        step.launch(
            torch.tensor([[5, -1], [-1, 6]], device=DEVICE), torch.ones(2, 2, device=DEVICE)
        )
    step.set_limits(np.zeros(7, np.int64))
    step.launch(torch.tensor([[5, 2]], device=DEVICE), torch.ones(1, 2, device=DEVICE))
    assert step.read_plan().waves[0].experts == (5,)
    assert step.read_plan().cpu == (2,)


@marked
def test_resizing_keeps_what_the_policy_saw() -> None:
    layer = a_layer(policy="lfu")
    pair = Pair(layer)
    for step in some_steps(layer, 4):
        pair.step(*step)
    pair.device.resize(2)
    pair.table = SlotTable(6, 2)
    for step in some_steps(layer, 4):
        pair.step(*step)
    pair.device.invalidate()
    pair.table.clear()
    for step in some_steps(layer, 4):
        pair.step(*step)
    assert pair.device.step.item() == 12


@marked
def test_slots_that_are_filled_already_are_taken_over() -> None:
    pair = Pair(a_layer())
    pair.table.place(4, 0)
    pair.table.place(2, 1)
    pair.device.seed(pair.table)
    pair.step(np.array([[2, 5]], np.int32), np.ones((1, 2), np.float32), pair.limits)
    assert pair.counters["hits"] == 1
    gap = SlotTable(6, 3)
    gap.place(4, 1)
    with pytest.raises(ValueError, match="must be its last ones"):
        pair.device.seed(gap)
    with pytest.raises(ValueError, match="table of 6 experts and 2 slots"):
        pair.device.seed(SlotTable(6, 2))


@marked
def test_a_step_counter_that_wraps_around_misroutes_nothing() -> None:
    layer = a_layer(policy="lfru", num_waves=3)
    step = device_step(layer)
    step.step.fill_(2**31 - 4)
    for ids, weights, *_ in some_steps(layer, 8):
        before = step.read_table().expert_of
        step.launch(torch.from_numpy(ids).to(DEVICE), torch.from_numpy(weights).to(DEVICE))
        after = replay(before, step.read_plan(), used_by(ids, 6))
        np.testing.assert_array_equal(after, step.read_table().expert_of)
    assert step.step.item() < 0


@marked
@pytest.mark.parametrize("policy", ["lfru", "lru"])
def test_what_was_used_millions_of_steps_ago_is_older_than_what_was_used_since(policy: str) -> None:
    """Ages are counted up to 2^23; from there on the lower number goes first."""
    layer = a_layer(policy=policy, num_slots=3, num_waves=1)
    most, now = 2**23 - 1, 2**25
    state = Residency(6, 3, policy)
    for slot, expert in enumerate((5, 4, 3)):
        state.table.place(expert, slot)
    state.policy.step = now
    state.policy.last_used[3:] = now - 10, now - most - 50, now - most - 100
    device = device_step(layer)
    device.take_over(state)
    ids = torch.zeros((1, layer.top_k), dtype=torch.int32, device=DEVICE)
    for expert, in_slots in ((0, {0, 3, 5}), (1, {0, 1, 3}), (2, {0, 1, 2})):
        device.launch(ids.fill_(expert), torch.ones(ids.shape, device=DEVICE))
        assert set(device.read_table().expert_of.tolist()) == in_slots


@marked
@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_plans_a_step_in_between(policy: str) -> None:
    """A step that is too large to capture is planned by the host, from where the device is."""
    pair = Pair(a_layer(policy=policy, num_experts=9, num_slots=4))
    rng = np.random.default_rng(1)
    for number in range(12):
        ids = np.stack([rng.permutation(9)[:2] for _ in range(3)]).astype(np.int32)
        if number % 4 != 3:
            misses = np.arange(10)
            pair.step(ids, rng.random((3, 2), np.float32), misses // 2, misses)
            continue
        used = np.zeros(9, np.bool_)
        used[ids] = True
        theirs = Residency(9, 4, policy)
        pair.device.read_into(theirs)
        mine = Residency(9, 4, policy)
        mine.table, mine.policy = pair.table, pair.policy
        assert theirs.step(used) == mine.step(used)
        pair.device.take_over(theirs)


@pytest.mark.gpu
def test_a_captured_step_goes_on_from_the_one_before() -> None:
    layer = Layer(37, 11, "lfru", top_k=4, cache_topk=3, num_waves=2)
    ids = torch.full((2, 4), 37, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros((2, 4), device=DEVICE)
    device_step(layer).launch(ids, weights)  # compiles, which capturing does not allow
    pair = Pair(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair.device.launch(ids, weights)
    rng = np.random.default_rng(3)
    for number in range(100):
        if number == 50:  # a new split between the lanes needs no new capture
            pair.limits = np.minimum(np.arange(38), 1)
            pair.promotions = pair.limits
            pair.device.set_limits(pair.limits, pair.promotions)
        drawn = np.stack([rng.permutation(37)[:4] for _ in range(2)]).astype(np.int32)
        ids.copy_(torch.from_numpy(drawn))
        heaviness = rng.random((2, 4), np.float32)
        weights.copy_(torch.from_numpy(heaviness))
        graph.replay()
        pair.check(drawn, heaviness)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_experts=513), "513 experts"),
        (dict(num_slots=0), "0 slots"),
        (dict(num_slots=7), "7 slots"),
        (dict(policy="mru"), "unknown policy 'mru'"),
        (dict(cache_topk=3), "cache_topk is 3"),
        (dict(num_waves=0), "0 waves leave none"),
    ],
)
@marked
def test_what_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        device_step(a_layer(**changes))


@marked
def test_ids_and_weights_of_other_shapes_are_refused() -> None:
    step = device_step(a_layer())
    ids = torch.zeros((4, 2), dtype=torch.int32, device=DEVICE)
    for bad in (ids[:, :1], ids[:2], ids.view(-1)):
        with pytest.raises(ValueError, match="both must be"):
            step.launch(bad, ids.float())
    with pytest.raises(ValueError, match="contiguous"):
        step.launch(ids[::2], ids[:2].float())
    with pytest.raises(ValueError, match="one for 0 to 6 misses"):
        step.set_limits(np.zeros(6, np.int64))
    with pytest.raises(ValueError, match="one for 0 to 6 misses"):
        step.set_limits(np.zeros(7, np.int64), np.zeros(8, np.int64))


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
