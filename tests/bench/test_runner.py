"""Runs that share a machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from bench import runner
from bench.rates import METRICS
from bench.runner import Cell, Session


def test_runs_that_share_a_folder_measure_when_all_are_there_and_one_at_a_time(
    tmp_path: Path,
) -> None:
    events: list[str] = []

    def runs(name: str, starts: float) -> None:
        session = Session.__new__(Session)
        session.options = Namespace(turns=tmp_path / "turns", runs=3, timeout=20.0)
        session.run = SimpleNamespace(run=name)
        session._ends = time.monotonic() + 20
        time.sleep(starts)
        events.append("there")
        for _ in range(2):  # a run with several groups of engines is counted once
            with session.turn():
                events.append(f"{name} begins")
                time.sleep(0.05)
                events.append(f"{name} ends")

    threads = [Thread(target=runs, args=(f"run {i}", 0.2 * i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[:3] == ["there"] * 3
    pairs = list(zip(events[3::2], events[4::2], strict=True))
    assert len(pairs) == 6
    assert all(begins.replace("begins", "ends") == ends for begins, ends in pairs), events


def test_of_a_run_that_is_asked_to_end_what_was_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engines(tmp_path, monkeypatch)

    class Machine:
        sampled = 0

        def __init__(self, *_: Any) -> None: ...

        def sample(self) -> dict[str, Any]:
            self.sampled += 1
            if self.sampled == 2:  # behind the first cell
                sys.exit(143)
            return dict.fromkeys(METRICS, [1.0] * 3)

        def close(self) -> None: ...

    monkeypatch.setattr(runner.rates, "Machine", Machine)
    kept = tmp_path / "rows.json"
    options, began = parsed("--together", "2", "--json", str(kept)), time.monotonic()
    cells = [Cell("uniform", batch=1), Cell("uniform", batch=8)]
    with pytest.raises(SystemExit, match="143"), runner.session("decode", options) as session:
        session.compete(["vllm-uva", "vllm-gpu"], cells, {})
    assert time.monotonic() - began < 20, "engines that wait for their turn are not waited for"
    steps = [row for row in json.loads(kept.read_text()) if row["metric"] == "step_ms"]
    assert [(row["batch"], row["value"]) for row in steps] == 2 * [(1, 2.0), (8, None)]


def test_a_run_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    session = Session.__new__(Session)
    session.options = Namespace(turns=tmp_path, runs=2, timeout=0.2)
    session.run = SimpleNamespace(run="alone")
    session._ends = time.monotonic() + 20
    with session.turn():
        assert time.monotonic() < session._ends - 15


def test_a_turn_that_lasts_beyond_the_deadline_is_not_waited_for(tmp_path: Path) -> None:
    """Else the run would end without saying what it has not measured."""

    def run(name: str, seconds: float) -> Session:
        session = Session.__new__(Session)
        session.options = Namespace(turns=tmp_path, runs=2, timeout=0.0)
        session.run = SimpleNamespace(run=name)
        session._ends = time.monotonic() + seconds
        return session

    late = run("late", 0.3)
    with run("first", 20).turn():
        began = time.monotonic()
        with late.turn():
            assert time.monotonic() >= late._ends
        assert time.monotonic() - began < 10


def test_a_run_that_has_failed_is_not_waited_for(tmp_path: Path) -> None:
    def run(name: str) -> Session:
        session = Session.__new__(Session)
        session.options = Namespace(turns=tmp_path / "turns", runs=2, timeout=20.0)
        session.run = SimpleNamespace(run=name)
        session._ends = time.monotonic() + 20
        session._started, session._machine = [], None
        return session

    run("failed before its turn").close()
    other = run("other")
    with other.turn():
        assert time.monotonic() < other._ends - 15


def parsed(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    runner.arguments(parser)
    return parser.parse_args(["--eager", *arguments])


ENGINE = """
import json, os, sys
order = json.load(open(sys.stdin.readline().strip()))
name = order["result"].rpartition("-")[2].removesuffix(".jsonl")  # uva or gpu

def write(metric, **keys):
    with open(order["result"], "a") as file:
        file.write(json.dumps({"metric": metric, "unit": "ms", "value": 2.0, **keys}) + "\\n")

write("start_s")
for cell in (None, *order["cells"]):
    assert sys.stdin.readline() == "go\\n"
    with open(os.environ["EVENTS"], "a") as file:
        file.write(f"{name} {cell and cell['batch']}\\n")
    if (name, cell) == (os.environ["FAILS"], order["cells"][0]):
        sys.exit("RuntimeError: out of slots")
    if (name, cell) == (os.environ["HANGS"], order["cells"][0]):
        sys.stdin.readline()
    if cell:
        write("step_ms", **cell)
    write("turn")
