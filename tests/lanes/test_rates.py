"""The rates of both lanes are of the bytes they read, and come from the experts of the layer."""

from __future__ import annotations

import time

import pytest
import torch

from tests.device.kernels import INTERPRETED, run_interpreted
from tests.engine.shards import random_shard
from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import rates
from vllm_moe_offload.lanes.rates import measure_rates
from vllm_moe_offload.planning import LaneRates

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of the last test")


@interpreted
@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_rates_are_bytes_by_seconds(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_SECONDS", 0.05)
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
    host = random_shard(spec, 5, torch.Generator().manual_seed(0))
    slots = spec.layout.empty(2)
    with CpuExpertEngine(threads=1) as engine:
        fetch = ExpertFetch(host, slots)
        plan = engine.plan(spec, host, max_tokens=4, top_k=top_k)
        seen: set[int] = set()
        calls: list[float] = []
        run = plan.run

        def watched(x: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor) -> None:
            calls.append(time.perf_counter())
            seen.update(ids.ravel().tolist())
            run(x, ids, *rest)
            time.sleep(0.01)

        monkeypatch.setattr(plan, "run", watched)
        got = measure_rates(fetch, 2, plan, CPU)
    assert seen == set(range(5)) or len(calls) * top_k < 5
    # Ten milliseconds a row of `top_k` experts, and whatever the machine adds.
    assert 0 < got.cpu <= top_k * spec.layout.nbytes / 0.01
    assert got.cpu >= top_k * spec.layout.nbytes / 2
    assert 0 < got.cpu_beside_fetch <= top_k * spec.layout.nbytes / 0.01
    assert got.fetch > 0 and got.fetch_beside_cpu > 0
    for name, tensor in slots.items():
        assert torch.equal(tensor[0], host[name][4]), "the last expert of slot 0"


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)


def test_the_best_window_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both lanes at once the one that slowed neither: where the bus stalls the CPU is fast."""
    windows = {
        "fetch_for": iter([1.0, 0.1, 0.25, 0.2, 0.5]),  # compiles, is sized, and three
        "compute_for": iter([60.0, 90.0, 80.0]),
        "both": iter([(30.0, 60.0), (6.0, 112.0), (25.0, 50.0)]),
    }

    class Lanes:
        pass_bytes = 10.0

        def __init__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> object:
            return lambda *_: next(windows[name])

    monkeypatch.setattr(rates, "_Lanes", Lanes)
    got = measure_rates(None, 2, None, CPU)  # type: ignore[arg-type]
    assert got == LaneRates(fetch=50.0, cpu=90.0, fetch_beside_cpu=30.0, cpu_beside_fetch=60.0)
    assert not any(list(left) for left in windows.values())
