"""Rows: complete, checked, and never half written."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.common import KEYS, Row, Run, append, problems, summary, version_of

RUN = Run("decode", "abc", "1234567", "2026-01-01", "h100", "a CPU", "0.26.0", "2.11.0")


def figure(**changes: object) -> Row:
    return RUN.row(
        **(dict(contestant="cache", metric="step_ms", unit="ms", value=2.0, repeats=5) | changes)
    )


def test_a_row_has_every_key() -> None:
    row = figure(batch=8, min=1.0, max=3.0)
    assert tuple(row) == KEYS
    assert problems(row) == []
    assert row["batch"] == 8 and row["tokens"] is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"value": None}, "no value, and no note"),
        ({"value": "2"}, "not a number"),
        ({"min": 3.0, "max": 4.0}, "outside of 3.0 to 4.0"),
        ({"min": 1.0}, "min is 1.0 and max None, not two numbers"),
        ({"max": 3.0}, "min is None and max 3.0, not two numbers"),
        ({"min": 1.0, "max": "3"}, "min is 1.0 and max '3', not two numbers"),
        ({"contestant": None}, "contestant is None"),
    ],
)
def test_a_wrong_row_is_not_written(
    changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    assert problem in problems(figure(**changes))[0]
    with pytest.raises(ValueError, match=problem):
        append(tmp_path / "rows.json", [figure(), figure(**changes)])
    assert not list(tmp_path.iterdir())


def test_a_failed_contestant_is_a_row() -> None:
    assert problems(figure(value=None, note="out of memory")) == []


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown keys of a row: batches"):
        figure(batches=8)


def test_rows_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    append(path, [figure()])
    append(path, [figure(value=None, note="why")])
    rows = json.loads(path.read_text())
    assert [row["value"] for row in rows] == [2.0, None]
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]


def test_runs_that_share_a_file_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with ThreadPoolExecutor(4) as runs:
        list(runs.map(lambda number: append(path, [figure(batch=number)]), range(80)))
    assert sorted(row["batch"] for row in json.loads(path.read_text())) == list(range(80))


def test_a_figure_is_a_median_of_five() -> None:
    assert summary([5, 1, 2, 3, 100]) == {"value": 3, "min": 1, "max": 100, "repeats": 5}
    with pytest.raises(ValueError, match="4 repeats"):
        summary([1, 2, 3, 4])


def test_the_facts_of_this_machine_are_found() -> None:
    run = Run.here("decode", "a-commit")
    assert run.commit == "a-commit"
    assert run.card and run.host_cpu
    assert problems(run.row(contestant="x", metric="step_ms", unit="ms", value=1)) == []
    assert version_of("pytest") == pytest.__version__
    assert version_of("no-such-distribution") is None
