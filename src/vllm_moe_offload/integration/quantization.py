"""The name `pingpong_moe` for ``--quantization``, on checkpoints that are not quantised.

It quantises nothing: it is one way to ask for ``mode="stream"``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from vllm_moe_offload.config import PING_PONG_QUANTIZATION


class PingpongMoEConfig(QuantizationConfig):
    """Leaves every layer as vLLM makes it without quantisation."""

    @classmethod
    def get_name(cls) -> Any:
        """As vLLM knows it."""
        return PING_PONG_QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those of unquantised experts."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of the GPU: any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: it has no settings."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PingpongMoEConfig:
        """The one there is."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The unquantised one of linear layers; None for others, which then have their own."""
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def install() -> None:
    """Let vLLM know the name. May be called again."""
    register_quantization_config(PING_PONG_QUANTIZATION)(PingpongMoEConfig)
