"""Decode steps of several architectures, in every mode, in vLLM's default graphs and without.

No further from float32 than stock, by the log-probabilities that tokens are drawn with in batches
of 1, 3 (which vLLM pads to 4), 8 and 32; and faults are noticed. One engine an architecture serves
all modes (`modes.py`); that an engine starts in each of them is `test_captured.py`'s to show.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")
import numpy as np
from vllm import LLM
from vllm import envs as vllm_envs
from vllm.compilation import monitor

from tests.e2e import checkpoints
from tests.e2e.drawing import BATCHES, NEW, SEEDS, Drawn, draw, prompts
from tests.e2e.engines import engine, errors, is_no_further, stats
from tests.e2e.reference import Reference
from tests.gpu.decode_faults import FAULTS
from tests.gpu.modes import Modes
from vllm_moe_offload import moe_offload_args

pytestmark = pytest.mark.gpu
DEMO = Path(__file__).parents[2] / "models" / "demo-moe"
MODES = ("auto", "hybrid", "cache", "cpu")
# Every mode and way is compared with stock's 99th percentile: of more tokens, a surer one.
STOCK_SEEDS = range(0, 800, 100)
SIZES: dict[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
    "max_num_batched_tokens": 512,
    "max_num_seqs": max(BATCHES),
}
# torch.compile, and graphs of both kinds: vLLM's default, but for the number of sizes.
DEFAULT: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 4, 8, 32]},
}


@dataclass(frozen=True)
class Judge:
    """Compares what was drawn with a float32 model's reading of it, and with stock's error."""

    reference: Reference
    stock: np.ndarray

    def error(self, drawn: Drawn) -> np.ndarray:
        """By how much the logarithm of each drawn token's probability is off."""
        return drawn.values - drawn.of_the_new(self.reference.log_probabilities(drawn.sequences))

    def accepts(self, name: str, drawn: Drawn) -> bool:
        error = self.error(drawn)
        exact = np.zeros(())  # the errors are what is compared, of as many tokens as each has
        print(f"  {name}: {errors(error, exact)}, stock {errors(self.stock, exact)}")
        return is_no_further(error, self.stock, exact)


def judge(path: Path) -> Judge:
    reference = Reference(path)
    with engine(path, dtype="bfloat16", **SIZES) as llm:
        drawn = draw(llm, STOCK_SEEDS)
    made = Judge(reference, np.zeros(0))
    stock = made.error(drawn)
    assert np.abs(stock).mean() < 0.1, "the reference is not this model"
    return Judge(reference, stock)


def draw_counted(llm: LLM, mode: str) -> Drawn:
    """Every token is counted once, and every lane of the mode has done its part."""
    began = time.perf_counter()
    drawn = draw(llm)
    seconds = time.perf_counter() - began
    done = stats(llm)
    names = ("steps", "tokens", "hits", "misses", "cpu_experts", "promoted", "waves")
    print(f"  {mode}: {seconds:.1f} s, { ({name: done[name] for name in names}) }")
    tokens = sum(len(p) + NEW - 1 for batch in prompts() for p in batch)
    assert done["tokens"] == len(SEEDS) * tokens
    if mode == "cpu":
        assert done["hits"] == done["misses"] == 0 < done["cpu_experts"]
    else:
        assert done["misses"] > 0
    if mode == "cache":
        assert done["cpu_experts"] == done["promoted"] == 0
    if mode == "hybrid":
        assert 0 < done["cpu_experts"] < done["misses"]
    return drawn


@pytest.mark.parametrize("name", [*checkpoints.ARCHITECTURES, "demo"])
def test_every_mode_in_graphs_and_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    # What the engines before this one leave behind in the process.
    vllm_envs.disable_envs_cache()
    monitor.set_cudagraph_capturing_enabled(True)
    path = DEMO if name == "demo" else checkpoints.write(name, tmp_path)
    num_slots = (32 if name == "demo" else checkpoints.NUM_EXPERTS[name]) // 4
    began = time.perf_counter()
    by = judge(path)
    print(f"\n{name}: stock in {time.perf_counter() - began:.0f} s")
    settings = moe_offload_args(slots_per_layer=num_slots, stream_threshold="off")
    wrong, unnoticed = [], []
    with engine(path, dtype="bfloat16", **settings, **DEFAULT, **SIZES) as llm:
        modes = Modes(llm)
        print(f"{name}: ours after {time.perf_counter() - began:.0f} s")
        for mode in MODES:
            modes.to(mode, num_slots)
            with modes.eagerly():
                if not by.accepts(f"{mode}, eager", draw_counted(llm, mode)):
                    wrong.append(f"{mode}, eager")
            modes.to(mode, num_slots)
            modes.capture()
            if not by.accepts(f"{mode}, captured", draw_counted(llm, mode)):
                wrong.append(f"{mode}, captured")
        with pytest.MonkeyPatch.context() as patch:
            FAULTS["two experts swapped"](patch)
            modes.to("cache", num_slots)
            with modes.eagerly():
                if by.accepts("cache, eager: two experts swapped", draw(llm)):
                    unnoticed.append("two experts swapped")
        with pytest.MonkeyPatch.context() as patch:
            FAULTS["one expert dropped"](patch)
            modes.to("auto", num_slots)
            modes.capture()
            if by.accepts("auto, captured: one expert dropped", draw(llm)):
                unnoticed.append("one expert dropped")
    vllm_envs.disable_envs_cache()
    print(f"{name}: {time.perf_counter() - began:.0f} s")
    assert not wrong
    assert not unnoticed
