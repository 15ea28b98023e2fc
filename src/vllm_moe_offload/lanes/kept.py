"""Experts of a streamed step that stay in slots: copied from its buffer while they are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from typing_extensions import override

from vllm_moe_offload.device.copies import copy
from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.keep import DeviceKeep
from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.routing import LastUses, Residency, plan_kept

Tensors = Mapping[str, torch.Tensor]

# Nothing runs beside this copy, and it is within the device: two for each multiprocessor or so.
_PROGRAMS = 256


class Kept(ABC):
    """What is kept of the streamed steps of one layer.

    `counter`: int64 ``[1]``, how many experts have been copied.
    """

    counter: torch.Tensor

    @abstractmethod
    def keep(
        self, topk_ids: torch.Tensor, requests: torch.Tensor, in_buffer: torch.Tensor | None
    ) -> None:
        """Copy experts from the buffer to slots, on the current stream.

        topk_ids: int32 [T, K] in 0..E, E for rows of padding; requests: int32 [R + 1], where the
        rows of each request begin and the last one's end; in_buffer: int32 [E], -1 for used
        experts that are not in the buffer, or None where all are.
        """


class KeptOnDevice(Kept):
    """Decided on the device, from the state of `step`."""

    def __init__(self, step: DeviceStep, buffer: Tensors, slots: Tensors) -> None:
        self._decide = DeviceKeep(step)
        self.counter = self._decide.counter
        self._copy = ExpertFetch(buffer, slots, num_programs=_PROGRAMS)

    @override
    def keep(
        self, topk_ids: torch.Tensor, requests: torch.Tensor, in_buffer: torch.Tensor | None
    ) -> None:
        self._decide.launch(topk_ids, requests, in_buffer)
        self._copy.launch(self._decide.kept, self._decide.kept_count)


class KeptByHost(Kept):
    """Decided by the host, from the state of `residency`; waits for the device."""

    def __init__(self, residency: Residency, buffer: Tensors, slots: Tensors) -> None:
        self._residency = residency
        self._buffer = buffer
        self._slots = slots
        self.counter = torch.zeros(1, dtype=torch.int64)

    @override
    def keep(
        self, topk_ids: torch.Tensor, requests: torch.Tensor, in_buffer: torch.Tensor | None
    ) -> None:
        table, policy = self._residency.table, self._residency.policy
        at_hand = np.ones(table.num_experts, np.bool_)
        if in_buffer is not None:
            at_hand = in_buffer.cpu().numpy() >= 0
        last = LastUses.of(topk_ids.cpu().numpy(), requests.cpu().numpy(), table.num_experts)
        pairs = plan_kept(table, policy, last, at_hand)
        copy(
            [
                (slots[slot], self._buffer[name][expert])
                for name, slots in self._slots.items()
                for expert, slot in pairs
            ]
        )
        self.counter[0] += len(pairs)
