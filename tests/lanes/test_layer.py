"""A layer's output is the oracle's, whatever the routing, the capacity and the policy."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import oracle
from tests.engine.shards import random_shard, tolerance
from tests.interrupted import interruptions
from vllm_moe_offload.device import HostDevice, SlotCache
from vllm_moe_offload.device.host import HostSlotCache
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import EngineLane, OffloadedLayer
from vllm_moe_offload.routing import POLICIES

TOP_K = 3


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine() as engine:
        yield engine


class Case:
    """A layer of random experts, as host memory holds it."""

    def __init__(
        self,
        engine: CpuExpertEngine,
        num_experts: int = 6,
        format_: Format = Format.FP32,
        *,
        hidden: int = 24,
        intermediate: int = 10,
        bias: bool = False,
        activation: Activation = Activation.SILU,
    ) -> None:
        self.engine = engine
        self.spec = ExpertSpec(hidden, intermediate, activation, format_, bias)
        self.generator = torch.Generator().manual_seed(num_experts)
        self.host = random_shard(self.spec, num_experts, self.generator)

    def layer(
        self, num_slots: int, policy: str = "lfru", device: HostDevice | None = None
    ) -> OffloadedLayer:
        def allocate(count: int) -> dict[str, torch.Tensor]:
            slots = self.spec.layout.empty(count)
            for tensor in slots.values():
                tensor.fill_(float("nan"))  # an expert computed from an unfilled slot shows
            return slots

        return OffloadedLayer(
            self.host,
            device or HostDevice(),
            allocate,
            lambda slots: EngineLane(self.engine, self.spec, slots, TOP_K, 8),
            EngineLane(self.engine, self.spec, self.host, TOP_K, 8),
            num_slots=num_slots,
            policy=policy,
        )

    def x(self, tokens: int) -> torch.Tensor:
        values = torch.randn((tokens, self.spec.hidden), generator=self.generator)
        return values.to(self.spec.format.dtype)

    def check(
        self,
        layer: OffloadedLayer,
        x: torch.Tensor,
        ids: torch.Tensor,
        padding: torch.Tensor | None = None,
    ) -> None:
        weights = torch.rand(ids.shape, generator=self.generator)
        got = layer.forward(x, weights, ids, padding)
        expected = oracle.experts(self.spec, self.host, x, ids.int(), weights)
        assert got.dtype == x.dtype
        assert got.shape == x.shape
        if padding is not None:
            got, expected = got[~padding], expected[~padding]
        rounding = torch.finfo(got.dtype).eps / 2
        assert oracle.relative_error(got, expected) <= max(tolerance(self.spec), rounding)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Experts, slots and steps of (ids [T, K], padding [T]): few or many experts, any rows."""
    num_experts = draw(st.integers(1, 9))
    num_slots = draw(st.integers(0, num_experts))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.integers(0, 12))
        pool = draw(st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=num_experts))
        row = st.lists(st.sampled_from(pool), min_size=TOP_K, max_size=TOP_K)
        ids = draw(st.lists(row, min_size=tokens, max_size=tokens))
        padding = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
        steps.append(
            (
                torch.tensor(ids, dtype=torch.int64).reshape(tokens, TOP_K),
                torch.tensor(padding, dtype=torch.bool),
            )
        )
    return num_experts, num_slots, steps


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=batches())
def test_any_routing_any_capacity_equals_the_oracle(
    engine: CpuExpertEngine,
    policy: str,
    case: tuple[int, int, list[tuple[torch.Tensor, torch.Tensor]]],
) -> None:
    num_experts, num_slots, steps = case
    layer_case = Case(engine, num_experts)
    layer = layer_case.layer(num_slots, policy)
    for ids, padding in steps:
        layer_case.check(layer, layer_case.x(len(ids)), ids, padding)


@pytest.mark.parametrize("num_slots", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("format_", [Format.FP32, Format.FP16, Format.BF16])
@pytest.mark.parametrize("bias", [False, True])
def test_formats_and_biases(
    engine: CpuExpertEngine, num_slots: int, format_: Format, bias: bool
) -> None:
    case = Case(engine, 6, format_, hidden=96, intermediate=64, bias=bias)
    layer = case.layer(num_slots)
    for tokens in (1, 3, 40):
        ids = torch.randint(0, 6, (tokens, TOP_K), generator=case.generator)
        case.check(layer, case.x(tokens), ids)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU, Activation.GELU_TANH])
