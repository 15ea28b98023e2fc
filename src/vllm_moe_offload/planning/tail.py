"""Which experts of a streamed layer the CPU computes while the others are copied."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

# A step that would not have the CPU's part has it when so many of its size have passed: at first,
# and at most. What the first steps of a size took, compiling their kernels say, is soon forgotten.
_AGAIN_FIRST, _AGAIN_LAST = 2, 32
# The shares of the last two steps of a size, before there were any: the part pays.
_BELIEVED = (0.6, 0.6)
# One of so many missing experts is copied before the routing is known, until it has been seen how
# long that takes: a third of section 1's layer keeps the bus busy for 6 ms, in which the layer
# before is computed and this one's routing is read.
_AHEAD = 3
# What is left, a layer later, of the time by which one had to wait longer for its routing.
_LASTS = 0.9


@dataclass(frozen=True)
class TailRates:
    """Seconds an expert takes: copied with the CPU idle, and computed by the CPU beside copies.

    The CPU's are `cpu` for reading it and `cpu_row` more for each row. While it reads, and takes
    memory's bandwidth from the bus, a copy takes `slowed` times as long. On the machine of design
    section 1, 9.4 MB of bf16: 175 us copied; 112, 137, 205, 590 and 1953 us for 1, 16, 64, 256 and
    1024 rows, which is 112 and 1.85 a row. So of 103 experts with 32 rows each the CPU takes half
    (18 ms become 9), with 256 rows a fifth (14 ms).
    """

    copy: float
    cpu: float
    cpu_row: float
    slowed: float = 1.0

    def on_cpu(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """What the CPU takes for experts of so many rows each: float64, as `rows`."""
        return self.cpu + self.cpu_row * rows.astype(np.float64)

    def of(self, size: float) -> TailRates:
        """The same for experts that have `size` times as many bytes."""
        return TailRates(self.copy * size, self.cpu * size, self.cpu_row * size, self.slowed)

    def with_cpu(self, level: float) -> TailRates:
        """The same with a CPU that is `level` times as fast."""
        return replace(self, cpu=self.cpu / level, cpu_row=self.cpu_row / level)


class TailWorth:
    """Whether steps are sooner done with the CPU's part, by what such steps took.

    Steps of similar sizes share an opinion: what the part costs beside the experts (the host waits
    for the routing, the sum passes the bus) grows with the rows, and what it saves shrinks. The
    lesser of the last two shares decides: a step that was disturbed changes nothing, however
    little the part saves, and two in turn do.
    """

    def __init__(self) -> None:
        self._beliefs: defaultdict[int, _Belief] = defaultdict(_Belief)

    def has_part(self, rows: int) -> bool:
        """Whether the step of so many rows that comes next is to have the CPU's part.

        Now and then one has it that would not, each time after twice as many: the machine may have
        become another.
        """
        belief = self._beliefs[_size(rows)]
        if min(belief.shares) < 1.0:
            belief.skipped, belief.again = 0, _AGAIN_FIRST
            return True
        belief.skipped += 1
        if belief.skipped < belief.again:
            return False
        belief.skipped, belief.again = 0, min(2 * belief.again, _AGAIN_LAST)
        return True

    def took(self, rows: int, share: float) -> None:
        """A step with it took `share` of what copying every expert would have taken."""
        belief = self._beliefs[_size(rows)]
        belief.shares = belief.shares[1], share


class CopiesAhead:
    """How many of a layer's missing experts are copied before it is known what it is routed to.

    As many as keep the bus busy until those come that the routing has chosen. A bus that waits
    loses what it waits; of copies that are too many the CPU only has less to choose from. So it is
    the longest time that counts, for a while. Steps of similar sizes have it in common: the more
    rows, the later a routing is known.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def count(self, rows: int, missing: int, copy: float) -> int:
        """Of so many `missing` experts of a step of `rows`, each copied in `copy` seconds.

        One at least, if any is missing: a layer passes in one wave or more.
        """
        seconds = self._seconds.get(_size(rows))
        ahead = missing / _AHEAD if seconds is None else seconds / copy
        return min(max(math.ceil(ahead), 1), missing)

    def took(self, rows: int, seconds: float) -> None:
        """So long after the first of them those came that the routing has chosen."""
        size = _size(rows)
        longer = max(self._seconds.get(size, seconds) - seconds, 0.0)
        self._seconds[size] = seconds + _LASTS * longer


@dataclass
class _Belief:
    """What is held of the steps of a size.

    `shares`: of the last two that had the part. Where it does not pay, how many have `skipped` it,
    and so many go by for one that tries it `again`.
    """

    shares: tuple[float, float] = _BELIEVED
    skipped: int = 0
    again: int = _AGAIN_FIRST


def _size(rows: int) -> int:
    """A number that steps within a factor of 1.4 have in common."""
    return round(2 * math.log2(max(rows, 1)))


def experts_for_cpu(
    rates: TailRates, rows: npt.NDArray[np.integer], ahead: float
) -> npt.NDArray[np.int64]:
    """Which of some experts to leave to the CPU: how many of those with the fewest rows.

    So many that both lanes are done soonest; a copy takes as long for each expert, so no other
    choice is better where a computing CPU does not slow copies. rows: [N], those that each expert
    has, 1 or more; ahead: how many other experts are copied first. Returns indices into `rows`. Of
    choices that end together the one with the fewest.
    """
    order = np.argsort(rows, kind="stable")
    on_cpu = np.arange(len(rows) + 1)
    cpu = np.concatenate(([0.0], np.cumsum(rates.on_cpu(rows[order]))))
    # Of its time the CPU reads this share, evenly, and copies that are all beside it are slowed.
    reads = np.divide(on_cpu * rates.cpu, cpu, out=np.zeros_like(cpu), where=cpu > 0)
    copies = (ahead + len(rows) - on_cpu) * rates.copy * (1 + (rates.slowed - 1) * reads)
    return order[: int(np.argmin(np.maximum(cpu, copies)))]
