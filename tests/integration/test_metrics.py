"""What is reported while serving: the worker's file, the collector that reads it, the log line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from prometheus_client import CollectorRegistry, generate_latest, multiprocess, values

from vllm_moe_offload.integration import metrics
from vllm_moe_offload.integration.metrics import (
    DecodeClock,
    FloorClock,
    FolderCollector,
    Reporter,
    Totals,
    line,
)

NUMBERS = Totals(*range(1, len(fields(Totals)) + 1))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> FolderCollector:
    collector = FolderCollector()
    registry.register(collector)
    return collector


def page(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_what_the_worker_writes_is_collected_by_name(
    tmp_path: Path, registry: CollectorRegistry, collector: FolderCollector
) -> None:
    collector.folders += [tmp_path / "of no engine", tmp_path]
    assert page(registry) == [], "nothing is reported yet"
    Reporter(lambda: NUMBERS, tmp_path).report()
    got = page(registry)
    assert f'vllm_moe_offload_hits_total{{engine="0"}} {float(NUMBERS.hits)}' in got
    assert (
        f'vllm_moe_offload_bytes_total{{engine="0",lane="cpu"}} {float(NUMBERS.bytes_cpu)}' in got
    )
    shown = sorted(float(sample.split()[1]) for sample in got)
    assert shown == sorted(map(float, asdict(NUMBERS).values())), "each number once"


def test_engines_that_share_a_folder_are_told_apart(
    tmp_path: Path, registry: CollectorRegistry, collector: FolderCollector
) -> None:
    collector.folders.append(tmp_path)
    for hits in (3, 4):
        Reporter(lambda hits=hits: Totals(hits=hits), tmp_path).report()
    got = [line for line in page(registry) if "hits" in line]
    assert [line.partition(" ")[2] for line in got] == ["3.0", "4.0"]


def test_several_processes_share_what_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with several API servers; a reset of the statistics takes nothing back."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(shared))
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    totals = [Totals(hits=5, bytes_cpu=7), Totals(hits=8, bytes_cpu=7), Totals(hits=20)]
    reporter = Reporter(lambda: totals.pop(0), tmp_path)
    reporter.report()
    with reporter.restarting():
        assert len(totals) == 1, "what was counted until then is read"
    reporter.report()
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    one = FolderCollector()
    one.folders.append(tmp_path)
    registry.register(one)
    got = page(registry)
    assert got.count('vllm_moe_offload_hits_total{engine="0"} 28.0') == 2, "shared, and by file"
    assert got.count('vllm_moe_offload_bytes_total{engine="0",lane="cpu"} 7.0') == 2


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda text, *given: lines.append(text % given))
    yield lines


def test_the_thread_reports_every_interval_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.02")
    steps = iter(range(3, 10**6))
    reporter = Reporter(lambda: Totals(steps=next(steps)), tmp_path)
    reporter.start()
    until = time.monotonic() + 20
    while len(said) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    reporter.close()
    reporter.close()
    count = len(said)
    time.sleep(0.1)
    assert len(said) == count >= 3
    assert said[0].startswith("moe_offload: 3 steps, ") and said[1].startswith(
        "moe_offload: 1 step, "
    )


def test_an_interval_without_a_step_is_not_worth_a_line(tmp_path: Path, said: list[str]) -> None:
    reporter = Reporter(lambda: Totals(steps=3), tmp_path)
    reporter.report()
    reporter.report()
    assert len(said) == 1


def test_the_line_says_hits_lanes_and_how_near_the_floor() -> None:
    since = Totals(
        steps=100, streamed_steps=2, hits=30, misses=10, bytes_fetched=2 << 30,
        bytes_cpu=3 << 20, bytes_streamed=4 << 30, decode_seconds=2.0, floor_seconds=1.5,
    )  # fmt: skip
    assert line(since) == (
        "100 steps, 75.0% of the used experts in slots, 2.00 GiB fetched, 3.0 MiB on the CPU, "
        "4.00 GiB streamed in 2 steps, decode at 75% of its floor"
    )
    one = line(Totals(steps=1, streamed_steps=1, decode_seconds=1.0))
    assert one == "1 step, 0.0 KiB fetched, 0.0 KiB on the CPU, 0.0 KiB streamed in 1 step", (
        "no expert was used, no rates were measured"
    )


def test_the_clock_leaves_idle_times_and_large_steps_out() -> None:
    clock = DecodeClock(64)
    for rows, goes_on, now in (
        (500, False, 0.0),  # a prompt
        (1, True, 5.0),  # its decodes
        (1, True, 6.0),
        (8, True, 7.5),
        (1, False, 100.0),  # after a pause
        (65, True, 101.0),
        (1, True, 150.0),
    ):
        clock.begin(rows, goes_on, now)
    assert clock.seconds == 1.0 + 1.5 + 1.0


def test_missed_bytes_take_what_they_did_at_the_rate_of_their_time() -> None:
    """A rate that is corrected later changes nothing that has been counted."""
    floor = FloorClock()
    assert floor.seconds(500, 0.0) == 0.0, "before the rates are measured"
    assert floor.seconds(900, 100.0) == 4.0
    assert floor.seconds(900, 400.0) == 4.0
    assert floor.seconds(1700, 400.0) == 6.0


def test_a_reset_goes_on_where_nothing_can_be_reported(tmp_path: Path) -> None:
    reporter = Reporter(lambda: Totals(hits=3), tmp_path / "gone")
    with reporter.restarting():
        pass


def test_nobody_who_asks_gets_no_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(metrics.FOLDER_VARIABLE, raising=False)
    assert metrics.reporter(Totals) is None
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path / "gone"))
    assert metrics.reporter(Totals) is None
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, str(tmp_path))
    assert metrics.reporter(Totals) is not None


def test_every_engine_of_a_process_is_collected_from_its_own_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, "")
    monkeypatch.setattr(metrics, "_collector", None)
    registry = CollectorRegistry()
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    for hits in (3, 4):
        metrics.offer()
        totals = Totals(hits=hits)
        folder = Path(os.environ[metrics.FOLDER_VARIABLE])
        Reporter(lambda totals=totals: totals, folder).report()
    got = page(registry)
    assert 'vllm_moe_offload_hits_total{engine="0"} 3.0' in got
    assert 'vllm_moe_offload_hits_total{engine="1"} 4.0' in got


def test_an_api_server_makes_no_folder_beside_that_of_who_started_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metrics.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(metrics, "_collector", None)
    monkeypatch.setattr(metrics, "REGISTRY", CollectorRegistry())
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv(metrics.FOLDER_VARIABLE, "")
    metrics.offer()  # vLLM's main process
    (folder,) = tmp_path.iterdir()
    assert os.environ[metrics.FOLDER_VARIABLE] == str(folder)
    metrics.offer()  # each of its API servers
    assert list(tmp_path.iterdir()) == [folder]
    assert os.environ[metrics.FOLDER_VARIABLE] == str(folder)