def test_activations(engine: CpuExpertEngine, activation: Activation) -> None:
    case = Case(engine, activation=activation)
    case.check(case.layer(2), case.x(9), torch.randint(0, 6, (9, TOP_K), generator=case.generator))


@pytest.mark.parametrize("num_slots", [0, 1, 4])
def test_all_tokens_to_one_expert_and_every_expert_used(
    engine: CpuExpertEngine, num_slots: int
) -> None:
    case = Case(engine)
    layer = case.layer(num_slots)
    case.check(layer, case.x(20), torch.full((20, TOP_K), 4))
    case.check(layer, case.x(20), torch.arange(60).remainder(6).reshape(20, TOP_K))


def test_rows_that_are_padding_use_no_expert(engine: CpuExpertEngine) -> None:
    case = Case(engine)
    layer = case.layer(2)
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    out = layer.forward(case.x(2), torch.rand(2, TOP_K), ids, torch.tensor([False, True]))
    assert not out[1].any()
    assert out[0].any()
    assert (layer.counters.misses, layer.counters.tokens) == (3, 1)


def test_a_step_of_padding_alone_and_an_empty_step(engine: CpuExpertEngine) -> None:
    case = Case(engine)
    for num_slots in (0, 2):
        layer = case.layer(num_slots)
        ids = torch.zeros((3, TOP_K), dtype=torch.int64)
        out = layer.forward(case.x(3), torch.rand(3, TOP_K), ids, torch.ones(3, dtype=torch.bool))
        assert not out.any()
        assert layer.forward(case.x(0), torch.rand(0, TOP_K), ids[:0]).shape == (0, 24)


def test_counters_say_what_was_done(engine: CpuExpertEngine) -> None:
    case = Case(engine)
    layer = case.layer(3)
    for _ in range(4):
        case.check(layer, case.x(1), torch.tensor([[0, 1, 2]]))
    done = layer.counters
    assert (done.steps, done.tokens, done.hits, done.misses, done.waves) == (4, 4, 9, 3, 4)
    assert done.bytes_fetched == 3 * layer.layout.nbytes
    assert layer.device_bytes == 3 * layer.layout.nbytes
    assert layer.host_bytes == 6 * layer.layout.nbytes
    on_cpu = case.layer(0)
    case.check(on_cpu, case.x(1), torch.tensor([[0, 1, 1]]))
    assert (on_cpu.counters.cpu_experts, on_cpu.counters.hits) == (2, 0)


def test_resizing_between_steps_keeps_the_output_right(engine: CpuExpertEngine) -> None:
    case = Case(engine)
    layer = case.layer(2)
    for num_slots in (6, 1, 3):
        layer.resize(num_slots)
        assert layer.num_slots == num_slots
        for _ in range(3):
            ids = torch.randint(0, 6, (5, TOP_K), generator=case.generator)
            case.check(layer, case.x(5), ids)


@pytest.mark.parametrize("num_slots", [0, -1, 7, "3", None, True, 2.0])
def test_resizing_to_what_cannot_be_is_refused(engine: CpuExpertEngine, num_slots: Any) -> None:
    case = Case(engine)
    layer = case.layer(2)
    with pytest.raises(ValueError, match=rf"asked for {num_slots!r} slots in a layer of 6 expe"):
        layer.resize(num_slots)
    assert layer.num_slots == 2
    case.check(layer, case.x(1), torch.tensor([[0, 1, 2]]))


@pytest.mark.parametrize("most", [2, 1])
def test_slots_that_cannot_be_allocated_leave_those_there_were(
    engine: CpuExpertEngine, most: int
) -> None:
    case = Case(engine)
    layer = case.layer(2)
    allocate = layer._allocate
    begun: list[weakref.ref[torch.Tensor]] = []

    def fail(count: int) -> Any:
        assert not any(one() is not None for one in begun), "what was begun is given back before"
        if count <= most:
            return allocate(count)
        part = torch.zeros(8)
        begun.append(weakref.ref(part))
        raise MemoryError(f"{count} slots")

    layer._allocate = fail
    with pytest.raises(MemoryError, match="3 slots"):
        layer.resize(3)
    ids = torch.tensor([[0, 1, 2]])
    if most >= 2:
        assert layer.num_slots == 2
        assert layer.device_bytes == 2 * layer.layout.nbytes
        case.check(layer, case.x(1), ids)
    else:
        assert layer.device_bytes == 0
        with pytest.raises(RuntimeError, match="no slots: taking them failed"):
            layer.forward(case.x(1), torch.rand(1, TOP_K), ids)
    layer._allocate = allocate
    layer.resize(3)
    case.check(layer, case.x(1), ids)


