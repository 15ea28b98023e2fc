"""A layer whose large steps pass through buffers: the oracle's output, and slots as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import oracle
from tests.engine.shards import random_shard, tolerance
from tests.stream.buffers import poison, poison_buffers
from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.device.copies import CopyStream, RowCopies
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.errors import CpuLaneError
from vllm_moe_offload.experts import Activation, ExpertLayout, ExpertSpec, Format
from vllm_moe_offload.lanes import Counters, EngineLane, OffloadedLayer
from vllm_moe_offload.planning import TailRates
from vllm_moe_offload.stream import BufferMemory, CpuTail, LayerStreamer, buffer_bytes
from vllm_moe_offload.stream import tail as tail_module

CPU = torch.device("cpu")
TOP_K, THRESHOLD = 3, 8


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine(threads=1) as engine:
        yield engine


class Model:
    """Layers of random experts with their streamer."""

    def __init__(
        self,
        engine: CpuExpertEngine,
        sizes: list[tuple[int, int]],
        format_: Format = Format.FP32,
        policy: str = "lfru",
        seed: int = 0,
        buffer_experts: int = 100,
    ) -> None:
        """sizes: experts and slots of each layer; buffer_experts: what a buffer holds at most."""
        self.spec = ExpertSpec(24, 10, Activation.SILU, format_, bool(seed % 2))
        self.rng = np.random.default_rng(seed)
        self.streamer = LayerStreamer(CopyStream(CPU), THRESHOLD)
        self.hosts = [
            random_shard(self.spec, experts, torch.Generator().manual_seed(seed + i))
            for i, (experts, _) in enumerate(sizes)
        ]

        def lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
            return EngineLane(engine, self.spec, tensors, TOP_K, 64)

        most = min(max(experts for experts, _ in sizes), buffer_experts)
        memory = [BufferMemory(buffer_bytes(self.spec.layout, most), CPU) for _ in range(2)]
        self.layers = []
        for host, (experts, slots) in zip(self.hosts, sizes, strict=True):
            layer = OffloadedLayer(
                host,
                HostDevice(),
                ExpertLayout.of(host).empty,
                lane,
                lane(host),
                num_slots=slots,
                policy=policy,
            )
            size = min(experts, buffer_experts)
            buffers = [each.tensors(ExpertLayout.of(host), size) for each in memory]
            slots = layer._slots.cache.tensors if slots else {}
            for shard in (*buffers, slots):
                poison(shard)
            layer.stream_through(
                self.streamer, [(buffer, lane(buffer)) for buffer in buffers], "layer"
            )
            self.layers.append(layer)

    def leave_some_to_the_cpu(self, cpu: float, row: float) -> None:
        """A tail of these times of what copying an expert takes."""
        self.streamer.tail = CpuTail(TailRates(1.0, cpu, row))

    def step(self, number: int, rows: int, padded: float = 0.0) -> None:
        """A step of random rows of one layer, some of them padding, is the oracle's."""
        layer, host = self.layers[number], self.hosts[number]
        ids = torch.from_numpy(self.rng.integers(0, layer.num_experts, (rows, TOP_K)))
        weights = torch.from_numpy(self.rng.random((rows, TOP_K), np.float32))
        x = torch.from_numpy(self.rng.standard_normal((rows, 24), np.float32))
        x = x.to(self.spec.activation_dtype)
        padding = torch.from_numpy(self.rng.random(rows) < padded)
        got = layer.forward(x, weights, ids, padding if padded else None)
        real = ~padding
        expected = oracle.experts(self.spec, host, x[real], ids[real].int(), weights[real])
        rounding = torch.finfo(got.dtype).eps / 2
        allowed = tolerance(self.spec) + rounding
        assert not real.any() or oracle.relative_error(got[real], expected) <= allowed


class Beside:
    """A call in a thread of its own, whose error is raised where it is waited for."""

    def __init__(self, call: Any, *given: Any) -> None:
        thread = ThreadPoolExecutor(1)
        self._done = thread.submit(call, *given)
        self._done.add_done_callback(lambda _: given[-1].fill_(1))
        thread.shutdown(wait=False)
        self.abandoned = False

    def wait(self, timeout: float | None = None) -> float:
        self._done.result(timeout)
        return 0.0

    def abandon(self) -> None:
        self.abandoned = True


