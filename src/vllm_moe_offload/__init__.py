"""Serve mixture-of-experts models bigger than GPU memory with stock vLLM."""

from vllm_moe_offload.config import OffloadConfig, moe_offload_args
from vllm_moe_offload.errors import (
    ConfigError,
    CpuLaneError,
    InactiveError,
    MemoryShortError,
    OffloadError,
    UnsupportedError,
)

__all__ = [
    "ConfigError",
    "CpuLaneError",
    "InactiveError",
    "MemoryShortError",
    "OffloadConfig",
    "OffloadError",
    "UnsupportedError",
    "moe_offload_args",
]
