"""Faults to plant in a running engine, to see that a check of sameness notices them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_moe_offload.device import SlotCache
from vllm_moe_offload.routing import Wave

Plant = Callable[[pytest.MonkeyPatch, type[SlotCache]], None]
Pairs = Sequence[tuple[int, int]]


def drop_an_expert(patch: pytest.MonkeyPatch, caches: type[SlotCache]) -> None:
    publish = caches.publish

    def faulty(self: SlotCache, wave: Wave) -> None:
        publish(self, wave)
        self.expert_map[3] = -1

    patch.setattr(caches, "publish", faulty)


def swap_two_experts(patch: pytest.MonkeyPatch, caches: type[SlotCache]) -> None:
    fetch = caches.fetch

    def faulty(self: SlotCache, pairs: Pairs) -> None:
        swapped = {1: 3, 3: 1}
        fetch(self, [(swapped.get(expert, expert), slot) for expert, slot in pairs])

    patch.setattr(caches, "fetch", faulty)


def leave_a_slot_stale(patch: pytest.MonkeyPatch, caches: type[SlotCache]) -> None:
    fetch = caches.fetch
    filled: set[int] = set()

    def faulty(self: SlotCache, pairs: Pairs) -> None:
        fetch(self, [pair for pair in pairs if pair[1] != 1 or id(self) not in filled])
        if any(slot == 1 for _, slot in pairs):
            filled.add(id(self))

    patch.setattr(caches, "fetch", faulty)


def scale_one_tensor(patch: pytest.MonkeyPatch, caches: type[SlotCache]) -> None:
    fetch = caches.fetch

    def faulty(self: SlotCache, pairs: Pairs) -> None:
        fetch(self, pairs)
        names = [name for name in self.tensors if "scale" in name] or ["w2_weight"]
        wrong: Any = self.tensors[names[-1]]
        for expert, slot in pairs:
            if expert == 3:
                wrong[slot].mul_(4)

    patch.setattr(caches, "fetch", faulty)


FAULTS: dict[str, Plant] = {
    "one expert dropped": drop_an_expert,
    "two experts swapped": swap_two_experts,
    "one slot left stale": leave_a_slot_stale,
    "one scale wrong": scale_one_tensor,
}
