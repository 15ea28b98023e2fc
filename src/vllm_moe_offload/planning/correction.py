"""The rates of the lanes, corrected by what these have done while serving."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from vllm_moe_offload.planning.split import LaneRates

# What is seen of a lane is an average over all kinds of steps, and which of its time the other one
# ran beside it is not seen: up to so much off is as good as right.
_TOLERANCE = 1.15
# How much of what it is off is corrected at once, as an exponent, and the most: a reading may be of
# a moment in which the machine did something else.
_DAMPING = 0.5
_MOST_AT_ONCE = 2.0
# A lane is believed to be at most so many times as fast, or as slow, as it was measured: beside the
# starts of other engines a CPU was measured at a sixth of what it has.
_MOST = 16.0
# A lane that gets nothing to do and is tried is believed so much faster with each reading, until it
# gets something and shows what it does.
_PROBING = 1.1
# One that is believed slower than it was measured is tried at once, one that gets nothing by what
# was measured, which may be wrong itself, after so many readings; either after twice as many each
# time that it did not pay, and so many at most. It pays where the lane has something to do for so
# many of them.
_AGAIN_FIRST, _AGAIN_LAST = 16, 512
_PAYS_AFTER = 4
# A lane that was busy for less than this is not judged by it.
LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class LaneUse:
    """Bytes of experts that each lane has moved or computed, and the seconds it was busy."""

    fetched: float = 0.0
    fetch_seconds: float = 0.0
    computed: float = 0.0
    cpu_seconds: float = 0.0

    def __sub__(self, other: LaneUse) -> LaneUse:
        return LaneUse(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def correct_rates(rates: LaneRates, measured: LaneRates, use: LaneUse) -> LaneRates:
    """Rates that are closer to what `use` shows than `rates`, those the split was made by.

    What a lane took is compared with what it would have taken by `rates`, the lanes beside each
    other as far as they could be. Both rates of a lane are scaled by one factor, so that how much
    the lanes slow each other down stays as `measured`. A lane that is about as expected, or was
    hardly used, keeps its rates, and none leaves `measured` by more than a factor of 16.
    """
    beside = min(use.fetched / rates.fetch_beside_cpu, use.computed / rates.cpu_beside_fetch)
    fetch = beside + (use.fetched - beside * rates.fetch_beside_cpu) / rates.fetch
    cpu = beside + (use.computed - beside * rates.cpu_beside_fetch) / rates.cpu
    bus_level = corrected_level(rates.fetch / measured.fetch, fetch, use.fetch_seconds)
    cpu_level = corrected_level(rates.cpu / measured.cpu, cpu, use.cpu_seconds)
    return measured.scaled(bus_level, cpu_level)


class LaneTrials:
    """Corrects rates as `correct_rates`, and now and then tries a lane that gets nothing to do.

    Such a lane shows nothing: slower for a while than it was measured, or measured too slow by more
    than the other lane is faster, it would be left out for ever. So it is believed faster and
    faster until it gets something; what it then shows is believed as always, and if that leaves it
    without anything again, it is believed as little as before.
    """

    def __init__(self) -> None:
        self._bus, self._cpu = _Trial(), _Trial()

    def correct(self, rates: LaneRates, measured: LaneRates, use: LaneUse) -> LaneRates:
        """What `correct_rates` gives of the same, but for a lane that is tried."""
        corrected = correct_rates(rates, measured, use)
        is_bus_used = use.fetch_seconds >= LEAST_SECONDS
        is_cpu_used = use.cpu_seconds >= LEAST_SECONDS
        return measured.scaled(
            self._bus.level(corrected.fetch / measured.fetch, is_bus_used, is_cpu_used),
            self._cpu.level(corrected.cpu / measured.cpu, is_cpu_used, is_bus_used),
        )


class _Trial:
    """Of one lane. `_before`: its level when it was last let be; `_used`: for how many readings.

    `_again`: after so many readings the next one begins; None: the last one paid, or none was.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._waited = 0
        self._again: int | None = None
        self._before, self._used = 1.0, 0

    def level(self, level: float, is_used: bool, is_other_used: bool) -> float:
        """The lane's level, after a reading that gives it this one."""
        if not is_used and not is_other_used:
            return level  # nothing is served
        if not self._is_on:
            self._waited = 0 if is_used else self._waited + 1
            if self._waited < (self._again or (1 if level < 1.0 else _AGAIN_FIRST)):
                return level
            self._is_on, self._before, self._used = True, level, 0
        if is_used:
            self._used += 1
            if self._used == _PAYS_AFTER:
                self._end(None)
            return level
        if self._used == 0 and level < _MOST:
            return min(level * _PROBING, _MOST)
        self._end(min(2 * (self._again or _AGAIN_FIRST), _AGAIN_LAST))
        return self._before

    def _end(self, again: int | None) -> None:
        self._is_on, self._waited, self._again = False, 0, again


def corrected_level(level: float, expected: float, seconds: float) -> float:
    """By what a lane's measured rates are to be multiplied, `level` until now.

    expected: seconds that what it did takes by `level`; `seconds`: what it took.
    """
    if seconds < LEAST_SECONDS or expected <= 0:
        return level
    off = expected / seconds
    if 1 / _TOLERANCE <= off <= _TOLERANCE:
        return level
    step = np.clip(off**_DAMPING, 1 / _MOST_AT_ONCE, _MOST_AT_ONCE)
    return float(np.clip(level * step, 1 / _MOST, _MOST))
