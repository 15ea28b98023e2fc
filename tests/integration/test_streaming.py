"""What a worker settles about streamed steps when its layers are there, on the host device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch

from tests.engine.shards import random_shard
from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.errors import CpuLaneError, UnsupportedError
from vllm_moe_offload.experts import Activation, ExpertLayout, ExpertSpec, Format
from vllm_moe_offload.integration import streaming
from vllm_moe_offload.integration.selfcheck import random_step
from vllm_moe_offload.integration.streaming import Streaming
from vllm_moe_offload.lanes import MAX_CAPTURED, EngineLane, OffloadedLayer
from vllm_moe_offload.stream import CpuTail, buffer_bytes

CPU = torch.device("cpu")
SPEC = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
EXPERTS, SLOTS, BUFFER, TOP_K = 12, 3, 4, 2
# Seconds an expert takes of the CPU of `Timed`, and more of a row.
READING, ROW = 1e-3, 1e-4


class Timed(EngineLane):
    """A lane that says it took so long."""

    def begin(self, x, weights, ids, expert_map, out, done):
        experts = expert_map[ids.long()].unique()
        count = int((experts >= 0).sum())
        rows = len(x) * TOP_K / EXPERTS
        run = super().begin(x, weights, ids, expert_map, out, done)
        run.wait()

        class Run:
            def wait(self, timeout: float | None = None) -> float:
                return count * (READING + ROW * rows)

        return Run()


class Settled:
    """Two layers that are streamed from 9 rows on."""

    def __init__(
        self, engine: CpuExpertEngine, corrects: bool, has_tail: bool, most_rows: int = 64
    ) -> None:
        nbytes = 2 * buffer_bytes(SPEC.layout, BUFFER)
        self.streaming = Streaming(8, nbytes, CPU, corrects=corrects)
        self.checked: list[str] = []
        self.tails: list[CpuTail | None] = []  # when these were checked
        self.layers, lanes = {}, {}

        def lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
            return EngineLane(engine, SPEC, tensors, TOP_K, 64)

        for name in ("layers.0", "layers.1"):
            host = random_shard(SPEC, EXPERTS, torch.Generator().manual_seed(len(lanes)))
            layout = ExpertLayout.of(host)
            lanes[name] = Timed(engine, SPEC, host, TOP_K, 2048)
            layer = OffloadedLayer(
                *(host, HostDevice(), layout.empty, lane, lanes[name]),
                num_slots=SLOTS,
                policy="lfru",
            )

            def bind(memory):
                tensors = memory.tensors(layout, BUFFER)  # noqa: B023 - called at once
                return tensors, lane(tensors)

            self.streaming.add(name, layer, bind)
            self.layers[name] = layer
        self.settle = lambda: self.streaming.settle(
            self.layers,
            lanes,
            self.check,
            lambda name, rows: random_step(EXPERTS, SPEC, TOP_K, rows),
            has_tail,
            most_rows,
        )
        self.settle()

    def check(self, name: str) -> None:
        self.checked.append(name)
        self.tails.append(self.tail)

    @property
    def tail(self) -> CpuTail | None:
        return self.streaming._streamer.tail


@pytest.fixture(scope="module")
def engine():
    with CpuExpertEngine(threads=1) as engine:
        yield engine


def test_without_a_tail_every_expert_is_copied(engine: CpuExpertEngine) -> None:
    settled = Settled(engine, corrects=True, has_tail=False)
    assert settled.tail is None
    assert settled.streaming.tail_stats() is None
    assert not settled.streaming.is_measured, "the threshold is set"
    settled.streaming.reset_stats()
    assert settled.checked == ["layers.0", "layers.1"]
    assert settled.streaming.threshold == 8


@pytest.mark.parametrize(
    ("threshold", "is_asked", "is_refused"),
    [(8, False, True), (None, True, True), (None, False, False)],
)
def test_a_layer_that_cannot_be_streamed_is_refused_where_it_was_asked_for(
    threshold: int | None, is_asked: bool, is_refused: bool
) -> None:
    def bind(memory):
        raise UnsupportedError("this format keeps what it has captured")

    streaming = Streaming(threshold, 512, CPU, is_asked=is_asked)
    layer = SimpleNamespace(num_slots=SLOTS, num_experts=EXPERTS)
    with pytest.raises(UnsupportedError) if is_refused else nullcontext():
        streaming.add("layers.0", layer, bind)


def test_buffers_that_no_step_is_large_enough_for_are_a_warning(
    engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, str] = {}
    for level in ("info", "warning"):

        def log(text: str, *given: object, level: str = level) -> None:
            said[level] = text % given

        monkeypatch.setattr(streaming.logger, level, log)
    Settled(engine, corrects=False, has_tail=False, most_rows=9)
    assert said.pop("info").endswith("steps of more than 8 rows are streamed (stream_threshold)")
    assert not said
    Settled(engine, corrects=False, has_tail=False, most_rows=8)
    assert "than 8 rows, which none has (max_num_batched_tokens=8), are streamed" in said["warning"]


@pytest.mark.parametrize("corrects", [False, True])
def test_rates_are_corrected_where_they_may_be(engine: CpuExpertEngine, corrects: bool) -> None:
    settled = Settled(engine, corrects, has_tail=True)
    assert settled.checked == 2 * ["layers.0", "layers.1"], "again with the CPU's part"
    tail = settled.tail
    assert tail._corrects == corrects
    assert tail._expert_bytes == SPEC.layout.nbytes
    assert tail._measured.copy > 0
    assert tail._measured.slowed >= 1
    assert tail._measured.cpu == pytest.approx(READING)
    assert tail._measured.cpu_row == pytest.approx(ROW)


def test_settled_again_nothing_of_before_is_left(engine: CpuExpertEngine) -> None:
    settled = Settled(engine, corrects=True, has_tail=True)
    before = settled.tail
    assert settled.streaming.is_measured, "the rates of its tail"
    settled.streaming._streamer.threshold = None
    settled.settle()
    assert settled.tail is not before
    assert settled.streaming.threshold == 8
    assert settled.checked == 4 * ["layers.0", "layers.1"]
    first, again = settled.tails[:4], settled.tails[4:]
    assert first == 2 * [None] + 2 * [before], "first without the CPU's part"
    assert again == 2 * [None] + 2 * [settled.tail]


def test_where_settling_again_fails_what_was_known_holds(engine: CpuExpertEngine) -> None:
    settled = Settled(engine, corrects=True, has_tail=True)
    before = settled.tail

    def fail(name: str) -> None:
        raise CpuLaneError(name)

    settled.check = fail
    with pytest.raises(CpuLaneError, match=r"layers\.0"):
        settled.settle()
    assert settled.tail is before
    assert settled.streaming.threshold == 8


class Watch:
    """The time of a streamed step, and of one beside which the CPU computes: which it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._is_beside = False

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def is_done(self) -> bool:
        self._is_beside = True
        return True

    def seconds(self) -> float:
        return 18e-6 if self._is_beside else 12e-6


