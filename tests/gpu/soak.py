"""Random batches through an engine on a GPU, with layers checked against float64 on the way.

    python -m tests.gpu.soak --minutes 8 [--kinds bf16 fp8_block] [--every 20]
    python -m tests.gpu.soak --minutes 8 --captured --mode auto --every 50

Every 20th step is computed again in float64, layer by layer; the first layer that is further off
than its format's floor ends the program with status 1. Between batches slots are resized or
emptied at random, and then hold NaN. With --captured steps run in vLLM's default graphs, those of
up to 64 rows; resizing captures them anew.
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
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

import torch
from vllm import SamplingParams, TokensPrompt

from tests.e2e.engines import engine, resize, stats
from tests.gpu import checkpoints
from tests.gpu.modes import Modes
from tests.gpu.oracle import Checked, checked_layers
from tests.gpu.recording import Recorder, after_steps, recording
from vllm_moe_offload import moe_offload_args

# Of the norm, as wide as rows of a model can be; a wrong expert among eight gives 0.3.
FLOOR = {"bf16": 1e-2, "fp8_block": 8e-2, "fp8_tensor": 8e-2, "fp8_channel": 8e-2}
SLOTS = (8, 16, 32, 64, 127, 128)
MAX_PROMPT, MAX_NEW, MAX_BATCH, MAX_ROWS = 300, 24, 16, 512
# Seconds from one account of it to the next.
_EVERY = 60.0
MODES = ("auto", "hybrid", "cache", "cpu")


class Watch:
    """Compares every n-th step of all layers with float64 on the same input."""

    def __init__(self, layers: list[Checked], recorder: Recorder, floor: float, every: int) -> None:
        self.steps = self.compared = 0
        self.worst = 0.0
        self._layers = layers
        self._recorder = recorder
        self._floor = floor
        self._every = every

    def look(self, steps: int) -> None:
        """After a step has been launched; waits for it where it is compared."""
        self.steps = steps
        if steps % self._every:
            return
        torch.cuda.synchronize()
        for checked in self._layers:
            error, rows = self._recorder.of[id(checked.layer)].error(checked)
            self.worst = max(self.worst, error)
            self.compared += 1
            if not error <= self._floor:
                raise SystemExit(
                    f"{checked.name}, step {steps} of {rows} rows with "
                    f"{checked.layer.num_slots} slots: {error:.2e} of the norm from float64, "
                    f"allowed {self._floor:.0e}"
                )


def soak(kind: str, seconds: float, options: argparse.Namespace) -> None:
    """Serve random batches of one kind of checkpoint for so long; SystemExit for a wrong layer."""
    rng, batches = random.Random(options.seed), options.batches
    with tempfile.TemporaryDirectory() as folder, recording(MAX_ROWS) as recorder:
        quantised, _ = checkpoints.write(
            kind, Path(folder), seed=options.seed, layers=options.layers
        )
        # Where there are graphs the mode is set in the running engine: see `Modes`.
        mode = "auto" if options.captured else options.mode
        sized: dict[str, Any] = {} if mode == "cpu" else {"slots_per_layer": 32}
        if mode != options.mode == "cpu":
            sized["stream_threshold"] = "off"
        with engine(
            quantised,
            dtype="bfloat16",
            enforce_eager=not options.captured,
            gpu_memory_utilization=0.5,  # less what others take while this engine starts
            kv_cache_memory_bytes=1 << 30,
            max_num_batched_tokens=MAX_ROWS,
            **moe_offload_args(mode=mode, **sized),
        ) as llm:
            layers = list(checked_layers(llm))
            watch = Watch(layers, recorder, FLOOR[kind], options.every)
            modes = Modes(llm) if options.captured else None
            done, tokens, began = 0, 0, time.monotonic()
            ends, tells = began + seconds, began + _EVERY

            def tell() -> None:
                how = f"{options.mode}, {'captured' if options.captured else 'eager'}"
                print(
                    f"{kind}, {how}, {(time.monotonic() - began) / 60:.1f} min: {done} batches, "
                    f"{tokens} tokens generated, {watch.steps} steps, {watch.compared} layers "
                    f"compared, the furthest {watch.worst:.2e} from float64 (allowed "
                    f"{FLOOR[kind]:.0e}); since the last resize {counted(stats(llm))}",
                    flush=True,
                )

            if modes is not None:
                modes.to(options.mode, 32)
                modes.capture()
            with after_steps(watch.look):
                while time.monotonic() < ends and (batches is None or done < batches):
                    if options.mode != "cpu":
                        shake(llm, layers, modes, options.mode, rng)
                    tokens += generate(llm, rng)
                    done += 1
                    if time.monotonic() > tells:
                        tells += _EVERY
                        tell()
            tell()


def counted(done: dict[str, Any]) -> str:
    names = ("hits", "misses", "cpu_experts", "promoted", "streamed")
    return ", ".join(f"{done[name]} {name}" for name in names)


def shake(
    llm: Any, layers: list[Checked], modes: Modes | None, mode: str, rng: random.Random
) -> None:
    """Now and then another number of slots, or empty ones; then nothing may be read unfetched."""
    drawn = rng.random()
    if drawn < (0.02 if modes is not None else 0.2):
        slots = rng.choice(SLOTS)
        if modes is None:
            resize(llm, slots)
        else:
            modes.to(mode, slots)
            modes.capture()
    elif drawn > 0.2:
        return
    for checked in layers:
        # Capturing has filled some; with a slot for every expert all are in them from now on.
        if checked.layer.num_slots == checked.layer.num_experts:
            continue
        checked.layer.invalidate()
        for tensor in checked.layer._slots.cache.tensors.values():
            tensor.view(torch.uint8).fill_(0xFF)


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--kinds", nargs="+", choices=checkpoints.KINDS, default=["bf16"])
    parser.add_argument("--mode", choices=MODES, default="cache")
    parser.add_argument("--captured", action="store_true", help="in CUDA graphs, else eagerly")
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
