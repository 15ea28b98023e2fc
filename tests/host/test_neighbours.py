"""What others have of the CPUs, by the times that the system counts."""

from __future__ import annotations

import os
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from vllm_moe_offload.host import Neighbours

Times = namedtuple("Times", "user system idle iowait steal guest")


@pytest.mark.parametrize(
    ("of_each", "own", "share"),
    [
        (Times(0, 0, 10, 0, 0, 0), 0, 0.0),
        (Times(6, 1, 2, 1, 0, 0), 14, 0.0),
        (Times(6, 1, 2, 1, 0, 6), 10, 0.2),  # what guests had is in the user's
        (Times(2, 0, 4, 0, 4, 0), 4, 0.4),
        (Times(0, 0, 10, 0, 0, 0), 3, 0.0),  # on CPUs that it may not use any more
        (Times(0, 0, 0, 0, 0, 0), 0, 0.0),  # a system that counts nothing
    ],
)
def test_the_share_of_others(
    of_each: Times, own: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two of three CPUs, during ten seconds."""
    busy, taken = [Times(*[7.0] * 6)] * 3, 1.0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: busy)
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=taken, system=0.5))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    neighbours = Neighbours()
    assert neighbours.share() == 0.0, "no time has passed"
    later = Times(*(7.0 + seconds for seconds in of_each))
    busy, taken = [later, Times(*[99.0] * 6), later], taken + own
    assert neighbours.share() == pytest.approx(share)
    assert neighbours.cpus == 2
