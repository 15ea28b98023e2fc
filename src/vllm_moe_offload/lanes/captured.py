"""The decode step of one layer as launches alone: nothing is read back, so a graph can hold it."""

from __future__ import annotations

import torch

from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.request import CpuRequest
from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.lanes.base import Lane


class CapturedLayer:
    """Three lanes of one step: slots, fetches into slots, and the CPU by its doorbell.

    Args:
        step: Decides; its slots are those that `fetch` fills and `resident` reads.
        fetch: Copies what the step lists.
        resident: Computes from the slots.
        cpu: Asks the CPU lane for its experts, from `CpuLane.add`; None where the step's limits
            leave none to it.
        side: What runs beside the current stream.

    A graph that captured a step needs this object to live.
    """

    def __init__(
        self,
        step: DeviceStep,
        fetch: ExpertFetch,
        resident: Lane,
        cpu: CpuRequest | None,
        side: SideStream,
    ) -> None:
        self.step = step
        self._fetch = fetch
        self._resident = resident
        self._cpu = cpu
        self._side = side

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_waves: int,
    ) -> torch.Tensor:
        """The routed experts' output [T, H], of x's dtype.

        x: [T, H]; topk_weights: float32 [T, K]; topk_ids: int32 [T, K] in 0..E, E for rows of
        padding; all contiguous. num_waves: 1 to the step's own number; with the hits apart 2 is
        the least.
        """
        step = self.step
        step.launch(topk_ids, topk_weights, num_waves)
        if self._cpu is not None:
            self._cpu.submit(x, topk_ids, topk_weights, step.cpu_map)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        first = int(step.hits_apart)
        self._launch_fetch(first)
        if step.hits_apart:
            # Meanwhile: the hits read slots that no expert of this step is fetched into.
            self._compute(0, x, topk_weights, topk_ids, out)
        for wave in range(first, num_waves):
            if wave > first:
                self._launch_fetch(wave)
            self._side.join()
            self._compute(wave, x, topk_weights, topk_ids, out)
        if self._cpu is None:
            return out.to(x.dtype)
        summed = torch.empty_like(x)
        self._cpu.wait()
        self._cpu.join(out, step.cpu_map, summed)
        return summed

    def _launch_fetch(self, wave: int) -> None:
        with self._side.fork():
            self._fetch.launch(self.step.fetches[wave], self.step.fetch_counts[wave])

    def _compute(
        self,
        wave: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        expert_map = self.step.expert_maps[wave]
        self._resident.compute(x, topk_weights, topk_ids, expert_map, out, wave > 0)
