"""Random weights and batches for the engine's tests."""

from __future__ import annotations

import torch

from vllm_moe_offload.experts import Activation, ExpertSpec, Format

Shard = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Standard deviation of a format's codes as drawn below, before scaling.
_SPREAD = {
    Format.FP8_BLOCK: 1.0,
    Format.FP8_CHANNEL: 1.0,
    Format.FP8_TENSOR: 1.0,
    Format.INT8_CHANNEL: 73.0,
    Format.INT4: 4.6,
    Format.INT4_ZEROS: 6.5,
    Format.MXFP4: 2.8,
    Format.NVFP4: 2.8,
}


def tolerance(spec: ExpertSpec) -> float:
    """Relative error of the norm that rounding explains.

    Sums of a few hundred to a few thousand terms, each rounded at 2^-24, and an activation good to
    about 1e-6. Where the activations are bf16, the engine may round weights and intermediate rows
    to bf16 too, 2^-9 each.
    """
    return 5e-3 if spec.activation_dtype is torch.bfloat16 else 1e-5


def columns(spec: ExpertSpec, name: str) -> int:
    return spec.hidden if name.startswith("w13") else spec.intermediate


def random_shard(spec: ExpertSpec, experts: int, generator: torch.Generator) -> Shard:
    """Weights that keep the size of what they multiply, for `experts` experts."""

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    shard = {}
    for part in spec.layout.tensors:
        shape = (experts, *part.shape)
        gain = columns(spec, part.name) ** -0.5
        quantised_gain = gain / _SPREAD.get(spec.format, 1.0)
        kind = part.name.split("_", 1)[1]
        if kind == "bias":
            values = normal(shape)
        elif kind == "global_scale":
            values = torch.full(shape, quantised_gain) * (0.8 + 0.1 * integers(0, 4, shape))
        elif kind == "scale" and spec.format is Format.MXFP4:
            middle = 127 + round(torch.tensor(quantised_gain).log2().item())
            values = middle + integers(-2, 2, shape)
        elif kind == "scale" and spec.format is Format.NVFP4:
            values = 2.0 ** integers(-8, 2, shape) + 0.5 * normal(shape).abs()
        elif kind == "scale":
            values = quantised_gain * (0.5 + torch.rand(shape, generator=generator))
        elif kind == "zeros" or part.dtype == torch.uint8:
            values = integers(0, 256, shape)  # every code
        elif part.dtype == torch.int8:
            values = integers(-128, 128, shape)
        elif part.dtype == torch.float8_e4m3fn:
            values = normal(shape) * 4.0 ** integers(-4, 1, shape)  # subnormals too
        else:
            values = normal(shape) * gain
        shard[part.name] = values.to(part.dtype)
    return shard


def random_batch(
    spec: ExpertSpec,
    tokens: int,
    top_k: int,
    ids: tuple[int, int],
    generator: torch.Generator,
) -> Batch:
    """x, topk_ids in [ids[0], ids[1]) with repetitions, topk_weights."""
    x = torch.randn((tokens, spec.hidden), generator=generator).to(spec.activation_dtype)
    topk_ids = torch.randint(*ids, (tokens, top_k), generator=generator, dtype=torch.int32)
    return x, topk_ids, torch.rand((tokens, top_k), generator=generator)


def make_spec(
    hidden: int,
    intermediate: int,
    format: Format,
    **arguments: object,
) -> ExpertSpec:
    """SiLU unless told otherwise, and sizes rounded up to what the format can store."""
    group = 32 if format in (Format.INT4, Format.INT4_ZEROS) else None
    multiple = group or format.fixed_group or 1
    arguments.setdefault("activation", Activation.SILU)
    return ExpertSpec(
        hidden=-(-hidden // multiple) * multiple,
        intermediate=-(-intermediate // multiple) * multiple,
        format=format,
        group_size=group,
        **arguments,  # type: ignore[arg-type]
    )
