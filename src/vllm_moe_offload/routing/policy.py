"""Which expert leaves a slot first.

A policy sees, step by step, which experts a layer used, and orders the experts by how little it
would be missed. All arithmetic is on integers, so that a device computes exactly the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Policy(ABC):
    """Orders the experts of one layer. Subclasses override `score` and what it needs.

    State: `step`, `last_used` int64 [E] (-1: never) and `value` int64 [E], what the policy counts.
    """

    name: ClassVar[str]

    def __init__(self, num_experts: int) -> None:
        self.step = 0
        self.last_used: IntArray = np.full(num_experts, -1, np.int64)
        self.value: IntArray = np.zeros(num_experts, np.int64)

    def observe(self, used: BoolArray) -> None:
        """Start a step in which the experts marked in `used` (bool [E]) are computed."""
        self.step += 1
        self.last_used[used] = self.step

    @abstractmethod
    def score(self) -> IntArray:
        """int64 [E]: the higher, the longer an expert should stay."""

    def order(self) -> IntArray:
        """int64 [E]: each expert's place, 0 for the one that leaves first.

        Equal scores: the one unused for longer leaves first, then the one of the lower number.
        """
        experts = np.arange(len(self.last_used))
        place = np.empty(len(experts), np.int64)
        place[np.lexsort((experts, self.last_used, self.score()))] = experts
        return place

    def evictable(self, num_slots: int) -> BoolArray:
        """Bool [S]: the slots whose expert may leave. At least one is, when there are slots."""
        return np.ones(num_slots, np.bool_)


class LRU(Policy):
    """The least recently used expert leaves."""

    name = "lru"

    @override
    def score(self) -> IntArray:
        return self.last_used


class LFU(Policy):
    """The expert used in the fewest steps leaves."""

    name = "lfu"

    @override
    def observe(self, used: BoolArray) -> None:
        super().observe(used)
        self.value[used] += 1

    @override
    def score(self) -> IntArray:
        return self.value


class LFRU(Policy):
    """The expert of the lowest decayed frequency over age leaves: ``frequency / (1 + age)``.

    Frequency is a fixed-point number that loses 1/32 of itself each step (half of it in 22 steps)
    and gains 1 in a step that uses the expert; age counts the steps since the last use.
    """

    name = "lfru"
    ONE: ClassVar[int] = 1 << 16
    DECAY_SHIFT: ClassVar[int] = 5

    @override
    def observe(self, used: BoolArray) -> None:
        super().observe(used)
        self.value -= self.value >> self.DECAY_SHIFT
        self.value[used] += self.ONE

    @override
    def score(self) -> IntArray:
        return self.value // (1 + self.step - self.last_used)


class Static(Policy):
    """The first experts used fill the slots and stay; the last quarter of the slots is passed on.

    An expert outside the set passes through one of those last slots (at least one of them), the
    least recently used leaving first.
    """

    name = "static"

    @override
    def score(self) -> IntArray:
        return self.last_used

    @override
    def evictable(self, num_slots: int) -> BoolArray:
        passing = max(1, num_slots // 4)
        return np.arange(num_slots) >= num_slots - passing


POLICIES: dict[str, Callable[[int], Policy]] = {
    policy.name: policy for policy in (LFRU, LRU, LFU, Static)
}


def make_policy(name: str, num_experts: int) -> Policy:
    """A fresh policy for a layer of `num_experts`; raises ValueError for an unknown name."""
    try:
        return POLICIES[name](num_experts)
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; what exists: {', '.join(POLICIES)}") from None
