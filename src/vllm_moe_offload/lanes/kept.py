"""Experts of a streamed step that stay in slots: copied from a buffer while they are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

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

    Experts are copied from one of two buffers, name -> ``[B, ...]`` each, to slots. `counter`:
    int64 ``[1]``, how many have been.
    """

    counter: torch.Tensor

    @abstractmethod
    def decide(
        self, topk_ids: torch.Tensor, requests: torch.Tensor, at_hand: torch.Tensor | None
    ) -> None:
        """Decide which experts of a step are kept, on the current stream; the tables say so then.

        topk_ids: int32 [T, K] in 0..E, E for rows of padding; requests: int32 [R + 1], where the
        rows of each request begin and the last one's end; at_hand: int32 [E], -1 for used experts
        that come into no buffer, or None where all do.
        """

    @abstractmethod
    def take(self, buffer: int, rows: torch.Tensor | None) -> None:
        """Copy those of them that are in this buffer to their slots, on the current stream.

        buffer: 0 or 1; rows: int32 [E + 1], expert -> row of the buffer, or -1; None: every expert
        is in the row of its number.
        """


class KeptOnDevice(Kept):
    """Decided on the device, from the state of `step`."""

    def __init__(self, step: DeviceStep, buffers: Sequence[Tensors], slots: Tensors) -> None:
        self._decide = DeviceKeep(step)
        self.counter = self._decide.counter
        self._copies = [ExpertFetch(buffer, slots, num_programs=_PROGRAMS) for buffer in buffers]
        if self.counter.is_cuda:
            self._compile(step.top_k)

    def _compile(self, top_k: int) -> None:
        """Launch each kernel in each form for a step of no request, which changes nothing.

        Compiling them takes a second, which a request would otherwise wait.
        """
        kept = self._decide.kept
        ids = torch.zeros(1, top_k, dtype=torch.int32, device=kept.device)
        requests = torch.zeros(2, dtype=torch.int32, device=kept.device)
        for experts in (None, torch.zeros(len(kept), dtype=torch.int32, device=kept.device)):
            self.decide(ids, requests, experts)
            for buffer in range(len(self._copies)):
                self.take(buffer, experts)

    @override
    def decide(
        self, topk_ids: torch.Tensor, requests: torch.Tensor, at_hand: torch.Tensor | None
    ) -> None:
        self._decide.launch(topk_ids, requests, at_hand)

    @override
    def take(self, buffer: int, rows: torch.Tensor | None) -> None:
        self._copies[buffer].launch(self._decide.kept, self._decide.kept_count, rows)


class KeptByHost(Kept):
    """Decided by the host, from the state of `residency`; waits for the device."""

    def __init__(self, residency: Residency, buffers: Sequence[Tensors], slots: Tensors) -> None:
        self._residency = residency
        self._buffers = buffers
        self._slots = slots
        self._kept: Sequence[tuple[int, int]] = ()
        self.counter = torch.zeros(1, dtype=torch.int64)

    @override
    def decide(
        self, topk_ids: torch.Tensor, requests: torch.Tensor, at_hand: torch.Tensor | None
    ) -> None:
        table, policy = self._residency.table, self._residency.policy
        here = np.ones(table.num_experts, np.bool_)
        if at_hand is not None:
            here = at_hand.cpu().numpy() >= 0
        last = LastUses.of(topk_ids.cpu().numpy(), requests.cpu().numpy(), table.num_experts)
        self._kept = plan_kept(table, policy, last, here)
        self.counter[0] += len(self._kept)

    @override
    def take(self, buffer: int, rows: torch.Tensor | None) -> None:
        row_of = range(self._residency.table.num_experts) if rows is None else rows.tolist()
        copy(
            [
                (slots[slot], self._buffers[buffer][name][row_of[expert]])
                for name, slots in self._slots.items()
                for expert, slot in self._kept
                if row_of[expert] >= 0
            ]
        )
