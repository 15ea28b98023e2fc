"""Layers whose launches ask and the CPU engine that answers them: nothing here plays either side.

The launches are interpreted, or compiled and replayed from a graph.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.device.kernels import DEVICE, INTERPRETED, marked, run_interpreted
from tests.engine import oracle
from tests.engine.faults import end_service_thread, kept_busy
from tests.engine.shards import random_shard, tolerance
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.errors import CpuLaneError
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import CpuLane

EXPERTS, TOP_K, MOST = 10, 3, 16
SPECS = (
    ExpertSpec(96, 64, Activation.SILU, Format.BF16),
    ExpertSpec(96, 32, Activation.GELU, Format.BF16),
    ExpertSpec(72, 40, Activation.SILU, Format.FP32),
    ExpertSpec(96, 64, Activation.SILU, Format.BF16, bias=True),
)
NAN = float("nan")


class Layer:
    """A layer's experts, and the tensors of a step of it on the device."""

    def __init__(
        self, lane: CpuLane, engine: CpuExpertEngine, spec: ExpertSpec, name: str, tokens: int
    ) -> None:
        self.spec = spec
        self.shard = random_shard(spec, EXPERTS, torch.Generator().manual_seed(len(name)))
        plan = engine.plan(spec, self.shard, max_tokens=MOST, top_k=TOP_K)
        self.request = lane.add(name, plan)
        self.x = torch.zeros(tokens, spec.hidden, dtype=spec.activation_dtype, device=DEVICE)
        self.ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=DEVICE)
        self.weights = torch.zeros(tokens, TOP_K, device=DEVICE)
        self.cpu_map = torch.full((EXPERTS + 1,), -1, dtype=torch.int32, device=DEVICE)
        self.resident = torch.zeros(tokens, spec.hidden, device=DEVICE)
        self.out = torch.zeros_like(self.resident)
        self._poison = torch.full((MOST, spec.hidden), NAN, device=DEVICE)

    def draw(self, generator: torch.Generator) -> None:
        """Another step; the sentinel is among the ids; the CPU has no, some or all experts."""
        for tensor in (self.x, self.weights, self.resident):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.ids.copy_(torch.randint(0, EXPERTS + 1, self.ids.shape, generator=generator))
        experts = torch.arange(EXPERTS, dtype=torch.int32)
        share = float(torch.randint(0, 4, (), generator=generator)) / 3
        of_cpu = torch.rand(EXPERTS, generator=generator) < share
        self.cpu_map[:-1] = torch.where(of_cpu, experts, -1).to(DEVICE)
        self.out.fill_(NAN)

    @property
    def asks(self) -> bool:
        return bool((self.cpu_map >= 0).any())

    def launch(self) -> None:
        self.request.operands.partial.copy_(self._poison, non_blocking=True)
        self.request.submit(self.x, self.ids, self.weights, self.cpu_map)
        self.request.wait()
        self.request.join(self.resident, self.cpu_map, self.out)

    def check(self) -> None:
        given = (t.cpu() for t in (self.x, self.ids, self.weights, self.cpu_map))
        expected = oracle.experts(self.spec, self.shard, *given)
        resident = self.resident.cpu().double()
        error = (self.out.cpu() - (resident + expected)).norm()
        rounding = 2**-23 * resident.norm()  # of the sum
        assert error <= tolerance(self.spec) * expected.norm() + rounding


class Model:
    """Layers of one lane, and a step through all of them."""

    def __init__(self, engine: CpuExpertEngine, tokens: int, timeout: float = 30.0) -> None:
        self.engine = engine
        self.lane = CpuLane(
            engine, max_layers=len(SPECS), max_tokens=MOST, device=DEVICE, timeout=timeout
        )
        self.layers = [
            Layer(self.lane, engine, spec, f"layers.{i}", tokens) for i, spec in enumerate(SPECS)
        ]
        self._graph: torch.cuda.CUDAGraph | None = None
        if not INTERPRETED:
            self._launch()  # compiles, which capturing does not allow
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._launch()

    def draw(self, generator: torch.Generator) -> None:
        for layer in self.layers:
            layer.draw(generator)

    def start(self) -> None:
        self.lane.wake()
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()

    def step(self) -> None:
        """A whole step; fails where it does not end."""
        self.start()
        if self._graph is not None:
            ended = torch.cuda.Event()
            ended.record()
            until = time.monotonic() + 20
            while not ended.query():
                assert time.monotonic() < until, "the stream waits and nobody answers"

    def _launch(self) -> None:
        for layer in self.layers:
            layer.launch()


