"""Faults in a step that the device decides; the first may be captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.step import DeviceStep

Plant = Callable[[pytest.MonkeyPatch], None]


def drop_an_expert(patch: pytest.MonkeyPatch) -> None:
    launch = DeviceStep.launch

    def faulty(self: DeviceStep, *arguments: object) -> None:
        launch(self, *arguments)
        self.expert_maps[:, 3].fill_(-1)
        self.cpu_map[3].fill_(-1)

    patch.setattr(DeviceStep, "launch", faulty)


def swap_two_experts(patch: pytest.MonkeyPatch) -> None:
    """On their way into slots, and on their way to the CPU."""
    launch = DeviceStep.launch

    def faulty(self: DeviceStep, *arguments: object) -> None:
        launch(self, *arguments)
        fetched = self.fetches[:, :, 0]
        one, other = fetched == 1, fetched == 3
        fetched.masked_fill_(one, 3).masked_fill_(other, 1)
        self.cpu_map[[1, 3]] = self.cpu_map[[3, 1]]

    patch.setattr(DeviceStep, "launch", faulty)


def leave_a_slot_stale(patch: pytest.MonkeyPatch) -> None:
    """Slot 1 keeps the first expert that came into it: here, always expert 0."""
    launch = ExpertFetch.launch

    def faulty(self: ExpertFetch, pairs: torch.Tensor, count: torch.Tensor) -> None:
        stale = pairs.clone()
        stale[:, 0].masked_fill_(stale[:, 1] == 1, 0)
        launch(self, stale, count)

    patch.setattr(ExpertFetch, "launch", faulty)


def scale_one_tensor(patch: pytest.MonkeyPatch) -> None:
    """The second matrix of expert 3 becomes four times what it is, in bf16."""
    launch = ExpertFetch.launch

    def faulty(self: ExpertFetch, pairs: torch.Tensor, count: torch.Tensor) -> None:
        launch(self, pairs, count)
        slots = self._slots[1].view(torch.bfloat16)
        wrong = (pairs[:, 0] == 3) & (torch.arange(len(pairs), device=pairs.device) < count)
        slot = torch.where(wrong, pairs[:, 1], len(slots)).long()
        factor = torch.ones(len(slots) + 1, dtype=slots.dtype, device=pairs.device)
        factor[slot] = torch.where(wrong, 4.0, 1.0).to(slots.dtype)
        slots.mul_(factor[:-1, None])

    patch.setattr(ExpertFetch, "launch", faulty)


FAULTS: dict[str, Plant] = {
    "one expert dropped": drop_an_expert,
    "two experts swapped": swap_two_experts,
    "one slot left stale": leave_a_slot_stale,
    "one scale wrong": scale_one_tensor,
}
