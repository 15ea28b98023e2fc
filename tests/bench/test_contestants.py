"""Everybody gets our GPU bytes, or the next size up; and the floors are what was written down."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import floors, latency
from bench.contestants import make, prefetch_arguments, uva_arguments
from bench.models import FORMATS, MODELS, Shape, write_checkpoint, write_config
from bench.runner import Cell

QWEN = Shape(layers=24, experts=128, top_k=8, hidden=2048, intermediate=768, expert_bytes=9437184)
SHAPES = [QWEN, Shape(5, 8, 2, 64, 32, 12288), Shape(48, 128, 8, 2048, 768, 4720896)]
SHARES = [0.01, 0.2, 0.5, 0.99]


def ours(shape: Shape, slots: int) -> int:
    """Experts in slots, and two buffers: an eighth of a layer's, or 256 MiB if that is a tenth."""
    in_slots = slots * shape.layers
    buffers = 2 * min(shape.experts, max(math.ceil(shape.experts / 8), 2**28 // shape.expert_bytes))
    if buffers > (in_slots + buffers) / 10:
        buffers = 2 * math.ceil(shape.experts / 8)
    return min(in_slots + buffers, shape.experts * shape.layers)


def uva_offloaded(shape: Shape, gib: float) -> float:
    """What vLLM's UVA offloader moves: parameters in order, while it is below the limit."""
    moved = 0.0
    for _ in range(shape.layers):
        for part in (2, 1):
            if moved >= gib * 2**30:
                return moved
            moved += part * shape.experts * shape.expert_bytes / 3
    return moved


def prefetch_layers(shape: Shape, arguments: dict) -> float:
    """Layers that vLLM's prefetcher has on the GPU: the resident ones and its buffers."""
    group, offloaded = arguments["offload_group_size"], arguments["offload_num_in_group"]
    resident = [i for i in range(shape.layers) if i % group < group - offloaded]
    return len(resident) + arguments["offload_prefetch_step"]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shape", SHAPES)
def test_uva_keeps_at_least_as_much_and_at_most_one_parameter_more(
    shape: Shape, share: float
) -> None:
    slots = max(1, round(share * shape.experts))
    arguments = uva_arguments(shape, slots)
    kept = shape.expert_bytes_total - uva_offloaded(shape, arguments["cpu_offload_gb"])
    wanted = ours(shape, slots) * shape.expert_bytes
    assert wanted - 1 <= kept < wanted + shape.experts * shape.expert_bytes * 2 / 3 + 1


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefetch_keeps_at_least_as_much(shape: Shape, share: float) -> None:
    slots = max(1, round(share * shape.experts))
    kept = prefetch_layers(shape, prefetch_arguments(shape, slots))
    assert ours(shape, slots) / shape.experts <= kept <= shape.layers


def test_prefetch_of_a_fifth_of_24_layers_keeps_five_and_a_buffer() -> None:
    assert ours(QWEN, 26) / QWEN.experts == 5.3125
    assert prefetch_layers(QWEN, prefetch_arguments(QWEN, 26)) == 6


def test_ours_has_the_slots_and_the_mode() -> None:
    cache = make("cache", QWEN, 26)
    assert cache.slots == 26
    assert cache.engine["additional_config"]["moe_offload"] == {
        "mode": "cache",
        "slots_per_layer": 26,
    }
    assert make("cpu", QWEN, 26).slots == 0
    stream = make("stream", QWEN, 26)
    assert stream.slots == 0, "two buffers, each of a layer's size"
    assert stream.engine["additional_config"]["moe_offload"] == {"mode": "stream"}
    assert make("vllm-gpu", QWEN, 26).engine == {}


def test_auto_finds_for_itself_that_everything_fits() -> None:
    def settings(name: str) -> object:
        return make(name, QWEN, 128).engine["additional_config"]["moe_offload"]

    assert settings("auto") == {"mode": "auto"}
    assert settings("hybrid") == {"mode": "hybrid", "slots_per_layer": 128}
    assert make("auto", QWEN, 128).slots == 128


def test_what_does_not_exist_says_what_does() -> None:
    with pytest.raises(ValueError, match=r"unknown contestant 'tgi'; what exists: auto, .*uva"):
        make("tgi", QWEN, 26)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_a_written_config_has_the_shape(name: str, format: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_config(name, 3, format, tmp_path)
    shape = Shape.of(folder)
    assert shape.layers == 3
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == MODELS[name]["architectures"]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    if name == "qwen3-30b-a3b":
        scales = 3 * (2048 // 128) * (768 // 128) * 4
        expected = QWEN.expert_bytes if format == "bf16" else 3 * 2048 * 768 + scales
        assert (shape.experts, shape.top_k, shape.expert_bytes) == (128, 8, expected)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_written_checkpoint_is_complete(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16)
    monkeypatch.setitem(MODELS, name, MODELS[name] | small)
    write_checkpoint(name, 2, tmp_path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(p.isfinite().all() and p.std() > 0 for p in model.parameters())


def test_the_floor_of_a_step_is_the_missed_bytes_at_both_rates_and_the_gpus_other_work() -> None:
    layer = QWEN.layers * QWEN.expert_bytes
    bare = floors.decode_ms(QWEN, needed=8, missed=4, both_gb_per_s=100)
    assert bare == pytest.approx(4 * layer / 1e11 * 1e3)
    full = floors.decode_ms(
        QWEN, needed=8, missed=4, both_gb_per_s=100, gpu_ms=3, gpu_read_gb_per_s=2000
    )
    assert full == pytest.approx(bare + 3 - 8 * layer / 2e12 * 1e3)


def test_the_floor_of_a_prefill_is_the_longer_of_gpu_and_copies() -> None:
    moved = 102 * 24 * 9437184 / 1e11 * 1e3
    few = floors.prefill_ms(QWEN, tokens=4096, chunk=8192, slots=26, both_gb_per_s=100, gpu_ms=40)
    assert few == pytest.approx(moved, rel=1e-6)
    rates = dict(both_gb_per_s=100)
    assert floors.prefill_ms(QWEN, tokens=4096, chunk=8192, slots=26, gpu_ms=900, **rates) == 900
    assert floors.prefill_ms(QWEN, tokens=4096, chunk=8192, slots=128, **rates) == 0
    chunked = floors.prefill_ms(QWEN, tokens=32768, chunk=8192, slots=26, gpu_ms=40, **rates)
    assert chunked == pytest.approx(4 * moved, rel=1e-6), "every chunk copies anew"


def test_the_floor_of_a_prefill_knows_what_the_cpu_computes() -> None:
    """Copied at 9437184 / 50e9 s an expert, or computed, 256 rows of 9.4 MFLOP at 4 TFLOP/s."""

    def floor(tokens: int, *lanes: tuple[float, float]) -> float:
        return floors.prefill_ms(
            QWEN, tokens=tokens, chunk=8192, slots=26, both_gb_per_s=140, lanes=lanes
        )

    copy, compute = 9437184 / 50e9, 256 * 6 * 2048 * 768 / 4e12
    both = 1e3 * 24 * 102 / (1 / copy + 1 / compute)
    assert floor(4096, (50, 4)) == pytest.approx(both, rel=1e-6)
    assert floor(4096, (50, 4)) < 1e3 * 24 * 102 * copy
    assert floor(8192, (50, 4)) > floor(4096, (50, 4)), "each expert has more rows"
    assert floor(8192, (50, 1e-9)) == pytest.approx(1e3 * 24 * 102 * copy, rel=1e-6), (
        "all is copied"
    )
    # Where computing costs the bus more than it adds, all is copied with the CPU idle.
    assert floor(4096, (50, 0), (30, 4)) == pytest.approx(1e3 * 24 * 102 * copy, rel=1e-6)
    assert floor(4096, (50, 0), (40, 4), (0, 60)) == pytest.approx(floor(4096, (0, 60)), rel=1e-6)
    assert floor(512, (50, 4)) == pytest.approx(1e3 * 24 * 102 * 9437184 / 140e9, rel=1e-2), (
        "few rows"
    )


def test_the_floor_of_a_prefill_is_of_the_lanes_alone_or_both_at_once() -> None:
    measured: dict[str, float | None] = {
        "both_gb_per_s": 140.0,
        **{"h2d_gb_per_s": 60.0, "cpu_tflop_per_s": 8.0},
        **{"computing_h2d_gb_per_s": 50.0, "computing_tflop_per_s": 4.0},
    }

    class Measured:
        shape, slots = QWEN, 26

        def value(self, contestant: str, metric: str, **keys: object) -> float | None:
            return measured.get(metric) if contestant == "machine" else None

    def expected(*lanes: tuple[float, float]) -> float:
        return floors.prefill_ms(
            QWEN, tokens=4096, chunk=8192, slots=26, both_gb_per_s=140, lanes=lanes
        )

    def found(routing: str = "uniform") -> float | str:
        return latency._floor(Measured(), Cell(routing, tokens=4096), 8192)

    assert found() == expected((50, 4)) < expected((60, 0), (0, 8))
    measured["computing_h2d_gb_per_s"] = 20.0
    assert found() == expected((60, 0))
    measured["computing_tflop_per_s"] = None
    assert found() == expected((60, 0))
    measured["cpu_tflop_per_s"] = 80.0
    assert found() == expected((0, 80))
    assert found("model") == "what is missed under routing model is not known beforehand"


def test_the_floor_of_routings_in_turns_is_their_mean() -> None:
    class Measured:
        shape, slots = QWEN, 26

        def value(self, contestant: str, metric: str, **keys: object) -> float | None:
            return 100.0 if metric == "both_gb_per_s" else None

    uniform, local, both = (
        latency._floor(Measured(), Cell(routing, batch=1), 8192)
        for routing in ("uniform", "local", "switching")
    )
    assert both == pytest.approx((uniform + local) / 2)
    assert uniform > both > local


def test_what_a_step_misses_follows_from_routing_and_slots() -> None:
    needed, missed = floors.experts_of_a_step(QWEN, "uniform", 1, 26)
    assert needed == 8
    assert missed == pytest.approx(8 * (1 - 26 / 128), abs=0.3)
    _, local = floors.experts_of_a_step(QWEN, "local", 1, 26)
    assert local < 0.4 * missed
    needed, missed = floors.experts_of_a_step(QWEN, "uniform", 32, 26)
    assert needed == pytest.approx(128 * (1 - (1 - 8 / 128) ** 32), rel=0.02)
    assert needed - 26 <= missed < needed
