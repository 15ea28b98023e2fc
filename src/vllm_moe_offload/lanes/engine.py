"""A lane of the CPU expert engine: over slots on the host device, over host memory otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_moe_offload.engine import CpuExpertEngine, ExpertRun
from vllm_moe_offload.experts import ExpertSpec


class EngineLane:
    """Computes the experts of `tensors` (name -> ``[N, ...]``) on the CPU.

    A `lanes.base.LaneBeside`. `plan`: what it computes by.
    """

    def __init__(
        self,
        engine: CpuExpertEngine,
        spec: ExpertSpec,
        tensors: Mapping[str, torch.Tensor],
        top_k: int,
        max_tokens: int,
    ) -> None:
        self.plan = engine.plan(spec, tensors, max_tokens=max_tokens, top_k=top_k)

    def compute(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        out: torch.Tensor,
        accumulate: bool,
    ) -> None:
        """As `lanes.base.Lane.compute`."""
        self.plan.run(x, topk_ids, topk_weights, out, expert_map=expert_map, accumulate=accumulate)

    def begin(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor,
        out: torch.Tensor,
        done: torch.Tensor,
    ) -> ExpertRun:
        """As `lanes.base.LaneBeside.begin`."""
        return self.plan.start(x, topk_ids, topk_weights, out, expert_map=expert_map, done=done)

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `lanes.base.Lane.output`, in float32."""
        out = torch.empty(x.shape, dtype=torch.float32)
        self.compute(x, topk_weights, topk_ids, expert_map, out, False)
        return out
