"""The CPU expert engine: computes routed experts where their weights lie, in host memory."""

from vllm_moe_offload.engine.engine import ISA_VARIABLE, CpuExpertEngine
from vllm_moe_offload.engine.plan import ExpertPlan

__all__ = ["ISA_VARIABLE", "CpuExpertEngine", "ExpertPlan"]
