"""What an engine's process writes down beside the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.child import Child

CELL = {"routing": "uniform", "tokens": 512}


def written(tmp_path: Path, tail: dict[str, Any] | None) -> dict[str, float]:
    result = tmp_path / "rows.jsonl"
    child = Child({"result": str(result)})
    layers = {"layers.0": {"streamed": 6}, "layers.1": {"streamed": 4}}
    stats = {"tail": tail, "layers": layers, "cpu_experts": 120}
    child._tail(stats, CELL)
    if not result.exists():
        return {}
    rows = [json.loads(line) for line in result.read_text().splitlines()]
    assert all(row.items() >= CELL.items() for row in rows)
    return {row["metric"]: row["value"] for row in rows}


def test_where_the_time_of_streamed_steps_went(tmp_path: Path) -> None:
    rates = {"copy": 175e-6, "cpu": 112e-6, "cpu_row": 2e-6, "slowed": 1.1}
    times = {"computed": 6.0, "passed": 8.0, "waited": 2.0, "by_copies": 12.0}
    assert written(tmp_path, {"rates": rates, "rates_now": rates, **times}) == pytest.approx(
        {
            "cpu_busy_percent": 75,
            "host_wait_percent": 25,
            "cpu_experts_a_layer": 12,
            "expert_copy_us": 175,
            "expert_cpu_us": 112,
            "expert_cpu_row_us": 2,
            "expert_slowed": 1.1,
        }
    )


@pytest.mark.parametrize("tail", [None, {"passed": 0.0}])
def test_steps_without_the_cpu_say_nothing(tmp_path: Path, tail: dict[str, Any] | None) -> None:
    assert written(tmp_path, tail) == {}
