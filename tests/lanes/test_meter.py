"""The lanes' sums are read while they serve, and the split follows what they say.

By Triton's interpreter, whose fetches are slow beside the engine's threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.device.kernels import INTERPRETED, run_interpreted
from tests.engine.shards import random_shard
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.engine import CpuExpertEngine, MailboxStats
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import CapturedLayer, CpuLane, EngineLane
from vllm_moe_offload.lanes.meter import LaneMeter
from vllm_moe_offload.planning import LaneRates, correct_rates, fetch_limits

CPU = torch.device("cpu")
SPEC = ExpertSpec(64, 32, Activation.SILU, Format.FP32)
EXPERTS, SLOTS, TOP_K, LAYERS = 12, 3, 4, 2
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of the last test")


class Serving:
    """Two layers, and a clock that is set by hand."""

    def __init__(self, engine: CpuExpertEngine) -> None:
        self.now = 0.0
        self.rng = np.random.default_rng(0)
        self.cpu = CpuLane(engine, max_layers=LAYERS, max_tokens=1, device=CPU)
        self.layers = []
        for number in range(LAYERS):
            host = random_shard(SPEC, EXPERTS, torch.Generator().manual_seed(number))
            slots = SPEC.layout.empty(SLOTS)
            plan = engine.plan(SPEC, host, max_tokens=1, top_k=TOP_K)
            self.layers.append(
                CapturedLayer(
                    host,
                    slots,
                    EngineLane(engine, SPEC, slots, TOP_K, 1),
                    SideStream(CPU),
                    self.cpu.add(f"layers.{number}", plan),
                    policy="lru",
                    top_k=TOP_K,
                )
            )
        self.meter = LaneMeter(lambda: self.layers, self.cpu, 2.0, lambda: self.now)

    def split(self, limits: np.ndarray) -> None:
        for layer in self.layers:
            layer.split(limits, np.minimum(np.arange(EXPERTS + 1) - limits, 1))

    def steps(self, count: int) -> None:
        for _ in range(count):
            for layer in self.layers:
                ids = torch.from_numpy(self.rng.permutation(EXPERTS)[None, :TOP_K].copy())
                layer.forward(torch.ones(1, SPEC.hidden), torch.ones(1, TOP_K), ids.int())


@pytest.fixture
def serving() -> Iterator[Serving]:
    with CpuExpertEngine(threads=1) as engine:
        yield Serving(engine)


@interpreted
def test_a_reading_is_what_was_done_since_the_last_one(serving: Serving) -> None:
    serving.split(np.arange(EXPERTS + 1) // 2)
    meter = serving.meter
    serving.steps(1)
    assert meter.read() is None and meter.read() is None, "the first one says from where on"
    serving.steps(3)
    assert meter.read() is None, "not due"
    serving.now = 2.0
    before = [layer.read_counters() for layer in serving.layers]
    busy = sum(each.busy_seconds for each in serving.cpu.stats().values())
    fetching = sum(int(layer.fetch.busy_ns) for layer in serving.layers) / 1e9
    assert meter.read() is None, "asked for now"
    use = meter.read()
    assert use is not None
    # All but the first step of each layer, which found its slots empty.
    nbytes = SPEC.layout.nbytes
    assert 0 < use.fetched < sum(done.bytes_fetched for done in before)
    assert 0 < use.computed < nbytes * sum(done.cpu_experts for done in before)
    assert 0 < use.fetch_seconds < fetching
    assert 0 < use.cpu_seconds < busy
    assert use.fetched % nbytes == use.computed % nbytes == 0


@interpreted
def test_the_first_readings_come_soon(serving: Serving) -> None:
    serving.split(np.arange(EXPERTS + 1) // 2)
    times = []
    for quarter in range(32):
        serving.now = quarter / 4
        serving.steps(1)
        if [use for use in (serving.meter.read(), serving.meter.read()) if use is not None]:
            times.append(serving.now)
    assert times == [0.25, 0.75, 1.75, 3.75, 5.75, 7.75]


@interpreted
def test_all_of_both_lanes_is_in_it(serving: Serving) -> None:
    serving.split(np.arange(EXPERTS + 1) // 2)
    assert serving.meter.read() is None and serving.meter.read() is None
    serving.steps(3)
    serving.now = 2.0
    assert serving.meter.read() is None
    use = serving.meter.read()
    assert use is not None
    done = [layer.read_counters() for layer in serving.layers]
    assert use.fetched == sum(each.bytes_fetched for each in done)
    assert use.computed == SPEC.layout.nbytes * sum(each.cpu_experts for each in done)
    assert use.fetch_seconds == pytest.approx(
        sum(int(layer.fetch.busy_ns) for layer in serving.layers) / 1e9
    )
    assert use.cpu_seconds == sum(each.busy_seconds for each in serving.cpu.stats().values())


@interpreted
def test_sums_that_begin_anew_are_no_use(serving: Serving) -> None:
    serving.split(np.arange(EXPERTS + 1) // 2)
    assert serving.meter.read() is None and serving.meter.read() is None
    serving.steps(2)
    for layer in serving.layers:
        layer.step.reset_counters()
    serving.meter.restart()
    serving.now = 2.0
    assert serving.meter.read() is None and serving.meter.read() is None
    serving.steps(1)
    serving.now = 4.0
    assert serving.meter.read() is None
    use = serving.meter.read()
    assert use is not None and use.fetched > 0


@interpreted
@pytest.mark.parametrize("slow", ["fetch", "cpu"])
def test_the_split_leaves_a_slow_lane(
    slow: str, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rates say that both are alike; one of them takes far longer than the other."""
    experts_a_second = {"fetch": 1e3, "cpu": 10.0}[slow]  # more than the slow one does
    measured = rates = LaneRates(*[SPEC.layout.nbytes * experts_a_second] * 4)
    if slow == "cpu":
        stats = serving.cpu.stats

        def slower() -> dict[str, MailboxStats]:
            return {
                name: replace(each, busy_seconds=1.0 * each.requests)
                for name, each in stats().items()
            }

        monkeypatch.setattr(serving.cpu, "stats", slower)
    limits = fetch_limits(rates, EXPERTS)
    assert limits[TOP_K] == TOP_K // 2
    for number in range(4):
        serving.split(limits)
        serving.steps(3)
        serving.now = 2.0 * number
        assert serving.meter.read() is None
        if (use := serving.meter.read()) is not None:
            rates = correct_rates(rates, measured, use)
            limits = fetch_limits(rates, EXPERTS)
    if slow == "cpu":
        assert limits[TOP_K] > TOP_K // 2
    else:
        assert limits[TOP_K] < TOP_K // 2


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
