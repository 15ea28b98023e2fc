"""Starting an engine: with settings that go, that do not go, and without any."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: E402
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.model_executor.models import qwen3_moe  # noqa: E402
from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: E402

from tests.e2e.engines import Prompts, engine, greedy, resize, stats  # noqa: E402
from tests.integration.test_refusals import config  # noqa: E402
from vllm_moe_offload import (  # noqa: E402
    ConfigError,
    InactiveError,
    MemoryShortError,
    UnsupportedError,
    moe_offload_args,
)
from vllm_moe_offload.config import OffloadConfig  # noqa: E402
from vllm_moe_offload.device import HostDevice  # noqa: E402
from vllm_moe_offload.device import host as host_device  # noqa: E402
from vllm_moe_offload.host import store as store_module  # noqa: E402
from vllm_moe_offload.integration import layers, runtime, sizing  # noqa: E402
from vllm_moe_offload.integration.compat import check_version  # noqa: E402
from vllm_moe_offload.integration.frontend import configure  # noqa: E402
from vllm_moe_offload.integration.layers import offloaded_layers  # noqa: E402
from vllm_moe_offload.integration.plugin import register  # noqa: E402
from vllm_moe_offload.integration.selfcheck import SelfCheckError  # noqa: E402
from vllm_moe_offload.stream import LayerStreamer  # noqa: E402

PROMPTS = Prompts.draw(checkpoints.VOCAB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def stock_tokens(model: Path) -> list[list[int]]:
    with engine(model) as stock:
        return greedy(stock, PROMPTS)


def test_registering_again_changes_nothing() -> None:
    from vllm.engine.arg_utils import EngineArgs

    register()
    before = (EngineArgs.create_engine_config, WorkerWrapperBase.load_model)
    register()
    assert (EngineArgs.create_engine_config, WorkerWrapperBase.load_model) == before


def test_without_settings_vllm_is_untouched(model: Path) -> None:
    with engine(model) as stock:
        found = [module for module in _model(stock).modules() if isinstance(module, RoutedExperts)]
        assert found
        assert all(type(module) is RoutedExperts for module in found)
        with pytest.raises(Exception, match="without moe_offload settings: give some in add"):
            stats(stock)
    assert "RoutedExperts" not in op_registry_oot


def test_without_settings_no_module_of_the_layers_is_imported() -> None:
    code = (
        "import sys; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "import json; print(json.dumps([m for m in sys.modules if m.startswith('vllm_moe_of')]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    loaded = json.loads(printed.splitlines()[-1])
    assert "vllm_moe_offload.integration.plugin" in loaded
    assert not [m for m in loaded if m.endswith((".layers", ".runtime", ".op")) or "engine" in m]


def test_environment_variables_alone_turn_it_on(
    model: Path, monkeypatch: pytest.MonkeyPatch, stock_tokens: list[list[int]]
) -> None:
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER", "3")
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_POLICY", "lru")
    with engine(model) as ours:
        assert greedy(ours, PROMPTS) == stock_tokens
        done = stats(ours)
        assert {layer["policy"] for layer in done["layers"].values()} == {"lru"}
        assert {layer["slots"] for layer in done["layers"].values()} == {3}
        assert done["host_bytes"] == 3 * 16 * 24576
        assert done["device_bytes"] == 3 * 3 * 24576
        assert done["tokens"] == max(layer["tokens"] for layer in done["layers"].values())


@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])
def test_every_policy_gives_the_same_tokens(
    model: Path, policy: str, stock_tokens: list[list[int]]
) -> None:
    with engine(model, **moe_offload_args(slots_per_layer=5, policy=policy)) as ours:
        assert greedy(ours, PROMPTS) == stock_tokens
        assert stats(ours)["misses"] > 0


def test_compiled_gives_the_same_tokens(model: Path, stock_tokens: list[list[int]]) -> None:
    settings = moe_offload_args(slots_per_layer=4, cpu_threads=1)
    with engine(model, enforce_eager=False, **settings) as ours:
        assert greedy(ours, PROMPTS) == stock_tokens
        assert stats(ours)["misses"] > 0
        assert stats(ours)["cpu_threads"] == 1


def test_a_budget_sizes_the_slots(model: Path) -> None:
    with engine(model, **moe_offload_args(gpu_memory_gib=0.0005)) as ours:
        done = stats(ours)
        (slots,) = {layer["slots"] for layer in done["layers"].values()}
        expert = next(iter(done["layers"].values()))["expert_bytes"]
        budget = int(0.0005 * 2**30)
        assert slots == budget // (3 * expert)
        assert done["device_bytes"] <= budget


def test_a_budget_is_for_slots_and_buffers(model: Path) -> None:
    """Of an eighth of a layer's 16 experts each, unless it is said."""
    for asked, size in (("auto", 2), (3, 3), (16, 16)):
        settings = moe_offload_args(
            gpu_memory_gib=0.00107, stream_threshold=64, stream_experts=asked
        )
        with engine(model, **settings) as ours:
            done = stats(ours)
            (slots,) = {layer["slots"] for layer in done["layers"].values()}
            assert {layer["buffer_experts"] for layer in done["layers"].values()} == {size}
            assert done["buffer_bytes"] == 2 * size * 24576
            assert slots == (int(0.00107 * 2**30) - done["buffer_bytes"]) // (3 * 24576)
            assert done["stream_threshold"] == 64


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"gpu_memory_gib": 0.0005, "stream_threshold": 64, "stream_experts": 16},
            MemoryShortError,
            r"two buffers for streamed layers need 0.8 MiB.*smaller buffers \(stream_experts",
        ),
        (
            {"slots_per_layer": 4, "stream_threshold": 64, "stream_experts": 17},
            ConfigError,
            r"stream_experts=17, but .* has 16 experts, and no layer has more: give at most 16",
        ),
        (
            {"slots_per_layer": 16, "stream_threshold": 64, "stream_experts": 4},
            ConfigError,
            r"slots_per_layer=16 has every expert in a slot.* stream_threshold, stream_experts",
        ),
        (
            {"slots_per_layer": 4, "stream_experts": 4},
            ConfigError,
            r"stream_experts=4, but in vLLM's CPU build nothing is streamed unless",
        ),
        (
            {"mode": "stream", "stream_experts": 15},
            ConfigError,
            r"stream_experts=15 with mode='stream'.* layer of 16 .* leave stream_experts out",
        ),
        ({"mode": "stream", "stream_experts": 17}, ConfigError, r"give at most 16"),
    ],
)
def test_buffers_that_do_not_go_stop_the_start(
    model: Path, settings: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        start(model, settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"slots_per_layer": 4, "policy": "lru"},
            "mode=cache, 3 layers, 1.1 MiB of experts in host memory, 4 slots a layer, 0.3 MiB in "
            "slots, policy lru, 1 CPU thread (",
        ),
        (
            {"mode": "stream"},
            "mode=stream, 3 layers, 1.1 MiB of experts in host memory, 0.8 MiB in two buffers, 1",
        ),
        ({"mode": "cpu"}, "mode=cpu, 3 layers, 1.1 MiB of experts in host memory, 1 CPU thread ("),
        ({}, "3 layers fits on the device, so offload is off and vLLM runs as without it"),
        (
            {"group_size": 1, "params": ["self_attn"]},
            "3 layers fits on the device, so offload of experts is off; prefetching stays on",
        ),
    ],
)
def test_the_log_says_what_there_is(
    model: Path, settings: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(runtime.logger, "info", lambda text, *given: lines.append(text % given))
    with engine(model, **moe_offload_args(cpu_threads=1, **settings)):
        assert said in "\n".join(lines)


def test_buffers_hold_whole_layers_in_the_mode_stream(model: Path) -> None:
    for settings in ({}, {"stream_experts": 16}):
        with engine(model, **moe_offload_args(mode="stream", **settings)) as ours:
            done = stats(ours)
            assert {layer["buffer_experts"] for layer in done["layers"].values()} == {16}
            assert done["buffer_bytes"] == 2 * 16 * 24576


def test_the_first_copies_start_with_the_step(
    model: Path, stock_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    begin = LayerStreamer.begin

    def spy(self: LayerStreamer, rows: int, first: int = 0) -> None:
        begun.append((self, first))
        begin(self, rows, first)

    with engine(model, **moe_offload_args(slots_per_layer=4, stream_threshold=8)) as ours:
        monkeypatch.setattr(LayerStreamer, "begin", spy)
        ours.llm_engine.reset_prefix_cache()
        ours.collective_rpc("moe_offload_reset_stats")
        assert greedy(ours, PROMPTS) == stock_tokens
        done = stats(ours)
        streamed = {layer["streamed"] for layer in done["layers"].values()}
        assert streamed == {len(begun)}, "once a step, and the step goes on from there"
        assert {first for _, first in begun} == {0}


@pytest.mark.parametrize("settings", [{}, {"slots_per_layer": "auto"}, {"gpu_memory_gib": "auto"}])
def test_auto_with_room_for_all_is_stock_vllm(
    model: Path, settings: dict, stock_tokens: list[list[int]]
) -> None:
    with engine(model, **moe_offload_args(**settings)) as ours:
        assert stats(ours)["layers"] == {}
        assert greedy(ours, PROMPTS) == stock_tokens
        assert "moe_offload" not in ours.llm_engine.vllm_config.additional_config
        with pytest.raises(ValueError, match="has every expert on the device: it has no slots"):
            resize(ours, 4)


def test_auto_without_room_for_all_fills_what_there_is(
    model: Path, monkeypatch: pytest.MonkeyPatch, stock_tokens: list[list[int]]
) -> None:
    def free(self: HostDevice, host_bytes: int) -> int:
        assert host_bytes == 3 * 16 * 24576, "the experts, which are not in host memory yet"
        return 3 * 24576 * 7 + 5

    monkeypatch.setattr(HostDevice, "free_memory", free)
    with engine(model, **moe_offload_args(slots_per_layer="auto")) as ours:
        assert {layer["slots"] for layer in stats(ours)["layers"].values()} == {7}
        assert greedy(ours, PROMPTS) == stock_tokens


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        (r"nothing", []),
        (r"2\.down_proj", ["w2_weight (w2) of 1 of 16"]),
        (r"(2\.down|(9|11)\.up)_proj", ["w13_weight (w3) of 2 of 16", "w2_weight (w2) of 1 of 16"]),
        (r"\d+\.gate_proj", ["w13_weight (w1) of 16 of 16"]),
        (
            r"\d+\.\w+",
            [
                "w13_weight (w1) of 16 of 16",
                "w13_weight (w3) of 16 of 16",
                "w2_weight (w2) of 16 of 16",
            ],
        ),
    ],
)
def test_experts_that_a_checkpoint_lacks_are_named(
    model: Path, tmp_path: Path, lost: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(layers.logger, "warning", lambda text, *args: lines.append(text % args))
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    for name in list(tensors):
        if re.fullmatch(rf"model\.layers\.1\.mlp\.experts\.{lost}\.weight", name):
            del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with engine(tmp_path, **moe_offload_args(slots_per_layer=4)):
        pass
    assert len(lines) == len(found)
    for line, words in zip(lines, found, strict=True):
        assert f"has no {words} experts of model.layers.1.mlp.experts" in line
    if "11" in lost:
        assert lines[0].endswith("weights of zero: 9, 11")


def test_a_projection_that_a_checkpoint_lacks_in_all_layers_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(layers.logger, "warning", lambda text, *args: lines.append(text % args))
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "up_proj" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with engine(tmp_path, **moe_offload_args(slots_per_layer=4)):
        pass
    assert len(lines) == 3
    for number, line in enumerate(lines):
        assert f"has no w13_weight (w3) of 16 of 16 experts of model.layers.{number}.mlp" in line


def test_experts_in_one_tensor_have_arrived_all() -> None:
    parameter = torch.nn.Parameter(torch.zeros(16, 4, 8))
    layer = SimpleNamespace(
        _names={parameter: "w2_weight"},
        _arrived={},
        _runtime=SimpleNamespace(arrived=set()),
        moe_config=SimpleNamespace(num_experts=16),
    )
    note: Any = layers.OffloadedRoutedExperts._note_arrival
    note(layer, parameter, torch.zeros(4, 8), "w2", 3)
    assert layer._arrived == {("w2_weight", "w2"): {3}}
    note(layer, parameter, torch.zeros(16, 4, 8), "w2", 0)
    assert layer._arrived == {("w2_weight", "w2"): set(range(16))}
    layer._arrived.clear()
    note(layer, parameter, torch.zeros(16, 8), "w2", 3)  # 16 rows of one expert
    note(layer, parameter, torch.zeros(8, 4, 8), "w2", 4)  # not as many experts
    assert layer._arrived == {("w2_weight", "w2"): {3, 4}}


@pytest.mark.parametrize(
    ("arrived", "is_gated", "lines"),
    [
        (set(), True, 0),  # made-up weights: nothing comes from a checkpoint
        ({("w2_scale", "w2")}, True, 1),
        ({("w13_weight", "w1")}, False, 2),
        ({("w13_weight", "w1")}, True, 3),
    ],
)
def test_what_is_expected_of_a_checkpoint(
    arrived: set[tuple[str, str]],
    is_gated: bool,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(layers.logger, "warning", lambda text, *args: said.append(text % args))
    layer = SimpleNamespace(
        _names=dict(enumerate(("w13_weight", "w2_weight", "w2_scale"))),
        _arrived={},
        _runtime=SimpleNamespace(arrived=arrived),
        layer_name="a layer",
        moe_config=SimpleNamespace(num_experts=2, is_act_and_mul=is_gated),
    )
    say: Any = layers.OffloadedRoutedExperts._say_what_is_missing
    say(layer)
    assert len(said) == lines


def test_weights_are_written_into_memory_that_is_ready(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ready, load = store_module.HostStore._touch_and_register, RoutedExperts.weight_loader
    found: list[bool] = []

    def slowly(self: Any, *args: Any) -> None:
        time.sleep(0.2)
        make_ready(self, *args)

    def looked(self: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = self._runtime.store._blocks
        found.append(all(blocks[t.data_ptr()].ready.is_set() for t in self.host.values()))
        return load(self, *args, **kwargs)

    monkeypatch.setattr(store_module.HostStore, "_touch_and_register", slowly)
    monkeypatch.setattr(RoutedExperts, "weight_loader", looked)
    with engine(model, **moe_offload_args(slots_per_layer=4)):
        pass
    assert len(found) == 3 * 16 * 3
    assert all(found)


def test_a_layer_that_is_not_the_first_of_its_kind_is_checked_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, caches = host_device.HostSlotCache.fetch, []

    def others_in_the_third(self: host_device.HostSlotCache, pairs: Any) -> None:
        if self not in caches:
            caches.append(self)
        shift = int(self is caches[2]) if len(caches) > 2 else 0
        fetch(self, [((expert + shift) % 16, slot) for expert, slot in pairs])

    monkeypatch.setattr(host_device.HostSlotCache, "fetch", others_in_the_third)
    with pytest.raises(
        SelfCheckError, match=r"model\.layers\.2\.mlp\.experts: fp32 experts .* differ"
    ):
        start(model, {"slots_per_layer": 4})


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_are_written_in_place_are_used(
    model: Path, stock_tokens: list[list[int]], fails: bool
) -> None:
    with engine(model, **moe_offload_args(slots_per_layer=16)) as ours:
        assert greedy(ours, PROMPTS) == stock_tokens
        zeros = [
            (name, torch.zeros_like(parameter))
            for name, parameter in _model(ours).named_parameters()
            if "experts" in name
        ]
        if fails:
            zeros.append(("no such parameter", zeros[0][1]))
        with pytest.raises(Exception, match="no such") if fails else nullcontext():
            ours.collective_rpc(
                "reload_weights",
                kwargs={"weights_iterator": zeros, "is_checkpoint_format": False},
            )
        tokens = greedy(ours, PROMPTS)
        assert tokens != stock_tokens
        resize(ours, 16)  # which empties the slots
        assert greedy(ours, PROMPTS) == tokens


def test_dummy_weights_load(model: Path) -> None:
    with engine(model, load_format="dummy", **moe_offload_args(slots_per_layer=4)) as ours:
        assert all(len(tokens) for tokens in greedy(ours, PROMPTS))
        blocks = [layer.mlp.experts.routed_experts.host for layer in _model(ours).model.layers]
        experts = torch.cat([block["w2_weight"].flatten(1) for block in blocks])
        assert len(experts.unique(dim=0)) == len(experts), "every expert of every layer differs"


def test_reloaded_weights_are_used(model: Path, stock_tokens: list[list[int]]) -> None:
    with engine(model, load_format="dummy", **moe_offload_args(slots_per_layer=16)) as ours:
        assert greedy(ours, PROMPTS) != stock_tokens
        ours.collective_rpc(
            "update_config", args=({"load_config": {"load_format": "safetensors"}},)
        )
        ours.collective_rpc("reload_weights")
        assert greedy(ours, PROMPTS) == stock_tokens


def test_weights_loaded_from_outside_are_used(model: Path, stock_tokens: list[list[int]]) -> None:
    """What a trainer does: new tensors through the model's loader, without any processing."""
    with engine(model, **moe_offload_args(slots_per_layer=16)) as ours:
        assert greedy(ours, PROMPTS) == stock_tokens
        layer = _model(ours).model.layers[0].mlp.experts.routed_experts
        name = "model.layers.0.mlp.experts.5.down_proj.weight"
        _model(ours).load_weights([(name, torch.zeros(64, 32))])
        assert not layer.host["w2_weight"][5].any()
        assert greedy(ours, PROMPTS) != stock_tokens


def test_resizing_an_engine_checks_every_layer_first(model: Path) -> None:
    with engine(model, **moe_offload_args(slots_per_layer=4)) as ours:
        with pytest.raises(ValueError, match=r"asked for 17 slots .* from 1 to 16"):
            resize(ours, 17)
        assert {layer["slots"] for layer in stats(ours)["layers"].values()} == {4}


def test_resizing_an_engine_whose_memory_does_not_suffice_changes_no_layer(model: Path) -> None:
    def fail(count: int) -> Any:
        if count > 4:
            raise MemoryError(f"{count} slots")
        return allocate(count)

    with engine(model, **moe_offload_args(slots_per_layer=4)) as ours:
        (runtime,) = ours.collective_rpc(lambda worker: worker._moe_offload_runtime)
        last = list(runtime._layers().values())[-1]
        allocate, last._allocate = last._allocate, fail
        with pytest.raises(MemoryError, match="8 slots"):
            resize(ours, 8)
        assert [layer["slots"] for layer in stats(ours)["layers"].values()] == [4, 4, 4]


def test_an_engine_without_slots_cannot_be_resized_nor_measured_again(model: Path) -> None:
    with engine(model, **moe_offload_args(mode="cpu")) as ours:
        with pytest.raises(ValueError, match=r"mode='cpu', which fetches nothing: it has no"):
            resize(ours, 4)
        with pytest.raises(ValueError, match="nothing is measured in this engine"):
            ours.collective_rpc("moe_offload_measure")


def start(model: Path, settings: dict, **arguments: object) -> None:
    with engine(model, additional_config={"moe_offload": settings}, **arguments):
        pass


def test_a_wrong_setting_stops_the_start(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown: 'slots' .*; what exists: mode, slots_per"):
        start(model, {"slots": 4})


def test_more_slots_than_experts_stop_the_start(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"slots_per_layer=17.*has 16 experts: give at most 16"):
        start(model, {"slots_per_layer": 17})


@pytest.mark.parametrize("settings", [{"slots_per_layer": 1}, {}, {"mode": "stream"}])
def test_experts_that_the_host_does_not_hold_are_named_first(
    model: Path, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU slots take of the same memory, and fewer of them would not help."""
    for module in (host_device, store_module):
        monkeypatch.setattr(module, "available_memory", lambda: 1 << 10)
    with pytest.raises(
        MemoryShortError,
        match=r"^moe_offload: offloaded weights need 1.1 MiB of host memory .*: free memory",
    ):
        start(model, settings)


def test_a_sharded_checkpoint_is_loaded_and_its_memory_checked_first(
    model: Path, tmp_path: Path, stock_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader writes into the tensors of a state dict."""
    with engine(model, **moe_offload_args(slots_per_layer=4)) as ours:
        ours.collective_rpc("save_sharded_state", args=(str(tmp_path),))
    # The CPU build packs other layers and drops their parameters.
    (saved,) = tmp_path.glob("*.safetensors")
    tensors, written = load_file(saved), load_file(model / "model.safetensors")
    for n in range(3):
        layer = f"model.layers.{n}"
        attention = [written[f"{layer}.self_attn.{c}_proj.weight"] for c in "qkv"]
        tensors[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(attention)
        tensors[f"{layer}.self_attn.o_proj.weight"] = written[f"{layer}.self_attn.o_proj.weight"]
        tensors[f"{layer}.mlp.experts.gate.weight"] = written[f"{layer}.mlp.gate.weight"]
    save_file(tensors, saved)
    for path in model.glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, tmp_path)
    settings = moe_offload_args(slots_per_layer=4)
    with engine(tmp_path, load_format="sharded_state", **settings) as ours:
        assert greedy(ours, PROMPTS) == stock_tokens
    for module in (host_device, store_module):
        monkeypatch.setattr(module, "available_memory", lambda: 1 << 10)
    with pytest.raises(MemoryShortError, match=r"weights need 1\.1 MiB of host memory"):
        start(tmp_path, {"slots_per_layer": 4}, load_format="sharded_state")


def test_a_layer_that_the_system_does_not_promise_stops_the_start(
    model: Path, tmp_path: Path
) -> None:
    said = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "moe_intermediate_size": 2**40}))
    with pytest.raises(
        MemoryShortError,
        match=r"^moe_offload: \d+\.\d\d GiB of host memory cannot be mapped .*: free memory",
    ):
        start(tmp_path, {"slots_per_layer": 4}, load_format="dummy")


def test_a_budget_below_one_slot_each_stops_the_start(model: Path) -> None:
    with pytest.raises(MemoryShortError, match=r"do not hold one expert for each of 3 layers"):
        start(model, {"gpu_memory_gib": 1e-5})


def test_a_start_that_fails_gives_up_making_host_memory_ready(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = mock.Mock()
    monkeypatch.setattr(store_module.HostStore, "close", closed)
    monkeypatch.setattr(
        layers.OffloadedRoutedExperts, "weight_loader", mock.Mock(side_effect=ValueError("torn"))
    )
    with pytest.raises(ValueError, match="torn"):
        start(model, {"slots_per_layer": 4})
    closed.assert_called()


def test_what_the_host_lacks_stops_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"settings: cpu_threads=4000: an engine of 4000 thr"):
        start(model, {"slots_per_layer": 4, "cpu_threads": 4000})
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"mmx.*scalar"):
        start(model, {"slots_per_layer": 4})


@pytest.mark.parametrize(
    ("cpus", "is_cpu_build", "asked", "threads"),
    [(2, True, "auto", 1), (2, True, 2, 2), (2, False, "auto", None), (4, True, "auto", None)],
)
def test_the_engine_has_one_thread_beside_torchs_on_few_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int, is_cpu_build: bool, asked: Any, threads: int | None
) -> None:
    made: list[int | None] = []
    monkeypatch.setattr(runtime, "CpuExpertEngine", made.append)
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setattr(type(runtime.current_platform), "is_cpu", lambda self: is_cpu_build)
    runtime._engine(OffloadConfig(cpu_threads=asked))
    assert made == [threads]


def test_a_worker_names_the_setting_whose_threads_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = OffloadConfig(cpu_threads=4000)
    with pytest.raises(ConfigError, match=r"in the worker, .* cpu_threads=4000: an engine of 4000"):
        runtime._engine(asked)
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"vLLM chooses: VLLM_MOE_OFFLOAD_ISA=mmx: "):
        runtime._engine(OffloadConfig(cpu_threads=1))