class SpyDevice(HostDevice):
    """Writes down which of a slot cache's methods are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.copied = 0

    def slot_cache(self, host: Any, tensors: Any) -> SlotCache:
        spy = self

        class Cache(HostSlotCache):
            def fetch(self, pairs: Any) -> None:
                spy.calls.append("fetch")
                spy.copied += len(pairs)
                super().fetch(pairs)

            def publish(self, wave: Any) -> None:
                spy.calls.append("publish")
                super().publish(wave)

            def release(self) -> None:
                spy.calls.append("release")
                super().release()

        return Cache(host, tensors)


def test_the_device_is_called_in_the_order_it_is_promised_and_copies_each_miss_once(
    engine: CpuExpertEngine,
) -> None:
    case = Case(engine)
    spy = SpyDevice()
    layer = case.layer(2, device=spy)
    for _ in range(3):
        ids = torch.randint(0, 6, (4, TOP_K), generator=case.generator)
        case.check(layer, case.x(4), ids)
    assert spy.calls == ["fetch", "publish", "release"] * layer.counters.waves
    assert spy.copied == layer.counters.misses
    assert spy.copied * layer.layout.nbytes == layer.counters.bytes_fetched


@pytest.mark.parametrize("num_slots", [2, 4, 6])
def test_after_a_step_that_was_interrupted_anywhere_the_next_ones_are_right(
    num_slots: int, engine: CpuExpertEngine
) -> None:
    case = Case(engine)
    first, then = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([[4, 5, 2], [4, 5, 3]])
    for interruption in interruptions(least=4):
        layer = case.layer(num_slots, "lru")
        case.check(layer, case.x(2), first)
        layer.invalidate()  # with all in slots they are filled by the next step
        slots = layer._slots
        steps = [(slots.cache, name) for name in ("fetch", "publish", "release")]
        with interruption.of(*steps, (slots.resident, "compute"), (slots.resident, "output")):
            case.check(layer, case.x(2), then)
        for ids in (then, first, then):
            case.check(layer, case.x(2), ids)


def test_new_weights_in_host_memory_are_used_after_invalidate(engine: CpuExpertEngine) -> None:
    case = Case(engine)
    layer = case.layer(6)
    ids = torch.tensor([[0, 1, 2]])
    case.check(layer, case.x(1), ids)
    case.host["w2_weight"].mul_(-2.0)
    layer.invalidate()
    case.check(layer, case.x(1), ids)


def test_ids_of_any_integer_type_and_rows_of_any_stride(engine: CpuExpertEngine) -> None:
    case = Case(engine)
    layer = case.layer(2)
    wide = torch.randn((4, 48), generator=case.generator)[:, ::2]
    ids = torch.randint(0, 6, (TOP_K, 4), generator=case.generator).T.to(torch.int32)
    case.check(layer, wide, ids)


def test_many_slots_hit_what_was_used_before(engine: CpuExpertEngine) -> None:
    case = Case(engine, 32)
    layer = case.layer(8)
    rng = np.random.default_rng(0)
    for _ in range(60):  # nine of ten experts come from a working set of six
        pool = rng.choice(6, TOP_K, replace=False)
        if rng.random() < 0.3:
            pool[0] = rng.integers(6, 32)
        case.check(layer, case.x(1), torch.from_numpy(pool[None]))
    assert layer.counters.hits > 0.8 * (layer.counters.hits + layer.counters.misses)


def test_a_layer_with_all_its_experts_in_slots_fetches_nothing_in_a_step(
    engine: CpuExpertEngine,
) -> None:
    case = Case(engine)
    layer = case.layer(6)
    case.check(layer, case.x(5), torch.randint(0, 6, (5, TOP_K), generator=case.generator))
    assert (layer.counters.misses, layer.counters.bytes_fetched) == (0, 0)
    assert layer.counters.hits > 0


@pytest.mark.parametrize("first", [True, False])
def test_counters_are_read_while_another_thread_resizes(
    engine: CpuExpertEngine, first: bool
) -> None:
    """Its slots are gone at every second look."""
    layer = Case(engine).layer(3)
    looks = itertools.cycle([first, not first])

    class Resized(OffloadedLayer):
        @property
        def _slots(self) -> Any:
            return vars(self)["_slots"] if next(looks) else None

    layer.__class__ = Resized
    for _ in range(3):
        layer.counted({name: each.tolist() for name, each in layer.readings().items()})
