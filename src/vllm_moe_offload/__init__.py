"""Serve mixture-of-experts models bigger than GPU memory with stock vLLM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_moe_offload.config import OffloadConfig, moe_offload_args
from vllm_moe_offload.errors import (
    ConfigError,
    CpuLaneError,
    InactiveError,
    MemoryShortError,
    OffloadError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from vllm_moe_offload.device.mapped import copy_all_experts_to_gpu, create_cpu_mapped_tensor
    from vllm_moe_offload.integration.models import OffloadFusedMoE, Qwen3MoeForCausalLMOffload
    from vllm_moe_offload.integration.pingpong import PingpongUnquantizedFusedMoEMethod

__all__ = [
    "ConfigError",
    "CpuLaneError",
    "InactiveError",
    "MemoryShortError",
    "OffloadConfig",
    "OffloadError",
    "OffloadFusedMoE",
    "PingpongUnquantizedFusedMoEMethod",
    "Qwen3MoeForCausalLMOffload",
    "UnsupportedError",
    "copy_all_experts_to_gpu",
    "create_cpu_mapped_tensor",
    "moe_offload_args",
]

# Imported when they are asked for: settings need neither torch nor vLLM.
_LATE = {
    "OffloadFusedMoE": "integration.models",
    "PingpongUnquantizedFusedMoEMethod": "integration.pingpong",
    "Qwen3MoeForCausalLMOffload": "integration.models",
    "copy_all_experts_to_gpu": "device.mapped",
    "create_cpu_mapped_tensor": "device.mapped",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
