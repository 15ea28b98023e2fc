"""A layer whose small steps are decided on the device: the oracle's output, whoever plans a step.

By Triton's interpreter, in a process of its own that the last test here starts; the expert engine
is the lane over the slots, which are ordinary memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import INTERPRETED, run_interpreted
from tests.engine import oracle
from tests.engine.shards import random_shard, tolerance
from tests.interrupted import Interruption, interruptions
from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.device.host import HostSlotCache
from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import MAX_CAPTURED, CapturedLayer, Counters, EngineLane, OffloadedLayer
from vllm_moe_offload.lanes.base import Lane
from vllm_moe_offload.routing import POLICIES

CPU = torch.device("cpu")
TOP_K, MOST = 3, MAX_CAPTURED + 6

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of the last test")


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine(threads=1) as engine:
        yield engine


class Case:
    """A layer of random experts, and what its counters should say."""

    def __init__(
        self,
        engine: CpuExpertEngine,
        num_experts: int,
        num_slots: int,
        policy: str,
        seed: int = 0,
    ) -> None:
        self.spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32, bool(seed % 2))
        self.rng = np.random.default_rng(seed)
        self.host = random_shard(self.spec, num_experts, torch.Generator().manual_seed(seed))
        self.steps = self.tokens = self.used = 0
        side = SideStream(CPU)

        def allocate(count: int) -> dict[str, torch.Tensor]:
            slots = self.spec.layout.empty(count)
            for tensor in slots.values():
                tensor.fill_(float("nan"))  # an expert computed from an unfilled slot shows
            return slots

        def lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
            return EngineLane(engine, self.spec, tensors, TOP_K, MOST)

        def capture(slots: dict[str, torch.Tensor], resident: Lane) -> CapturedLayer:
            return CapturedLayer(
                self.host,
                slots,
                resident,
                side,
                policy=policy,
                top_k=TOP_K,
            )

        self.layer = OffloadedLayer(
            self.host,
            HostDevice(),
            allocate,
            lane,
            lane(self.host),
            num_slots=num_slots,
            policy=policy,
            capture=capture,
        )

    def step(self, rows: int, padded: float = 0.0) -> None:
        """A step of random rows, some of them padding, is the oracle's."""
        num_experts = self.layer.num_experts
        order = np.argsort(self.rng.random((rows, num_experts)) * self.rng.random(num_experts))
        ids = torch.from_numpy(order[:, :TOP_K].copy())
        weights = torch.from_numpy(self.rng.random((rows, TOP_K), np.float32))
        x = torch.from_numpy(self.rng.standard_normal((rows, self.spec.hidden), np.float32))
        padding = torch.from_numpy(self.rng.random(rows) < padded)
        got = self.layer.forward(x, weights, ids, padding if padded else None)
        real = ~padding
        expected = oracle.experts(
            self.spec,
            self.host,
            x[real],
            ids[real],
            weights[real],
            torch.arange(num_experts, dtype=torch.int32),
        )
        assert not real.any() or oracle.relative_error(got[real], expected) <= tolerance(self.spec)
        self.steps += bool(real.any())
        self.tokens += int(real.sum())
        self.used += len(ids[real].unique())

    def check_counters(self) -> None:
        done = self.layer.counters
        assert (done.steps, done.tokens) == (self.steps, self.tokens)
        assert done.hits + done.misses == self.used
        assert done.bytes_fetched == done.misses * self.layer.layout.nbytes
        assert done.cpu_experts == 0


@interpreted
@settings(max_examples=15, deadline=None)
@given(
    num_experts=st.integers(3, 9),
    share=st.floats(0.1, 1.0),
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 2**31),
)
def test_steps_of_the_device_and_of_the_host_in_any_order(
    num_experts: int, share: float, policy: str, seed: int
) -> None:
    with CpuExpertEngine(threads=1) as engine:
        case = Case(engine, num_experts, max(1, int(share * num_experts)), policy, seed)
        for number in range(8):
            rows = MOST if case.rng.random() < 0.3 else int(case.rng.integers(1, 6))
            case.step(rows, padded=0.3 if number % 2 else 0.0)
        case.check_counters()


@interpreted
def test_a_step_of_the_host_goes_on_from_the_devices_and_back(engine: CpuExpertEngine) -> None:
    case = Case(engine, 6, 5, "lru")
    x, weights = torch.ones(MOST, 24), torch.ones(MOST, 1).repeat(1, TOP_K)
    few, many = torch.tensor([[0, 1, 2]]), torch.tensor([[3, 4, 0]])
    case.layer.forward(x[:1], weights[:1], few)
    case.layer.forward(x, weights, many.repeat(MOST, 1))
    case.layer.forward(x[:1], weights[:1], few)
    case.layer.forward(x[:1], weights[:1], many)
    done = case.layer.counters
    assert (done.misses, done.hits, done.waves, done.steps) == (5, 7, 4, 4)