def test_copies_are_timed_alone_and_beside_a_cpu_that_reads(
    engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "Stopwatch", Watch)
    rates = Settled(engine, corrects=True, has_tail=True).tail._measured
    assert rates.copy == pytest.approx(12e-6 / EXPERTS)
    assert rates.slowed == pytest.approx(1.5)


def test_steps_that_the_device_decides_are_not_streamed(
    engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OffloadedLayer, "decides_on_device", True)
    settled = Settled(engine, corrects=True, has_tail=False)
    assert settled.streaming.threshold == MAX_CAPTURED > 8


def test_the_statistics_say_by_which_rates_steps_are_split_and_what_they_took(
    engine: CpuExpertEngine,
) -> None:
    settled = Settled(engine, corrects=True, has_tail=True)
    tail = settled.tail
    tail.begin(8)
    for name, layer in settled.layers.items():
        layer.forward(*random_step(EXPERTS, SPEC, TOP_K, 16))
        assert tail.times.passed > 0 or name == "layers.0"
    told = settled.streaming.tail_stats()
    assert told["rates"] == asdict(tail.rates)
    assert told["rates_now"] == asdict(tail.rates_now)
    assert told["computed"] == tail.times.computed
    assert 0 <= told["waited"] <= told["passed"]
    assert told["by_copies"] > 0
    settled.streaming.reset_stats()
    assert not any(asdict(tail.times).values())


def test_a_failed_cpu_is_told_before_an_output_is_used(engine: CpuExpertEngine) -> None:
    settled = Settled(engine, corrects=True, has_tail=True)

    class Failed:
        def wait(self, timeout: float) -> float:
            raise ValueError("no sum")

    settled.streaming.check()
    settled.tail._computing, settled.tail._layer = Failed(), "layers.1"
    with pytest.raises(CpuLaneError, match=r"layers\.1: .* failed: no sum"):
        settled.streaming.check()
    settled.streaming.check()


@pytest.mark.parametrize(
    ("rows", "takes", "most_captured", "called"),
    [
        (100, True, 64, ["begin 100"]),
        (100, False, 64, ["end"]),
        (100, True, 128, ["end"]),  # its graph has the first copies in it
    ],
)
def test_copies_begin_with_a_streamed_step_and_end_before_another(
    rows: int, takes: bool, most_captured: int, called: list[str]
) -> None:
    done: list[str] = []
    streamer = SimpleNamespace(
        takes=lambda _: takes,
        begin=lambda rows: done.append(f"begin {rows}"),
        end=lambda: done.append("end"),
    )
    expect = Streaming.expect
    given = SimpleNamespace(_streamer=streamer, _most_captured=most_captured)
    assert expect(given, rows) == (called != ["end"])  # type: ignore[arg-type]
    assert done == called
