"""Rates that were measured wrong are corrected while decoding in graphs; right ones about stay."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.engines import decoded, engine, stats
from tests.gpu import checkpoints
from tests.gpu.drawing import CAPTURED, SIZES, prompts
from tests.gpu.oracle import checked_layers
from tests.gpu.test_captured import SLOTS
from vllm_moe_offload import moe_offload_args
from vllm_moe_offload.integration import share
from vllm_moe_offload.lanes.meter import LaneMeter
from vllm_moe_offload.planning import LaneRates, fetch_limits

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("bf16", tmp_path_factory.mktemp("correction"), layers=2)[0]


@pytest.mark.parametrize("bus", [1.0, 3.0])
def test_the_rates_become_the_machines(
    bus: float, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus is said to be so many times as fast as it is."""
    measure, true = share.measure_rates, []

    def measured(*args: Any) -> LaneRates:
        rates = measure(*args)
        true.append(rates)
        return replace(
            rates, fetch=rates.fetch * bus, fetch_beside_cpu=rates.fetch_beside_cpu * bus
        )

    monkeypatch.setattr(share, "measure_rates", measured)
    monkeypatch.setattr(share, "LaneMeter", partial(LaneMeter, seconds=0.3))
    settings = moe_offload_args(mode="hybrid", slots_per_layer=SLOTS)
    with engine(checkpoint, dtype="bfloat16", **settings, **CAPTURED, **SIZES) as llm:
        for _ in range(3):
            decoded(llm, prompts()[2], 400)
        done = stats(llm)
    now = LaneRates(**done["rates_now"])
    print(f"\n{bus}: {done['rate_corrections']} corrections")
    for name, rates in (("true", true[0]), ("said", LaneRates(**done["rates"])), ("now", now)):
        print(f"{name:5} " + ", ".join(f"{rate / 1e9:.1f}" for rate in astuple(rates)))
    assert true[0].fetch / 1.5 <= now.fetch <= true[0].fetch * 1.5
    assert bus == 1.0 or done["rate_corrections"] > 0


def test_rates_of_a_busy_start_are_measured_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine whose steps are captured, as at the start."""
    measure = share.measure_rates
    busy = LaneRates(1e9, 1e9, 1e9, 1e9)
    monkeypatch.setattr(share, "measure_rates", lambda *_: busy)
    settings = moe_offload_args(slots_per_layer=SLOTS, correct_rates="off")
    with engine(checkpoint, dtype="bfloat16", **settings, **CAPTURED, **SIZES) as llm:
        decoded(llm, prompts()[2], 40)
        before = stats(llm)
        monkeypatch.setattr(share, "measure_rates", measure)
        llm.collective_rpc("moe_offload_measure")
        (limits,) = {tuple(each.layer.captured._limits) for each in checked_layers(llm)}
        decoded(llm, prompts()[2], 40)
        now = stats(llm)
    rates = LaneRates(**now["rates_now"])
    print("\nnow " + ", ".join(f"{rate / 1e9:.1f}" for rate in astuple(rates)))
    assert LaneRates(**before["rates_now"]) == busy
    assert now["rates"] == now["rates_now"]
    assert min(astuple(rates)) > 4e9, "of any machine with a GPU like these tests'"
    assert limits == tuple(fetch_limits(rates, len(limits) - 1))
    assert limits != tuple(fetch_limits(busy, len(limits) - 1))
    assert 0 < now["cpu_experts"] < now["misses"]
