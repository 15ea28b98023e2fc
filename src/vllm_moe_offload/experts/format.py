"""How an expert's numbers are stored."""

from __future__ import annotations

import enum

import torch


class Format(enum.Enum):
    """Number format of the expert weights, rows contiguous in the dimension that is summed over.

    Unquantised, the weights' dtype is the activations' dtype. The others are the layouts that
    vLLM's Triton kernels read on the GPU, so that one host copy serves both sides:

    =============  ========================================================================
    FP8_BLOCK      e4m3, a float32 scale for each 128x128 block (vLLM ``weight_scale_inv``,
                   compressed-tensors block ``weight_scale``)
    FP8_CHANNEL    e4m3, a float32 scale for each row
    FP8_TENSOR     e4m3, a float32 scale for each expert and matrix (vLLM's after loading)
    INT8_CHANNEL   int8, a float32 scale for each row
    INT4           4 bits, two columns a byte, the even column low, value q - 8, a scale in
                   the activations' dtype for each group of columns: symmetric GPTQ and
                   compressed-tensors as vLLM's ``moe_wna16`` stores them
    INT4_ZEROS     the same with value q - zero, zero points 4 bits, two rows a byte: AWQ and
                   asymmetric GPTQ as ``moe_wna16`` stores them (GPTQ's zeros with its +1)
    MXFP4          e2m1, two columns a byte, the even column low, an e8m0 scale for 32 columns
    NVFP4          e2m1 likewise, an e4m3 scale for 16 columns, a float32 scale for each
                   expert and matrix (that which multiplies)
    =============  ========================================================================

    Not these layouts, and so without a CPU lane on the same copy: weights repacked for Marlin,
    swizzled scales of FlashInfer, CUTLASS and Triton's ``matmul_ogs``, DeepGEMM's packed scales.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_BLOCK = "fp8_block"
    FP8_CHANNEL = "fp8_channel"
    FP8_TENSOR = "fp8_tensor"
    INT8_CHANNEL = "int8_channel"
    INT4 = "int4"
    INT4_ZEROS = "int4_zeros"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def quantised(self) -> bool:
        """Whether scales go with the weights, whose dtype is then not the activations'."""
        return self not in _PLAIN

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the weights."""
        return _DTYPES[self]

    @property
    def columns_per_element(self) -> int:
        """How many columns of a row one element of the weight tensor holds."""
        return 2 if self in _GROUPS or self in (Format.INT4, Format.INT4_ZEROS) else 1

    @property
    def fixed_group(self) -> int | None:
        """Columns that share a scale, where the format itself says how many."""
        return _GROUPS.get(self)

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """The unquantised format with this dtype; raises ValueError for any other dtype."""
        for member in _PLAIN:
            if _DTYPES[member] == dtype:
                return member
        known = ", ".join(str(_DTYPES[member]) for member in _PLAIN)
        raise ValueError(f"expert weights of {dtype} are not supported (supported: {known})")


FP8_BLOCK_SIZE = 128

_PLAIN = (Format.FP32, Format.FP16, Format.BF16)
_GROUPS = {Format.MXFP4: 32, Format.NVFP4: 16}
_DTYPES = {
    Format.FP32: torch.float32,
    Format.FP16: torch.float16,
    Format.BF16: torch.bfloat16,
    Format.FP8_BLOCK: torch.float8_e4m3fn,
    Format.FP8_CHANNEL: torch.float8_e4m3fn,
    Format.FP8_TENSOR: torch.float8_e4m3fn,
    Format.INT8_CHANNEL: torch.int8,
    Format.INT4: torch.uint8,
    Format.INT4_ZEROS: torch.uint8,
    Format.MXFP4: torch.uint8,
    Format.NVFP4: torch.uint8,
}
