"""The `cuda` device: slots in GPU memory, fetched on a copy stream of their own.

Two events order the streams. `released`: the computing stream has read the slots, the copy stream
may overwrite them. `fetched`: the copies are done, the computing stream may read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from vllm_moe_offload.amounts import amount
from vllm_moe_offload.device.base import Device, SlotCache
from vllm_moe_offload.errors import MemoryShortError
from vllm_moe_offload.routing import Wave

# cudaHostRegisterPortable | cudaHostRegisterMapped: every context may use it, kernels may read it.
_REGISTER_FLAGS = 1 | 2


class CudaSlotCache(SlotCache):
    """Slots of one layer in GPU memory. `host` must be registered with CUDA."""

    def __init__(
        self,
        host: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        copy_stream: torch.cuda.Stream,
    ) -> None:
        self.tensors = tensors
        self._host = host
        self._copy_stream = copy_stream
        self._fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._released = torch.cuda.Event()  # type: ignore[no-untyped-call]
        some = next(iter(tensors.values()))
        num_experts = next(iter(host.values())).shape[0]
        self.expert_map = torch.full((num_experts + 1,), -1, dtype=torch.int32, device=some.device)
        self._released.record()

    @override
    def fetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._released)
            for name, source in self._host.items():
                slots = self.tensors[name]
                for expert, slot in pairs:
                    slots[slot].copy_(source[expert], non_blocking=True)
            self._fetched.record(self._copy_stream)
        torch.cuda.current_stream().wait_event(self._fetched)

    @override
    def publish(self, wave: Wave) -> None:
        staged = torch.full(self.expert_map.shape, -1, dtype=torch.int32).pin_memory()
        staged[list(wave.experts)] = torch.tensor(wave.slots, dtype=torch.int32)
        self.expert_map.copy_(staged, non_blocking=True)

    @override
    def release(self) -> None:
        self._released.record()


class CudaDevice(Device):
    """One GPU: the current device of the process."""

    name = "cuda"

    def __init__(self, memory_fraction: float, free_at_start: int) -> None:
        """Take at most `memory_fraction` of the GPU's memory.

        `free_at_start`: bytes that were free when this process came, which others may share the
        GPU with.
        """
        self._copy_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory_fraction = memory_fraction
        self._free_at_start = free_at_start

    @override
    def slot_cache(
        self, host: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> CudaSlotCache:
        return CudaSlotCache(host, tensors, self._copy_stream)

    @override
    def free_memory(self, host_bytes: int) -> int:
        free, total = torch.cuda.mem_get_info()
        usable = int(total * self._memory_fraction) - (self._free_at_start - free)
        return max(min(usable, free), 0)

    @override
    def register(self, address: int, nbytes: int) -> None:
        register(address, nbytes)

    @override
    def unregister(self, address: int) -> None:
        unregister(address)


def register(address: int, nbytes: int) -> None:
    """As `Device.register`."""
    code = _cudart().cudaHostRegister(address, nbytes, _REGISTER_FLAGS)
    if int(code):
        raise MemoryShortError(
            f"CUDA could not register {amount(nbytes)} of host memory (error "
            f"{int(code)}): raise the limit of locked memory, or free host memory"
        )


def unregister(address: int) -> None:
    """As `Device.unregister`."""
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
