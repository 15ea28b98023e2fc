"""What an engine's process writes down beside the times."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import child as bench_child
from bench.child import Child

CELL = {"routing": "uniform", "tokens": 512}


def written(tmp_path: Path, tail: dict[str, Any] | None) -> dict[str, float]:
    result = tmp_path / "rows.jsonl"
    child = Child({"result": str(result)})
    stats = {"tail": tail, "cpu_experts": 120}
    child._tail(stats, CELL)
    if not result.exists():
        return {}
    rows = [json.loads(line) for line in result.read_text().splitlines()]
    assert all(row.items() >= CELL.items() for row in rows)
    return {row["metric"]: row["value"] for row in rows}


def test_where_the_time_of_streamed_steps_went(tmp_path: Path) -> None:
    rates = {"copy": 175e-6, "cpu": 112e-6, "cpu_row": 2e-6, "slowed": 1.1}
    times = {"computed": 6.0, "passed": 8.0, "waited": 2.0, "by_copies": 12.0}
    times |= {"layers": 10, "ahead": 35}
    assert written(tmp_path, {"rates": rates, "rates_now": rates, **times}) == pytest.approx(
        {
            "cpu_busy_percent": 75,
            "host_wait_percent": 25,
            "by_copies_percent": 150,
            "cpu_layers": 10,
            "cpu_experts_a_layer": 12,
            "experts_ahead_a_layer": 3.5,
            "expert_copy_us": 175,
            "expert_cpu_us": 112,
            "expert_cpu_row_us": 2,
            "expert_slowed": 1.1,
        }
    )


@pytest.mark.parametrize("tail", [None, {"passed": 0.0}])
def test_steps_without_the_cpu_say_nothing(tmp_path: Path, tail: dict[str, Any] | None) -> None:
    assert written(tmp_path, tail) == {}


class Engine:
    """Of ours: whose rates are corrected while it serves, so often and every two seconds."""

    def __init__(self, corrections: int, rates: dict[str, float] | None) -> None:
        self.seconds, self.served = 0.0, []
        self._corrections, self._rates = corrections, rates

    def collective_rpc(self, name: str) -> list[dict[str, Any]]:
        assert name == "moe_offload_stats"
        done = min(self._corrections, int(self.seconds // 2))
        return [{"rates": self._rates, "rate_corrections": done}]

    def requests(self, _: Any, batch: int, prompt: int, new: int) -> Any:
        self.served.append(batch)
        steps = 0.7 / 16 * new
        return SimpleNamespace(finish=lambda: setattr(self, "seconds", self.seconds + steps))


@pytest.mark.parametrize(
    ("corrections", "rates", "served", "said"),
    [
        (0, {"fetch": 5e10}, 3.5, [0]),
        (3, {"fetch": 5e10}, 10.5, [3]),
        (100, {"fetch": 5e10}, 10.5, [5]),
        (0, None, 0, []),
    ],
)
def test_ours_serves_until_its_rates_stay(
    corrections: int,
    rates: dict[str, float] | None,
    served: float,
    said: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = Engine(corrections, rates)
    monkeypatch.setattr(bench_child, "Requests", llm.requests)
    monkeypatch.setattr(bench_child, "time", SimpleNamespace(perf_counter=lambda: llm.seconds))
    result = tmp_path / "rows.jsonl"
    cells = [{"routing": "uniform", "batch": 1}, {"routing": "uniform", "batch": 8}, CELL]
    Child({"result": str(result), "ours": True, "cells": cells})._settle(llm)
    assert llm.seconds == pytest.approx(served)
    assert set(llm.served) <= {8}
    rows = [json.loads(line) for line in result.read_text().splitlines()] if said else []
    assert [row["value"] for row in rows] == said
    assert result.exists() == bool(said)


@pytest.mark.parametrize(
    ("ours", "rates", "asked"),
    [
        (True, {"fetch": 5e10}, ["moe_offload_stats", "moe_offload_measure"]),
        (True, None, ["moe_offload_stats"]),
        (False, None, []),
    ],
)
def test_an_engine_measures_its_rates_again_when_it_is_alone(
    ours: bool, rates: dict[str, float] | None, asked: list[str], tmp_path: Path
) -> None:
    calls: list[str] = []

    def rpc(name: str) -> list[dict[str, Any]]:
        calls.append(name)
        return [{"rates": rates}]

    child = Child({"result": str(tmp_path / "rows"), "ours": ours, "cells": []})
    child._measure(SimpleNamespace(collective_rpc=rpc))
    assert calls == asked


@pytest.mark.parametrize("all_fit", [True, False])
@pytest.mark.parametrize("layers", [{}, {"a": {"slots": 57}}])
def test_where_everything_is_to_fit_it_does(
    all_fit: bool, layers: dict[str, Any], tmp_path: Path
) -> None:
    child = Child({"result": str(tmp_path / "rows"), "ours": True, "all_fit": all_fit})
    llm = SimpleNamespace(collective_rpc=lambda _: [{"layers": layers}])
    with (
        pytest.raises(RuntimeError, match="and 57 of a layer do: give this run a GPU")
        if all_fit and layers
        else nullcontext()
    ):
        child._check_fit(llm)
