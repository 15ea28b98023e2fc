"""What does not go with offload is refused by name, with what to do instead."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_moe_offload import ConfigError, UnsupportedError
from vllm_moe_offload.config import OffloadConfig
from vllm_moe_offload.integration import refusals, runtime, worker
from vllm_moe_offload.integration.compat import check_version, loses_errors_of_outputs
from vllm_moe_offload.integration.frontend import configure


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as the refusals look at, everything off but `changes`."""
    values: dict[str, Any] = {
        "parallel_config.enable_expert_parallel": False,
        "parallel_config.enable_eplb": False,
        "parallel_config.use_ubatching": False,
        "parallel_config.tensor_parallel_size": 1,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.prefill_context_parallel_size": 1,
        "parallel_config.data_parallel_size": 1,
        "model_config.enable_sleep_mode": False,
        "model_config.quantization": None,
        "model_config.architectures": ["Qwen3MoeForCausalLM"],
        "offload_config.uva.cpu_offload_gb": 0,
        "offload_config.prefetch.offload_group_size": 0,
        "lora_config": None,
        "speculative_config": None,
        "scheduler_config.async_scheduling": False,
        "parallel_config.distributed_executor_backend": "uni",
    }
    unknown = set(changes) - {name.replace(".", "__") for name in values}
    assert not unknown
    for name, value in changes.items():
        values[name.replace("__", ".")] = value
    root = SimpleNamespace()
    for path, value in values.items():
        *parents, leaf = path.split(".")
        node = root
        for parent in parents:
            if not hasattr(node, parent):
                setattr(node, parent, SimpleNamespace())
            node = getattr(node, parent)
        setattr(node, leaf, value)
    return root


def test_nothing_on_nothing_refused() -> None:
    refusals.refuse_features(config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_config__enable_expert_parallel": True}, r"--enable-expert-parallel.*leave it"),
        ({"parallel_config__enable_eplb": True}, r"--enable-eplb.*leave it out"),
        ({"parallel_config__use_ubatching": True}, r"--enable-dbo.*leave it out"),
        ({"parallel_config__tensor_parallel_size": 2}, r"tensor parallelism.*size 1"),
        ({"parallel_config__pipeline_parallel_size": 2}, r"pipeline parallelism.*size 1"),
        (
            {"parallel_config__prefill_context_parallel_size": 2},
            r"prefill context parallelism.*size 1",
        ),
        ({"parallel_config__data_parallel_size": 2}, r"data parallelism.*one server for each"),
        ({"lora_config": object()}, r"--enable-lora.*merge the adapter"),
        ({"model_config__enable_sleep_mode": True}, r"--enable-sleep-mode.*leave it out"),
        ({"offload_config__uva__cpu_offload_gb": 4}, r"--cpu-offload-gb.*slots_per_layer"),
        (
            {"offload_config__prefetch__offload_group_size": 2},
            r"--offload-group-size.*slots_per_layer",
        ),
    ],
)
def test_each_feature_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        refusals.refuse_features(config(**changes))


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    refusals.refuse_features(config())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedError, match=r"VLLM_BATCH_INVARIANT.*leave it out"):
        refusals.refuse_features(config())


@pytest.mark.parametrize(
    ("version", "backend", "is_async", "is_refused"),
    [
        ("0.24.0", "mp", True, True),
        ("0.24.0", "mp", False, False),
        ("0.24.0", "uni", True, False),
        ("0.25.1", "mp", True, False),
    ],
)
def test_an_executor_that_loses_errors_is_refused(
    version: str, backend: str, is_async: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        refusals, "loses_errors_of_outputs", lambda: loses_errors_of_outputs(version)
    )
    on = config(
        scheduler_config__async_scheduling=is_async,
        parallel_config__distributed_executor_backend=backend,
    )
    if is_refused:
        with pytest.raises(UnsupportedError, match=r"multiprocess executor.*--no-async-scheduling"):
            refusals.refuse_features(on)
    else:
        refusals.refuse_features(on)


def test_several_are_named_together() -> None:
    on = config(parallel_config__enable_eplb=True, lora_config=object())
    with pytest.raises(UnsupportedError, match=r"--enable-eplb.*nor with LoRA"):
        refusals.refuse_features(on)


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def platform(name: str) -> SimpleNamespace:
        return SimpleNamespace(is_cpu=lambda: name == "cpu", is_cuda=lambda: name == "cuda")

    monkeypatch.setattr(refusals, "current_platform", platform("rocm"))
    with pytest.raises(UnsupportedError, match=r"neither CUDA nor vLLM's CPU build"):
        refusals.refuse_features(config())
    for name in ("cpu", "cuda"):
        monkeypatch.setattr(refusals, "current_platform", platform(name))
        refusals.refuse_features(config())


@pytest.mark.parametrize(
    ("settings", "named", "advice"),
    [
        ({"mode": "hybrid"}, "mode='hybrid'", "with: use mode='cache', 'cpu' or 'stream' there"),
        ({"cache_topk": 2}, "cache_topk", "with: leave out cache_topk there"),
        ({"correct_rates": "off"}, "correct_rates", "with: leave out correct_rates there"),
        (
            {"mode": "hybrid", "update_expert_num": 1},
            "mode='hybrid', update_expert_num",
            "with: leave out update_expert_num, and use mode='cache', 'cpu' or 'stream' there",
        ),
    ],
)
def test_what_needs_a_bus_is_refused_without_one(
    settings: dict[str, Any], named: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=f"{named}: vLLM's CPU build has no bus.*{advice}"):
        refusals.refuse_settings(OffloadConfig.parse(settings))
    monkeypatch.setattr(refusals.current_platform, "is_cpu", lambda: False)
    refusals.refuse_settings(OffloadConfig.parse(settings))


