"""What other processes do on this one's CPUs while something is measured."""

from __future__ import annotations

import os

import psutil

# Of a CPU's times, what nobody had of it.
_IDLE = ("idle", "iowait")
# Counted within others.
_WITHIN = ("guest", "guest_nice")


class Neighbours:
    """How much of the CPUs that this process may use others have had since this was made.

    What a hypervisor gave to other machines counts as well, where the system hears of it.
    """

    def __init__(self) -> None:
        self._cpus = os.sched_getaffinity(0)
        self._busy, self._own = self._seconds()

    @property
    def cpus(self) -> int:
        """How many CPUs this process may use."""
        return len(self._cpus)

    def share(self) -> float:
        """From 0 to 1: of the time that these CPUs were busy or idle, what others had."""
        busy, own = self._seconds()
        passed = sum(busy) - sum(self._busy)
        if passed <= 0:
            return 0.0
        others = (busy[0] - self._busy[0]) - (own - self._own)
        return min(max(others / passed, 0.0), 1.0)

    def _seconds(self) -> tuple[tuple[float, float], float]:
        """Busy and idle seconds of the CPUs, and the seconds that this process has had of any."""
        busy = idle = 0.0
        for number, times in enumerate(psutil.cpu_times(percpu=True)):
            if number in self._cpus:
                of = times._asdict()
                idle += sum(of.get(name, 0.0) for name in _IDLE)
                busy += sum(s for name, s in of.items() if name not in (*_IDLE, *_WITHIN))
        own = psutil.Process().cpu_times()
        return (busy, idle), own.user + own.system
