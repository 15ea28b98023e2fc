"""The routed experts in float64, plain torch: what the engine's results are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from vllm_moe_offload.experts import Activation, ExpertSpec, Format

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def activate(spec: ExpertSpec, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`up` is ignored where the activation is not gated."""
    oai = spec.activation in (Activation.SWIGLUOAI, Activation.SWIGLUOAI_UNINTERLEAVE)
    limit = spec.swiglu_limit if spec.swiglu_limit is not None else (7.0 if oai else None)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    alpha = spec.swiglu_alpha if spec.swiglu_alpha is not None else (1.702 if oai else 1.0)
    beta = spec.swiglu_beta if spec.swiglu_beta is not None else (1.0 if oai else 0.0)
    name = spec.activation.value
    if name.startswith(("silu", "swigluoai")):
        value = gate * torch.sigmoid(alpha * gate)
    elif name.startswith("gelu_tanh"):
        value = F.gelu(gate, approximate="tanh")
    elif name.startswith("gelu"):
        value = F.gelu(gate)
    else:
        value = F.relu(gate) ** 2
    return value * (up + beta) if spec.activation.gated else value


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The last dimension doubled: low nibbles at even places, high ones at odd places."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).long()


def dequantise(spec: ExpertSpec, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The matrix `name` ("w13" or "w2") of all experts as float64."""
    weight = tensors[f"{name}_weight"]
    if not spec.format.quantised:
        return weight.double()
    scale = tensors[f"{name}_scale"]
    if spec.format is Format.MXFP4:
        scale = torch.exp2(scale.double() - 127)
    scale = scale.double()
    if spec.format in (Format.FP8_CHANNEL, Format.INT8_CHANNEL):
        return weight.double() * scale
    if spec.format is Format.FP8_TENSOR:
        return weight.double() * scale[:, None, None]
    if spec.format is Format.FP8_BLOCK:
        parts = spec.activation.parts if name == "w13" and not spec.activation.interleaved else 1
        halves = zip(weight.double().chunk(parts, 1), scale.chunk(parts, 1), strict=True)
        return torch.cat([half * _spread(blocks, half.shape) for half, blocks in halves], 1)
    codes = nibbles(weight)
    if spec.format in (Format.MXFP4, Format.NVFP4):
        values = E2M1[codes]
    else:
        zeros = torch.full((), 8.0, dtype=torch.float64)
        if spec.format is Format.INT4_ZEROS:
            packed = tensors[f"{name}_zeros"]  # two rows a byte
            zeros = nibbles(packed.transpose(1, 2).contiguous()).transpose(1, 2).double()
            zeros = zeros.repeat_interleave(codes.shape[2] // zeros.shape[2], 2)
        values = codes.double() - zeros
    values = values * scale.repeat_interleave(codes.shape[2] // scale.shape[2], 2)
    if spec.format is Format.NVFP4:
        values = values * tensors[f"{name}_global_scale"].double()[:, None, None]
    return values


def _spread(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    spread = blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return spread[:, : shape[1], : shape[2]]


def expert(
    spec: ExpertSpec,
    weights: Mapping[str, torch.Tensor],
    row: int,
    x: torch.Tensor,
    part: tuple[int, int],
) -> torch.Tensor:
    """One expert: x [rows, H] float64 to [rows, H]; the weights dequantised."""
    product = x @ weights["w13_weight"][row].T
    if spec.bias:
        product = product + weights["w13_bias"][row].double()
    if spec.activation.interleaved:
        gate, up = product[:, 0::2], product[:, 1::2]
    else:
        gate, up = product.chunk(2, -1) if spec.activation.gated else (product, product)
    inner = activate(spec, gate, up)[:, slice(*part)]
    out = inner @ weights["w2_weight"][row][:, slice(*part)].T
    if spec.bias and part[0] == 0:
        out = out + weights["w2_bias"][row].double()
    return out


def experts(
    spec: ExpertSpec,
    tensors: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    part: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The weighted sum over each token's experts: [T, H] float64."""
    weights = dict(tensors)
    for name in ("w13", "w2"):
        weights[f"{name}_weight"] = dequantise(spec, tensors, name)
    out = torch.zeros(x.shape, dtype=torch.float64)
    rows = topk_ids.long()
    if expert_map is not None:
        rows = torch.where(rows < 0, rows, expert_map.long()[rows.clamp(min=0)])
    for row in range(weights["w13_weight"].shape[0]):
        token, k = (rows == row).nonzero(as_tuple=True)
        scale = topk_weights[token, k].double()[:, None]
        on_input = spec.apply_router_weight_on_input
        inputs = x[token].double() * (scale if on_input else 1)
        value = expert(spec, weights, row, inputs, part or (0, spec.intermediate))
        out.index_add_(0, token, value if on_input else scale * value)
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The error's norm over the expected value's norm."""
    scale = expected.norm().item()
    return (got.double() - expected).norm().item() / (scale if scale > 0 else 1.0)
