"""One offloaded layer: decide the step, move the bytes, sum the lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device import Device, SlotCache
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.lanes.base import Lane
from vllm_moe_offload.lanes.counters import Counters
from vllm_moe_offload.routing import Residency

Tensors = Mapping[str, torch.Tensor]


class OffloadedLayer:
    """The experts of one layer in host memory, some of them in slots of a device.

    Args:
        host: name -> ``[E, ...]``, every expert.
        device: Where the slots are.
        allocate: Gives the tensors of that many slots, name -> ``[S, ...]``.
        resident: Gives the lane that computes from such tensors.
        cpu: The lane over host memory, which computes every expert when there are no slots.
        num_slots: 0 for no slots.
        policy: Which expert leaves a slot first, a name of `routing.POLICIES`.
    """

    def __init__(
        self,
        host: Tensors,
        device: Device,
        allocate: Callable[[int], Tensors],
        resident: Callable[[Tensors], Lane],
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
        self._allocate = allocate
        self._make_resident = resident
        self._cpu = cpu
        self._every_expert = torch.arange(self.num_experts + 1, dtype=torch.int32)
        self._every_expert[-1] = -1
        self._policy = policy
        self._residency: Residency | None = None
        self._cache: SlotCache | None = None
        self._resident: Lane | None = None
        self._is_filled = False
        if num_slots:
            self.resize(num_slots)

    @property
    def num_slots(self) -> int:
        """Slots of the device this layer has now; 0 when the CPU computes every expert."""
        return self._residency.table.num_slots if self._residency else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory the slots take."""
        return self.num_slots * self.layout.nbytes if self._cache is not None else 0

    @property
    def policy(self) -> str | None:
        """Name of the policy in force, None without slots."""
        return self._residency.policy.name if self._residency else None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory the experts take."""
        return self.num_experts * self.layout.nbytes

    def resize(self, num_slots: int) -> None:
        """Take `num_slots` empty slots instead of those there are; no step may be under way.

        Raises ValueError for less than one slot or more than there are experts.
        """
        self.check_resize(num_slots)
        if self._residency is None:
            self._residency = Residency(self.num_experts, num_slots, self._policy)
        # Freed before the new slots are allocated: if that fails none is left, and a step says so.
        self._resident = self._cache = None
        slots = self._allocate(num_slots)
        self._cache = self._device.slot_cache(self._host, slots)
        self._resident = self._make_resident(slots)
        self._residency.resize(num_slots)
        self._is_filled = False

    def check_resize(self, num_slots: int) -> None:
        """Raise what `resize` would raise for this number of slots, and change nothing."""
        if type(num_slots) is not int or not 1 <= num_slots <= self.num_experts:
            raise ValueError(
                f"asked for {num_slots!r} slots in a layer of {self.num_experts} experts: "
                f"give a whole number from 1 to {self.num_experts}"
            )

    def invalidate(self) -> None:
        """The experts in host memory have changed: what is in slots is stale."""
        if self._residency is not None:
            self._residency.invalidate()
            self._is_filled = False

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts' output, of x's dtype and on its device.

        x: [T, H]; topk_weights: [T, K]; topk_ids: integers [T, K] in 0..E-1; padding: bool [T],
        rows that are no tokens: they use no expert, and their output means nothing.
        """
        x = x.contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        ids = topk_ids.to(torch.int32)
        if padding is not None:
            ids = ids.masked_fill(padding[:, None], self.num_experts)
        ids = ids.contiguous()

        used = np.zeros(self.num_experts + 1, np.bool_)
        used[ids.cpu().numpy().ravel()] = True
        used = used[:-1]
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if self._residency is None:
            done = self._on_cpu(x, weights, ids, used, out)
        elif self.num_slots == self.num_experts:
            done = self._all_resident(x, weights, topk_ids.int().contiguous(), used, out)
        else:
            done = self._in_waves(x, weights, ids, used, out)
        done.tokens = len(x) if padding is None else len(x) - int(padding.sum())
        self.counters += done
        return out.to(x.dtype)

    def _on_cpu(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        used: npt.NDArray[np.bool_],
        out: torch.Tensor,
    ) -> Counters:
        here = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
        self._cpu.compute(x.cpu(), weights.cpu(), ids.cpu(), self._every_expert, here, False)
        if here is not out:
            out.copy_(here)
        return Counters(steps=1, cpu_experts=int(used.sum()))

    def _all_resident(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        used: npt.NDArray[np.bool_],
        out: torch.Tensor,
    ) -> Counters:
        """As without offload: no map, and rows of padding go where the router sent them.

        Every expert is in the slot of its own number, put there before the first step.
        """
        cache, resident = self._slots()
        if not self._is_filled:
            cache.fetch([(expert, expert) for expert in range(self.num_experts)])
            self._is_filled = True
        resident.compute(x, weights, ids, None, out, False)
        return Counters(steps=1, hits=int(used.sum()), waves=1)

    def _slots(self) -> tuple[SlotCache, Lane]:
        if self._cache is None or self._resident is None:
            raise RuntimeError("no slots: allocating them failed when this layer was resized")
        return self._cache, self._resident

    def _in_waves(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        used: npt.NDArray[np.bool_],
        out: torch.Tensor,
    ) -> Counters:
        assert self._residency is not None
        cache, resident = self._slots()
        plan = self._residency.step(used)
        if not plan.waves:
            out.zero_()
        for number, wave in enumerate(plan.waves):
            cache.fetch(wave.fetches)
            cache.publish(wave)
            resident.compute(x, weights, ids, cache.expert_map, out, number > 0)
            cache.release()
        return Counters(
            steps=1,
            hits=plan.hits,
            misses=plan.misses,
            waves=len(plan.waves),
            bytes_fetched=plan.misses * self.layout.nbytes,
        )
