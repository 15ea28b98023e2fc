"""The decode step of one layer as launches alone: nothing is read back, so a graph can hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.request import CpuRequest
from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.lanes.base import Lane
from vllm_moe_offload.lanes.counters import Counters
from vllm_moe_offload.routing import waves_for_all

# Rows of a step that is decided on the device; larger ones are planned by the host.
MAX_CAPTURED = 64


class CapturedLayer:
    """Three lanes of one step: slots, fetches into slots, and the CPU by its doorbell.

    Args:
        step: Decides; its slots are those that `fetch` fills and `resident` reads.
        fetch: Copies what the step lists.
        resident: Computes from the slots.
        cpu: Asks the CPU lane for its experts, from `CpuLane.add`; None where the step's limits
            leave none to it.
        side: What runs beside the current stream.
        waves: How many waves a step of so many rows has: 1 to the step's own number; with the hits
            apart 2 is the least. What they do not hold is the CPU's.

    A graph that captured a step needs this object to live.
    """

    def __init__(
        self,
        step: DeviceStep,
        fetch: ExpertFetch,
        resident: Lane,
        cpu: CpuRequest | None,
        side: SideStream,
        waves: Callable[[int], int],
    ) -> None:
        self.step = step
        self._fetch = fetch
        self._resident = resident
        self._cpu = cpu
        self._side = side
        self._waves = waves

    @classmethod
    def fetching_all(
        cls,
        host: Mapping[str, torch.Tensor],
        slots: Mapping[str, torch.Tensor],
        resident: Lane,
        side: SideStream,
        *,
        policy: str,
        top_k: int,
        hits_apart: bool = False,
    ) -> CapturedLayer:
        """One that fetches every miss, in as many waves as its rows may need.

        host: name -> ``[E, ...]``, which the device reads; slots: name -> ``[S, ...]``; top_k: K.
        """
        some = next(iter(slots.values()))
        num_experts, num_slots = next(iter(host.values())).shape[0], some.shape[0]

        def waves(rows: int) -> int:
            return hits_apart + waves_for_all(rows * top_k, num_experts, num_slots, policy)

        step = DeviceStep(
            num_experts,
            num_slots,
            policy,
            top_k=top_k,
            cache_topk=top_k,
            num_waves=waves(MAX_CAPTURED),
            hits_apart=hits_apart,
            device=some.device,
        )
        return cls(step, ExpertFetch(host, slots), resident, None, side, waves)

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The routed experts' output [T, H], of x's dtype.

        x: [T, H]; topk_weights: float32 [T, K]; topk_ids: int32 [T, K] in 0..E, E for rows of
        padding; all contiguous.
        """
        step = self.step
        num_waves = self._waves(len(x))
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

    def forward_all(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        counted: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, of any number of rows, where expert e is in slot e for every e.

        As without offload: the kernel gets no map, and rows of padding, which name experts here,
        go where they say. `counted`: `topk_ids` with E for them; it is counted meanwhile.
        """
        with self._side.fork():
            self.step.launch(counted, topk_weights, 1 + self.step.hits_apart)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        self._resident.compute(x, topk_weights, topk_ids, None, out, False)
        self._side.join()
        return out.to(x.dtype)

    def read_counters(self) -> Counters:
        """What all steps have done since the step's counters were reset; waits for the device."""
        counted = self.step.read_counters()
        bytes_fetched = counted.pop("fetched") * self._fetch.expert_bytes
        return Counters(**counted, bytes_fetched=bytes_fetched)

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
