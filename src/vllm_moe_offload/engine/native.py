"""An expert's tensors in the terms of the compiled engine: the numbers of csrc/kernels/kernel.h."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from vllm_moe_offload.engine import _engine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.experts.format import FP8_BLOCK_SIZE

# enum class Format
FORMATS = {
    Format.FP32: 0,
    Format.FP16: 1,
    Format.BF16: 2,
    Format.FP8_BLOCK: 3,
    Format.FP8_CHANNEL: 3,
    Format.FP8_TENSOR: 3,
    Format.INT8_CHANNEL: 4,
    Format.INT4: 5,
    Format.INT4_ZEROS: 5,
    Format.MXFP4: 6,
    Format.NVFP4: 7,
}
# enum class Dtype
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# enum class Activation
_ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.SWIGLUOAI: 0,
    Activation.SWIGLUOAI_UNINTERLEAVE: 0,
    Activation.SILU_NO_MUL: 0,
    Activation.GELU: 1,
    Activation.GELU_NO_MUL: 1,
    Activation.GELU_TANH: 2,
    Activation.GELU_TANH_NO_MUL: 2,
    Activation.RELU2_NO_MUL: 3,
}
_SWIGLUOAI = (Activation.SWIGLUOAI, Activation.SWIGLUOAI_UNINTERLEAVE)

# "All columns of a row share one scale": no column index is as large as 2**63.
_WHOLE_ROW = 63


def make_plan(
    engine: _engine.Engine,
    spec: ExpertSpec,
    tensors: Mapping[str, torch.Tensor],
    *,
    max_tokens: int,
    top_k: int,
) -> _engine.Plan:
    """The native plan for checked tensors."""
    oai = spec.activation in _SWIGLUOAI
    limit = spec.swiglu_limit
    if limit is None:
        limit = 7.0 if oai else math.inf
    alpha, beta = (1.702, 1.0) if oai else (1.0, 0.0)
    # Interleaved gate and up rows have no two parts: a block of scales spans both.
    parts = 1 if spec.activation.interleaved else spec.activation.parts
    return _engine.Plan(
        engine=engine,
        w13=_matrix(spec, tensors, "w13", parts),
        w2=_matrix(spec, tensors, "w2", 1),
        experts=tensors["w13_weight"].shape[0],
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        format=FORMATS[spec.format],
        dtype=DTYPES[spec.activation_dtype],
        activation=_ACTIVATIONS[spec.activation],
        gated=spec.activation.gated,
        interleaved=spec.activation.interleaved,
        alpha=alpha if spec.swiglu_alpha is None else spec.swiglu_alpha,
        beta=beta if spec.swiglu_beta is None else spec.swiglu_beta,
        limit=limit,
        router_weight_on_input=spec.apply_router_weight_on_input,
        max_tokens=max_tokens,
        top_k=top_k,
    )


def column_multiple(spec: ExpertSpec) -> int:
    """A part of the intermediate dimension begins and ends at multiples of this (or at its end)."""
    if spec.format is Format.FP8_BLOCK:
        return FP8_BLOCK_SIZE
    return spec.group_size or spec.format.fixed_group or 1


def _matrix(
    spec: ExpertSpec, tensors: Mapping[str, torch.Tensor], name: str, parts: int
) -> _engine.Matrix:
    def address(part: str) -> int:
        tensor = tensors.get(f"{name}_{part}")
        return 0 if tensor is None else tensor.data_ptr()

    weight = tensors[f"{name}_weight"]
    rows = weight.shape[1]
    scale = tensors.get(f"{name}_scale")
    block_rows, part_scale_rows, row_bytes, expert_bytes, shift = 1, 0, 0, 0, _WHOLE_ROW
    if scale is not None:
        expert_bytes = math.prod(scale.shape[1:]) * scale.itemsize
        if scale.dim() == 1:  # a scale for each expert
            block_rows = rows
        else:
            row_bytes = scale.shape[-1] * scale.itemsize
            part_scale_rows = scale.shape[1] // parts
        if spec.format is Format.FP8_BLOCK:
            block_rows = FP8_BLOCK_SIZE
        multiple = column_multiple(spec)
        if multiple > 1:
            shift = multiple.bit_length() - 1
    return _engine.Matrix(
        weight=weight.data_ptr(),
        rows=rows,
        row_bytes=weight.shape[2] * weight.itemsize,
        parts=parts,
        bias=address("bias"),
        scale=address("scale"),
        scale_expert_bytes=expert_bytes,
        scale_row_bytes=row_bytes,
        scale_block_rows=block_rows,
        scale_part_rows=part_scale_rows,
        scale_shift=shift,
        zero=address("zeros"),
        global_scale=address("global_scale"),
    )
