"""Decode steps in CUDA graphs, and the same steps eagerly: no further from float32 than stock.

As `tests.gpu.drawing` draws tokens; the last tests let a float32 engine read the same ones. So the
tests here go together, in their order.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import LLM
from vllm import envs as vllm_envs
from vllm.compilation import monitor

from tests.e2e.engines import decoded, engine, resize, stats
from tests.engine.faults import end_service_thread
from tests.gpu import checkpoints
from tests.gpu.decode_faults import FAULTS
from tests.gpu.drawing import (
    BATCHES,
    CAPTURED,
    NEW,
    RUNNERS,
    SIZES,
    Drawn,
    draw,
    is_accepted,
    prompts,
)
from tests.gpu.oracle import checked_layers
from vllm_moe_offload import moe_offload_args

pytestmark = pytest.mark.gpu
SLOTS, LAYERS = 24, 2
WAYS: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}, "captured": CAPTURED}
SLOTTED: dict[str, Any] = {"slots_per_layer": SLOTS, "stream_threshold": "off"}
MODES: dict[str, dict[str, Any]] = {
    "cache": SLOTTED,
    "cpu": {},
    "hybrid": {**SLOTTED, "cache_topk": 6, "update_expert_num": 4},
    "auto": SLOTTED,
}
AGAIN = "rates measured again"
# Those that can do harm in a mode, one way only: starting is what takes time here.
ALL_FAULTS = {
    "cache": tuple(FAULTS),
    "cpu": ("one expert dropped",),
    "hybrid": ("two experts swapped",),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    return checkpoints.write("bf16", folder, seed=9, layers=LAYERS)[0]


def draw_counted(llm: LLM, name: str) -> Drawn:
    """Every token is counted once: no row of padding and none of vLLM's dummy runs."""
    llm.collective_rpc("moe_offload_reset_stats")
    began = time.perf_counter()
    drawn = draw(llm)
    seconds = time.perf_counter() - began
    done = stats(llm)
    counted = {n: done[n] for n in ("steps", "tokens", "hits", "misses", "cpu_experts", "waves")}
    print(f"\n{name}: {seconds:.1f} s, {counted}")
    assert done["tokens"] == sum(len(p) + NEW - 1 for batch in prompts() for p in batch)
    assert len(BATCHES) * NEW <= done["steps"] <= len(BATCHES) * (NEW + 3)
    if done["mode"] == "cache":
        assert done["cpu_experts"] == 0
    if done["mode"] == "cpu":
        assert done["hits"] == done["misses"] == 0 < done["cpu_experts"]
        return drawn
    if done["mode"] == "hybrid":
        assert 0 < done["cpu_experts"] < done["misses"]
    for layer in done["layers"].values():
        if layer["streamed"]:  # whose experts on the CPU are no misses
            continue
        fetched = layer["misses"] - layer["cpu_experts"] + layer["promoted"]
        assert layer["bytes_fetched"] == fetched * layer["expert_bytes"]
    return drawn


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_decoding(mode: str, way: str, checkpoint: Path, drawn: dict[str, Drawn]) -> None:
    settings = moe_offload_args(mode=mode, **MODES[mode])
    with engine(checkpoint, dtype="bfloat16", **settings, **WAYS[way], **SIZES) as llm:
        drawn[f"{mode}, {way}"] = draw_counted(llm, f"{mode}, {way}")
        in_graph = {checked.layer._is_in_graph for checked in checked_layers(llm)}
        assert in_graph == {way == "captured"}
        if way == "captured":
            if mode != "cpu":
                with pytest.raises(Exception, match="CUDA graphs have been captured"):
                    resize(llm, 8)
            return
        for fault in ALL_FAULTS.get(mode, ()):
            with pytest.MonkeyPatch.context() as patch:
                FAULTS[fault](patch)
                if mode != "cpu":
                    resize(llm, SLOTS)
                drawn[f"{mode}: {fault}"] = draw(llm)


def test_decoding_with_a_fault_in_the_graphs(
    checkpoint: Path, drawn: dict[str, Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check before the first request would notice it already.
    monkeypatch.setattr("vllm_moe_offload.integration.runtime.check_layer", lambda *_, **__: None)
    FAULTS["one expert dropped"](monkeypatch)
    settings = moe_offload_args(mode="cache", slots_per_layer=SLOTS)
    with engine(checkpoint, dtype="bfloat16", **settings, **CAPTURED, **SIZES) as llm:
        drawn["captured: one expert dropped"] = draw(llm)


@pytest.mark.parametrize("runner", RUNNERS)
def test_decoding_with_vllms_default_graphs(
    runner: str, checkpoint: Path, drawn: dict[str, Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile; full graphs for decode, piecewise ones for the rest, of all sizes allowed."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    # What the engines before this one leave behind in the process.
    vllm_envs.disable_envs_cache()
    monitor.set_cudagraph_capturing_enabled(True)
    settings = moe_offload_args(slots_per_layer=SLOTS)
    with engine(checkpoint, dtype="bfloat16", enforce_eager=False, **settings, **SIZES) as llm:
        drawn[runner] = draw_counted(llm, runner)
        config = llm.llm_engine.vllm_config
        assert config.use_v2_model_runner is (RUNNERS[runner] == "1")
        assert config.compilation_config.max_cudagraph_capture_size == 64
        llm.collective_rpc("moe_offload_measure")
        assert stats(llm)["steps"] == 0
        drawn[f"{runner}, {AGAIN}"] = draw_counted(llm, f"{runner}, {AGAIN}")
    vllm_envs.disable_envs_cache()


def test_a_lane_that_dies_ends_the_step_and_not_the_process(checkpoint: Path) -> None:
    settings = moe_offload_args(mode="cpu")
    with engine(checkpoint, dtype="bfloat16", **settings, **CAPTURED, **SIZES) as llm:
        decoded(llm, prompts()[1], 4)
        end_service_thread()
        began = time.perf_counter()
        with pytest.raises(Exception, match=r"model\.layers\.\d+"):
            decoded(llm, prompts()[1], 4)
        assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "name",
    [
        *(f"{mode}, {way}" for mode in MODES for way in WAYS),
        *RUNNERS,
        *(f"{runner}, {AGAIN}" for runner in RUNNERS),
    ],
)
def test_no_further_from_float32_than_stock(
    name: str, drawn: dict[str, Drawn], reference: LLM
) -> None:
    assert is_accepted(name, drawn, reference)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{mode}: {fault}" for mode, faults in ALL_FAULTS.items() for fault in faults),
        "captured: one expert dropped",
    ],
)
def test_a_fault_is_noticed(name: str, drawn: dict[str, Drawn], reference: LLM) -> None:
    assert not is_accepted(name, drawn, reference)