def in_slots(layer: OffloadedLayer) -> tuple[list[int], list[torch.Tensor]]:
    return layer._residency.table.slot_of.tolist(), [
        tensor.clone() for tensor in layer._slots.cache.tensors.values()
    ]


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(3, 8),
    share=st.floats(0.1, 1.0),
    layers=st.integers(1, 4),
    format_=st.sampled_from([Format.FP32, Format.BF16, Format.FP8_CHANNEL]),
    policy=st.sampled_from(["lfru", "static"]),
    tail=st.none() | st.tuples(st.floats(0, 2), st.floats(0, 0.5)),
    buffer_experts=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_streamed_and_other_steps_in_any_order(
    engine: CpuExpertEngine,
    experts: int,
    share: float,
    layers: int,
    format_: Format,
    policy: str,
    tail: tuple[float, float] | None,
    buffer_experts: int,
    seed: int,
) -> None:
    sizes = [(experts + i % 2, max(1, int(share * experts))) for i in range(layers)]
    model = Model(engine, sizes, format_, policy, seed, buffer_experts)
    if tail is not None:
        model.leave_some_to_the_cpu(*tail)
    for turn in range(6):
        rows = 1 + int(model.rng.integers(2 * THRESHOLD))
        for number in range(layers):
            if model.rng.random() < 0.2:  # not every layer, not all of a size
                continue
            if model.rng.random() < 0.2:
                rows = 1 + int(model.rng.integers(2 * THRESHOLD))
            model.step(number, rows, padded=0.3 * (turn % 2))


@pytest.mark.parametrize("buffer_experts", [2, 8])
def test_a_small_step_forgets_what_was_copied_for_its_layer(
    engine: CpuExpertEngine, buffer_experts: int
) -> None:
    model = Model(engine, [(8, 3), (8, 3)], buffer_experts=buffer_experts)
    for _ in range(4):
        model.step(1, 2)
        model.step(0, 40)  # and what layer 1 lacks in its slots begins to be copied
        model.step(1, 2)  # after which it lacks others
        model.step(1, 40)


