"""Ping-pong in an engine: every way to ask for it, what does not go with it, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")

import torch  # noqa: E402
from vllm.config.compilation import CompilationMode, CUDAGraphMode  # noqa: E402
from vllm.model_executor.models import qwen3_moe  # noqa: E402

from tests.e2e.engines import Prompts, engine, greedy, resize, stats  # noqa: E402
from tests.integration.test_refusals import config  # noqa: E402
from tests.integration.test_startup import _model  # noqa: E402
from vllm_moe_offload import (  # noqa: E402
    ConfigError,
    InactiveError,
    MemoryShortError,
    OffloadFusedMoE,
    PingpongUnquantizedFusedMoEMethod,
    Qwen3MoeForCausalLMOffload,
    UnsupportedError,
    moe_offload_args,
)
from vllm_moe_offload.device import HostDevice  # noqa: E402
from vllm_moe_offload.device.copies import RowCopies  # noqa: E402
from vllm_moe_offload.integration import graphs  # noqa: E402
from vllm_moe_offload.integration.compat import fused_moe_factory  # noqa: E402
from vllm_moe_offload.integration.frontend import configure  # noqa: E402
from vllm_moe_offload.integration.streaming import Streaming  # noqa: E402
from vllm_moe_offload.stream import LayerStreamer  # noqa: E402

PROMPTS = Prompts.draw(checkpoints.VOCAB)
ARCHITECTURE = {"hf_overrides": {"architectures": ["Qwen3MoeForCausalLMOffload"]}}
LAYER_BYTES = 16 * 24576
# The name under which the model calls vLLM's factory.
FACTORY = fused_moe_factory().__name__


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def stock_tokens(model: Path) -> list[list[int]]:
    with engine(model) as stock:
        return greedy(stock, PROMPTS)


def is_streamed(llm: Any) -> None:
    """Every step of every layer since the last reset, all of its experts."""
    done = stats(llm)
    assert done["mode"] == "stream"
    assert len(done["layers"]) == 3
    for layer in done["layers"].values():
        assert layer["steps"] == layer["streamed"] > 0
        assert layer["bytes_streamed"] == layer["steps"] * LAYER_BYTES
        assert layer["slots"] == layer["device_bytes"] == layer["cpu_experts"] == 0
    assert done["buffer_bytes"] == 2 * LAYER_BYTES


@pytest.mark.parametrize(
    "arguments",
    [
        moe_offload_args(mode="stream"),
        {"quantization": "pingpong_moe"},
        ARCHITECTURE,
        {**ARCHITECTURE, **moe_offload_args(cpu_threads=1)},
        moe_offload_args(mode="stream") | {"enforce_eager": False},
    ],
    ids=["mode", "quantization", "architecture", "architecture and a setting", "compiled"],
)
def test_every_way_to_ask_for_it(
    arguments: dict[str, Any], model: Path, stock_tokens: list[list[int]]
) -> None:
    with engine(model, **arguments) as ours:
        ours.collective_rpc("moe_offload_reset_stats")
        assert greedy(ours, PROMPTS) == stock_tokens
        is_streamed(ours)
        named = ours.llm_engine.vllm_config.additional_config["moe_offload"]
        assert named["mode"] == "stream", "the workers hear of it"
        with pytest.raises(ValueError, match=r"mode='stream', which copies every .* no slots to"):
            resize(ours, 4)


def test_a_factory_in_a_models_code(
    model: Path, stock_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen3_moe, FACTORY, OffloadFusedMoE)
    with engine(model) as ours:
        ours.collective_rpc("moe_offload_reset_stats")
        assert greedy(ours, PROMPTS) == stock_tokens
        is_streamed(ours)
    with engine(model, **moe_offload_args(mode="cpu")) as ours:
        assert stats(ours)["mode"] == "cpu", "settings say more"
    with (
        pytest.raises(UnsupportedError, match="--enable-expert-parallel"),
        engine(model, enable_expert_parallel=True),
    ):
        pass


@pytest.mark.parametrize("make", [Qwen3MoeForCausalLMOffload, OffloadFusedMoE])
def test_outside_of_a_worker_nothing_would_be_offloaded(make: Callable[..., Any]) -> None:
    with pytest.raises(InactiveError, match="made where no worker of vLLM loads a model"):
        make(vllm_config=None)


@pytest.mark.parametrize("arguments", [{"quantization": "pingpong_moe"}, ARCHITECTURE])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "cache"}, r"mode is 'cache', and .* asks for mode='stream': leave out"),
        ({"slots_per_layer": 4}, r"slots_per_layer would fill no slot"),
    ],
)
def test_other_settings_stop_the_start(
    settings: dict, message: str, arguments: dict, model: Path
) -> None:
    with (
        pytest.raises(ConfigError, match=message),
        engine(model, **arguments, additional_config={"moe_offload": settings}),
    ):
        pass


def test_a_model_that_does_not_ask_is_left_alone() -> None:
    plain = config()
    plain.additional_config = {}
    assert configure(plain) is None
    assert plain.additional_config == {}


def test_buffers_that_do_not_fit_stop_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "free_memory", lambda self, host_bytes: 2 * LAYER_BYTES - 1)
    with (
        pytest.raises(
            MemoryShortError, match=r"two buffers, each for the largest layer, need 0\.8 MiB"
        ),
        engine(model, **moe_offload_args(mode="stream")),
    ):
        pass


def test_layers_of_a_second_model_are_refused(model: Path) -> None:
    with engine(model, **moe_offload_args(mode="stream")) as ours:
        (runtime,) = ours.collective_rpc(lambda worker: worker._moe_offload_runtime)
        runtime._slots.popitem()  # as if the last one came when the others have been sized
        with pytest.raises(UnsupportedError, match=r"layers of one model .* draft model"):
            runtime.prepare()


def test_a_wrong_copy_gives_other_tokens(
    model: Path, stock_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = RowCopies.pairs
    with engine(model, **moe_offload_args(mode="stream")) as ours:
        monkeypatch.setattr(
            RowCopies, "pairs", lambda self, runs: [(t, s.flip(0)) for t, s in pairs(self, runs)]
        )
        assert greedy(ours, PROMPTS) != stock_tokens


def test_reloaded_weights_are_used(model: Path, stock_tokens: list[list[int]]) -> None:
    with engine(model, load_format="dummy", **moe_offload_args(mode="stream")) as ours:
        assert greedy(ours, PROMPTS) != stock_tokens
        ours.collective_rpc(
            "update_config", args=({"load_config": {"load_format": "safetensors"}},)
        )
        ours.collective_rpc("reload_weights")
        assert greedy(ours, PROMPTS) == stock_tokens


def test_the_first_copies_start_before_a_step_that_no_graph_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str | int] = []
    monkeypatch.setattr(LayerStreamer, "begin", lambda self, rows: heard.append(rows))
    monkeypatch.setattr(LayerStreamer, "end", lambda self: heard.append("end"))
    streaming = Streaming(0, 512, torch.device("cpu"), most_captured=64)
    streaming._streamer.threshold = 0
    for rows in (1, 64, 65, 4096):
        streaming.expect(rows)
    assert heard == ["end", "end", 65, 4096]


def test_what_graphs_may_replay() -> None:
    def most(mode: CUDAGraphMode | None, size: int | None) -> int:
        compilation = SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=size)
        return graphs.most_captured(SimpleNamespace(compilation_config=compilation))  # type: ignore[arg-type]

    assert most(CUDAGraphMode.FULL_AND_PIECEWISE, 512) == 512
    assert most(CUDAGraphMode.NONE, 512) == most(None, 512) == 0
    assert most(CUDAGraphMode.FULL, None) == 0


@pytest.mark.parametrize(
    ("is_capturing", "mode", "is_a_piece"),
    [
        (True, CUDAGraphMode.PIECEWISE, True),
        (True, CUDAGraphMode.FULL, False),
        (True, CUDAGraphMode.NONE, False),  # as V2 captures full graphs
        (False, CUDAGraphMode.PIECEWISE, False),
    ],
)
def test_a_piece_is_told_from_a_full_graph(
    is_capturing: bool, mode: CUDAGraphMode, is_a_piece: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(cudagraph_runtime_mode=mode)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(graphs, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(graphs, "get_forward_context", lambda: context)
    assert graphs.captures_a_piece() is is_a_piece


@pytest.fixture
def by_hand(model: Path) -> Iterator[tuple[Any, list[Any]]]:
    """An engine without offload, and the runners of its layers."""
    with engine(model) as stock:
        yield stock, [layer.mlp.experts for layer in _model(stock).model.layers]


def test_a_method_by_hand_computes_from_the_buffer(
    by_hand: tuple[Any, list[Any]], stock_tokens: list[list[int]]
) -> None:
    stock, runners = by_hand
    for runner in runners:
        experts = runner.routed_experts
        experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
    assert greedy(stock, PROMPTS) == stock_tokens, "its own weights"
    for runner in runners:
        experts = runner.routed_experts
        experts.w13_buffer = experts.w13_weight.data.clone()
        experts.w13_weight.data.zero_()
    assert greedy(stock, PROMPTS) == stock_tokens, "the buffer's"
    last = runners[-1].routed_experts
    last.w13_buffer[3].zero_()
    assert greedy(stock, PROMPTS) != stock_tokens
    last.w13_buffer = None
    assert greedy(stock, PROMPTS) != stock_tokens, "its own again"
    assert isinstance(last.w13_weight, torch.nn.Parameter), "and in its place"


def test_a_buffer_unlike_the_weights_is_refused(by_hand: tuple[Any, list[Any]]) -> None:
    _, runners = by_hand
    experts = runners[0].routed_experts
    method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
    experts.quant_method = method
    x, weights = torch.zeros(1, 64), torch.zeros(1, 4)
    own = experts.w13_weight.data
    others = own[:-1], own.double(), own.transpose(1, 2).contiguous().transpose(1, 2)
    for buffer in others:
        experts.w13_buffer = buffer
        with pytest.raises(ValueError, match=r"w13_buffer is .*give a buffer like the weight"):
            method.apply(experts, x, weights, torch.zeros(1, 4, dtype=torch.int32))


def test_where_it_would_do_nothing_it_is_refused(
    by_hand: tuple[Any, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runners = by_hand
    runner, experts = runners[0], runners[0].routed_experts
    before = experts.quant_method
    method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
    with pytest.raises(InactiveError, match=r"MoERunner would do nothing: set it as \.routed_exp"):
        runner.quant_method = method
    with pytest.raises(InactiveError, match=r"'method' of a RoutedExperts .* set it as \.quant_me"):
        experts.method = method
    with pytest.raises(InactiveError, match="would do nothing"):
        torch.nn.ModuleList([method])
    monkeypatch.setattr(type(before), "is_monolithic", property(lambda self: True))
    with pytest.raises(InactiveError, match=r"routes inside .*--moe-backend"):
        experts.quant_method = method
    monkeypatch.undo()
    assert experts.quant_method is before
    experts.quant_method = method
    with pytest.raises(ConfigError, match="make one for each layer"):
        runners[1].routed_experts.quant_method = method


@pytest.mark.parametrize(
    ("changed", "done"),
    [
        ({"cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY}, "captured"),
        ({"mode": CompilationMode.DYNAMO_TRACE_ONCE}, "compiled"),
    ],
)
def test_where_steps_are_replayed_it_is_refused(
    changed: dict[str, Any],
    done: str,
    by_hand: tuple[Any, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, runners = by_hand
    (compilation,) = stock.collective_rpc(lambda worker: worker.vllm_config.compilation_config)
    experts = runners[1].routed_experts
    for name, value in changed.items():
        monkeypatch.setattr(compilation, name, value)
    before = experts.quant_method
    with pytest.raises(InactiveError, match=rf"layers\.1\..* has {done} .*enforce_eager=True"):
        experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
    assert experts.quant_method is before


def test_a_compiled_engine_refuses_it(model: Path) -> None:
    with engine(model, enforce_eager=False) as compiled:
        experts = _model(compiled).model.layers[0].mlp.experts.routed_experts
        with pytest.raises(InactiveError, match="the engine has compiled its steps"):
            experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)


def test_on_quantised_experts_it_is_refused(by_hand: tuple[Any, list[Any]]) -> None:
    _, runners = by_hand
    experts = runners[0].routed_experts
    experts._modules["quant_method"] = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match=r"are quantised \(Identity\).*mode='stream'"):
        experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)


def test_where_every_expert_fits_it_computes_from_the_buffer(
    model: Path, stock_tokens: list[list[int]]
) -> None:
    with engine(model, **moe_offload_args()) as ours:
        for layer in _model(ours).model.layers:
            experts = layer.mlp.experts.routed_experts
            experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
            experts.w13_buffer = experts.w13_weight.data.clone()
            experts.w13_weight.data.zero_()
        assert greedy(ours, PROMPTS) == stock_tokens


def test_on_an_offloaded_layer_it_is_refused(model: Path) -> None:
    with engine(model, **moe_offload_args(mode="stream")) as ours:
        experts = _model(ours).model.layers[0].mlp.experts.routed_experts
        with pytest.raises(InactiveError, match=r"is offloaded, and not computed by it"):
            experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
