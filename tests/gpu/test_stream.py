"""Layers through buffers on a GPU, however late the copies, the kernels or the CPU are.

Where a buffer holds a whole layer these are stock's own bits, and in waves another order of its
sums.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from tests.e2e.engines import (
    engine,
    errors,
    is_no_further,
    log_probabilities,
    resize,
    sequences_for,
    stats,
)
from tests.engine.oracle import relative_error
from tests.gpu import checkpoints
from tests.gpu.oracle import checked_layers
from tests.gpu.test_layer import FLOOR, ROUNDING, draw
from tests.gpu.test_sameness import SIZES
from tests.stream.buffers import poison_buffers
from vllm_moe_offload import moe_offload_args
from vllm_moe_offload.device.copies import CopyStream, Mark
from vllm_moe_offload.errors import CpuLaneError
from vllm_moe_offload.integration.formats import FormatLane
from vllm_moe_offload.lanes import EngineLane, OffloadedLayer
from vllm_moe_offload.planning import TailRates
from vllm_moe_offload.stream import CpuTail
from vllm_moe_offload.stream import tail as tail_module

pytestmark = pytest.mark.gpu
E, SLOTS = checkpoints.EXPERTS, 24
ROWS = (65, 200, 512)
# A layer's copies take about 20 ms in bf16, 10 in FP8.
COPY_CYCLES = 20_000_000  # about 10 ms
KERNEL_CYCLES = 100_000_000  # 50: the next copies into a buffer are over before it is read


# What a buffer holds: every expert of a layer, or an eighth, so that with 24 of 128 in slots a
# layer takes seven waves and the slots' own.
BUFFERS = {"whole": E, "waves": "auto"}


@pytest.fixture(
    scope="module",
    params=[(kind, size) for kind in checkpoints.KINDS for size in BUFFERS],
    ids=lambda param: "-".join(param),
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple]:
    kind, size = request.param
    folder = tmp_path_factory.mktemp("stream")
    quantised, _ = checkpoints.write(kind, folder, seed=3)
    settings = moe_offload_args(
        mode="cache", slots_per_layer=SLOTS, stream_threshold=64, stream_experts=BUFFERS[size]
    )
    with engine(quantised, dtype="bfloat16", enforce_eager=True, **settings, **SIZES) as llm:
        shutil.rmtree(folder)  # all of them are some 50 GiB
        yield kind, llm


def layers(llm: Any) -> list[OffloadedLayer]:
    return [checked.layer for checked in checked_layers(llm)]


def run(llm: Any, seed: int = 0) -> list[torch.Tensor]:
    """Steps of all layers, small ones between: what the large ones gave."""
    outputs = []
    for rows in ROWS:
        for layer in layers(llm):
            outputs.append(layer.forward(*draw(rows, seed + rows)))
        for layer in layers(llm):
            layer.forward(*draw(3, seed + rows))
    torch.cuda.synchronize()
    return outputs


def stock(llm: Any, seed: int = 0) -> list[torch.Tensor]:
    """The same with every expert in its slot; then there are `SLOTS` again."""
    resize(llm, E)
    expected = run(llm, seed)
    resize(llm, SLOTS)
    return expected


def poison(llm: Any) -> None:
    for layer in layers(llm):
        poison_buffers(layer)
        layer._streamed.forget()


def are_stocks(
    kind: str, llm: Any, outputs: list[torch.Tensor], expected: list[torch.Tensor]
) -> bool:
    """Bit for bit where a buffer holds a whole layer, else but for the order of the sums.

    And for the scale of the activations where there is one for all of them: a wave has its own.
    """
    both = list(zip(outputs, expected, strict=True))
    if layers(llm)[0].buffer_experts == E:
        return all(torch.equal(got, want) for got, want in both)
    allowed = FLOOR["fp8_block"] if kind == "fp8_tensor" else ROUNDING
    return all(relative_error(got, want.double()) <= allowed for got, want in both)


def before(function: Callable[..., Any], patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let a method be preceded by a call of `function`."""
    method = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        function(*args)
        return method(*args, **kwargs)

    patch.setattr(owner, name, both)


def sleep_on_copies(copies: CopyStream, *_: Any) -> None:
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(COPY_CYCLES)


def sleep_here(*_: Any) -> None:
    torch.cuda._sleep(KERNEL_CYCLES)


DELAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda patch: None,
    "copies are late": lambda patch: before(sleep_on_copies, patch, CopyStream, "copy"),
    "kernels are late": lambda patch: before(sleep_here, patch, FormatLane, "output"),
}


@torch.inference_mode()
@pytest.mark.parametrize("delay", DELAYS)
def test_every_layer_is_stocks(delay: str, running: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, llm = running
    expected = stock(llm)
    poison(llm)
    DELAYS[delay](monkeypatch)
    assert are_stocks(kind, llm, run(llm), expected)
    done = stats(llm)["layers"].values()
    assert {layer["streamed"] for layer in done} == {len(ROWS)}
    for layer in done:
        moved = len(ROWS) * E * layer["expert_bytes"]
        assert moved - len(ROWS) * layer["device_bytes"] <= layer["bytes_streamed"] <= moved


@torch.inference_mode()
@pytest.mark.parametrize("delay", ["copies are late", "kernels are late"])
def test_without_the_marks_it_is_noticed(
    delay: str, running: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, llm = running
    expected = stock(llm)
    poison(llm)
    DELAYS[delay](monkeypatch)
    monkeypatch.setattr(Mark, "wait", lambda self: None)
    assert not are_stocks(kind, llm, run(llm), expected)


class LateRun:
    """What the CPU computes is in its place, and said to be there, a while later; NaN before."""

    def __init__(self, run: Any, partial: torch.Tensor, out: torch.Tensor, done: torch.Tensor):
        self._run, self._partial, self._out, self._done = run, partial, out, done
        self._thread = threading.Thread(target=self._end)
        self._thread.start()

    def _end(self) -> None:
        self._seconds = self._run.wait()
        time.sleep(0.03)
        self._out.copy_(self._partial)
        self._done.fill_(1)

    def wait(self, timeout: float | None = None) -> float:
        self._thread.join(timeout)
        return self._seconds


def let_the_cpu_be_late(patch: pytest.MonkeyPatch) -> None:
    begin = EngineLane.begin

    def late(self: EngineLane, *given: torch.Tensor) -> LateRun:
        *given, out, done = given
        partial = torch.empty(out.shape)
        run = begin(self, *given, partial, torch.zeros(1, dtype=torch.int32))
        return LateRun(run, partial, out.fill_(float("nan")), done)

    patch.setattr(EngineLane, "begin", late)


@torch.inference_mode()
@pytest.mark.parametrize("delay", [*DELAYS, "the CPU is late"])
@pytest.mark.parametrize("cpu", [0.0, 1.0, 1e6])
def test_some_experts_on_the_cpu(
    cpu: float, delay: str, running: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that may be, about half and none of those that are not copied ahead."""
    kind, llm = running
    expected = stock(llm)
    poison(llm)
    DELAYS.get(delay, let_the_cpu_be_late)(monkeypatch)
    streamer = layers(llm)[0]._streamed.streamer
    monkeypatch.setattr(streamer, "tail", CpuTail(TailRates(1.0, cpu, 0.0)))
    worst = max(
        relative_error(got, want.double()) for got, want in zip(run(llm), expected, strict=True)
    )
    done = stats(llm)
    print(f"\n{kind}: {done['cpu_experts']} experts on the CPU, {worst:.2e} from stock's")
    assert (done["cpu_experts"] > 0) == (cpu < 1e6)
    # The kernels of FP8 quantise activations, the engine does not.
    assert worst <= (ROUNDING if kind == "bf16" else FLOOR["fp8_block"])


@torch.inference_mode()
def test_without_the_wait_for_the_cpu_it_is_noticed(
    running: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, llm = running
    let_the_cpu_be_late(monkeypatch)
    streamer = layers(llm)[0]._streamed.streamer
    monkeypatch.setattr(streamer, "tail", CpuTail(TailRates(1.0, 0.0, 0.0)))
    monkeypatch.setattr(tail_module, "wait_for_word", lambda *_: None)
    assert any(output.isnan().any() for output in run(llm))
    streamer.check()


class Stalled:
    """A computation that does not end."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait(self, timeout: float) -> float:
        raise TimeoutError(f"not in {timeout} s")

    def abandon(self) -> None:
        pass


@torch.inference_mode()
@pytest.mark.parametrize("number", [0, -1])
def test_a_cpu_that_does_not_end_ends_the_step(
    number: int, running: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream that waits for it is let go, and the next step is right."""
    kind, llm = running
    expected = stock(llm)
    layer = layers(llm)[number]
    streamer = layer._streamed.streamer
    with monkeypatch.context() as patch:
        patch.setattr(streamer, "tail", CpuTail(TailRates(1.0, 0.0, 0.0)))
        patch.setattr(EngineLane, "begin", Stalled)
        with pytest.raises(CpuLaneError, match=r"layers\.\d"):
            layer.forward(*draw(200, 1))
            streamer.check()
        torch.cuda.synchronize()
    assert are_stocks(kind, llm, run(llm), expected)


@torch.inference_mode()
def test_slots_are_left_as_they_were(running: tuple) -> None:
    _, llm = running
    resize(llm, SLOTS)
    some = layers(llm)[0]
    some.forward(*draw(3, 1))
    tables = some.captured.step._state.clone()
    slots = {name: tensor.clone() for name, tensor in some._slots.cache.tensors.items()}
    some.forward(*draw(200, 2))
    torch.cuda.synchronize()
    assert torch.equal(some.captured.step._state, tables)
    for name, tensor in some._slots.cache.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), slots[name].view(torch.uint8))


@torch.inference_mode()
@pytest.mark.parametrize("cpu", [None, 0.0])
@pytest.mark.parametrize("delay", DELAYS)
def test_slots_hold_what_is_kept_of_a_prompt(
    delay: str, cpu: float | None, running: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte what host memory holds; then small steps are right."""
    kind, llm = running
    layer = layers(llm)[0]
    resize(llm, SLOTS)
    small = draw(3, 1)
    expected = layer.forward(*small)
    resize(llm, SLOTS)
    everything = {name: tensor.cuda() for name, tensor in layer._host.items()}
    poison(llm)
    DELAYS[delay](monkeypatch)
    if cpu is not None:
        monkeypatch.setattr(layer._streamed.streamer, "tail", CpuTail(TailRates(1.0, cpu, 0.0)))
    for rows in ROWS:
        for each in layers(llm):
            bounds = torch.tensor([0, 1, 2, rows], dtype=torch.int32, device="cuda")
            each.forward(*draw(rows, rows), None, bounds)
    torch.cuda.synchronize()
    slot_of = layer.captured.step.slot_of.tolist()
    assert layer.counters.kept > 0
    assert sum(slot >= 0 for slot in slot_of) > 1
    for name, tensor in layer._slots.cache.tensors.items():
        for expert, slot in enumerate(slot_of):
            if slot >= 0:
                # Kept a dimension, without which a single scale has no bytes to be seen as.
                there = tensor[slot : slot + 1].view(torch.uint8)
                assert torch.equal(there, everything[name][expert : expert + 1].view(torch.uint8))
    error = relative_error(layer.forward(*small), expected.double())
    assert error <= (ROUNDING if kind == "bf16" else FLOOR["fp8_block"])


@pytest.mark.parametrize("mode", ["cache", "auto"])
@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_no_further_from_float32_than_stock(kind: str, mode: str, tmp_path: Any) -> None:
    quantised, plain = checkpoints.write(kind, tmp_path)
    sequences = sequences_for(checkpoints.VOCABULARY)
    with engine(plain, dtype="float32", enforce_eager=True, **SIZES) as llm:
        reference = log_probabilities(llm, sequences)
    with engine(quantised, dtype="bfloat16", enforce_eager=True, **SIZES) as llm:
        theirs = log_probabilities(llm, sequences)
    settings = moe_offload_args(mode=mode, slots_per_layer=SLOTS, stream_threshold=64)
    with engine(quantised, dtype="bfloat16", enforce_eager=True, **settings, **SIZES) as llm:
        ours = log_probabilities(llm, sequences)
        assert stats(llm)["bytes_streamed"] > 0
        again = ours
        if mode == "auto":  # by the kernels of every format, whose scratch steps have made
            llm.collective_rpc("moe_offload_measure")
            again = log_probabilities(llm, sequences)
        copy = CopyStream.copy
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                CopyStream,
                "copy",
                lambda self, pairs, **marks: copy(
                    self, [(t, s.flip(0)) for t, s in pairs], **marks
                ),
            )
            faulty = log_probabilities(llm, sequences)
    print(f"\n{kind}: {errors(ours, reference)}, stock {errors(theirs, reference)}")
    assert is_no_further(ours, theirs, reference)
    assert is_no_further(again, theirs, reference)
    assert not is_no_further(faulty, theirs, reference)
