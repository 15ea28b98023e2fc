"""One offloaded layer: decide the step, move the bytes, sum the lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from vllm_moe_offload.device import Device, SlotCache
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.lanes.base import Lane
from vllm_moe_offload.lanes.counters import Counters
from vllm_moe_offload.routing import Residency


class OffloadedLayer:
    """The experts of one layer in host memory, some of them in slots of a device.

    `host`: name -> ``[E, ...]``, every expert. `make_resident` gives the lane over a set of slots;
    `cpu` is the lane over host memory, used when there are no slots (`num_slots` 0).
    """

    def __init__(
        self,
        host: Mapping[str, torch.Tensor],
        device: Device,
        make_resident: Callable[[SlotCache], Lane],
        cpu: Lane,
        *,
        num_slots: int,
        policy: str,
    ) -> None:
        self.layout = ExpertLayout.of(host)
        self.num_experts = next(iter(host.values())).shape[0]
        self.counters = Counters()
        self._host = host
        self._device = device
        self._make_resident = make_resident
        self._cpu = cpu
        self._policy = policy
        self._every_expert = torch.arange(self.num_experts + 1, dtype=torch.int32)
        self._every_expert[-1] = -1
        self._residency: Residency | None = None
        self._cache: SlotCache | None = None
        self._resident: Lane | None = None
        if num_slots:
            self.resize(num_slots)

    @property
    def num_slots(self) -> int:
        """Slots of the device this layer has now; 0 when the CPU computes every expert."""
        return self._residency.table.num_slots if self._residency else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory the slots take."""
        return self.num_slots * self.layout.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory the experts take."""
        return self.num_experts * self.layout.nbytes

    def resize(self, num_slots: int) -> None:
        """Take `num_slots` empty slots instead of those there are; no step may be under way.

        Raises ValueError for less than one slot or more than there are experts.
        """
        if not 1 <= num_slots <= self.num_experts:
            raise ValueError(
                f"asked for {num_slots} slots in a layer of {self.num_experts} experts: "
                f"give 1 to {self.num_experts}"
            )
        if self._residency is None:
            self._residency = Residency(self.num_experts, num_slots, self._policy)
        else:
            self._residency.resize(num_slots)
        self._resident = self._cache = None  # freed before the new slots are allocated
        self._cache = self._device.slot_cache(self.layout, self._host, num_slots)
        self._resident = self._make_resident(self._cache)

    def invalidate(self) -> None:
        """The experts in host memory have changed: what is in slots is stale."""
        if self._residency is not None:
            self._residency.invalidate()

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts' output, of x's dtype.

        x: [T, H]; topk_weights: [T, K]; topk_ids: integers [T, K] in 0..E-1; padding: bool [T],
        rows that are no tokens: they use no expert and their output is zero.
        """
        x = x.contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        ids = topk_ids.to(torch.int32)
        if padding is not None:
            ids = ids.masked_fill(padding[:, None], self.num_experts)
        ids = ids.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)

        used = np.zeros(self.num_experts + 1, np.bool_)
        used[ids.numpy().ravel()] = True
        used = used[:-1]
        real = len(x) if padding is None else int(len(x) - padding.sum())
        if self._residency is None:
            self._on_cpu(x, weights, ids, out)
            done = Counters(steps=1, tokens=real, cpu_experts=int(used.sum()))
        else:
            done = self._in_waves(x, weights, ids, used, out)
            done.tokens = real
        self.counters += done
        return out.to(x.dtype)

    def _on_cpu(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._cpu.compute(x, weights, ids, self._every_expert, out, False)

    def _in_waves(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        used: np.ndarray,
        out: torch.Tensor,
    ) -> Counters:
        assert self._residency is not None
        assert self._cache is not None
        assert self._resident is not None
        plan = self._residency.step(used)
        if not plan.waves:
            out.zero_()
        for number, wave in enumerate(plan.waves):
            self._cache.fetch(wave.fetches)
            self._cache.publish(wave)
            self._resident.compute(x, weights, ids, self._cache.expert_map, out, number > 0)
            self._cache.release()
        return Counters(
            steps=1,
            hits=plan.hits,
            misses=plan.misses,
            waves=len(plan.waves),
            bytes_fetched=plan.misses * self.layout.nbytes,
        )
