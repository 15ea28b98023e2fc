"""How the measured rates reach the layers, and what the settings make of them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton")

from vllm_moe_offload import ConfigError
from vllm_moe_offload.config import OffloadConfig
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.integration import runtime as worker
from vllm_moe_offload.integration import share as module
from vllm_moe_offload.integration.metrics import DecodeClock, Reporter, Totals
from vllm_moe_offload.integration.runtime import OffloadRuntime
from vllm_moe_offload.integration.share import CpuShare
from vllm_moe_offload.planning import LaneRates, LaneUse, fetch_limits

RATES = LaneRates(fetch=50e9, cpu=100e9, fetch_beside_cpu=50e9, cpu_beside_fetch=100e9)
CPU = torch.device("cpu")


class Layer:
    """As much of an OffloadedLayer as measuring looks at."""

    def __init__(self, num_slots: int, num_experts: int, host_bytes: int) -> None:
        self.num_slots, self.num_experts, self.host_bytes = num_slots, num_experts, host_bytes
        self.invalidated = False
        self.limits: Any = None
        self.promotions: Any = None
        self.captured = SimpleNamespace(
            fetch=object(),
            step=SimpleNamespace(num_slots=num_slots, num_experts=num_experts),
            split=self._split,
        )

    def _split(self, limits: Any, promotions: Any) -> None:
        self.limits, self.promotions = limits, promotions

    def invalidate(self) -> None:
        self.invalidated = True


def made(engine: CpuExpertEngine, **settings: Any) -> CpuShare:
    return CpuShare(OffloadConfig.parse(settings), engine, CPU)


@pytest.mark.parametrize("mode", ["auto", "hybrid"])
def test_the_largest_layer_is_measured_and_all_are_split_by_it(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "measure_rates", lambda *a: asked.append(a) or RATES)
    layers = {"a": Layer(4, 8, 10), "b": Layer(2, 12, 30), "all": Layer(8, 8, 99)}
    lanes = {name: SimpleNamespace(plan=f"plan of {name}") for name in layers}
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode=mode)
        np.testing.assert_array_equal(share.split(8), [np.arange(9) // 2, np.zeros(9)])
        share.measure(layers, lanes)  # type: ignore[arg-type]
        share.close()
    assert asked == [(layers["b"].captured.fetch, 2, "plan of b", CPU)]
    assert [layer.invalidated for layer in layers.values()] == [False, True, False]
    assert layers["a"].limits.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert layers["a"].promotions.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert len(layers["b"].limits) == len(layers["b"].promotions) == 13
    assert layers["all"].limits is None, "it has no misses"


def test_measured_again_the_layers_are_split_by_what_is_measured_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = LaneRates(fetch=50e9, cpu=10e9, fetch_beside_cpu=50e9, cpu_beside_fetch=10e9)
    rates = iter((slow, RATES))
    monkeypatch.setattr(module, "measure_rates", lambda *a: next(rates))
    layers = {"a": Layer(4, 8, 10)}
    lanes = {"a": SimpleNamespace(plan=None)}
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode="hybrid")
        share.measure(layers, lanes)  # type: ignore[arg-type]
        share.corrections, share.rates_now = 3, RATES
        assert layers["a"].limits.tolist() == fetch_limits(slow, 8).tolist()
        share.measure(layers, lanes)  # type: ignore[arg-type]
        share.close()
    assert (share.rates, share.rates_now, share.corrections) == (RATES, RATES, 0)
    assert layers["a"].limits.tolist() == fetch_limits(RATES, 8).tolist()


def test_slots_that_measuring_has_written_to_hold_nothing_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> LaneRates:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "measure_rates", lambda *_: RATES)
    layers = {"a": Layer(4, 8, 10)}
    lanes = {"a": SimpleNamespace(plan=None)}
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode="hybrid")
        share.measure(layers, lanes)  # type: ignore[arg-type]
        layers["a"].invalidated = False
        monkeypatch.setattr(module, "measure_rates", interrupted)
        with pytest.raises(KeyboardInterrupt):
            share.measure(layers, lanes)  # type: ignore[arg-type]
        share.close()
    assert layers["a"].invalidated
    assert share.rates == RATES


@pytest.mark.parametrize(
    ("rates", "is_measured", "is_refused"),
    [(RATES, None, False), (RATES, False, False), (None, True, False), (None, False, True)],
)
def test_a_worker_measures_again_what_it_has_measured(
    rates: LaneRates | None, is_measured: bool | None, is_refused: bool
) -> None:
    done: list[Any] = []
    runtime = fake_worker(SimpleNamespace(num_slots=2, num_experts=4, reset_counters=lambda: None))
    runtime._share = SimpleNamespace(  # type: ignore[assignment]
        rates=rates,
        measure=lambda *_: done.append(("rates", torch.is_inference_mode_enabled())),
        restart=lambda: done.append("counts"),
    )
    if is_measured is not None:
        runtime._streaming = SimpleNamespace(  # type: ignore[assignment]
            is_measured=is_measured,
            settle=lambda *given: done.append(given[4]),
            reset_stats=lambda: None,
        )
    runtime.check = lambda: done.append("checked")  # type: ignore[method-assign]
    if is_refused:
        with pytest.raises(ValueError, match="nothing is measured in this engine"):
            runtime.measure()
        assert not done
        return
    runtime.measure()
    has_tail = [] if is_measured is None else [rates is not None]
    assert done == [("rates", True), *has_tail, "checked", "counts"]


def test_where_every_expert_has_a_slot_nothing_is_measured() -> None:
    runtime = fake_worker(SimpleNamespace(num_slots=4, num_experts=4))
    runtime._share = SimpleNamespace(rates=RATES)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="nothing is measured in this engine"):
        runtime.measure()


@pytest.mark.parametrize("fails", [False, True])
def test_what_measuring_does_is_not_counted(fails: bool, tmp_path: Path) -> None:
    """Nor is the time it takes a decode step's; whoever reports meanwhile waits."""
    counted, threads = Totals(), []

    def measure(*_: Any) -> None:
        nonlocal counted
        threads.append(threading.Thread(target=runtime._reporter.report))
        threads[-1].start()
        threads[-1].join(0.2)
        counted = Totals(steps=9)
        if fails:
            raise RuntimeError("the bus is gone")

    def reset() -> None:
        nonlocal counted
        counted = Totals()

    runtime = fake_worker(SimpleNamespace(num_slots=2, num_experts=4, reset_counters=reset))
    runtime._share = SimpleNamespace(  # type: ignore[assignment]
        rates=RATES, measure=measure, restart=lambda: None
    )
    runtime.check = lambda: None  # type: ignore[method-assign]
    runtime._reporter = Reporter(lambda: counted, tmp_path)
    runtime._clock.begin(3, False, 10.0)
    counted = Totals(steps=5)
    with pytest.raises(RuntimeError, match="bus is gone") if fails else nullcontext():
        runtime.measure()
    (thread,) = threads
    thread.join()
    counted = Totals(steps=1)
    runtime._reporter.report()
    assert runtime._reporter._sums["steps"] == 6
    runtime._clock.begin(3, True, 99.0)
    assert runtime._clock.seconds == 0.0


