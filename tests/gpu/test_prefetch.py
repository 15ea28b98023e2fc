"""Group prefetch on a GPU: stock's outputs and the memory that was predicted, however late copies
or kernels are.

A dense model of 7 layers, which two buffers do not divide, and attention beside cached experts.
Every way to run them is started once as stock, once with prefetch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import numpy as np
import torch
from vllm import LLM
from vllm import envs as vllm_envs
from vllm.compilation import monitor

from tests.e2e.engines import decoded, engine, errors, is_no_further, log_probabilities, stats
from tests.gpu import checkpoints
from tests.gpu.memory import Loading, watch_loading
from vllm_moe_offload import moe_offload_args
from vllm_moe_offload.device import copies
from vllm_moe_offload.device.copies import Mark
from vllm_moe_offload.stream import LayerPrefetcher

pytestmark = pytest.mark.gpu
LAYERS, STEP, NEW = 7, 2, 12
BATCHES = (1, 3, 8)
CYCLES = 10_000_000  # about 5 ms: a layer's copy takes 7
PREFETCH = {"group_size": 1, "prefetch_step": STEP}
SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.4,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_batched_tokens": 512,
}
CAPTURE_SIZES = [1, 4, 8, 32, 128]
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    # Without torch.compile: the very kernels of the eager steps.
    "captured": {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": CAPTURE_SIZES,
        },
    },
    # vLLM's default, full graphs for decode and piecewise ones for the rest, of fewer sizes.
    "compiled": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURE_SIZES},
    },
}
RUNNERS = {"V1 runner": "0", "V2 runner": "1"}


@dataclass(frozen=True)
class Ran:
    """What an engine gave for the same sequences: prompts that are read, and tokens drawn."""

    read: np.ndarray
    tokens: list[list[int]]
    drawn: np.ndarray
    loading: Loading
    prefetch: dict[str, Any] | None


def prompts(size: int) -> list[list[int]]:
    rng = np.random.default_rng(size)
    return [
        rng.integers(3, checkpoints.VOCABULARY, rng.integers(4, 90)).tolist() for _ in range(size)
    ]


def read(llm: LLM) -> np.ndarray:
    """Steps of many rows, in graphs (one prompt) and launched (all)."""
    one, many = prompts(1), prompts(16)
    return np.concatenate([log_probabilities(llm, one), log_probabilities(llm, many)])


def draw(llm: LLM) -> tuple[list[list[int]], np.ndarray]:
    tokens: list[list[int]] = []
    values = []
    for size in BATCHES:
        drawn, those = decoded(llm, prompts(size), NEW)
        tokens += drawn
        values.append(those)
    return tokens, np.concatenate(values)


def run(model: Path, way: str, settings: dict[str, Any], **arguments: Any) -> Ran:
    # What the engines before this one leave behind in the process.
    vllm_envs.disable_envs_cache()
    monitor.set_cudagraph_capturing_enabled(True)
    given = moe_offload_args(**settings) if settings else {}
    with (
        watch_loading() as loading,
        engine(model, **given, **WAYS[way], **SIZES, **arguments) as llm,
    ):
        # Long and short steps in turns: launched ones between graphs.
        values = read(llm)
        began = time.perf_counter()
        tokens, drawn = draw(llm)
        seconds = time.perf_counter() - began
        again = read(llm)
        if "slots_per_layer" not in settings:  # what is in slots decides the order of the sums
            assert (values == again).all(), "the same after other steps"
        done = stats(llm)["prefetch"] if settings else None
    vllm_envs.disable_envs_cache()
    print(f"\n{way} {settings}: {seconds / NEW / len(BATCHES) * 1e3:.1f} ms a step, {loading}")
    if done is not None:
        print(f"{done}, {done['step_bytes'] / 54e6:.1f} ms a step at 54 GB/s")
    return Ran(values, tokens, drawn, loading, done)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_dense(tmp_path_factory.mktemp("dense"), layers=LAYERS)


@pytest.fixture(scope="module")
def stock(dense: Path) -> dict[str, Ran]:
    return {way: run(dense, way, {}) for way in WAYS}


@pytest.fixture(scope="module")
def dense_reference(dense: Path) -> np.ndarray:
    arguments = SIZES | {"dtype": "float32"}
    with engine(dense, enforce_eager=True, **arguments) as llm:
        return read(llm)


def check_memory(ours: Ran, without: Ran) -> None:
    """What prefetch saves of the device, and what is then held there, within 5 % of predicted."""
    done = ours.prefetch
    assert done is not None
    assert done["device_bytes"] == done["predicted_bytes"]
    saved = done["host_bytes"] - done["predicted_bytes"]
    predicted = without.loading.gpu_after - saved
    taken = ours.loading.gpu_after
    print(f"{predicted / 2**20:.1f} MiB predicted, {taken / 2**20:.1f} taken")
    assert abs(taken - predicted) <= 0.05 * predicted
    assert abs(without.loading.gpu_after - taken - saved) <= 0.05 * saved
    # Exact host memory: nothing is rounded up to a power of two, and no second copy stays.
    grown = ours.loading.host_after - without.loading.host_after
    assert grown <= 1.1 * done["host_bytes"] + 2**28


def check_outputs(name: str, ours: Ran, theirs: Ran, reference: np.ndarray) -> None:
    """What is read is no further from float32 than stock's, what is drawn no further from stock's.

    Of the drawn tokens those up to the first other one of each sequence.
    """
    stocks = errors(theirs.read, reference)
    agreed: list[int] = []
    for number, (mine, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        same = [a == b for a, b in zip(mine, other, strict=True)]
        count = same.index(False) if False in same else NEW
        agreed += range(number * NEW, number * NEW + count)
    apart = np.abs(ours.drawn[agreed] - theirs.drawn[agreed])
    print(
        f"{name}: {errors(ours.read, reference)}, stock {stocks}; read alike: "
        f"{(ours.read == theirs.read).all()}; drawn alike: {len(agreed)} of {ours.drawn.size}, "
        f"{apart.mean():.2e} apart"
    )
    assert is_no_further(ours.read, theirs.read, reference)
    assert len(agreed) >= ours.drawn.size / 4
    assert apart.mean() <= 2 * stocks[0]  # both are rounded


@pytest.mark.parametrize("way", WAYS)
def test_a_dense_model_is_stock(
    way: str, dense: Path, stock: dict[str, Ran], dense_reference: np.ndarray
) -> None:
    ours = run(dense, way, PREFETCH)
    theirs = stock[way]
    check_outputs(way, ours, theirs, dense_reference)
    if way != "compiled":  # where the compiler fuses other kernels
        assert (ours.read == theirs.read).all()
        assert ours.tokens == theirs.tokens
        assert (ours.drawn == theirs.drawn).all()
    assert ours.prefetch is not None
    assert ours.prefetch["step_bytes"] > 0.99 * ours.prefetch["host_bytes"]
    check_memory(ours, theirs)
    layer = ours.prefetch["host_bytes"] / LAYERS
    assert ours.loading.gpu_peak <= theirs.loading.gpu_after - (LAYERS - STEP - 1) * layer, (
        "layers go to host memory as they are made"
    )


@pytest.mark.parametrize("runner", RUNNERS)
def test_each_runner(
    runner: str, dense: Path, dense_reference: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every second layer two thirds of the parameters, by one buffer, in default graphs."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    theirs = run(dense, "compiled", {})
    settings = {"group_size": 2, "params": ["gate_up_proj", "self_attn"]}
    ours = run(dense, "compiled", settings)
    assert ours.prefetch is not None and ours.prefetch["layers"] == LAYERS // 2
    check_outputs(runner, ours, theirs, dense_reference)
    check_memory(ours, theirs)


def test_a_format_that_changes_its_tensors(dense: Path) -> None:
    """FP8 made while loading: other dtype, strides and parameters than were wrapped."""
    theirs = run(dense, "eager", {}, quantization="fp8")
    ours = run(dense, "eager", PREFETCH, quantization="fp8")
    np.testing.assert_array_equal(ours.read, theirs.read)
    assert ours.tokens == theirs.tokens
    assert ours.prefetch is not None
    assert ours.prefetch["device_bytes"] < 0.6 * STEP * 385e6


@pytest.mark.parametrize("way", WAYS)
def test_attention_beside_cached_experts(way: str, tmp_path: Path) -> None:
    model, _ = checkpoints.write("bf16", tmp_path)
    arguments = SIZES | {"dtype": "float32"}
    with engine(model, enforce_eager=True, **arguments) as llm:
        reference = read(llm)
    theirs = run(model, way, {})
    experts = {"mode": "cache", "slots_per_layer": 24, "stream_threshold": 64}
    without = run(model, way, experts)
    ours = run(model, way, experts | PREFETCH | {"params": ["self_attn"]})
    check_outputs(way, ours, theirs, reference)
    print(f"{way}: tokens as without prefetch: {ours.tokens == without.tokens}")
    assert ours.prefetch is not None and ours.prefetch["layers"] == checkpoints.LAYERS
    check_memory(ours, without)


def late_copies(patch: pytest.MonkeyPatch) -> None:
    copy = copies.copy

    def late(pairs: copies.Pairs) -> None:
        torch.cuda._sleep(CYCLES)  # on the copy stream, and in the graph where one is captured
        copy(pairs)

    patch.setattr(copies, "copy", late)


def late_kernels(patch: pytest.MonkeyPatch) -> None:
    wait = LayerPrefetcher.wait

    def late(self: LayerPrefetcher, number: int) -> None:
        wait(self, number)
        torch.cuda._sleep(CYCLES)

    patch.setattr(LayerPrefetcher, "wait", late)


def poison(patch: pytest.MonkeyPatch) -> None:
    """Buffers are NaN from the moment they are given away."""
    refill = LayerPrefetcher.refill

    def poisoned(self: LayerPrefetcher, number: int) -> None:
        for fill in self._refills[number]:
            for to, _ in fill.pairs:
                to.fill_(0xFF)
        refill(self, number)

    patch.setattr(LayerPrefetcher, "refill", poisoned)


DELAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "copies are late": late_copies,
    "kernels are late": late_kernels,
}


@pytest.mark.parametrize("way", ["eager", "captured"])
@pytest.mark.parametrize("delay", DELAYS)
def test_stock_however_late(
    delay: str, way: str, dense: Path, stock: dict[str, Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    DELAYS[delay](monkeypatch)
    poison(monkeypatch)
    ours = run(dense, way, PREFETCH)
    assert (ours.read == stock[way].read).all()
    assert ours.tokens == stock[way].tokens
    assert (ours.drawn == stock[way].drawn).all()


def values_with(
    model: Path, way: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> tuple[np.ndarray, list[list[int]]]:
    """What an engine reads and draws that is broken from its start on."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        monitor.set_cudagraph_capturing_enabled(True)
        with engine(model, **moe_offload_args(**PREFETCH), **WAYS[way], **SIZES) as llm:
            return read(llm), draw(llm)[0]