@interpreted
def test_no_step_of_the_device_reads_anything_back(
    engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever brings a number to the host would break a capture."""
    cases = [Case(engine, 6, slots, "lfru") for slots in (2, 6)]

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the host waits for the device")

    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    ids, padding = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([False, True])

    class Silent:
        """In place of the engine, which reads its arguments: it is host code."""

        def compute(self, *args: object) -> None: ...

        def output(self, x: torch.Tensor, *args: object) -> torch.Tensor:
            return torch.empty_like(x)

    for case in cases:
        captured = case.layer._slots.captured
        monkeypatch.setattr(captured, "_resident", Silent())
        monkeypatch.setattr(captured.step, "_kernel", _Launched())
        monkeypatch.setattr(captured.fetch, "_kernel", _Launched())
        case.layer.forward(torch.ones(2, 24), torch.ones(2, 3), ids, padding)
        assert captured.step._kernel.launches == 1
        # Without a CPU lane nothing is promoted, and no launch is there for it.
        waves = 0 if case.layer.num_slots == 6 else captured.num_waves(2)
        assert captured.fetch._kernel.launches == waves


class _Launched:
    """A kernel that only counts: the interpreter itself reads tensors."""

    launches = 0

    def __getitem__(self, grid: object) -> object:
        def launch(*args: object, **kwargs: object) -> None:
            self.launches += 1

        return launch


@interpreted
def test_all_experts_in_slots_are_there_before_the_first_step(engine: CpuExpertEngine) -> None:
    case = Case(engine, 6, 6, "static")
    for name, tensor in case.layer._slots.cache.tensors.items():
        assert torch.equal(tensor, case.host[name])
    for rows in (1, MOST):
        case.step(rows, padded=0.5)
    case.check_counters()
    assert (case.layer.counters.misses, case.layer.counters.hits) == (0, case.used)
    case.host["w2_weight"].mul_(2)
    case.layer.invalidate()
    case.step(2)


@interpreted
def test_resizing_keeps_what_the_policy_saw_and_what_was_counted(engine: CpuExpertEngine) -> None:
    case = Case(engine, 9, 4, "lfu")
    missed = 0  # in steps of the device
    for slots in (4, 2, 9, 3):
        case.layer.resize(slots)
        for rows in (2, MOST, 3):
            before = case.layer.counters.misses
            case.step(rows)
            missed += (case.layer.counters.misses - before) if rows <= MAX_CAPTURED else 0
    case.check_counters()
    values = {name: each.tolist() for name, each in case.layer.readings().items()}
    counted, decided = case.layer.counted(values)
    assert 0 < decided.misses == missed < counted.misses
    case.layer._slots.captured.step.read_into(case.layer._residency)
    assert case.layer._residency.policy.step == 12
    case.layer.reset_counters()
    assert case.layer.counters == Counters()
    case.layer.resize(2)
    assert case.layer.counted({}) == (Counters(), Counters())


@interpreted
def test_emptying_the_slots_keeps_what_the_policy_saw(engine: CpuExpertEngine) -> None:
    case = Case(engine, 9, 4, "lfu")
    for _ in range(5):
        case.step(3)
    before = case.layer._slots.captured.step.value.clone()
    case.layer.invalidate()
    step = case.layer._slots.captured.step
    assert int(step.step) == 5 and torch.equal(step.value, before) and before.any()
    assert (step.slot_of < 0).all()
    case.step(3)


@interpreted
@pytest.mark.parametrize("rows", [2, MOST], ids=["the device", "the host"])
def test_after_a_step_that_was_interrupted_anywhere_the_next_ones_are_right(
    rows: int, engine: CpuExpertEngine
) -> None:
    """A step that the device has decided on, or the host, to which it lends the state."""
    for interruption in interruptions(least=6):
        case = Case(engine, 9, 4, "lru", seed=interruption.number)
        case.step(3)
        slots = case.layer._slots
        step = slots.captured.step
        calls = [
            *((step, name) for name in ("launch", "read_into", "take_over")),
            *((slots.cache, name) for name in ("fetch", "publish", "release")),
            (slots.captured.fetch, "launch"),
            *((slots.resident, name) for name in ("compute", "output")),
        ]
        with interruption.of(*calls):
            case.step(rows)
        for each in (rows, 5, MOST):
            case.step(each)


@interpreted
@pytest.mark.parametrize("num_slots", [2, 9])
def test_after_a_resize_that_was_interrupted_anywhere_steps_are_right(
    num_slots: int, engine: CpuExpertEngine
) -> None:
    """As many slots as before are there, or as many as were asked for; no step counts twice."""
    for interruption in interruptions(least=8):
        case = Case(engine, 9, 4, "lru", seed=interruption.number)
        case.step(3)
        counted = case.layer.counters
        calls = [
            *((case.layer, name) for name in ("_allocate", "_make_resident", "_count")),
            *((HostSlotCache, "fetch"), (DeviceStep, "read_into"), (DeviceStep, "take_over")),
            *((torch, "zeros_like"), (case.layer._passed, "zero_")),
        ]
        with interruption.of(*calls):
            case.layer.resize(num_slots)
        assert case.layer.num_slots in (4, num_slots)
        assert case.layer.counters == counted
        for rows in (3, MOST):
            case.step(rows)


@interpreted
def test_after_a_filling_that_was_interrupted_steps_are_right(
    engine: CpuExpertEngine,
) -> None:
    case, interruption = Case(engine, 9, 9, "lru"), Interruption(0)
    for tensor in case.layer._slots.cache.tensors.values():
        tensor.fill_(float("nan"))
    with interruption.of((HostSlotCache, "fetch")):
        case.layer.invalidate()
    assert interruption.has_come
    case.step(3)


@interpreted
def test_slots_that_a_graph_holds_are_not_resized(engine: CpuExpertEngine) -> None:
    layer = Case(engine, 6, 3, "lru").layer
    layer._is_in_graph = True
    with pytest.raises(ValueError, match=r"asked for 2 slots.*the 3 there are.*--enforce-eager"):
        layer.resize(2)
    assert layer.num_slots == 3


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