def fake_worker(layer: Any) -> OffloadRuntime:
    """As much of a worker as measuring looks at."""
    runtime = OffloadRuntime.__new__(OffloadRuntime)
    runtime._modules = {"a": SimpleNamespace(offload=layer)}  # type: ignore[dict-item]
    runtime._cpu_lanes, runtime._max_tokens = {}, 512
    runtime._streaming = runtime._reporter = runtime.prefetch = None
    runtime._clock = DecodeClock(64)
    return runtime


@pytest.mark.parametrize(
    ("share", "is_measured", "is_said"),
    [(0.3, True, True), (0.05, True, False), (0.3, False, False)],
)
def test_a_busy_start_is_said(
    share: float, is_measured: bool, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(worker, "Neighbours", lambda: SimpleNamespace(share=lambda: share, cpus=16))
    monkeypatch.setattr(worker.logger, "warning", lambda text, *of: said.append(text % of))
    runtime = fake_worker(SimpleNamespace(num_slots=2, num_experts=4))
    rates: Any = object() if is_measured else None
    runtime._share = SimpleNamespace(rates=rates, measure=lambda *_: None)  # type: ignore[assignment]
    runtime.check = lambda: None  # type: ignore[method-assign]
    runtime._measure({})
    assert len(said) == is_said
    assert not said or "other processes had 30 % of the 16 CPUs" in said[0]


class Meter:
    """Says what it is told."""

    def __init__(self) -> None:
        self.use: LaneUse | None = None
        self.restarts = 0

    def read(self) -> LaneUse | None:
        return self.use

    def restart(self) -> None:
        self.restarts += 1


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_the_split_is_corrected_by_what_the_lanes_did(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter()
    monkeypatch.setattr(module, "measure_rates", lambda *a: RATES)
    monkeypatch.setattr(module, "LaneMeter", lambda *a: meter)
    layers = {"a": Layer(4, 8, 10), "b": Layer(2, 8, 30)}
    lanes = {name: SimpleNamespace(plan=None) for name in layers}
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode="hybrid", correct_rates=setting)
        share.correct()
        share.measure(layers, lanes)  # type: ignore[arg-type]
        before = layers["a"].limits
        share.correct()
        assert layers["a"].limits is before and share.rates_now == RATES
        # As expected, and then the CPU at half of its rate.
        meter.use = LaneUse(50e9, 1.0, 100e9, 1.0)
        share.correct()
        assert layers["a"].limits is before and share.corrections == 0
        meter.use = LaneUse(50e9, 1.0, 100e9, 2.0)
        share.correct()
        share.restart()
        share.close()
        share.correct()
    assert share.rates == RATES
    assert meter.restarts == share.corrections == (setting == "auto")
    if setting == "off":
        assert layers["a"].limits is before
    else:
        assert share.rates_now.cpu == pytest.approx(100e9 / 2**0.5)
        assert layers["a"].limits.tolist() == fetch_limits(share.rates_now, 8).tolist()
        assert layers["a"].limits.tolist() != before.tolist()
        assert layers["b"].limits is layers["a"].limits, "one table for all layers of a size"


def test_a_lane_that_got_nothing_is_tried_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while; measured again, after another."""
    slow, meter = RATES.scaled(1.0, 1 / 100), Meter()
    monkeypatch.setattr(module, "measure_rates", lambda *a: slow)
    monkeypatch.setattr(module, "LaneMeter", lambda *a: meter)
    meter.use = LaneUse(fetched=50e9, fetch_seconds=1.0)
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode="hybrid")
        layer = Layer(4, 8, 10)
        for _ in range(2):
            share.measure({"a": layer}, {"a": SimpleNamespace(plan=None)})  # type: ignore[arg-type]
            until = next(n for n in range(99) if share.correct() or share.corrections)
            assert 8 < until < 32
        for _ in range(16):
            share.correct()
        assert share.rates_now.cpu > 4 * slow.cpu
        share.close()


def test_a_limit_on_the_experts_fetched_is_kept() -> None:
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode="hybrid", update_expert_num=2)
        assert share.split(12)[0].max() == 2, "before there are rates"
        share.rates_now = RATES
        limits, promotions = share.split(12)
        assert limits.max() == (limits + promotions).max() == 2
        share.close()


def test_how_many_of_a_tokens_experts_may_be_fetched() -> None:
    with CpuExpertEngine(threads=1) as engine:
        assert made(engine, mode="hybrid", cache_topk=4).cache_topk == 4
        assert made(engine, mode="auto").cache_topk is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_topk": 3}, r"cache_topk=3, but layer routes.*to 2 experts: give at most 2, or"),
        ({"update_expert_num": 9}, r"update_expert_num=9, but layer has 8 experts: give at most 8"),
        ({"slots_per_layer": 9}, r"slots_per_layer=9, but layer has 8 experts: give at most 8$"),
    ],
)
def test_limits_above_what_a_layer_has_are_refused(settings: dict, message: str) -> None:
    layer = SimpleNamespace(layer_name="layer", moe_config=SimpleNamespace(num_experts=8), top_k=2)
    runtime = OffloadRuntime.__new__(OffloadRuntime)
    runtime._modules, runtime._slots = {}, {}
    for most in ({}, {"cache_topk": 2, "update_expert_num": 8, "slots_per_layer": 8}):
        runtime.config = OffloadConfig.parse(most)
        runtime.adopt(layer)  # type: ignore[arg-type]
    runtime.config = OffloadConfig.parse(settings)
    with pytest.raises(ConfigError, match=message):
        runtime.adopt(layer)  # type: ignore[arg-type]
    runtime._slots = {"of another model": 8}
    runtime.adopt(layer)  # type: ignore[arg-type]


def test_where_every_miss_is_fetched_there_is_no_lane() -> None:
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode="cache")
        assert share.request("layer", None) is None  # type: ignore[arg-type]
        share.measure({"a": Layer(4, 8, 10)}, {})  # type: ignore[dict-item]
        share.wake()
        share.check()
        share.close()
        assert share.rates is None


def test_a_lane_is_closed_once() -> None:
    with CpuExpertEngine(threads=1) as engine:
        share = made(engine, mode="cpu")
        share.wake()
        share.check()
        share.close()
        share.close()
