"""A step that the host plans: as many waves as it needs, every miss fetched."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device import SlotCache
from vllm_moe_offload.lanes.base import Lane
from vllm_moe_offload.lanes.counters import Counters
from vllm_moe_offload.routing import LastUses, Residency


class PlannedLayer:
    """Plans a step in plain Python and carries it out wave by wave.

    Args:
        residency: What is in the slots, and the policy.
        cache: The slots.
        resident: Computes from them.
        expert_bytes: Bytes of one expert.
    """

    def __init__(
        self, residency: Residency, cache: SlotCache, resident: Lane, expert_bytes: int
    ) -> None:
        self.residency = residency
        self._cache = cache
        self._resident = resident
        self._expert_bytes = expert_bytes

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        used: npt.NDArray[np.bool_],
        out: torch.Tensor,
        last: LastUses | None = None,
    ) -> Counters:
        """Write the routed experts' output to `out`, float32 [T, H]; returns what it took.

        x: [T, H]; topk_weights: float32 [T, K]; topk_ids: int32 [T, K] in 0..E, E for rows of
        padding; used: bool [E], the experts that `topk_ids` names; last: as for
        `Residency.step`.
        """
        plan = self.residency.step(used, last)
        if not plan.waves:
            out.zero_()
        for number, wave in enumerate(plan.waves):
            self._cache.fetch(wave.fetches)
            self._cache.publish(wave)
            self._resident.compute(
                x, topk_weights, topk_ids, self._cache.expert_map, out, number > 0
            )
            self._cache.release()
        return Counters(
            steps=1,
            hits=plan.hits,
            misses=plan.misses,
            waves=len(plan.waves),
            bytes_fetched=plan.misses * self._expert_bytes,
        )