@pytest.mark.parametrize("delay", DELAYS)
def test_without_the_marks_it_is_noticed(delay: str, dense: Path, stock: dict[str, Ran]) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        DELAYS[delay](patch)
        patch.setattr(Mark, "wait", lambda self: None)

    got, _ = values_with(dense, "eager", plant)
    assert not (got == stock["eager"].read).all()


def exchange_two_layers(patch: pytest.MonkeyPatch) -> None:
    fill = LayerPrefetcher._fill
    other = {3: 5, 5: 3}

    def faulty(self: LayerPrefetcher, number: int, buffers: Sequence[int]) -> Any:
        right = fill(self, number, buffers)
        wrong = fill(self, other.get(number, number), buffers)
        return type(right)(number, buffers, wrong.pairs)

    patch.setattr(LayerPrefetcher, "_fill", faulty)


def keep_what_was_there(patch: pytest.MonkeyPatch) -> None:
    """Copies are made into the buffers once, before the first step."""
    copied: set[int] = set()
    copy = copies.copy

    def once(pairs: copies.Pairs) -> None:
        copy([pair for pair in pairs if pair[0].data_ptr() not in copied])
        copied.update(to.data_ptr() for to, _ in pairs)

    patch.setattr(copies, "copy", once)


@pytest.mark.parametrize("way", ["eager", "captured"])
@pytest.mark.parametrize("fault", [exchange_two_layers, keep_what_was_there])
def test_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], way: str, dense: Path, stock: dict[str, Ran]
) -> None:
    got, tokens = values_with(dense, way, fault)
    assert not (got == stock[way].read).all()
    assert tokens != stock[way].tokens
