"""The decode step of one layer as launches alone: nothing is read back, so a graph can hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.request import CpuRequest
from vllm_moe_offload.device.step import COUNTERS, DeviceStep
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.lanes.base import Lane
from vllm_moe_offload.lanes.counters import Counters
from vllm_moe_offload.routing import waves_needed

# Rows of a step that is decided on the device; larger ones are planned by the host.
MAX_CAPTURED = 64


class CapturedLayer:
    """Three lanes of one step: slots, fetches into slots, and the CPU by its doorbell.

    Some of what the CPU computes is *promoted*: fetched meanwhile, and a hit from the next step on.
    What is promoted has the bus until the step ends, also while later layers compute; their own
    fetches come behind it.

    Args:
        host: name -> ``[E, ...]``, every expert, in memory that the device reads.
        slots: name -> ``[S, ...]``, those that `resident` reads.
        resident: Computes from the slots.
        side: What runs beside the current stream.
        cpu: Asks the CPU lane for the misses that are not fetched, from `CpuLane.add`; None where
            every miss is fetched.
        policy: Which expert leaves a slot first, a name of `routing.POLICIES`.
        top_k: K.
        cache_topk: With a CPU lane, a miss is fetched only if it is among so many heaviest experts
            of some token; None for K.
        ends_step: Whether the step, or what captures it, may end behind the layer that is computed
            now: what was promoted is waited for there. The layers of a step share `side`.

    `step` decides, `fetch` copies what it lists.

    A graph that captured a step needs this object to live. It holds the number of waves that the
    split of the lanes asked for when it was captured; what they do not hold is the CPU's.
    """

    def __init__(
        self,
        host: Mapping[str, torch.Tensor],
        slots: Mapping[str, torch.Tensor],
        resident: Lane,
        side: SideStream,
        cpu: CpuRequest | None = None,
        *,
        policy: str,
        top_k: int,
        cache_topk: int | None = None,
        ends_step: Callable[[], bool] = lambda: True,
    ) -> None:
        some = next(iter(slots.values()))
        num_experts, num_slots = next(iter(host.values())).shape[0], some.shape[0]
        self.fetch = ExpertFetch(host, slots)
        self._resident = resident
        self._side = side
        self._cpu = cpu
        self._ends_step = ends_step
        self._limits: npt.NDArray[np.integer[Any]] = np.arange(num_experts + 1)
        self._waves: dict[int, int] = {}
        most = waves_needed(self._limits, MAX_CAPTURED * top_k, num_slots, policy)
        self.step = DeviceStep(
            num_experts,
            num_slots,
            policy,
            top_k=top_k,
            cache_topk=top_k if cache_topk is None or cpu is None else cache_topk,
            num_waves=most,
            device=some.device,
        )

    def split(
        self,
        limits: npt.NDArray[np.integer[Any]],
        promotions: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """How many misses are fetched, by how many there are: [E + 1]; the rest is the CPU's.

        promotions: [E + 1], how many of the rest are promoted; None for none. Without a CPU lane
        all are fetched, and nothing else can be asked for.
        """
        if self._cpu is None:
            raise ValueError("without a CPU lane every miss is fetched: there is nothing to split")
        self.step.set_limits(limits, promotions)
        self._limits = limits
        self._waves = {}

    def num_waves(self, rows: int) -> int:
        """How many waves a step of so many rows has."""
        if rows not in self._waves:
            step = self.step
            self._waves[rows] = waves_needed(
                self._limits, rows * step.top_k, step.num_slots, step.policy
            )
        return self._waves[rows]

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The routed experts' output [T, H], of x's dtype.

        x: [T, H]; topk_weights: float32 [T, K]; topk_ids: int32 [T, K] in 0..E, E for rows of
        padding; all contiguous.
        """
        step = self.step
        num_waves = self.num_waves(len(x))
        step.launch(topk_ids, topk_weights, num_waves)
        self._launch_fetch(0, num_waves)
        if self._cpu is not None:
            self._cpu.submit(x, topk_ids, topk_weights, step.cpu_map)
        if num_waves == 1:
            self._side.join()
            # Not summed with another wave, and so not copied.
            out = self._resident.output(x, topk_weights, topk_ids, step.expert_maps[0])
        else:
            out = self._in_waves(num_waves, x, topk_weights, topk_ids)
        if self._cpu is None:
            return out.to(x.dtype)
        summed = torch.empty_like(x)
        self._cpu.wait()
        self._cpu.join(out, step.cpu_map, summed)
        if self._ends_step():
            # Whatever comes next may read the slots.
            self._side.join_followed()
        return summed

    def _in_waves(
        self,
        num_waves: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The sum of the waves, float32; the first one is being fetched."""
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        maps = self.step.expert_maps
        for wave in range(num_waves):
            if wave:
                self._launch_fetch(wave, num_waves)
            self._side.join()
            self._resident.compute(x, topk_weights, topk_ids, maps[wave], out, wave > 0)
        return out

    def forward_all(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `forward`, of any number of rows, where expert e is in slot e for every e.

        As without offload: the kernel gets no map, and rows of padding, which name experts here,
        go where they say. padding: bool [T], for those; the others are counted meanwhile.
        """
        with self._side.fork():
            counted = with_padding(topk_ids, padding, self.step.num_experts)
            self.step.launch(counted, topk_weights, 1)
        out = self._resident.output(x, topk_weights, topk_ids, None)
        self._side.join()
        return out.to(x.dtype)

    def read_counters(self) -> Counters:
        """What all steps have done since the step's counters were reset; waits for the device."""
        return self.counted(self.step.counters.tolist())

    def counted(self, values: list[int]) -> Counters:
        """What these values of the step's counters say."""
        return _counters(values, self.fetch.expert_bytes)

    def _launch_fetch(self, wave: int, num_waves: int) -> None:
        step = self.step
        with self._side.fork():
            self.fetch.launch(step.fetches[wave], step.fetch_counts[wave])
        # Behind the last wave's, since a wave is waited for.
        if self._cpu is not None and wave == num_waves - 1:
            with self._side.follow():
                self.fetch.launch(step.promoted, step.promoted_count)


class AskingLayer:
    """A step without slots: every expert it uses is asked of the CPU lane.

    Args:
        num_experts: E.
        top_k: K.
        cpu: Asks, from `CpuLane.add`.
        device: Where the launches run.

    A graph that captured a step needs this object to live.
    """

    def __init__(self, num_experts: int, top_k: int, cpu: CpuRequest, device: torch.device) -> None:
        self._cpu = cpu
        # It tells the experts that are used, and counts. Its one slot is never filled.
        self.step = DeviceStep(
            num_experts, 1, "lru", top_k=top_k, cache_topk=top_k, num_waves=1, device=device
        )
        self.step.set_limits(np.zeros(num_experts + 1, np.int32))

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """As `CapturedLayer.forward`."""
        self.step.launch(topk_ids, topk_weights)
        self._cpu.submit(x, topk_ids, topk_weights, self.step.cpu_map)
        summed = torch.zeros_like(x)
        self._cpu.wait()
        self._cpu.join(summed, self.step.cpu_map, summed)
        return summed

    def read_counters(self) -> Counters:
        """As `CapturedLayer.read_counters`."""
        return self.counted(self.step.counters.tolist())

    def counted(self, values: list[int]) -> Counters:
        """As `CapturedLayer.counted`; without slots nothing is a miss."""
        counted = _counters(values, 0)
        counted.misses = 0
        return counted


def with_padding(
    topk_ids: torch.Tensor, padding: torch.Tensor | None, num_experts: int
) -> torch.Tensor:
    """Ids with the sentinel E in the rows that are padding."""
    return topk_ids if padding is None else topk_ids.masked_fill(padding[:, None], num_experts)


def _counters(values: list[int], expert_bytes: int) -> Counters:
    counted = dict(zip(COUNTERS, values, strict=True))
    copied = counted.pop("fetched") + counted["promoted"]
    return Counters(bytes_fetched=copied * expert_bytes, **counted)