def test_the_log_names_the_cpus_threads_where_they_compute(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, **moe_offload_args(slots_per_layer=4, cpu_threads=1)) as ours:
        (running,) = ours.collective_rpc(lambda worker: worker._moe_offload_runtime)
        layers = list(running._layers().values())

        def is_said(mode: str) -> bool:
            running.config = OffloadConfig(mode=mode)
            return running._summary(layers)[-1].startswith("1 CPU thread (")

        assert all(map(is_said, ("cache", "stream", "cpu")))
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(type(runtime.current_platform), "is_cpu", lambda self: False)
            assert all(map(is_said, ("auto", "hybrid", "cpu")))
            assert not any(map(is_said, ("cache", "stream")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slots_per_layer": 16}, ["with slots_per_layer=16 every expert has a slot, and offload"]),
        ({"gpu_memory_gib": 0.01}, ["with gpu_memory_gib=0.01 every expert has a slot, and offlo"]),
        ({"slots_per_layer": 15, "policy": "lru"}, []),
        (
            {"slots_per_layer": 16, "policy": "lru"},
            ["every expert fits on the device, so polic"],
        ),
        (
            {"policy": "lru", "stream_threshold": 4},
            ["every expert fits on the device, so polic"],
        ),
        ({"stream_threshold": "off"}, []),
        ({}, []),
    ],
)
def test_the_log_says_that_every_expert_fits_and_what_decides_nothing_then(
    model: Path, settings: dict, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(sizing.logger, level, lambda text, *given: lines.append(text % given))
    with engine(model, **moe_offload_args(**settings)) as ours:
        is_given = bool({"slots_per_layer", "gpu_memory_gib"} & set(settings))
        assert bool(stats(ours)["layers"]) is is_given
    if is_given and len(lines) == 2:
        assert lines.pop().startswith("moe_offload: with slots_per_layer=16 every expert")
    assert [line.removeprefix("moe_offload: ")[: len(said[0])] for line in lines] == said


def test_settings_of_the_environment_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER", "3")
    on = config()
    on.additional_config = {"moe_offload": {"policy": "lru"}}
    configure(on)
    assert on.additional_config == {"moe_offload": {"policy": "lru", "slots_per_layer": 3}}


def test_another_vllm_version_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_version, "__defaults__", ("0.34.0",))
    on = config()
    on.additional_config = {"moe_offload": {}}
    with pytest.raises(UnsupportedError, match=r"0\.34\.0"):
        configure(on)
    on.additional_config = {}
    assert configure(on) is None


