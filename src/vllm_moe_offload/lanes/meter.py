"""What both lanes of all layers have done, read while they serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_moe_offload.device.snapshot import Snapshot
from vllm_moe_offload.device.step import COUNTERS
from vllm_moe_offload.lanes.captured import CapturedLayer
from vllm_moe_offload.lanes.cpu import CpuLane
from vllm_moe_offload.planning import LaneUse

# Long enough for many steps of any length; a change of load is followed within some of these.
_SECONDS = 2.0
# The first reading is about this, and each later one about twice as long until it is that: what was
# measured beside a start of others is corrected soon.
_FIRST_SECONDS = 0.25
_FETCHED, _ON_CPU, _PROMOTED = map(COUNTERS.index, ("fetched", "cpu_experts", "promoted"))


class LaneMeter:
    """Reads the sums that the layers' launches and the CPU lane keep, now and then.

    Args:
        layers: Gives the layers there are, each time they are read.
        cpu: Their lane.
        seconds: How long a reading is about, but for the first few, which are shorter.
        clock: Seconds, of any origin.
    """

    def __init__(
        self,
        layers: Callable[[], Sequence[CapturedLayer]],
        cpu: CpuLane,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers = layers
        self._cpu = cpu
        self._seconds = seconds
        self._wait = min(_FIRST_SECONDS, seconds)
        self._clock = clock
        self._due = clock()
        self._asked: tuple[Snapshot, np.ndarray] | None = None
        self._last: LaneUse | None = None

    def read(self) -> LaneUse | None:
        """What was done since the last reading, where the next one is there; never waits.

        To be called between steps. None also for the first one.
        """
        if self._asked is None:
            if self._clock() >= self._due:
                self._ask()
            return None
        snapshot, expert_bytes = self._asked
        numbers = snapshot.numbers()
        if numbers is None:
            return None
        self._asked = None
        self._due = self._clock() + self._wait
        self._wait = min(2 * self._wait, self._seconds)
        counted = numbers.reshape(len(expert_bytes), -1)
        # What the device has asked for by now the CPU has answered, but for a step under way.
        busy = sum(each.busy_seconds for each in self._cpu.stats().values())
        now = LaneUse(
            fetched=float(expert_bytes @ (counted[:, _FETCHED] + counted[:, _PROMOTED])),
            fetch_seconds=float(counted[:, -1].sum()) / 1e9,
            computed=float(expert_bytes @ counted[:, _ON_CPU]),
            cpu_seconds=busy,
        )
        last, self._last = self._last, now
        return None if last is None else now - last

    def restart(self) -> None:
        """The sums have been reset, or are those of other layers."""
        self._asked = self._last = None

    def _ask(self) -> None:
        layers = self._layers()
        tensors = [t for layer in layers for t in (layer.step.counters, layer.fetch.busy_ns)]
        expert_bytes = np.array([layer.fetch.expert_bytes for layer in layers], np.int64)
        self._asked = Snapshot(tensors), expert_bytes
