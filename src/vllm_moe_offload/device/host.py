"""The `host` device: slots are ordinary memory and a fetch is a memory copy.

Used in vLLM's CPU build. Not a mock: tables, policies, waves and lanes run through it unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from vllm_moe_offload.device.base import Device, SlotCache
from vllm_moe_offload.host import available_memory
from vllm_moe_offload.routing import Wave


class HostSlotCache(SlotCache):
    """Slots of one layer in ordinary memory; every call is done when it returns."""

    def __init__(
        self, host: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self.tensors = tensors
        self._host = host
        num_experts = next(iter(host.values())).shape[0]
        self.expert_map = torch.full((num_experts + 1,), -1, dtype=torch.int32)

    @override
    def fetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        for name, source in self._host.items():
            slots = self.tensors[name]
            for expert, slot in pairs:
                slots[slot].copy_(source[expert])

    @override
    def publish(self, wave: Wave) -> None:
        self.expert_map.fill_(-1)
        self.expert_map[list(wave.experts)] = torch.tensor(wave.slots, dtype=torch.int32)

    @override
    def release(self) -> None:
        """Nothing to do: the lane has finished reading when it returns."""


class HostDevice(Device):
    """The CPU as the device."""

    name = "host"

    @override
    def slot_cache(
        self, host: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> HostSlotCache:
        return HostSlotCache(host, tensors)

    @override
    def free_memory(self, host_bytes: int) -> int:
        # The other half is for the experts in host memory, the KV cache and activations; experts
        # that do not fit in it leave half of the rest.
        available = available_memory()
        half = available // 2
        return half if host_bytes <= half else max(available - host_bytes, 0) // 2

    @override
    def register(self, address: int, nbytes: int) -> None:
        """Nothing to do: the CPU reads all of its memory."""

    @override
    def unregister(self, address: int) -> None:
        """Nothing to do."""
