"""The benchmarks from end to end on the CPU build: small numbers, but every kind of row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.common import ROOT, Row, problems
from bench.runner import reason

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def bench(name: str, model: Path, folder: Path, *options: str) -> tuple[list[Row], str]:
    """Run it with 5 slots for 16 experts of three layers; its rows and what it printed."""
    common = "--dtype float32 --load-format auto --eager --kv-gib 0.06 --slots 5 --seconds 0.5"
    result = folder / "rows.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", f"bench.{name}"),
            *("--model", str(model), "--json", str(result)),
            *(*common.split(), *options),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows: list[Row] = json.loads(result.read_text())
    assert [problems(row) for row in rows if problems(row)] == []
    return rows, done.stdout


def values(rows: list[Row], **wanted: Any) -> list[float | None]:
    return [r["value"] for r in rows if all(r[key] == value for key, value in wanted.items())]


def test_decode(model: Path, tmp_path: Path) -> None:
    contestants = "vllm-gpu,cache,vllm-uva,vllm-prefetch,hybrid"
    rows, printed = bench(
        *("decode", model, tmp_path, "--contestants", contestants),
        *("--batches", "1,3", "--tokens", "40", "--routing", "switching,uniform,local"),
    )
    assert len({row["run"] for row in rows}) == 1
    for name in ("vllm-gpu", "cache"):
        steps = values(rows, contestant=name, metric="step_ms")
        assert len(steps) == 6 and all(steps)
    (alone,) = values(rows, contestant="cache", metric="hit_percent", routing="local", batch=1)
    (chance,) = values(rows, contestant="cache", metric="hit_percent", routing="uniform", batch=1)
    (turns,) = values(rows, contestant="cache", metric="hit_percent", routing="switching", batch=1)
    assert None not in (alone, turns, chance) and alone > turns > chance
    assert {r["slots"] for r in rows if r["contestant"] == "cache"} == {5}
    # On the CPU build vLLM's own offloading is not there, and nothing to share misses with.
    for name, why in (
        ("vllm-uva", "offloaded nothing"),
        ("vllm-prefetch", "AssertionError"),
        ("hybrid", "vLLM's CPU build has no bus"),
    ):
        failed = [r for r in rows if r["contestant"] == name and r["metric"] == "step_ms"]
        assert len(failed) == 6
        assert all(r["value"] is None and why in r["note"] for r in failed), failed
    assert len(values(rows, contestant="floor", metric="step_ms")) == 6
    (prefill,) = [r for r in rows if r["contestant"] == "cache" and r["metric"] == "ttft_ms"]
    assert prefill["value"] and prefill["bench"] == "prefill" and prefill["tokens"] == 40
    assert "ms to the first token" in report.sections([tmp_path / "rows.json"])
    read = values(rows, contestant="machine", metric="read_gb_per_s")
    assert len(read) == 1 + 7 and all(read)  # of the run, and around each cell
    assert "| cache |" in printed


def test_prefill(model: Path, tmp_path: Path) -> None:
    options = ("--contestants", "cache", "--tokens", "40,100", "--routing", "uniform,model")
    rows, _ = bench("prefill", model, tmp_path, *options)
    times = values(rows, contestant="cache", metric="ttft_ms")
    assert len(times) == 4 and all(times)


def test_serve(tmp_path: Path) -> None:
    demo = ROOT / "models" / "demo-moe"
    # Many chunks: where others have the CPUs, tokens of several steps arrive at once.
    load = ("--decodes", "2", "--tokens", "400", "--chunk", "16", "--room", "1000")
    logs = tmp_path / "logs"
    options = ("--contestants", "cache", "--seconds", "0.5", "--logs", str(logs))
    rows, printed = bench("serve", demo, tmp_path, *options, *load)
    ours = {
        (row["metric"], row["batch"], row["tokens"]): row
        for row in rows
        if row["contestant"] == "cache"
    }
    assert all(row["value"] and row["repeats"] == 5 for row in ours.values()), ours
    chunk = ours["chunk_ms", None, 400]["value"]
    assert chunk == pytest.approx(ours["ttft_ms", None, 400]["value"] / 25)
    assert ours["ttft_ms", 2, 400]["value"] > chunk
    # How long a token takes beside a chunk and without one is the machine's affair: on a busy one
    # either may be the longer.
    assert ours["itl_p99_ms", 2, None]["value"] >= ours["itl_p50_ms", 2, None]["value"]
    assert ours["itl_p99_ms", 2, 400]["value"] >= ours["itl_p50_ms", 2, 400]["value"]
    assert "chunk times, 99th percentile" in printed
    assert "vllm_moe_offload_hits_total" in (logs / "metrics-cache.txt").read_text()


def test_load(model: Path, tmp_path: Path) -> None:
    rows, printed = bench("load", model, tmp_path, "--contestants", "cache,hybrid")
    (whole,) = values(rows, contestant="cache", metric="load_s")
    (weights,) = values(rows, contestant="cache", metric="weights_s")
    assert 0 < weights < whole
    assert "Loading weights, in that, s" in printed
    assert all(row["repeats"] == 5 for row in rows if row["contestant"] == "cache")
    assert len(values(rows, contestant="cache", metric="peak_host_gib")) == 1
    assert values(rows, contestant="hybrid", metric="load_s") == [None]


def test_time_that_is_over_is_a_row(model: Path, tmp_path: Path) -> None:
    options = ("--contestants", "cache", "--tokens", "40", "--deadline", "1")
    rows, _ = bench("prefill", model, tmp_path, *options)
    (row,) = [r for r in rows if r["contestant"] == "cache"]
    assert row["value"] is None and row["note"].startswith("not started: 1 s for the run")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("a\n[rank0]: torch.OutOfMemoryError: CUDA out\nlater words\n", "torch.OutOfMemoryError: "),
        (
            "pydantic.ValidationError: 2 validation errors for A\n  too long\n  further words\n",
            "pydantic.ValidationError: 2 validation errors for A too long",
        ),
        ("pydantic.ValidationError: 1 validation error for A\n", "pydantic.ValidationError: 1 val"),
        ("Killed\n", "Killed"),
        ("", "ended without a word"),
    ],
)
def test_the_reason_of_a_failure_is_found(log: str, expected: str) -> None:
    assert reason(log).startswith(expected)
    assert "further" not in reason(log)
