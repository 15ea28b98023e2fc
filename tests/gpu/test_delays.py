"""Captured steps whose lanes are late: the same sums, and not when a wait between them is left out.

Layers of one side stream and one CPU lane, as in a model, two steps of all in one graph. Every slot
holds NaN when it is made and again from when a fetch into it may begin until it is done: what reads
too early, or is overwritten too early, shows. As an index such a thing is brought into range, since
torch would end the process's use of the GPU.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.device.kernels import DEVICE, on_host
from tests.engine import oracle
from tests.engine.shards import random_shard
from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.request import CpuRequest
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import CapturedLayer, CpuLane, Lane
from vllm_moe_offload.planning import LaneRates, fetch_limits, promotion_limits

pytestmark = pytest.mark.gpu
SPEC = ExpertSpec(512, 256, Activation.SILU, Format.FP32)
LAYERS, STEPS, EXPERTS, SLOTS, TOP_K, MOST = 3, 2, 24, 6, 4, 8
REPLAYS = 12
FLOOR = 1e-3  # of the norm, in float32 or TF32; a wrong expert among four gives 0.5
CYCLES = 1_000_000  # about half a millisecond; fetching an expert takes 0.03
MISSES = np.arange(EXPERTS + 1)
H100 = LaneRates(fetch=50e9, cpu=95e9, fetch_beside_cpu=46e9, cpu_beside_fetch=88e9)
BY_RATES = fetch_limits(H100, EXPERTS)
# What is fetched and what promoted, by how many misses there are.
SPLITS = {
    "hybrid": (MISSES // 2, np.minimum(MISSES - MISSES // 2, 2)),
    "auto": (BY_RATES, promotion_limits(H100, BY_RATES)),
}
MODES = ("cache", *SPLITS)
NAN = float("nan")


class Dense(Lane):
    """All slots times all rows, and of those what was asked for: it is known to be right."""

    def __init__(self, slots: dict[str, torch.Tensor]) -> None:
        self._w13, self._w2 = slots["w13_weight"], slots["w2_weight"]
        self._slots = torch.arange(len(self._w13), device=self._w13.device)

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `lanes.base.Lane.output`."""
        assert expert_map is not None
        gate, up = (x @ self._w13.mT).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ self._w2.mT
        slot = expert_map[topk_ids.long().clamp(0, EXPERTS)]
        share = ((slot[:, :, None] == self._slots) * topk_weights[:, :, None]).sum(1).mT[:, :, None]
        return torch.where(share > 0, rows * share, 0.0).sum(0)


