"""Ways to ask for offload in a model's own code: an architecture, and a factory of its layers."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_moe_offload.config import OFFLOAD_ARCHITECTURE
from vllm_moe_offload.integration.compat import fused_moe_factory
from vllm_moe_offload.integration.worker import ask_for_offload


class Qwen3MoeForCausalLMOffload(Qwen3MoeForCausalLM):
    """Qwen3-MoE under a name that asks for offload with ``mode="stream"``."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        ask_for_offload(f"the architecture {OFFLOAD_ARCHITECTURE}")
        super().__init__(vllm_config=vllm_config, prefix=prefix)


def OffloadFusedMoE(*args: Any, **kwargs: Any) -> Any:
    """VLLM's `FusedMoE` (`FusedMoEFactory` from 0.27 on), whose experts are offloaded.

    For a model's own code, in place of vLLM's, with the same arguments; returns the same runner.
    Without settings of moe_offload it turns offload on, with ``mode="stream"``, for every layer of
    experts that is made from then on; with settings their mode counts. Raises ConfigError where
    they have none, InactiveError outside of a worker that loads a model, and what wrong settings
    raise.
    """
    ask_for_offload("OffloadFusedMoE")
    return fused_moe_factory()(*args, **kwargs)
