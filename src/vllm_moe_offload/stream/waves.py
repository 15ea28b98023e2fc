"""How the experts of a streamed layer pass through buffers: which together, and in which rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Experts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Wave:
    """Experts that are in a buffer at the same time.

    `experts`: int64 [N], ascending; `rows`: int64 [N], the row of the buffer that each is in.
    """

    experts: Experts
    rows: Experts

    def __len__(self) -> int:
        return len(self.experts)

    def behind(self, count: int) -> Wave:
        """The same without its first `count` experts."""
        return Wave(self.experts[count:], self.rows[count:])

    def expert_map(self, num_experts: int) -> npt.NDArray[np.int32]:
        """Int32 [E + 1]: expert -> row, -1 for those of other waves and for the sentinel."""
        entries = np.full(num_experts + 1, -1, np.int32)
        entries[self.experts] = self.rows
        return entries

    def runs(self) -> list[tuple[slice, slice]]:
        """(experts, rows) of neighbours: the larger a copy, the nearer it is to the bus's rate."""
        breaks = np.flatnonzero((np.diff(self.experts) != 1) | (np.diff(self.rows) != 1)) + 1
        edges = [0, *breaks.tolist(), len(self)]
        return [
            (_between(self.experts, start, end), _between(self.rows, start, end))
            for start, end in pairwise(edges)
            if end > start
        ]


def plan_waves(experts: Experts, size: int, num_experts: int) -> list[Wave]:
    """The waves of a layer of E experts that take turns in buffers of `size` rows.

    experts: int64 [N], ascending, those that pass. Where a buffer holds every expert of the layer
    there is one wave, whatever passes, with expert e in row e; else as few as it takes, each from
    row 0 on.
    """
    if size >= num_experts:
        return [Wave(experts, experts)]
    parts = [experts[start : start + size] for start in range(0, len(experts), size)]
    return [Wave(part, np.arange(len(part))) for part in parts]


def _between(numbers: Experts, start: int, end: int) -> slice:
    return slice(int(numbers[start]), int(numbers[end - 1]) + 1)