@cache
def experts() -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Of each layer, in float32 and in float64."""
    generator = torch.Generator().manual_seed(0)
    shards = [random_shard(SPEC, EXPERTS, generator) for _ in range(LAYERS)]
    return [(shard, {name: t.double() for name, t in shard.items()}) for shard in shards]


class Model:
    """Layers of one mode, and two steps of all of them in a graph."""

    def __init__(self, engine: CpuExpertEngine, mode: str, tokens: int) -> None:
        self.lane = CpuLane(engine, max_layers=LAYERS, max_tokens=MOST, device=DEVICE)
        self.side = SideStream(DEVICE)
        self.layers = []
        self.slots: list[dict[str, torch.Tensor]] = []
        for number, (shard, _) in enumerate(experts()):
            host = {name: on_host(tensor) for name, tensor in shard.items()}
            slots = {
                name: torch.full((SLOTS, *tensor.shape[1:]), NAN, device=DEVICE)
                for name, tensor in shard.items()
            }
            plan = engine.plan(SPEC, host, max_tokens=MOST, top_k=TOP_K)
            asks = None if mode == "cache" else self.lane.add(f"layers.{number}", plan)
            layer = CapturedLayer(
                host,
                slots,
                Dense(slots),
                self.side,
                asks,
                policy="lfru",
                top_k=TOP_K,
                ends_step=lambda number=number: number == LAYERS - 1,
            )
            if asks is not None:
                layer.split(*SPLITS[mode])
            # Nobody waits for what is listed there where a wait is left out: it is to be an expert.
            for listed in (layer.step.fetches, layer.step.promoted):
                listed.zero_()
            self.layers.append(layer)
            self.slots.append(slots)
        shape = (STEPS, LAYERS, tokens)
        self.x = torch.zeros(*shape, SPEC.hidden, device=DEVICE)
        self.ids = torch.zeros(*shape, TOP_K, dtype=torch.int32, device=DEVICE)
        self.weights = torch.full((*shape, TOP_K), 1 / TOP_K, device=DEVICE)
        self.out = torch.zeros_like(self.x)

    def launch(self) -> None:
        for step in range(STEPS):
            for number, layer in enumerate(self.layers):
                at = step, number
                self.out[at].copy_(layer.forward(self.x[at], self.weights[at], self.ids[at]))

    def capture(self) -> torch.cuda.CUDAGraph:
        """The graph of both steps; compiles first, which capturing does not allow."""
        stream = torch.cuda.Stream()
        self.lane.wake()
        with torch.cuda.stream(stream):
            self.launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            # Into the capture and out of it, whichever waits between are left out.
            self.side._stream.wait_stream(stream)
            self.launch()
            stream.wait_stream(self.side._stream)
        return graph

    def draw(self, rng: np.random.Generator) -> None:
        """Other steps, some of whose experts were in the one before."""
        shape = self.ids.shape[:-1]
        order = np.stack([rng.permutation(EXPERTS) for _ in range(int(np.prod(shape)))])
        order = order.reshape(*shape, EXPERTS)[..., :TOP_K].astype(np.int32)
        order[1, ..., : TOP_K // 2] = order[0, ..., : TOP_K // 2]
        repeated = (order[..., :, None] == order[..., None, :]).sum(-1) > 1
        order[repeated & (np.arange(TOP_K) >= TOP_K // 2)] = EXPERTS  # no expert twice in a row
        self.ids.copy_(torch.from_numpy(order))
        self.x.copy_(torch.from_numpy(rng.standard_normal(self.x.shape)))
        self.out.fill_(NAN)

    def error(self) -> float:
        """The worst layer of the last replay, of the norm of float64's sum."""
        torch.cuda.synchronize()
        self.lane.check()
        x, ids, weights, out = (t.cpu() for t in (self.x, self.ids, self.weights, self.out))
        worst = 0.0
        for step in range(STEPS):
            for number, (_, exact) in enumerate(experts()):
                at = step, number
                expected = torch.zeros(x[at].shape, dtype=torch.float64)
                for expert in range(EXPERTS):
                    token, k = (ids[at] == expert).nonzero(as_tuple=True)
                    rows = x[at][token].double()
                    value = oracle.expert(SPEC, exact, expert, rows, (0, SPEC.intermediate))
                    expected.index_add_(0, token, weights[at][token, k].double()[:, None] * value)
                error = oracle.relative_error(out[at], expected)
                worst = max(worst, error) if error == error else float("inf")
        return worst

    def replays(self) -> float:
        """The worst layer of many replays."""
        rng, graph, worst = np.random.default_rng(0), self.capture(), 0.0
        for _ in range(REPLAYS):
            self.draw(rng)
            self.lane.wake()
            graph.replay()
            worst = max(worst, self.error())
        return worst

    def close(self) -> None:
        self.lane.close()


@pytest.fixture
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine() as engine:
        yield engine


