"""How the measured rates reach the layers, and what the settings make of them."""

from __future__ import annotations

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
from vllm_moe_offload.integration import share as module
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


@pytest.mark.parametrize(
    ("rates", "is_measured", "is_refused"),
    [(RATES, None, False), (RATES, False, False), (None, True, False), (None, False, True)],
)
def test_a_worker_measures_again_what_it_has_measured(
    rates: LaneRates | None, is_measured: bool | None, is_refused: bool
) -> None:
    done: list[Any] = []
    runtime = OffloadRuntime.__new__(OffloadRuntime)
    runtime._modules, runtime._cpu_lanes, runtime._max_tokens = {}, {}, 512
    runtime._share = SimpleNamespace(  # type: ignore[assignment]
        rates=rates, measure=lambda *_: done.append("rates")
    )
    if is_measured is not None:
        runtime._streaming = SimpleNamespace(  # type: ignore[assignment]
            is_measured=is_measured, settle=lambda *given: done.append(given[4])
        )
    else:
        runtime._streaming = None
    runtime.check = lambda: done.append("checked")  # type: ignore[method-assign]
    runtime.reset_stats = lambda: done.append("counts")  # type: ignore[method-assign]
    if is_refused:
        with pytest.raises(ValueError, match="nothing was measured when this engine started"):
            runtime.measure()
        assert not done
        return
    runtime.measure()
    has_tail = [] if is_measured is None else [rates is not None]
    assert done == ["rates", *has_tail, "checked", "counts"]


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