@pytest.mark.parametrize("buffer_experts", [2, 8])
def test_a_streamed_step_leaves_the_slots_and_the_policy_as_they_were(
    engine: CpuExpertEngine, buffer_experts: int
) -> None:
    model = Model(engine, [(8, 3), (8, 3)], buffer_experts=buffer_experts)
    layer = model.layers[0]
    model.step(0, 2)
    table, tensors = in_slots(layer)
    model.step(0, 40)
    model.step(1, 40)
    assert in_slots(layer)[0] == table
    for before, after in zip(tensors, in_slots(layer)[1], strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


@pytest.mark.parametrize(("buffer_experts", "waves"), [(8, 1), (7, 2), (3, 3), (1, 6)])
def test_counters_of_streamed_steps(
    engine: CpuExpertEngine, buffer_experts: int, waves: int
) -> None:
    """Of 8 experts 3 are in slots; those and the others are waves."""
    model = Model(engine, [(8, 3), (8, 8)], buffer_experts=buffer_experts)
    layer = model.layers[0]
    model.step(0, 2)
    before = layer.counters
    for padded in (0.0, 0.5):
        model.rng = np.random.default_rng(5)
        model.step(0, 40, padded)
    done = layer.counters
    occupied = sum(slot >= 0 for slot in in_slots(layer)[0])
    assert occupied == 3
    assert done.streamed == 2
    assert done.bytes_streamed == 2 * (8 - occupied) * layer.layout.nbytes
    assert (done.steps, done.waves) == (before.steps + 2, before.waves + 2 * waves)
    assert before.tokens + 40 < done.tokens < before.tokens + 80
    assert (done.hits, done.misses, done.bytes_fetched) == (
        before.hits,
        before.misses,
        before.bytes_fetched,
    )
    layer.resize(2)
    assert layer.counters == done
    layer.reset_counters()
    assert layer.counters.tokens == 0
    model.step(1, 40)
    assert model.layers[1].counters.streamed == 0, "every expert is in its slot"


@pytest.mark.parametrize(
    ("cpu", "buffer_experts", "least", "most"),
    [
        (0.0, 8, 5, 5),
        (1.0, 8, 3, 5),
        (99.0, 8, 0, 0),
        (0.0, 2, 5, 5),
        (0.0, 1, 6, 6),
        (99.0, 2, 0, 0),
    ],
)
def test_the_split_between_the_bus_and_the_cpu(
    engine: CpuExpertEngine, cpu: float, buffer_experts: int, least: int, most: int
) -> None:
    """Of 8 experts in no slot a third, 3, are copied before it is known what they are used for.

    Unless both buffers hold fewer.
    """
    model = Model(engine, [(8, 3), (8, 3)], buffer_experts=buffer_experts)
    model.leave_some_to_the_cpu(cpu, 0.0)
    for number in range(2):
        model.step(number, 50, padded=0.3)
        done = model.layers[number].counters
        assert least <= done.cpu_experts <= most
        assert done.bytes_streamed == (8 - done.cpu_experts) * model.layers[0].layout.nbytes


@pytest.mark.parametrize(("buffer_experts", "copied"), [(8, 4), (2, 4), (1, 3)])
def test_experts_that_nobody_uses_are_not_copied_once_that_is_known(
    engine: CpuExpertEngine, buffer_experts: int, copied: int
) -> None:
    """Those ahead are 0, 1 and 2, or as many as a buffer holds."""
    model = Model(engine, [(8, 3)], buffer_experts=buffer_experts)
    model.leave_some_to_the_cpu(99.0, 0.0)
    layer = model.layers[0]
    x, weights = torch.ones(20, 24), torch.ones(20, TOP_K)
    layer.forward(x, weights, torch.tensor([[0, 1, 7]]).repeat(20, 1))
    assert layer.counters.bytes_streamed == copied * layer.layout.nbytes


def test_an_error_of_the_cpus_part_ends_the_step(engine: CpuExpertEngine) -> None:
    model = Model(engine, [(8, 3), (8, 3)], buffer_experts=2)
    model.leave_some_to_the_cpu(0.0, 0.0)
    first, last = (layer._streamed.cpu for layer in model.layers)
    first.begin = lambda *given: Beside(None, *given)
    step = torch.ones(40, 24), torch.ones(40, TOP_K), torch.arange(40 * TOP_K).view(40, TOP_K) % 8
    with pytest.raises(CpuLaneError, match=r"layer.*CPU's part.*not callable"):
        model.layers[0].forward(*step)
        model.streamer.check()
    model.layers[0].forward(*step)
    with pytest.raises(CpuLaneError, match="not callable"):
        model.step(1, 40)
    assert model.streamer._next is None, "the next layer begins a step of its own"
    model.streamer.check()
    last.begin = first.begin
    with pytest.raises(CpuLaneError, match="not callable"):
        model.step(1, 40)
    del first.begin, last.begin
    for number in (0, 1, 0):
        model.step(number, 40)


@pytest.mark.parametrize("number", [0, 1])
def test_a_cpu_that_does_not_end_ends_the_step(
    engine: CpuExpertEngine, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stream waits for it: it is let go."""
    monkeypatch.setattr(tail_module, "_TIMEOUT", 0.05)
    monkeypatch.setattr(tail_module, "wait_for_word", lambda *given: None)
    model = Model(engine, [(8, 3), (8, 3)], buffer_experts=2)
    model.leave_some_to_the_cpu(0.0, 0.0)
    stalled, runs = threading.Event(), []

    def begin(*given: Any) -> Beside:
        runs.append(Beside(lambda *_: stalled.wait(timeout=60), *given))
        return runs[-1]

    model.layers[number]._streamed.cpu.begin = begin
    step = torch.ones(40, 24), torch.ones(40, TOP_K), torch.arange(40 * TOP_K).view(40, TOP_K) % 8
    with pytest.raises(CpuLaneError, match=r"layer.*computed for more than|layer.*has failed"):
        model.layers[number].forward(*step)
        model.streamer.check()
    assert runs[0].abandoned
    assert model.streamer.tail._done.item() == 1
    stalled.set()


def test_the_cpus_part_of_a_failed_step_ends_before_another_is_read(
    engine: CpuExpertEngine,
) -> None:
    """It reads the memory that the next step's rows are staged in."""
    model = Model(engine, [(8, 3)], buffer_experts=1)
    model.leave_some_to_the_cpu(0.0, 0.0)
    streamed, tail = model.layers[0]._streamed, model.streamer.tail
    cpu, lane = streamed.cpu, streamed.buffers[0].lane
    begin, wave, choose = cpu.begin, lane.compute, tail.choose
    failed, ends = threading.Event(), []

    def late(*given: Any) -> None:
        assert failed.wait(timeout=60)
        time.sleep(0.05)
        begin(*given).wait()
        ends.append("computed")

    cpu.begin, lane.compute = lambda *given: Beside(late, *given), None
    with pytest.raises(TypeError):
        model.step(0, 40)
    failed.set()
    cpu.begin, lane.compute = begin, wave
    tail.choose = lambda *given: (ends.append("read"), choose(*given))[1]
    model.step(0, 40)
    assert ends == ["computed", "read"]


def test_the_cpus_part_is_computed_while_waves_are_launched(engine: CpuExpertEngine) -> None:
    """It ends only when the last wave has begun, and its sum is in the output all the same."""
    model = Model(engine, [(8, 3)], buffer_experts=1)
    model.leave_some_to_the_cpu(0.4, 0.0)
    streamed = model.layers[0]._streamed
    launched = threading.Semaphore(0)
    begin, outputs = streamed.cpu.begin, [buffer.lane.compute for buffer in streamed.buffers]
    waves = 2

    def late(*given: Any) -> None:
        for _ in range(waves):
            assert launched.acquire(timeout=60)
        begin(*given).wait()

    streamed.cpu.begin = lambda *given: Beside(late, *given)
    for buffer, wave in zip(streamed.buffers, outputs, strict=True):
        buffer.lane.compute = lambda *given, wave=wave: (launched.release(), wave(*given))
    model.step(0, 40)
    assert model.layers[0].counters.waves >= waves
    assert model.layers[0].counters.cpu_experts > 0


def test_new_weights_and_new_slots_between_streamed_steps(engine: CpuExpertEngine) -> None:
    model = Model(engine, [(6, 2), (6, 2), (6, 2)], buffer_experts=4)
    model.step(0, 20)
    for tensor in model.hosts[1].values():
        tensor.mul_(0.5)
    model.layers[1].invalidate()
    for number in range(3):
        model.step(number, 20)
    model.layers[2].resize(4)
    for number in range(3):
        model.step(number, 20)


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(3, 8),
    layers=st.integers(1, 4),
    format_=st.sampled_from([Format.FP32, Format.BF16, Format.FP8_CHANNEL]),
    buffer_experts=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_without_slots_steps_of_every_size_are_streamed(
    engine: CpuExpertEngine,
    experts: int,
    layers: int,
    format_: Format,
    buffer_experts: int,
    seed: int,
) -> None:
    sizes = [(experts + i % 2, 0) for i in range(layers)]
    model = Model(engine, sizes, format_, seed=seed, buffer_experts=buffer_experts)
    model.streamer.threshold = 0
    rows = [1 + int(model.rng.integers(2 * THRESHOLD)) for _ in range(4)]
    for turn, count in enumerate(rows):
        for number in range(layers):
            model.step(number, count, padded=0.3 * (turn % 2))
    for layer in model.layers:
        done = layer.counters
        waves = -(-layer.num_experts // min(buffer_experts, layer.num_experts))
        assert (done.steps, done.streamed, done.waves) == (4, 4, 4 * waves)
        assert layer.buffer_experts == min(buffer_experts, layer.num_experts)
        assert done.bytes_streamed == 4 * layer.host_bytes
        assert rows[0] + rows[2] <= done.tokens <= sum(rows)
        assert (done.hits, done.misses, done.bytes_fetched, done.cpu_experts) == (0, 0, 0, 0)
        assert layer.device_bytes == layer.num_slots == 0
        layer.reset_counters()
        assert layer.counters == Counters()


def test_without_slots_new_weights_are_copied(engine: CpuExpertEngine) -> None:
    model = Model(engine, [(6, 0)] * 3)
    model.streamer.threshold = 0
    for number in (0, 1):  # and the copies of the last one are under way
        model.step(number, 2)
    for tensor in model.hosts[2].values():
        tensor.mul_(0.5)
    model.layers[2].invalidate()
    model.step(2, 2)


def test_without_slots_a_step_that_is_not_streamed_is_the_cpus(engine: CpuExpertEngine) -> None:
    model = Model(engine, [(6, 0)])
    model.step(0, THRESHOLD)
    assert model.layers[0].counters.cpu_experts > 0 == model.layers[0].counters.streamed


@pytest.mark.parametrize("buffer_experts", [2, 6])
def test_a_wrong_copy_is_noticed(
    engine: CpuExpertEngine, buffer_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks above can fail: an expert that was not copied."""
    model = Model(engine, [(6, 2)], buffer_experts=buffer_experts)
    model.step(0, 20)
    launch = RowCopies.launch
    monkeypatch.setattr(RowCopies, "launch", lambda self, runs: launch(self, runs[1:]))
    poison_buffers(model.layers[0])
    model.streamer.end()
    with pytest.raises(AssertionError):
        model.step(0, 20)
