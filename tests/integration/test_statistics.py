"""What the reporter's thread makes of what the layers count, and that a resize keeps it away."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from vllm_moe_offload.device.readout import Readout
from vllm_moe_offload.integration.metrics import DecodeClock, FloorClock, Reporter, Totals
from vllm_moe_offload.integration.runtime import OffloadRuntime
from vllm_moe_offload.integration.statistics import worker_totals
from vllm_moe_offload.lanes import Counters


class Layer:
    """Says what it has counted when it is shown what it counts in."""

    def __init__(self, nbytes: int, counted: Counters, missed_on_device: int) -> None:
        self.layout = SimpleNamespace(nbytes=nbytes)
        self._counted = counted, Counters(misses=missed_on_device)
        self._cells = {"a": torch.tensor([nbytes, 2]), "b": torch.tensor([3])}

    def readings(self) -> dict[str, torch.Tensor]:
        return self._cells

    def counted(self, values: dict[str, list[int]]) -> tuple[Counters, Counters]:
        assert values == {"a": [self.layout.nbytes, 2], "b": [3]}, "another layer's"
        return self._counted


def test_totals_are_sums_over_layers_but_for_steps_and_tokens() -> None:
    one = Counters(
        **dict(steps=20, tokens=50, streamed=3, hits=100, misses=7, cpu_experts=5, kept=2),
        **dict(bytes_fetched=2000, bytes_streamed=4000, bytes_kept=8000),
    )
    other = Counters(
        **dict(steps=19, tokens=49, streamed=2, hits=200, misses=11, cpu_experts=6, kept=1),
        **dict(bytes_fetched=3000, bytes_streamed=5000, bytes_kept=9000),
    )
    layers: Any = [Layer(10, one, 4), Layer(1000, other, 8)]
    rates = SimpleNamespace(fetch=1e9, cpu=1e9, fetch_beside_cpu=300.0, cpu_beside_fetch=500.0)
    share: Any = SimpleNamespace(rates=rates)
    clock = DecodeClock(64)
    clock.seconds = 1.5
    floor = FloorClock()
    expected = Totals(
        steps=20,
        tokens=50,
        streamed_steps=3,
        hits=300,
        misses=18,
        bytes_fetched=5000,
        bytes_cpu=5 * 10 + 6 * 1000,
        bytes_streamed=9000,
        bytes_kept=17000,
        decode_seconds=1.5,
        floor_seconds=(4 * 10 + 8 * 1000) / 800,
    )
    readout = Readout(torch.device("cpu"))
    assert worker_totals(layers, readout, share, clock, floor) == expected
    for unmeasured in (None, SimpleNamespace(rates=None)):
        got = worker_totals(layers, readout, unmeasured, clock, FloorClock())
        assert got.floor_seconds == 0
        assert got.misses == 18


class Side:
    """Counts how often all that runs beside the steps is waited for."""

    joined = 0

    def join_all(self) -> None:
        self.joined += 1


def a_runtime(**layers: Any) -> OffloadRuntime:
    """With these layers, and nothing else."""
    runtime = OffloadRuntime.__new__(OffloadRuntime)
    runtime.config = SimpleNamespace(mode="cache")  # type: ignore[assignment]
    runtime.prefetch = runtime._share = runtime._streaming = runtime._reporter = None
    runtime._side_stream, runtime._is_under_way = Side(), False  # type: ignore[assignment]
    modules = {name: SimpleNamespace(offload=layer) for name, layer in layers.items()}
    runtime._modules = modules  # type: ignore[assignment]
    return runtime


def test_what_a_step_that_did_not_end_has_begun_is_waited_for_before_the_next_one() -> None:
    """Its layers' tables say that what it copies is in slots, which a streamed step reads."""
    runtime = a_runtime()
    side: Any = runtime._side_stream
    for _ in range(3):
        runtime.wake()
        runtime.check()
    assert side.joined == 0
    runtime.wake()
    for interrupted in (1, 2):
        runtime.wake()
        assert side.joined == interrupted
    runtime.check()
    runtime.wake()
    assert side.joined == 2
    runtime._side_stream = None
    runtime.wake()


class Slots:
    """Of a layer, that can be exchanged; `ends`: what exchanging them the first time raises."""

    def __init__(self, side: Side, ends: BaseException | None = None) -> None:
        self.num_slots, self._side, self._ends = 4, side, ends

    def check_resize(self, count: int) -> None: ...

    def resize(self, count: int) -> None:
        assert self._side.joined == 1, "copies into the old slots may be under way"
        self.num_slots = count
        if self._ends is not None:
            ends, self._ends = self._ends, None
            raise ends


@pytest.mark.parametrize("ends", [MemoryError("9 slots"), KeyboardInterrupt()])
def test_all_layers_get_other_slots_or_none(ends: BaseException) -> None:
    side = Side()
    runtime = a_runtime(a=Slots(side), b=Slots(side, ends), c=Slots(side))
    runtime._side_stream = side  # type: ignore[assignment]
    with pytest.raises(type(ends)):
        runtime.resize(9)
    assert {layer.num_slots for layer in runtime._layers().values()} == {4}  # type: ignore[attr-defined]
    side.joined = 0
    runtime.resize(9)
    assert {layer.num_slots for layer in runtime._layers().values()} == {9}  # type: ignore[attr-defined]


def test_nothing_is_read_while_slots_are_exchanged(tmp_path: Path) -> None:
    """What a layer counts in is then in two places for a moment."""
    reads: list[int] = []

    def read() -> Totals:
        reads.append(len(sizes))
        return Totals()

    threads: list[threading.Thread] = []
    sizes: list[int] = []

    class Exchanged:
        num_slots = 4

        def check_resize(self, count: int) -> None: ...

        def resize(self, count: int) -> None:
            threads.append(threading.Thread(target=runtime._reporter.report))
            threads[-1].start()
            threads[-1].join(0.2)
            sizes.append(count)
            if count == 9 and len(sizes) == 2:
                raise MemoryError("9 slots")
            self.num_slots = count

    runtime = a_runtime(a=Exchanged(), b=Exchanged())
    runtime._reporter = Reporter(read, tmp_path)
    with pytest.raises(MemoryError, match="9 slots"):
        runtime.resize(9)
    for thread in threads:
        thread.join()
    assert sizes == [9, 9, 4], "the first one has its slots again"
    assert reads == [3, 3, 3], "and whoever wanted to read has waited for that"
