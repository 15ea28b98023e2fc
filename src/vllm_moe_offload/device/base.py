"""The seam between what is decided and how bytes move.

A `Device` makes one `SlotCache` for each layer. The order of calls in a step is always::

    for wave in plan.waves:
        cache.fetch(wave.fetches)      # enqueue copies; may run beside other work
        cache.publish(wave)            # the map of this wave, visible after the copies
        <the resident lane reads cache.tensors through cache.expert_map>
        cache.release()                # the lane's reads are enqueued: slots may be overwritten

On a device with streams `fetch` waits for the last `release` and `publish` makes the computing
stream wait for the copies; on the host all three are immediate. Nothing here returns a value that
depends on the step, so the same calls can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from vllm_moe_offload.routing import Wave


class SlotCache(ABC):
    """The slots of one layer.

    `tensors`: name -> ``[S, ...]``, the experts in slots, one tensor for each of the layout.
    `expert_map`: int32 ``[E + 1]``, expert -> slot or -1; entry E is the sentinel that padding
    rows are routed to and is always -1.
    """

    tensors: Mapping[str, torch.Tensor]
    expert_map: torch.Tensor

    @abstractmethod
    def fetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (expert, slot) pair from host memory into its slot."""

    @abstractmethod
    def publish(self, wave: Wave) -> None:
        """Make `expert_map` say where the experts of this wave are, and -1 for all others."""

    @abstractmethod
    def release(self) -> None:
        """Allow slots to be overwritten once the work enqueued so far has read them."""


class Device(ABC):
    """Where slots are and the resident lane runs."""

    name: str

    @abstractmethod
    def slot_cache(
        self, host: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> SlotCache:
        """Slots over `tensors` (name -> ``[S, ...]``) for experts of `host` (``[E, ...]``)."""

    @abstractmethod
    def free_memory(self, host_bytes: int) -> int:
        """Bytes that slots could take now, while so many of host memory are still to be taken."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Let the device read this range of host memory. Raises MemoryShortError."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Take back what `register` did for the range that starts here."""
