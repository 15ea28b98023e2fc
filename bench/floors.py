"""Lower bounds, from the rates that the machine showed in the same run.

Experts that a step needs and the GPU lacks come over PCIe or are read by the CPU; at best both at
once, at the rate measured while both run. What else the GPU does is taken from vLLM with
everything on the GPU, less the time in which it read the experts at its own memory's rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.models import Shape
from vllm_moe_offload.routing import Residency
from vllm_moe_offload.routing.simulate import simulate

GB, TERA = 1e9, 1e12
_WARM, _STEPS, _LAYERS = 100, 200, 2


def experts_of_a_step(
    shape: Shape, routing: str, batch: int, slots: int, policy: str = "lfru"
) -> tuple[float, float]:
    """Experts that one layer needs in a decode step, and those of them not in slots: means."""
    table = simulate(
        routing,
        steps=_WARM + _STEPS,
        layers=_LAYERS,
        rows=batch,
        num_experts=shape.experts,
        top_k=shape.top_k,
    )
    needed, missed = [], []
    for layer in range(_LAYERS):
        residency = Residency(shape.experts, slots, policy)
        for step, used in enumerate(table.used(layer, batch, shape.experts)):
            plan = residency.step(used)
            if step >= _WARM:
                needed.append(plan.hits + plan.misses)
                missed.append(plan.misses)
    return float(np.mean(needed)), float(np.mean(missed))


def decode_ms(
    shape: Shape,
    *,
    needed: float,
    missed: float,
    both_gb_per_s: float,
    gpu_ms: float | None = None,
    gpu_read_gb_per_s: float | None = None,
) -> float:
    """The least time of a decode step. `gpu_ms`: a step of vLLM with everything on the GPU."""
    layer_bytes = shape.layers * shape.expert_bytes
    outside = 0.0
    if gpu_ms is not None and gpu_read_gb_per_s is not None:
        outside = max(0.0, gpu_ms - 1e3 * needed * layer_bytes / (gpu_read_gb_per_s * GB))
    return outside + 1e3 * missed * layer_bytes / (both_gb_per_s * GB)


def prefill_ms(
    shape: Shape,
    *,
    tokens: int,
    chunk: int,
    slots: int,
    both_gb_per_s: float,
    lanes: Sequence[tuple[float, float]] = (),
    gpu_ms: float | None = None,
) -> float:
    """The least time to prefill `tokens` in steps of up to `chunk`: the GPU's own time, or that of
    what it lacks, in every step anew.

    That is copied, or computed by the CPU: no faster than both move bytes, nor than the best of
    `lanes`, the ways to use them of which is known what they do: GB/s that are copied, TFLOP/s that
    the CPU computes meanwhile. Experts have as many rows each.
    """
    moved = 0.0
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start)
        needed = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** rows)
        seconds = shape.expert_bytes / (both_gb_per_s * GB)
        if lanes:
            # Two products with [2I, H] and [H, I], a multiplication and an addition a number.
            flop = 6 * shape.hidden * shape.intermediate * rows * shape.top_k / needed
            a_second = max(
                h2d * GB / shape.expert_bytes + tflop * TERA / flop for h2d, tflop in lanes
            )
            seconds = max(seconds, 1 / a_second)
        moved += max(0.0, needed - slots) * seconds
    return max(gpu_ms or 0.0, 1e3 * shape.layers * moved)