def sleep_before(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The stream sleeps before this method's launches."""
    method = getattr(owner, name)

    def slept(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(CYCLES)
        return method(*args, **kwargs)

    patch.setattr(owner, name, slept)


def poison_before_fetches(patch: pytest.MonkeyPatch) -> None:
    launch = ExpertFetch.launch

    def poisoned(self: ExpertFetch, pairs: torch.Tensor, count: torch.Tensor) -> None:
        listed = torch.arange(len(pairs), device=pairs.device) < count
        marks = torch.zeros(SLOTS + 1, dtype=torch.bool, device=pairs.device)
        marks.index_fill_(0, torch.where(listed, pairs[:, 1], SLOTS).long().clamp(0, SLOTS), True)
        for slots in self._slots:
            slots.view(torch.float32).masked_fill_(marks[:-1, None], NAN)
        launch(self, pairs, count)

    patch.setattr(ExpertFetch, "launch", poisoned)


@contextmanager
def busy(engine: CpuExpertEngine) -> Iterator[None]:
    """Another caller has the engine's threads most of the time, for a few milliseconds each."""
    generator = torch.Generator().manual_seed(0)
    spec = ExpertSpec(1024, 1024, Activation.SILU, Format.FP32)
    plan = engine.plan(spec, random_shard(spec, 2, generator), max_tokens=64, top_k=16)
    ids = torch.zeros(64, 16, dtype=torch.int32)
    work = torch.ones(64, 1024), ids, torch.ones(64, 16), torch.ones(64, 1024)
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            plan.run(*work)
            time.sleep(2e-4)  # a lock is not fair

    other = threading.Thread(target=run)
    other.start()
    try:
        yield
    finally:
        ends.set()
        other.join()  # the engine must not close under it


Delay = Callable[[pytest.MonkeyPatch], None]
DELAYS: dict[str, Delay] = {
    "none": lambda patch: None,
    "fetches are late": lambda patch: sleep_before(patch, ExpertFetch, "launch"),
    "kernels are late": lambda patch: sleep_before(patch, Dense, "output"),
    "requests are late": lambda patch: sleep_before(patch, CpuRequest, "submit"),
    "sums are late": lambda patch: sleep_before(patch, CpuRequest, "join"),
    "the CPU is late": lambda patch: None,
}


def late(delay: str, patch: pytest.MonkeyPatch, engine: CpuExpertEngine) -> Any:
    """This delay, in what is captured from now on and while the result is entered."""
    DELAYS[delay](patch)
    # Outermost: poisoned as early as a fetch may begin, and filled as late as it may end.
    poison_before_fetches(patch)
    return busy(engine) if delay == "the CPU is late" else nullcontext()


@pytest.mark.parametrize("tokens", [1, MOST])
@pytest.mark.parametrize(
    ("mode", "delay"),
    [
        *(("cache", delay) for delay in ("none", "fetches are late", "kernels are late")),
        *((mode, delay) for mode in SPLITS for delay in DELAYS),
    ],
)
def test_late_lanes_change_nothing(
    mode: str,
    delay: str,
    tokens: int,
    engine: CpuExpertEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(engine, mode, tokens)
    with late(delay, monkeypatch, engine):
        worst = model.replays()
    done = [layer.read_counters() for layer in model.layers]
    model.close()
    print(f"\n{mode}, {tokens} tokens, {delay}: {worst:.1e}")
    assert worst <= FLOOR
    for layer in done:
        assert layer.hits > 0
        assert (0 < layer.cpu_experts < layer.misses) == (mode != "cache")
        assert layer.promoted > 0 or mode != "hybrid"


def without_join(patch: pytest.MonkeyPatch) -> None:
    """A wave's kernel does not wait for its fetch."""
    patch.setattr(SideStream, "join", lambda self: None)


def without_fork(patch: pytest.MonkeyPatch) -> None:
    """A fetch waits neither for the decision nor for the kernel that reads its slot."""

    @contextmanager
    def fork(self: SideStream) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield
            self._done.record()

    patch.setattr(SideStream, "fork", fork)


def without_wait(patch: pytest.MonkeyPatch) -> None:
    """The CPU's sum is taken whether it is there or not."""
    patch.setattr(CpuRequest, "wait", lambda self: None)


@pytest.mark.parametrize(
    ("mode", "without", "delay"),
    [
        *((mode, without_join, "fetches are late") for mode in MODES),
        *((mode, without_fork, "kernels are late") for mode in MODES),
        *((mode, without_wait, "the CPU is late") for mode in SPLITS),
    ],
)
def test_without_a_wait_it_is_noticed(
    mode: str,
    without: Callable[[pytest.MonkeyPatch], None],
    delay: str,
    engine: CpuExpertEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(engine, mode, MOST)
    without(monkeypatch)
    with late(delay, monkeypatch, engine):
        worst = model.replays()
    model.close()
    print(f"\n{mode}, {without.__name__}, {delay}: {worst:.1e}")
    assert worst > FLOOR


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_step_that_did_not_end_has_promoted_is_waited_for(
    waits: bool, engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its layers the first alone was computed. Then slots are read by its table."""
    model, rng = Model(engine, "hybrid", 1), np.random.default_rng(0)
    layer = model.layers[0]
    for _ in range(2):  # kernels are compiled
        model.draw(rng)
        model.lane.wake()
        model.launch()
    model.draw(rng)
    before = layer.read_counters().promoted
    model.lane.wake()
    # Longer than all that the host and the CPU have to do until the slots are read.
    monkeypatch.setattr(sys.modules[__name__], "CYCLES", 100 * CYCLES)
    with late("fetches are late", monkeypatch, engine):
        layer.forward(model.x[0, 0], model.weights[0, 0], model.ids[0, 0])
        if waits:
            model.side.join_all()
        slots = {name: tensor.clone() for name, tensor in model.slots[0].items()}
        slot_of = layer.step.slot_of.tolist()
    torch.cuda.synchronize()
    assert layer.read_counters().promoted > before
    host, _ = experts()[0]
    are_right = [
        torch.equal(slots[name][slot].cpu(), tensor[expert])
        for expert, slot in enumerate(slot_of[:EXPERTS])
        for name, tensor in host.items()
        if slot >= 0
    ]
    model.close()
    assert all(are_right) == waits