@pytest.fixture
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine() as engine:
        yield engine


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@marked
@pytest.mark.parametrize("tokens", [1, 5, MOST])
def test_steps_are_the_oracles(
    engine: CpuExpertEngine, generator: torch.Generator, tokens: int
) -> None:
    model = Model(engine, tokens)
    asked = dict.fromkeys(model.lane.stats(), 0)
    before = model.lane.stats()
    for _ in range(25 if INTERPRETED else 300):
        model.draw(generator)
        model.step()
        model.lane.check()
        for name, layer in zip(asked, model.layers, strict=True):
            layer.check()
            asked[name] += layer.asks
    assert min(asked.values()) > 0
    for name, stats in model.lane.stats().items():
        assert stats.requests - before[name].requests == asked[name]
        assert stats.tokens - before[name].tokens == asked[name] * tokens
        assert stats.busy_seconds > before[name].busy_seconds
    model.lane.close()


def everyone_asks(model: Model, generator: torch.Generator) -> None:
    model.draw(generator)
    for layer in model.layers:
        layer.cpu_map[:-1] = torch.arange(EXPERTS, dtype=torch.int32)


def expect_failed(model: Model, first: int, *parts: str) -> None:
    """The step ends, those after it too, nothing is answered from `first` on, and `check` says why.

    `first`: the first layer that fails.
    """
    begin = time.monotonic()
    model.step()
    assert time.monotonic() - begin < 5
    for layer in model.layers[first:]:
        assert layer.out.isnan().all()
    answered = model.lane.stats()
    assert [stats.requests for stats in answered.values()] == [1] * first + [0] * (4 - first)
    for _ in range(3):
        with pytest.raises(CpuLaneError) as caught:
            model.lane.check()
        for part in parts:
            assert part in str(caught.value)
        model.step()
    # Not by what is in `out`: a thread that stalled may have gone on, and writes to it late.
    assert model.lane.stats() == answered
    model.lane.close()


@marked
def test_what_cannot_be_computed_fails(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    model = Model(engine, 4)
    everyone_asks(model, generator)
    model.layers[1].ids[0, 0] = 2
    model.layers[1].cpu_map[2] = EXPERTS
    expect_failed(model, 1, "layers.1", "expert_map[2] is 10")


@marked
def test_a_stall_fails(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    model = Model(engine, 4, timeout=0.2)
    everyone_asks(model, generator)
    with kept_busy(engine, 2.5):
        expect_failed(model, 0, "layers.0", "within 0.2 s")


@marked
def test_the_end_of_the_service_fails(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    model = Model(engine, 4)
    everyone_asks(model, generator)
    end_service_thread()
    expect_failed(model, 0, "the service thread ended; layers.0 was the next to ask")


@marked
def test_any_thread_may_check(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    model = Model(engine, 4)
    everyone_asks(model, generator)
    stop = threading.Event()
    raised = []

    def watch() -> None:
        while not stop.is_set():
            try:
                model.lane.check()
            except CpuLaneError as error:
                raised.append(error)
                return

    watchers = [threading.Thread(target=watch) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    try:
        model.step()
        assert not raised
        model.layers[0].ids[0, 0] = 2
        model.layers[0].cpu_map[2] = EXPERTS
        model.step()
        for watcher in watchers:
            watcher.join(5)
        assert len(raised) == len(watchers)
    finally:
        stop.set()


@marked
def test_closing_waits_for_what_is_launched(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    model = Model(engine, MOST)
    everyone_asks(model, generator)
    model.start()
    model.lane.close()
    for layer in model.layers:
        layer.check()
    model.lane.close()
    with pytest.raises(RuntimeError, match="closed"):
        model.lane.wake()
    with pytest.raises(RuntimeError, match="closed"):
        model.lane.check()


@marked
def test_layers_alike_share_operands(engine: CpuExpertEngine) -> None:
    model = Model(engine, 1)
    first, second, other, third = (layer.request.operands for layer in model.layers)
    assert first is second is third
    assert other is not first
    spec = SPECS[0]
    shard = random_shard(spec, 2, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="room for 4 mailboxes"):
        model.lane.add("layers.4", engine.plan(spec, shard, max_tokens=1, top_k=1))


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