def test_a_kernel_that_routes_inside_stops_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "is_monolithic", property(lambda self: True))
    with pytest.raises(UnsupportedError, match=r"routes inside .*--moe-backend"):
        start(model, {"slots_per_layer": 4})


def test_a_parameter_that_is_not_one_row_an_expert_stops_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = UnquantizedFusedMoEMethod.create_weights

    def with_one_more(
        self: object, layer: torch.nn.Module, *args: object, **kwargs: object
    ) -> None:
        create(self, layer, *args, **kwargs)
        layer.register_parameter("w13_lookup", torch.nn.Parameter(torch.zeros(3)))

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "create_weights", with_one_more)
    with pytest.raises(UnsupportedError, match=r"not one row an expert .*w13_lookup"):
        start(model, {"slots_per_layer": 4})


def test_rows_without_a_place_in_the_kv_cache_are_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(slot_mapping={"attn": torch.tensor([7, -1, 0])}, no_compile_layers={})
    monkeypatch.setattr(layers, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(layers, "get_forward_context", lambda: context)
    assert layers.padding_rows(3).tolist() == [False, True, False]
    assert layers.padding_rows(4) is None
    context.slot_mapping = {}
    assert layers.padding_rows(3) is None
    monkeypatch.setattr(layers, "is_forward_context_available", lambda: False)
    assert layers.padding_rows(3) is None


def test_the_places_are_those_of_a_layer_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of Mamba's, where -1 of a dummy run stays, nor of encoder-only attention."""
    stale, fresh, places = (torch.tensor([n, -n]) for n in (-1, -1, 1))
    context = SimpleNamespace(
        slot_mapping={"mamba": stale, "encoder": fresh, "attn": places},
        no_compile_layers={
            "mamba": mock.create_autospec(MambaBase, instance=True),
            "encoder": SimpleNamespace(attn_type="encoder_only"),
            "attn": SimpleNamespace(attn_type="decoder"),
        },
    )
    monkeypatch.setattr(layers, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(layers, "get_forward_context", lambda: context)
    assert layers.padding_rows(2).tolist() == [False, True]
    del context.slot_mapping["attn"]
    assert layers.padding_rows(2) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"tensor_parallel_size": 2}, "tensor parallelism"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"offload_group_size": 2}, "--offload-group-size"),
    ],
)
def test_a_feature_that_does_not_go_with_it_stops_the_start(
    model: Path, arguments: dict, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        start(model, {"slots_per_layer": 4}, **arguments)


def test_a_dense_model_stops_the_start(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        **checkpoints.COMMON, num_key_value_heads=2, head_dim=32, intermediate_size=64
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InactiveError, match=r"no mixture-of-experts layer.*: leave out slots"):
        start(tmp_path, {"slots_per_layer": 4})


def test_an_expert_layer_of_another_class_stops_the_start() -> None:
    class OtherRoutedExperts(RoutedExperts):
        pass

    with (
        offloaded_layers(SimpleNamespace()),  # type: ignore[arg-type]
        pytest.raises(UnsupportedError, match=r"OtherRoutedExperts.*would not be offloaded"),
    ):
        OtherRoutedExperts("layer", None, None, None, expert_map_manager=None)
    assert "RoutedExperts" not in op_registry_oot


def test_a_plugin_that_replaces_the_same_layer_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(op_registry_oot, "RoutedExperts", SimpleNamespace)
    with (
        pytest.raises(UnsupportedError, match=r"another plugin \(types\).*VLLM_PLUGINS"),
        offloaded_layers(SimpleNamespace()),  # type: ignore[arg-type]
    ):
        pass


def test_quantised_experts_stop_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Int3MoEMethod(UnquantizedFusedMoEMethod):
        pass

    monkeypatch.setattr(
        RoutedExperts, "_get_quant_method", lambda self, prefix, config, moe: Int3MoEMethod(moe)
    )
    with pytest.raises(UnsupportedError, match=r"experts quantised by Int3MoEMethod are not supp"):
        start(model, {"slots_per_layer": 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "swigluoai"}, r"activation 'swigluoai' is not one .*silu, gelu, gelu_tanh"),
        ({"swiglu_limit": 7.0}, r"the model sets swiglu_limit"),
    ],
)
def test_an_activation_the_engine_lacks_stops_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str
) -> None:
    original = qwen3_moe.FusedMoEFactory
    monkeypatch.setattr(
        qwen3_moe,
        "FusedMoEFactory",
        lambda *args, **kwargs: original(*args, **{**kwargs, **changes}),
    )
    with pytest.raises(UnsupportedError, match=message):
        start(model, {"slots_per_layer": 4})


def _model(llm: object) -> object:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.get_model()