def test_buffers_that_no_step_would_pass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = OffloadConfig.parse({"slots_per_layer": 2, "stream_experts": 4})
    with pytest.raises(ConfigError, match=r"stream_experts=4.* nothing is streamed unless stream"):
        refusals.refuse_settings(unused)
    for used in ({"stream_threshold": 64}, {"mode": "stream"}):
        refusals.refuse_settings(OffloadConfig.parse({"stream_experts": 4, **used}))
    monkeypatch.setattr(refusals.current_platform, "is_cpu", lambda: False)
    refusals.refuse_settings(unused)


@pytest.mark.parametrize("mode", ["auto", "cache", "cpu"])
def test_the_other_modes_go_without_a_bus(mode: str) -> None:
    refusals.refuse_settings(OffloadConfig.parse({"mode": mode}))


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0", "0.32.0", "0.33.1", "0.32.0+cpu"])
def test_known_versions_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.23.9", "0.34.0", "1.0.0", "dev", "0.x"])
def test_other_versions_are_refused_by_number(version: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{version}.*0\.24 to 0\.33"):
        check_version(version)


def test_a_draft_model_that_asks_for_ping_pong_is_refused() -> None:
    draft = SimpleNamespace(quantization="pingpong_moe", architectures=["Qwen3MoeForCausalLM"])
    vllm_config: Any = SimpleNamespace(
        model_config=None,
        speculative_config=SimpleNamespace(draft_model_config=draft),
        additional_config={},
    )
    with pytest.raises(ConfigError, match=r"quantization='pingpong_moe' asks .* for a draft model"):
        configure(vllm_config)
    draft.quantization = None
    assert configure(vllm_config) is None


def test_a_factory_beside_settings_without_a_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = OffloadConfig.parse({"cpu_threads": 1})
    loading = SimpleNamespace(runtime=SimpleNamespace(config=config))
    monkeypatch.setattr(worker, "_loading", loading)
    with pytest.raises(ConfigError, match="add mode='stream' to them"):
        worker.ask_for_offload("OffloadFusedMoE")
    for mode in ("stream", "cpu"):
        loading.runtime.config = OffloadConfig.parse({"mode": mode})
        worker.ask_for_offload("OffloadFusedMoE")


def test_loading_again_and_saving_are_refused_before_anything_is_changed() -> None:
    called: list[str] = []
    model = SimpleNamespace(load_weights=lambda weights: called.append("load"))
    made = SimpleNamespace(
        reload_weights=lambda: called.append("reload"),
        start_draft_weight_update=lambda: called.append("start"),
        reset_weights=lambda: called.append("reset"),
        save_sharded_state=lambda path: called.append("save"),
        compute_weight_checksums=lambda: called.append("sums"),
        get_model=lambda: model,
        other=lambda: "other",
    )
    refusals.refuse_whole_weights(made, "in this test")
    for name in ("reload_weights", "start_draft_weight_update", "reset_weights"):
        with pytest.raises(UnsupportedError, match=rf"{name}: .* again in this test: restart"):
            getattr(made, name)()
    for name in ("save_sharded_state", "compute_weight_checksums"):
        with pytest.raises(UnsupportedError, match=rf"{name}: .* in this test: do so without"):
            getattr(made, name)("path")
    with pytest.raises(UnsupportedError, match=r"load_weights: .* again in this test: restart"):
        model.load_weights([("norm.weight", None)])
    assert not called
    assert made.other() == "other"
    assert not hasattr(made, "update_weights")


@pytest.mark.parametrize(
    ("layers", "modules", "is_cpu", "refused"),
    [
        (
            {"a": 1},
            {"a": 1},
            False,
            {"reload_weights", "save_sharded_state", "load_weights"},
        ),
        # Every expert fits: parameters are whole.
        ({}, {"a": 1}, False, {"reload_weights", "load_weights"}),
        ({}, {}, False, set()),
        ({"a": 1}, {"a": 1}, True, set()),
    ],
)
def test_what_is_refused_once_the_model_is_loaded(
    layers: dict, modules: dict, is_cpu: bool, refused: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(load_weights=lambda: None)
    made = SimpleNamespace(
        reload_weights=lambda: None, save_sharded_state=lambda: None, get_model=lambda: model
    )

    class Loaded:
        prefetch = None
        _modules = modules
        finish_loading = runtime.OffloadRuntime.finish_loading

        def _layers(self) -> dict:
            return layers

        def _check_active(self) -> None: ...

        def _invalidate(self) -> None: ...

    monkeypatch.setattr(type(runtime.current_platform), "is_cpu", lambda self: is_cpu)
    loaded = Loaded()
    loaded.finish_loading(made)
    for owner, name in (
        (made, "reload_weights"),
        (made, "save_sharded_state"),
        (model, "load_weights"),
    ):
        with pytest.raises(UnsupportedError) if name in refused else nullcontext():
            getattr(owner, name)()


def test_what_follows_a_reload_is_called_once_and_not_kept() -> None:
    class Model:
        def __init__(self) -> None:
            self.count = 0

        def done(self) -> None:
            self.count += 1

    def reload(fails: bool = False) -> str:
        if fails:
            raise ValueError("half of it")
        return "reloaded"

    reloading = SimpleNamespace(reload_weights=reload)
    first, second = Model(), Model()
    refusals.after_reloading(reloading, first.done)
    assert reloading.reload_weights() == "reloaded"
    with pytest.raises(ValueError, match="half of it"):
        reloading.reload_weights(fails=True)
    assert first.count == 2
    refusals.after_reloading(reloading, second.done)  # the same worker has loaded another model
    assert reloading.reload_weights() == "reloaded"
    assert (first.count, second.count) == (2, 1)
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None
    assert reloading.reload_weights() == "reloaded"
