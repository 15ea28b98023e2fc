"""Ping-pong on a GPU, eager and in graphs of every kind: no further from float32 than stock.

And stock's own numbers however late the copies or the kernels are, with buffers poisoned between
steps; planted faults are noticed. The tests go together, in their order: the last ones let a
float32 engine read the tokens that those before have generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import numpy as np
import torch
from vllm import LLM
from vllm import envs as vllm_envs
from vllm.compilation import monitor

from tests.e2e.engines import decoded, engine, stats
from tests.gpu import checkpoints
from tests.gpu.drawing import CAPTURED, NEW, RUNNERS, SIZES, Drawn, draw, is_accepted, prompts
from tests.gpu.oracle import checked_layers
from tests.stream.buffers import poison_buffers
from vllm_moe_offload import (
    PingpongUnquantizedFusedMoEMethod,
    copy_all_experts_to_gpu,
    create_cpu_mapped_tensor,
    moe_offload_args,
)
from vllm_moe_offload.device import copies
from vllm_moe_offload.device.copies import CopyStream, RowCopies
from vllm_moe_offload.integration.formats import FormatLane
from vllm_moe_offload.stream import LayerStreamer

pytestmark = pytest.mark.gpu
LAYERS = 3  # the third takes the buffer of the first again
STREAM = moe_offload_args(mode="stream")
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full graphs": CAPTURED,
    "pieces": {
        "enforce_eager": False,
        "compilation_config": {
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [1, 4, 8, 32],
        },
    },
}
LATE = 150_000_000  # cycles: 70 ms and more, of which a layer's copies take 20

Plant = Callable[[pytest.MonkeyPatch], None]
Generated = tuple[list[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pingpong")
    return checkpoints.write("bf16", folder, seed=9, layers=LAYERS)[0]


def forget() -> None:
    """What the engines before leave behind in the process."""
    vllm_envs.disable_envs_cache()
    monitor.set_cudagraph_capturing_enabled(True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def draw_counted(llm: LLM, name: str, drawn: dict[str, Drawn]) -> None:
    """Every step of every layer is counted, replayed or not, and no row of padding."""
    llm.collective_rpc("moe_offload_reset_stats")
    drawn[name] = draw(llm)
    done = stats(llm)
    same = np.array_equal(drawn[name].values, drawn["stock"].values)
    print(f"\n{name}: {done['steps']} steps, {'as' if same else 'not bit for bit as'} stock")
    assert done["mode"] == "stream"
    assert done["tokens"] == sum(len(p) + NEW - 1 for batch in prompts() for p in batch)
    assert len(done["layers"]) == LAYERS
    for layer in done["layers"].values():
        assert layer["steps"] == layer["streamed"] == done["steps"]
        assert layer["bytes_streamed"] == layer["steps"] * layer["host_bytes"]
        assert layer["device_bytes"] == layer["cpu_experts"] == layer["misses"] == 0
    largest = max(layer["host_bytes"] for layer in done["layers"].values())
    assert 2 * largest <= done["buffer_bytes"] <= 2.01 * largest


@pytest.mark.parametrize("way", WAYS)
def test_decoding(way: str, checkpoint: Path, drawn: dict[str, Drawn]) -> None:
    with engine(checkpoint, dtype="bfloat16", **STREAM, **WAYS[way], **SIZES) as llm:
        draw_counted(llm, way, drawn)
        in_graph = {checked.layer._is_in_graph for checked in checked_layers(llm)}
        assert in_graph == {way != "eager"}
        if way == "full graphs":
            sizes = llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes
            assert 128 in sizes, "graphs of every size that vLLM has"


@pytest.mark.parametrize("runner", RUNNERS)
def test_decoding_with_vllms_default_graphs(
    runner: str,
    checkpoint: Path,
    drawn: dict[str, Drawn],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.compile; full graphs for decode, piecewise ones for the rest."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    with engine(
        checkpoint, dtype="bfloat16", enforce_eager=False, quantization="pingpong_moe", **SIZES
    ) as llm:
        draw_counted(llm, runner, drawn)
        config = llm.llm_engine.vllm_config
        assert config.use_v2_model_runner is (RUNNERS[runner] == "1")
        assert {checked.layer._is_in_graph for checked in checked_layers(llm)} == {True}


def generate(llm: LLM) -> Generated:
    """A few steps: small ones, and prompts that are longer than a step beside ones that decode."""
    rng = np.random.default_rng(7)
    long = [rng.integers(3, checkpoints.VOCABULARY, 300).tolist() for _ in range(4)]
    parts = [decoded(llm, prompts()[1], 4), decoded(llm, long, 4), decoded(llm, prompts()[0], 4)]
    return [t for tokens, _ in parts for t in tokens], np.concatenate([v for _, v in parts])


def are_equal(one: Generated, other: Generated) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1])


def poison(llm: LLM) -> None:
    """Every byte of both buffers becomes part of a NaN."""
    for checked in checked_layers(llm):
        poison_buffers(checked.layer)
    torch.cuda.synchronize()


@pytest.fixture(scope="module", params=["eager", "full graphs"])
def undelayed(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[dict[str, Any], Generated]:
    """A way, and what is generated that way when nothing is late."""
    way = WAYS[request.param]
    forget()
    with engine(checkpoint, dtype="bfloat16", **STREAM, **way, **SIZES) as llm:
        expected = generate(llm)
        poison(llm)
        assert are_equal(generate(llm), expected), "whatever is in the buffers"
    return way, expected


def sleep_before_copies(patch: pytest.MonkeyPatch) -> None:
    """On the stream of the copies, and so in a graph that has them."""
    launch = RowCopies.launch

    def late(self: RowCopies, runs: copies.Runs) -> None:
        torch.cuda._sleep(LATE)
        launch(self, runs)

    patch.setattr(RowCopies, "launch", late)


def sleep_before_kernels(patch: pytest.MonkeyPatch) -> None:
    output = FormatLane.output

    def late(self: FormatLane, *given: Any) -> torch.Tensor:
        torch.cuda._sleep(LATE)
        return output(self, *given)

    patch.setattr(FormatLane, "output", late)


DELAYS: dict[str, Plant] = {
    "copies are late": sleep_before_copies,
    "kernels are late": sleep_before_kernels,
}


@pytest.mark.parametrize("delay", DELAYS)
def test_nothing_is_read_or_overwritten_too_early(
    delay: str,
    undelayed: tuple[dict[str, Any], Generated],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way, expected = undelayed
    DELAYS[delay](monkeypatch)
    with engine(checkpoint, dtype="bfloat16", **STREAM, **way, **SIZES) as llm:
        for _ in range(2):
            poison(llm)
            assert are_equal(generate(llm), expected)


def leave_readers_out(patch: pytest.MonkeyPatch) -> None:
    """A buffer is free for the next copies although a kernel has yet to read it."""
    begin, output = LayerStreamer.begin, LayerStreamer.output
    record = copies.Mark.record
    state = {"is_counted": True}

    def counted(self: LayerStreamer, rows: int, first: int = 0) -> None:
        before, state["is_counted"] = state["is_counted"], True
        begin(self, rows, first)
        state["is_counted"] = before

    def reading(self: LayerStreamer, *given: Any) -> Any:
        # The marks of the copies, which are on a stream of their own, stay.
        state["is_counted"] = False
        try:
            return output(self, *given)
        finally:
            state["is_counted"] = True

    def recorded(self: copies.Mark) -> None:
        if state["is_counted"] or torch.cuda.current_stream() in own:
            record(self)

    own: list[torch.cuda.Stream] = []
    make = CopyStream.__init__

    def made(self: CopyStream, device: torch.device) -> None:
        make(self, device)
        own.append(self._stream)

    patch.setattr(CopyStream, "__init__", made)
    patch.setattr(copies.Mark, "record", recorded)
    patch.setattr(LayerStreamer, "begin", counted)
    patch.setattr(LayerStreamer, "output", reading)


def without_checks(patch: pytest.MonkeyPatch) -> None:
    """The check before the first request would notice a fault already."""
    patch.setattr("vllm_moe_offload.integration.runtime.check_layer", lambda *_, **__: None)


def test_a_buffer_that_is_overwritten_too_early_is_noticed(
    undelayed: tuple[dict[str, Any], Generated], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, expected = undelayed
    without_checks(monkeypatch)
    sleep_before_kernels(monkeypatch)
    leave_readers_out(monkeypatch)
    with engine(checkpoint, dtype="bfloat16", **STREAM, **way, **SIZES) as llm:
        assert not are_equal(generate(llm), expected)


launch_copies = RowCopies.launch


def drop(self: RowCopies, runs: copies.Runs) -> None:
    """In place of `RowCopies.launch`: three experts of 128 are not copied."""
    ((taken, rows),) = runs
    launch_copies(self, [(slice(3, taken.stop), slice(3, rows.stop))])


def test_a_fault_in_the_graphs(
    checkpoint: Path, drawn: dict[str, Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_checks(monkeypatch)
    monkeypatch.setattr(RowCopies, "launch", drop)
    with engine(checkpoint, dtype="bfloat16", **STREAM, **CAPTURED, **SIZES) as llm:
        for checked in checked_layers(llm):
            for buffer in checked.layer._streamed.buffers:
                for tensor in buffer.tensors.values():
                    tensor[:3].zero_()
        drawn["full graphs: experts dropped"] = draw(llm)


def test_a_fault_eagerly(
    checkpoint: Path, drawn: dict[str, Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(checkpoint, dtype="bfloat16", **STREAM, **WAYS["eager"], **SIZES) as llm:
        monkeypatch.setattr(RowCopies, "launch", drop)
        for checked in checked_layers(llm):
            for buffer in checked.layer._streamed.buffers:
                for tensor in buffer.tensors.values():
                    tensor[:3].zero_()
        drawn["eager: experts dropped"] = draw(llm)


def test_by_hand_from_mapped_memory(checkpoint: Path) -> None:
    """The weights of every layer are gone from the GPU but for the buffer that it computes from."""
    with engine(checkpoint, dtype="bfloat16", enforce_eager=True, **SIZES) as llm:
        expected = generate(llm)
        (model,) = llm.collective_rpc(lambda worker: worker.worker.get_model())
        buffer = None
        for layer in model.model.layers:
            experts = layer.mlp.experts.routed_experts
            weight = experts.w13_weight.data
            host = create_cpu_mapped_tensor(weight.shape, weight.dtype)
            host.copy_(weight)
            weight.zero_()
            buffer = torch.empty_like(weight)
            copy_all_experts_to_gpu(host, buffer)
            assert torch.equal(buffer.cpu(), host)
            experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
            experts.w13_buffer = buffer
        torch.cuda.synchronize()
        assert are_equal(generate(llm), expected)
        buffer[: checkpoints.EXPERTS // 2].zero_()
        assert not are_equal(generate(llm), expected)


@pytest.mark.parametrize("name", [*WAYS, *RUNNERS])
def test_no_further_from_float32_than_stock(
    name: str, drawn: dict[str, Drawn], reference: LLM
) -> None:
    assert is_accepted(name, drawn, reference)


@pytest.mark.parametrize("name", ["full graphs: experts dropped", "eager: experts dropped"])
def test_a_fault_is_noticed(name: str, drawn: dict[str, Drawn], reference: LLM) -> None:
    assert not is_accepted(name, drawn, reference)
