"""Random batches through an engine on a GPU, with layers checked against float64 on the way.

    python -m tests.gpu.soak --minutes 8 [--kinds bf16 fp8_block] [--every 20]

Every 20th step of every layer is computed again in float64; the first one that is further off than
its format's floor ends the program with status 1. Slots are resized at random between batches.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from vllm import SamplingParams, TokensPrompt

from tests.e2e.engines import engine, resize, stats
from tests.engine.oracle import relative_error
from tests.gpu import checkpoints
from tests.gpu.oracle import Checked, checked_layers
from vllm_moe_offload import moe_offload_args

# Of the norm, as wide as rows of a model can be; a wrong expert among eight gives 0.3.
FLOOR = {"bf16": 1e-2, "fp8_block": 8e-2, "fp8_tensor": 8e-2, "fp8_channel": 8e-2}
SLOTS = (8, 16, 32, 64, 127, 128)
MAX_PROMPT, MAX_NEW, MAX_BATCH = 300, 24, 16


class Watch:
    """Compares every n-th step of a layer with float64 on the same input."""

    def __init__(self, checked: Checked, floor: float, every: int) -> None:
        self.steps = self.compared = 0
        self.worst = 0.0
        self._checked = checked
        self._floor = floor
        self._every = every
        self._forward = checked.layer.forward
        checked.layer.forward = self._watched  # type: ignore[method-assign]

    def _watched(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *rest: Any
    ) -> Any:
        given = (x.clone(), weights.clone(), ids.clone())
        out = self._forward(x, weights, ids, *rest)
        self.steps += 1
        if self.steps % self._every == 0:
            padding = rest[0] if rest and rest[0] is not None else torch.zeros(len(x)).bool()
            real = ~padding.to(x.device)
            error = relative_error(out[real], self._checked.routed(*(g[real] for g in given)))
            self.worst = max(self.worst, error)
            self.compared += 1
            if not error <= self._floor:
                raise SystemExit(
                    f"{self._checked.name}, step {self.steps} of {int(real.sum())} rows with "
                    f"{self._checked.layer.num_slots} slots: {error:.2e} of the norm from float64, "
                    f"allowed {self._floor:.0e}"
                )
        return out


def soak(kind: str, seconds: float, options: argparse.Namespace) -> None:
    """Serve random batches of one kind of checkpoint for so long; SystemExit for a wrong layer."""
    rng, batches, every = random.Random(options.seed), options.batches, options.every
    with tempfile.TemporaryDirectory() as folder:
        quantised, _ = checkpoints.write(
            kind, Path(folder), seed=options.seed, layers=options.layers
        )
        with engine(
            quantised,
            dtype="bfloat16",
            enforce_eager=True,
            gpu_memory_utilization=0.25,
            kv_cache_memory_bytes=1 << 30,
            **moe_offload_args(mode="cache", slots_per_layer=32),
        ) as llm:
            watches = [Watch(c, FLOOR[kind], every) for c in checked_layers(llm)]
            done, tokens, ends = 0, 0, time.monotonic() + seconds
            while time.monotonic() < ends and (batches is None or done < batches):
                if rng.random() < 0.2:
                    resize(llm, rng.choice(SLOTS))
                    # Nothing may be read that was not fetched: all slots hold NaN.
                    for checked in checked_layers(llm):
                        for tensor in checked.layer._slots.cache.tensors.values():
                            tensor.view(torch.uint8).fill_(0xFF)
                tokens += generate(llm, rng)
                done += 1
            print(
                f"{kind}: {done} batches, {tokens} tokens generated, {watches[0].steps} steps, "
                f"{sum(w.compared for w in watches)} layers compared, the furthest "
                f"{max(w.worst for w in watches):.2e} from float64 (allowed {FLOOR[kind]:.0e}); "
                f"since the last resize {stats(llm)['hits']} hits, {stats(llm)['misses']} misses"
            )


def generate(llm: Any, rng: random.Random) -> int:
    prompts = [
        TokensPrompt(
            prompt_token_ids=[
                rng.randrange(3, checkpoints.VOCABULARY) for _ in range(rng.randint(1, MAX_PROMPT))
            ]
        )
        for _ in range(rng.randint(1, MAX_BATCH))
    ]
    parameters = [
        SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=rng.randint(1, MAX_NEW),
            ignore_eos=True,
            detokenize=False,
        )
        for _ in prompts
    ]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--kinds", nargs="+", choices=checkpoints.KINDS, default=["bf16"])
    parser.add_argument("--batches", type=int, help="at most so many of each kind")
    parser.add_argument("--layers", type=int, default=checkpoints.LAYERS)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    each = options.minutes * 60 / len(options.kinds)
    for kind in options.kinds:
        soak(kind, each, options)


if __name__ == "__main__":
    main()
