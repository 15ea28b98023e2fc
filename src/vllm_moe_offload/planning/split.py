"""How the misses of a step are split between the bus and the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class LaneRates:
    """Bytes of experts a second: of each lane alone, and of each while the other runs too."""

    fetch: float
    cpu: float
    fetch_beside_cpu: float
    cpu_beside_fetch: float


def fetch_limits(
    rates: LaneRates, num_experts: int, most: int | None = None
) -> npt.NDArray[np.int64]:
    """How many misses to fetch, by how many there are: [E + 1]; the rest is the CPU's.

    The number that ends soonest: both lanes run beside each other until one is done, then the other
    by itself. Of numbers that end together the larger: what is fetched may be a hit in a later
    step. most: a limit on the experts fetched a step.
    """
    misses = np.arange(num_experts + 1)[:, None]
    fetched = np.arange(num_experts + 1)[None, :]
    left = misses - fetched
    beside = np.minimum(fetched / rates.fetch_beside_cpu, left / rates.cpu_beside_fetch)
    alone = (fetched - beside * rates.fetch_beside_cpu) / rates.fetch
    alone += (left - beside * rates.cpu_beside_fetch) / rates.cpu
    seconds = beside + alone
    seconds[left < 0] = np.inf
    if most is not None:
        seconds[:, most + 1 :] = np.inf
    # Rounding may not decide between those that end together.
    is_soonest = seconds <= seconds.min(axis=1, keepdims=True) * (1 + 1e-9)
    limits: npt.NDArray[np.int64] = num_experts - np.argmax(is_soonest[:, ::-1], axis=1)
    return limits
