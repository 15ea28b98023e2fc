"""What one expert computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_moe_offload.experts.activation import Activation
from vllm_moe_offload.experts.format import FP8_BLOCK_SIZE, Format
from vllm_moe_offload.experts.layout import ExpertLayout, TensorSpec

_INT4_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class ExpertSpec:
    """One expert of a layer: ``w2 @ (act(gate) * up) + b2`` with ``[gate; up] = w13 @ x + b13``.

    `apply_router_weight_on_input`: the router's weight scales the input row, not the output.
    `dtype`: of the activations, the biases and INT4's scales; None: the weights' own where they
    are not quantised, bf16 where they are.
    `group_size`: columns that share a scale, for INT4 and INT4_ZEROS (32, 64 or 128).
    `swiglu_limit`: clamps the gate from above and up on both sides, for a gated activation; None:
    no limit, or 7 for SWIGLUOAI.
    `swiglu_alpha`, `swiglu_beta`: see `Activation`; None: 1 and 0, or 1.702 and 1 for both
    SwiGLU-OAI.
    """

    hidden: int
    intermediate: int
    activation: Activation
    format: Format
    bias: bool = False
    apply_router_weight_on_input: bool = False
    dtype: torch.dtype | None = None
    group_size: int | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.intermediate < 1:
            raise ValueError(
                f"an expert needs positive sizes, got hidden={self.hidden}, "
                f"intermediate={self.intermediate}"
            )
        if not self.format.quantised and self.dtype not in (None, self.format.dtype):
            raise ValueError(
                f"activations of {self.dtype} do not go with unquantised weights of "
                f"{self.format.dtype}: leave dtype out, or convert the weights"
            )
        takes_group = self.format in (Format.INT4, Format.INT4_ZEROS)
        if takes_group and self.group_size not in _INT4_GROUPS:
            raise ValueError(
                f"{self.format.value} needs a group_size of 32, 64 or 128, got {self.group_size}"
            )
        if not takes_group and self.group_size is not None:
            raise ValueError(
                f"group_size={self.group_size} does not go with {self.format.value}: leave it out"
            )
        group = self.group_size or self.format.fixed_group or 1
        if self.hidden % group or self.intermediate % group:
            raise ValueError(
                f"{self.format.value} scales {group} columns together, and hidden={self.hidden}, "
                f"intermediate={self.intermediate} are not both multiples of that"
            )
        if self.format is Format.INT4_ZEROS and self.hidden % 2:
            raise ValueError(f"zero points are stored two rows a byte: hidden={self.hidden} is odd")
        swiglu = (self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta)
        if not self.activation.gated and any(value is not None for value in swiglu):
            raise ValueError(
                f"swiglu_limit, swiglu_alpha and swiglu_beta do not go with {self.activation.value}"
            )
        if self.swiglu_limit is not None and not self.swiglu_limit >= 0:
            raise ValueError(f"swiglu_limit={self.swiglu_limit} clamps to nothing: give 0 or more")

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of the input rows, the biases and INT4's scales."""
        if self.dtype is not None:
            return self.dtype
        return torch.bfloat16 if self.format.quantised else self.format.dtype

    @property
    def layout(self) -> ExpertLayout:
        """Its tensors: w13_weight [2I, H] (not gated: [I, H]), w2_weight [H, I], and as needed.

        With `bias` w13_bias and w2_bias, in a quantised format w13_scale and w2_scale; INT4_ZEROS
        has w13_zeros and w2_zeros, NVFP4 w13_global_scale and w2_global_scale.
        """
        gate_rows, parts = self.intermediate, self.activation.parts
        tensors = [
            *self._matrix("w13", gate_rows, parts, self.hidden),
            *self._matrix("w2", self.hidden, 1, self.intermediate),
        ]
        if self.bias:
            tensors += [
                TensorSpec("w13_bias", (parts * gate_rows,), self.activation_dtype),
                TensorSpec("w2_bias", (self.hidden,), self.activation_dtype),
            ]
        return ExpertLayout(tuple(tensors))

    def _matrix(self, name: str, part_rows: int, parts: int, columns: int) -> list[TensorSpec]:
        """A weight matrix of `parts` times `part_rows` rows, and what scales it."""
        rows = parts * part_rows
        elements = columns // self.format.columns_per_element
        weight = TensorSpec(f"{name}_weight", (rows, elements), self.format.dtype)
        scale = f"{name}_scale"
        match self.format:
            case Format.FP8_BLOCK:
                blocks = (
                    parts * -(-part_rows // FP8_BLOCK_SIZE),
                    -(-columns // FP8_BLOCK_SIZE),
                )
                return [weight, TensorSpec(scale, blocks, torch.float32)]
            case Format.FP8_CHANNEL | Format.INT8_CHANNEL:
                return [weight, TensorSpec(scale, (rows, 1), torch.float32)]
            case Format.FP8_TENSOR:
                return [weight, TensorSpec(scale, (), torch.float32)]
            case Format.INT4 | Format.INT4_ZEROS:
                groups = columns // (self.group_size or 1)
                tensors = [weight, TensorSpec(scale, (rows, groups), self.activation_dtype)]
                if self.format is Format.INT4_ZEROS:
                    tensors.append(TensorSpec(f"{name}_zeros", (rows // 2, groups), torch.uint8))
                return tensors
            case Format.MXFP4:
                return [weight, TensorSpec(scale, (rows, columns // 32), torch.uint8)]
            case Format.NVFP4:
                return [
                    weight,
                    TensorSpec(scale, (rows, columns // 16), torch.float8_e4m3fn),
                    TensorSpec(f"{name}_global_scale", (), torch.float32),
                ]
            case _:
                return [weight]