"""


def make_engines(folder: Path, patch: pytest.MonkeyPatch, fails: str = "", hangs: str = "") -> Path:
    """Engines are such ones from now on; what they and the machine do is in the file returned."""
    events, engine = folder / "events", folder / "engine"
    (folder / "engine.py").write_text(ENGINE)
    engine.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'engine.py'}\n")
    engine.chmod(0o755)
    patch.setattr(sys, "executable", str(engine))
    for name, value in (("EVENTS", str(events)), ("FAILS", fails), ("HANGS", hangs)):
        patch.setenv(name, value)
    return events


@pytest.mark.parametrize(
    ("fails", "hangs"), [("", ""), ("gpu", ""), ("", "uva"), ("gpu", "uva")], ids=str
)
def test_engines_take_turns_cell_by_cell_and_the_machine_is_measured_around(
    fails: str, hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = make_engines(tmp_path, monkeypatch, fails, hangs)
    asked: list[tuple[int, set[int]]] = []
    samples = iter(range(1, 9))

    class Machine:
        def __init__(self, piece: int, cpus: set[int]) -> None:
            asked.append((piece, cpus))

        def sample(self) -> dict[str, Any]:
            with events.open("a") as file:
                file.write("machine\n")
            return dict.fromkeys(METRICS, [float(next(samples))] * 3)

        def close(self) -> None:
            asked.clear()

    monkeypatch.setattr(runner.rates, "Machine", Machine)
    cells = [Cell("uniform", batch=1), Cell("uniform", batch=8)]
    options = parsed("--together", "2", "--timeout", "5")
    with runner.session("decode", options) as session:
        session.compete(["vllm-uva", "vllm-gpu"], cells, {})
        assert asked == [(session.shape.expert_bytes, os.sched_getaffinity(0))]
        rows = session.rows
    assert not asked  # closed
    first = ["uva None", "gpu None", "machine", "uva 1", "gpu 1", "machine"]
    second = [f"{n} 8" for n in ("uva", "gpu") if n not in (fails, hangs)]
    assert events.read_text().split("\n")[:-1] == first + ([*second, "machine"] if second else [])

    def figure(contestant: str, **keys: Any) -> tuple[Any, Any]:
        (row,) = [
            r
            for r in rows
            if r["contestant"] == contestant and all(r[k] == v for k, v in keys.items())
        ]
        return row["value"], row.get("note")

    for name in ("uva", "gpu"):
        for cell in cells:
            got = figure(f"vllm-{name}", metric="step_ms", **cell.keys())
            if name == fails:
                assert got == (None, "RuntimeError: out of slots")
            elif name == hangs:
                assert got == (None, "stopped after 5 s")
            else:
                assert got == (2.0, None)
    read = {"contestant": "machine", "metric": "read_gb_per_s"}
    last = 3 if second else 2
    assert figure(**read, batch=None) == ((1 + last) / 2, None)
    assert figure(**read, **cells[0].keys()) == (1.5, None)
    assert figure(**read, **cells[1].keys()) == ((2.5, None) if second else (None, "not measured"))


def test_what_a_signal_has_ended_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, log = tmp_path / "engine", tmp_path / "log"
    engine.write_text("#!/bin/sh\necho loading\nkill -9 $$\n")
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    handle = os.open(log, os.O_CREAT | os.O_WRONLY)
    process = runner.Process(dict(os.environ), os.sched_getaffinity(0), handle, log)
    assert process.wait(20) == "ended by SIGKILL, having said: loading"


def test_runs_without_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--runs 2: they share the folder of --turns"):
        Session("decode", parsed("--runs", "2"), tmp_path)


def test_graphs_without_a_gpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed()
    options.eager = False
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here: give --eager, and a small model"):
        Session("decode", options, tmp_path)


def test_asked_to_end_a_run_ends_engines_that_wait_and_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, at_work, engine = (tmp_path / name for name in ("pids", "at_work", "engine"))
    engine.write_text(
        f"#!/bin/sh\necho $$ >> {pids}\nread order && touch {at_work}\nexec sleep 60\n"
    )
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))

    def ask() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if at_work.is_file() and pids.read_text().count("\n") == 2:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"), runner.session("decode", parsed()) as s:
            s.prepare(2)
            Thread(target=ask).start()
            s.figures("vllm-gpu", [Cell("uniform", batch=1)], {})
    finally:
        signal.signal(signal.SIGTERM, before)
    started = pids.read_text().split()
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "no JSON object"),
        ('{"a": 1}', "none of hidden_size"),
        ('{"hidden_size": 8, "intermediate_size": 8, "quantization_config": [1]}', "has no shape"),
    ],
)
def test_a_folder_that_says_no_shape_is_refused(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(SystemExit, match=f"--model {tmp_path}: .*{message}"):
        Session("decode", parsed("--model", str(tmp_path)), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_request_longer_than_the_models_positions_is_refused(
    more: dict[str, object], tmp_path: Path
) -> None:
    def session(**config: object) -> Session:
        (tmp_path / "config.json").write_text(json.dumps(config))
        made = Session.__new__(Session)
        made.model, made.options = tmp_path, Namespace(model="demo")
        return made

    made = session(max_position_embeddings=1024, rope_scaling=None, **more)
    made.check_length(1024)
    with pytest.raises(SystemExit, match=r"of 1025 tokens.*demo has 1024 pos.* less for --tokens$"):
        made.check_length(1025)
    with pytest.raises(SystemExit, match=r"less for --tokens and --room$"):
        made.check_length(1025, "--tokens and --room")
    session(max_position_embeddings=1024, rope_scaling={"factor": 4.0}).check_length(4096)
    session().check_length(4096)
