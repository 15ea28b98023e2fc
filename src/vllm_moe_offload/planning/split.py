"""How the misses of a step are split between the bus and the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# How many times as long as the CPU's share the one expert that enters the slots may take: of a
# single miss about twice on hosts of PCIe 5. Where the bus is slower by much, waiting for it at
# every miss would cost more than a hit gains.
_PATIENCE = 3


@dataclass(frozen=True)
class LaneRates:
    """Bytes of experts a second: of each lane alone, and of each while the other runs too."""

    fetch: float
    cpu: float
    fetch_beside_cpu: float
    cpu_beside_fetch: float

    def scaled(self, bus: float, cpu: float) -> LaneRates:
        """The same with a bus and a CPU that are so many times as fast."""
        return LaneRates(
            fetch=self.fetch * bus,
            cpu=self.cpu * cpu,
            fetch_beside_cpu=self.fetch_beside_cpu * bus,
            cpu_beside_fetch=self.cpu_beside_fetch * cpu,
        )


def fetch_limits(
    rates: LaneRates, num_experts: int, most: int | None = None
) -> npt.NDArray[np.int64]:
    """How many misses to fetch, by how many there are: [E + 1]; the rest is the CPU's.

    The number that ends soonest: both lanes run beside each other until one is done, then the other
    by itself. Of numbers that end together the larger: what is fetched may be a hit in a later
    step. most: a limit on the experts fetched a step.
    """
    misses = np.arange(num_experts + 1)
    top = misses if most is None else np.minimum(misses, most)
    # By what is fetched the time is two straight lines, which meet where both lanes end together:
    # no number is better than all of those beside that point and the two at the ends.
    together = misses * (rates.fetch_beside_cpu / (rates.fetch_beside_cpu + rates.cpu_beside_fetch))
    fetched = np.minimum([np.zeros_like(misses), np.floor(together), np.ceil(together), top], top)
    left = misses - fetched
    beside = np.minimum(fetched / rates.fetch_beside_cpu, left / rates.cpu_beside_fetch)
    alone = (fetched - beside * rates.fetch_beside_cpu) / rates.fetch
    alone += (left - beside * rates.cpu_beside_fetch) / rates.cpu
    seconds = beside + alone
    # Rounding may not decide between those that end together.
    is_soonest = seconds <= seconds.min(axis=0) * (1 + 1e-9)
    return np.asarray(np.where(is_soonest, fetched, 0).max(axis=0), np.int64)


def promotion_limits(
    rates: LaneRates, limits: npt.NDArray[np.integer[Any]], most: int | None = None
) -> npt.NDArray[np.int64]:
    """How many of the CPU's experts to fetch meanwhile, by how many misses there are: [E + 1].

    They are for later steps; limits: [E + 1], those fetched for the step itself. As many more as
    the bus has time for while the CPU computes its share. Where none is fetched for the step, one
    at least, unless that takes longer than `_PATIENCE` times the CPU's share: else an expert that
    is the only miss of each step would stay on the CPU. most: a limit on the experts fetched a
    step, for itself and for later.
    """
    on_cpu = np.arange(len(limits)) - limits
    seconds = on_cpu / rates.cpu_beside_fetch
    # Rounding may not decide whether a last one fits.
    fitting = np.floor(seconds * rates.fetch_beside_cpu * (1 + 1e-9)) - limits
    patient = seconds * _PATIENCE * rates.fetch_beside_cpu * (1 + 1e-9) >= 1
    promoted = np.clip(np.maximum(fitting, (limits == 0) & patient), 0, on_cpu)
    if most is not None:
        promoted = np.minimum(promoted, most - limits)
    return np.asarray(promoted, np.int64)
