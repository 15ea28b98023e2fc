"""Before the first request: the slots and the CPU engine agree on the experts in host memory."""

from __future__ import annotations

import math

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_moe_offload.errors import OffloadError
from vllm_moe_offload.experts import ExpertSpec, Format
from vllm_moe_offload.lanes import MAX_CAPTURED, Lane, OffloadedLayer

ROWS = 8
# Relative error of the norm. Unquantised: the kernel rounds its activations to the format. FP8:
# the kernel quantises its input rows and its activations to e4m3 (2^-4 each, averaged over a row's
# sum), the engine does not. A wrong expert, scale or slot gives about 1.
_FLOOR = {Format.FP32: 1e-4, Format.FP16: 5e-3, Format.BF16: 2e-2}
_QUANTISED_FLOOR = 8e-2
# Of the random rows of fp16: a model whose rows are small may overflow it with larger ones. The
# other dtypes have the engine's own range: what only the device finds infinite there is a fault.
_SCALES = (1.0, 2.0**-6, 2.0**-12)

logger = init_logger(f"vllm.{__name__}")


class SelfCheckError(OffloadError):
    """The device and the CPU do not compute the same from the same experts."""


def check_layer(
    name: str,
    layer: OffloadedLayer,
    spec: ExpertSpec,
    cpu: Lane,
    top_k: int,
    *,
    rows: int | None = None,
) -> None:
    """Compute random rows through slots and through the engine; SelfCheckError if they differ.

    `top_k`: experts a row is routed to. Every expert takes part, so all of them pass through the
    slots in waves. Where the device decides steps, there is one of each power of two of rows, which
    compiles its kernels, up to one that the host plans. rows: of one step instead of those. Rows
    that the engine finds infinite or NaN, by what the checkpoint holds, are not compared.
    """
    sizes = [rows]
    if rows is None and layer.decides_on_device:
        sizes = [1 << n for n in range(MAX_CAPTURED.bit_length() + 1)]
    worst = math.inf
    for scale in _SCALES if spec.activation_dtype == torch.float16 else (1.0,):
        worst = _worst(layer, spec, cpu, top_k, sizes, scale)
        if math.isfinite(worst):
            break
    layer.reset_counters()
    layer.invalidate()
    if worst < 0:
        logger.warning(
            "moe_offload: every random row that experts of %s compute is infinite or NaN, on the "
            "CPU already, so slots and CPU were not compared: is the checkpoint whole?",
            name,
        )
        return
    floor = _FLOOR.get(spec.format, _QUANTISED_FLOOR)
    if not worst <= floor:
        raise SelfCheckError(
            f"{name}: {spec.format.value} experts computed from {layer.num_slots} slots differ "
            f"from the same experts on the CPU by {worst:.1e} of the norm (allowed: {floor:.0e}); "
            "this is a fault of vllm-moe-offload or of the kernel: serve without moe_offload and "
            "report the model, the vLLM version and this line"
        )


def _worst(
    layer: OffloadedLayer,
    spec: ExpertSpec,
    cpu: Lane,
    top_k: int,
    sizes: list[int | None],
    scale: float,
) -> float:
    """The largest error of steps of so many rows (None: of as many as use every expert).

    Of the rows, scaled by `scale`, whose results are finite by the engine; -1 where none is.
    """
    x, weights, ids = random_step(layer.num_experts, spec, top_k)
    x *= scale
    expected = torch.empty(x.shape, dtype=torch.float32)
    cpu.compute(x, weights, ids, None, expected, False)
    finite = expected.isfinite().all(1)
    device = current_platform.device_type
    given = [tensor.to(device) for tensor in (x, weights, ids)]
    worst = -1.0
    for size in sizes:
        these = torch.arange(size or len(x)) % len(x)
        got = layer.forward(*(tensor[these.to(device)] for tensor in given)).cpu().float()
        if (kept := finite[these]).any():
            worst = max(worst, _error(got[kept], expected[these[kept]]))
    return worst


def random_step(
    num_experts: int, spec: ExpertSpec, top_k: int, rows: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and ids of so many rows, or of as many as it takes to use every expert."""
    generator = torch.Generator().manual_seed(0)
    rows = max(rows, -(-num_experts // top_k))
    # Types are given: while a model is loaded the default is the model's.
    x = torch.randn((rows, spec.hidden), generator=generator, dtype=torch.float32).to(
        spec.activation_dtype
    )
    order = torch.randperm(rows * top_k, generator=generator) % num_experts
    ids = order.view(rows, top_k).to(torch.int32)
    weights = torch.rand((rows, top_k), generator=generator, dtype=torch.float32) / top_k
    return x, weights, ids


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norm; infinite for what is no number, which no comparison would notice."""
    error = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
