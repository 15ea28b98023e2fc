"""Running contestants: one engine and one process each, so that none can end the run of another."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench import models, rates
from bench.arguments import known, number, positive, rows_file
from bench.child import ROUTING_VARIABLE, TURN
from bench.common import ROOT, SIMULATED, SWITCHING, Row, Run, append, ended_by
from bench.contestants import OURS, STOCK, make

_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): .+")
_COUNTED = re.compile(r"\d+ validation errors? for ")
_LEAST = 20.0  # seconds an engine is not started below


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark of engines has."""
    add = parser.add_argument
    add("--json", type=rows_file, help="file the rows are appended to")
    add("--model", default="qwen3-30b-a3b", help=f"{', '.join(models.MODELS)}, or a folder")
    add("--layers", type=number, help="of the model, the first ones; default 24, a folder's: all")
    add("--format", choices=models.FORMATS, default="bf16", help="ignored for a folder")
    add("--dtype", default="auto", help="as vLLM's")
    add("--load-format", default="dummy", help="as vLLM's")
    add(
        "--contestants",
        type=_contestants,
        default=["auto", "vllm-uva", "vllm-prefetch", "vllm-gpu"],
        help=", ".join((*OURS, *STOCK)),
    )
    add("--slots", type=int, help="experts a layer on the GPU; default a fifth of them")
    add("--runner", choices=("v1", "v2"), default="v1", help="vLLM's model runner")
    add("--eager", action="store_true", help="no CUDA graphs for anybody")
    add("--kv-gib", type=positive, default=4.0, help="KV cache")
    add("--deadline", type=positive, default=570.0, help="seconds for the whole run")
    add("--timeout", type=positive, default=300.0, help="seconds for one contestant")
    add("--seconds", type=positive, default=6.0, help="about so long for one figure")
    add(
        "--gpus", type=_gpus, default=1, help="engines that start at once, each on a GPU of its own"
    )
    add(
        "--together",
        type=number,
        default=1,
        help="engines that start at once on one GPU, which then needs memory for all of them",
    )
    add(
        "--turns",
        type=Path,
        help="folder by which runs on one machine agree, each on GPUs and CPUs of its own: all "
        "start their engines, then they measure one after another",
    )
    add("--runs", type=number, default=1, help="how many share the folder of --turns")
    add("--logs", type=Path, help="folder for what the engines print")
    add("--commit", help="of the code, where it is not a clone")


def _contestants(text: str) -> list[str]:
    return known(text, (*OURS, *STOCK))


def _gpus(text: str) -> int:
    import torch

    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    count = int(text)
    if count > 1 and count > torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{count}: this machine shows torch {torch.cuda.device_count()} CUDA devices, give no "
            "more than those, or 1"
        )
    return count


def routings(text: str) -> list[str]:
    """``uniform,local`` as a list; ``model`` is the model's own."""
    return known(text, (*SIMULATED, "model"))


def step_routings(text: str) -> list[str]:
    """As `routings`; ``switching`` is the simulated ones in turns."""
    return known(text, (*SIMULATED, SWITCHING, "model"))


@dataclass(frozen=True)
class Cell:
    """What one figure of an engine is measured at."""

    routing: str
    batch: int | None = None
    tokens: int | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether the routing is imposed."""
        return self.routing != "model"

    @property
    def metric(self) -> str:
        """What is measured at it: a decode step, a prefill, or with neither the loading."""
        if self.batch is not None:
            return "step_ms"
        return "load_s" if self.tokens is None else "ttft_ms"

    @property
    def bench(self) -> str:
        """The benchmark whose figure it is; one run can have those of several."""
        return {"step_ms": "decode", "ttft_ms": "prefill", "load_s": "load"}[self.metric]

    def keys(self) -> dict[str, Any]:
        """As keys of a row, those that apply."""
        given = {"routing": self.routing, "batch": self.batch, "tokens": self.tokens}
        return {name: value for name, value in given.items() if value is not None}


class Process:
    """A `bench.child`, which imports vLLM and waits for its order.

    Args:
        environment: Its environment.
        cpus: The processors it may use.
        handle: What it prints goes there.
        log: The file of it.
    """

    def __init__(self, environment: dict[str, str], cpus: set[int], handle: int, log: Path) -> None:
        self.log = log
        with os.fdopen(handle, "w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.child"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            )

    def tell(self, line: str) -> None:
        """Write it a line; one that has ended hears nothing, and `wait` says why it has."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def runs_until(self, has_come: Callable[[], bool], until: float) -> bool:
        """Wait until something has come or it has ended; whether it was not ended for that.

        until: by `time.monotonic`, when it is.
        """
        while self.is_running and not has_come():
            if time.monotonic() > until:
                self.end()
                return False
            time.sleep(0.05)
        return True

    def wait(self, seconds: float) -> str | None:
        """Wait for its end, which comes then at the latest; what went wrong, if anything.

        Of what a signal has ended (memory that ran out, say) the last words are no reason.
        """
        try:
            self._process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            self.end()
            return f"stopped after {max(seconds, 0):.0f} s"
        status, said = self._process.returncode, reason(self.log.read_text())
        if killed := ended_by(status):
            return f"{killed}, having said: {said}"
        return None if status == 0 else said

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


@dataclass
class Attempt:
    """One engine of one contestant. `note`: why it has no process, or what went wrong with it."""

    name: str
    cells: list[Cell]
    slots: int | None = None
    process: Process | None = None
    result: Path | None = None
    note: str | None = None

    def figures(self) -> list[dict[str, Any]]:
        """What the process has measured so far."""
        return [figure for figure in self._written() if figure["metric"] != TURN]

    @property
    def has_started(self) -> bool:
        """Whether its engine is up and waits for its turn."""
        return any(figure["metric"] == "start_s" for figure in self._written())

    @property
    def turns(self) -> int:
        """How often it has done what it was told to."""
        return sum(figure["metric"] == TURN for figure in self._written())

    def _written(self) -> list[dict[str, Any]]:
        if self.result is None or not self.result.is_file():
            return []
        lines = self.result.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


class Session:
    """A run over contestants: its model, its deadline and its rows."""

    def __init__(self, bench: str, options: argparse.Namespace, folder: Path) -> None:
        import torch

        if not options.eager and not torch.cuda.is_available():
            raise SystemExit(
                "torch finds no GPU here: give --eager, and a small model (--model FOLDER)"
            )
        self._ends = time.monotonic() + options.deadline
        self.options = options
        self.folder = folder
        self.run = Run.here(bench, options.commit, len(self.cpus(0)))
        self.model = self._model()
        try:
            self.shape = models.Shape.of(self.model, options.dtype)
        except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as e:
            said = (
                e if isinstance(e, OSError | ValueError) else f"its config.json has no shape: {e}"
            )
            raise SystemExit(f"--model {options.model}: {said}") from None
        if options.slots is not None and not 1 <= options.slots <= self.shape.experts:
            raise SystemExit(f"--slots {options.slots}: give 1 to {self.shape.experts}")
        if options.runs > 1 and options.turns is None:
            raise SystemExit(f"--runs {options.runs}: they share the folder of --turns, give one")
        self.slots: int = options.slots or max(1, round(self.shape.experts / 5))
        self.rows: list[Row] = []
        self._numbered = 0
        self._at_once: int = options.gpus * options.together
        self._started: list[Process] = []
        self._waiting: list[list[Process]] = [[] for _ in range(options.gpus)]
        self._machine: rates.Machine | None = None
        self._samples: list[rates.Figures] = []

    @property
    def seconds_left(self) -> float:
        """Until the run's deadline."""
        return max(self._ends - time.monotonic(), 0.0)

    @property
    def vocabulary(self) -> int:
        """The model's."""
        return int(self._config["vocab_size"])

    def check_length(self, positions: int, options: str = "--tokens") -> None:
        """SystemExit where no request of the model can be of so many tokens, by these options."""
        most = self._config.get("max_position_embeddings")
        scaling = (self._config.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
        if most is not None and positions > most and not any("factor" in each for each in scaling):
            raise SystemExit(
                f"a request of {positions} tokens, what it is answered with included, was asked "
                f"for, and {self.options.model} has {most} positions: give less for {options}"
            )

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config

    def common(self) -> dict[str, Any]:
        """Keys that all rows of this session share."""
        named = self.options.model in models.MODELS
        return {
            "model": self.options.model if named else Path(self.options.model).name,
            "layers": self.shape.layers,
            "format": self.options.format if named else self.options.dtype,
            "tensor_parallel": 1,
        }

    def add(self, rows: list[Row]) -> None:
        """Keep rows, and write them down at once."""
        self.rows += rows
        if self.options.json:
            append(self.options.json, rows)

    def value(self, contestant: str, metric: str, **keys: Any) -> float | None:
        """A figure of this session, or None when it was not or could not be measured."""
        wanted = {"contestant": contestant, "metric": metric, **keys}
        for row in self.rows:
            if all(row[key] == value for key, value in wanted.items()):
                return row["value"]
        return None

    def floor(self, cell: Cell, value: float | str) -> None:
        """A lower bound, or why there is none."""
        got = {"note": value} if isinstance(value, str) else {"value": value, "repeats": 1}
        keys = self.common() | cell.keys() | {"slots": self.slots}
        who = {"bench": cell.bench, "contestant": "floor", "metric": cell.metric, "unit": "ms"}
        self.add([self.run.row(**who, **keys, **got)])

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Measuring by itself, when every run that shares a folder with this one has come so far.

        Those that have ended are waited for no more, nor those that have not come in time, the
        timeout of a contestant; nor another's turn, when this run's deadline has come.
        """
        folder: Path | None = self.options.turns
        if folder is None:
            yield
            return
        self._come()
        until = min(time.monotonic() + self.options.timeout, self._ends)
        while len(list(folder.glob("*.here"))) < self.options.runs and time.monotonic() < until:
            time.sleep(0.05)
        with (folder / "turn").open("w") as file:
            while not _locked(file) and self.seconds_left > 0:
                time.sleep(0.05)
            yield

    def compete(self, names: list[str], cells: list[Cell], engine: dict[str, Any]) -> None:
        """Measure every cell of every contestant, and the machine's rates; keep the rows.

        Engines that start at once, on several GPUs or together on one, take turns when all have
        started, cell by cell: a machine that others use too is not the same a minute later. Its
        rates, for pieces of this model's expert, are measured before each cell and behind it.
        Simulated routings share an engine; the model's own needs one without the simulator.
        """
        around: dict[Cell, list[rates.Figures]] = {cell: [] for cell in cells}
        simulated = [cell for cell in cells if cell.is_simulated]
        for part in (simulated, [cell for cell in cells if not cell.is_simulated]):
            for at in range(0, len(names) if part else 0, self._at_once):
                together = names[at : at + self._at_once]
                attempts = [
                    self._begin(name, part, engine, i % self.options.gpus)
                    for i, name in enumerate(together)
                ]
                try:
                    self._await_start(attempts)
                    with self.turn():
                        self._measure(attempts, part, around)
                except BaseException:
                    self._ends = time.monotonic()  # what has been measured is kept
                    raise
                finally:
                    for attempt in attempts:
                        self.add(self._finish(attempt))
        keys = self.common()
        self.add(rates.rows(self.run, rates.pooled(self._samples), **keys))
        for cell in cells:
            figures = rates.pooled(around[cell])
            self.add(rates.rows(self.run, figures, **keys, **cell.keys(), bench=cell.bench))

    def _measure(
        self, attempts: list[Attempt], cells: list[Cell], around: dict[Cell, list[rates.Figures]]
    ) -> None:
        """Every cell of engines that are up, and the machine around each, as long as any is."""

        def take_turns() -> bool:
            for attempt in attempts:
                self._await_turn(attempt)
            return any(attempt.process and attempt.process.is_running for attempt in attempts)

        if not take_turns():  # to get ready
            return
        self._sample()
        for cell in cells:
            goes_on = take_turns()
            self._sample()
            around[cell] += self._samples[-2:]
            if not goes_on:
                break

    def _sample(self) -> None:
        """What the machine does now."""
        if self._machine is None:
            self._machine = rates.Machine(self.shape.expert_bytes, self.cpus(0))
        self._samples.append(self._machine.sample())

    def _await_turn(self, attempt: Attempt) -> None:
        """Let an engine do what comes next, and wait until it has."""
        process, done = attempt.process, attempt.turns
        if process is None or not process.is_running:
            return
        process.tell("go")
        began = time.monotonic()
        until = min(began + self.options.timeout, self._ends)
        if not process.runs_until(lambda: attempt.turns > done, until):
            attempt.note = f"stopped after {time.monotonic() - began:.0f} s"

    def figures(self, name: str, cells: list[Cell], engine: dict[str, Any]) -> list[Row]:
        """The rows of one engine; a cell that was not reached is a row that says why."""
        return self._finish(self._begin(name, cells, engine, 0))

    def _begin(self, name: str, cells: list[Cell], engine: dict[str, Any], gpu: int) -> Attempt:
        """Let an engine start."""
        attempt = Attempt(name, cells)
        if self._ends - time.monotonic() < _LEAST:
            attempt.note = f"not started: {self.options.deadline:.0f} s for the run are over"
            return attempt
        try:
            contestant = make(name, self.shape, self.slots)
        except ValueError as error:  # ConfigError included: settings that this release refuses
            attempt.note = str(error)
            return attempt
        attempt.slots = contestant.slots
        self._numbered += 1
        base = self.folder / f"{self._numbered:02}-{contestant.name}"
        attempt.result = base.with_suffix(".jsonl")
        order = {
            "task": self.run.bench,
            "repeats": self.options.repeats if self.run.bench == "load" else 1,
            "ours": contestant.name in OURS,
            # It finds that by itself, where nobody else takes the memory meanwhile.
            "all_fit": contestant.name == "auto" and contestant.slots == self.shape.experts,
            "stock_offload": contestant.name in ("vllm-uva", "vllm-prefetch"),
            "engine": self.engine() | engine | contestant.engine,
            "cells": [cell.keys() for cell in cells],
            # The first of those that are exchanged while the engine runs.
            "routing": SIMULATED[0] if cells[0].is_simulated else None,
            "seconds": self.options.seconds,
            "result": str(attempt.result),
        }
        base.with_suffix(".json").write_text(json.dumps(order))
        waiting = self._waiting[gpu]
        attempt.process = waiting.pop(0) if waiting else self._process(gpu)
        attempt.process.tell(str(base.with_suffix(".json")))
        return attempt

    def _await_start(self, attempts: list[Attempt]) -> None:
        """Return when every engine is up, has ended, or has taken too long."""
        until = min(time.monotonic() + self.options.timeout, self._ends)
        for attempt in attempts:
            process = attempt.process
            if process and not process.runs_until(lambda a=attempt: a.has_started, until):
                attempt.note = f"not started after {self.options.timeout:.0f} s"

    def _finish(self, attempt: Attempt) -> list[Row]:
        """Wait for an engine's end: its rows, those of what was not measured too."""
        process = attempt.process
        if process is not None:
            left = self._ends - time.monotonic()
            note = process.wait(min(self.options.timeout, left))
            attempt.note = attempt.note or note
            if self.options.logs and attempt.result is not None:
                self.options.logs.mkdir(parents=True, exist_ok=True)
                shutil.copy(process.log, self.options.logs / f"{attempt.result.stem}.log")
        measured = attempt.figures()
        keys = self.common() | {"slots": attempt.slots, "contestant": attempt.name}
        made = [
            self.run.row(**keys, **figures, **({"bench": "prefill"} if "tokens" in figures else {}))
            for figures in measured
        ]
        for cell in attempt.cells:
            wanted = cell.keys() | {"metric": cell.metric}
            if not any(wanted.items() <= f.items() for f in measured):
                missing = {
                    "bench": cell.bench,
                    "unit": "s" if cell.metric == "load_s" else "ms",
                    "note": attempt.note or "nothing was measured",
                }
                made.append(self.run.row(**keys, **wanted, **missing))
        return made

    def prepare(self, count: int) -> None:
        """Start processes for so many contestants: importing vLLM takes most of a start."""
        for index in range(count):
            gpu = index % self.options.gpus
            self._waiting[gpu].append(self._process(gpu))

    def _come(self) -> None:
        """Let no other run wait for this one."""
        if self.options.turns is not None:
            self.options.turns.mkdir(parents=True, exist_ok=True)
            (self.options.turns / f"{self.run.run}.here").touch()

    def close(self) -> None:
        """End every process that has not ended: those that got no order, and those at work."""
        for process in self._started:
            process.end()
        if self._machine is not None:
            self._machine.close()
        self._come()

    def _process(self, gpu: int) -> Process:
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if self.options.runner == "v2" else "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop(ROUTING_VARIABLE, None)
        if self.options.gpus > 1:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else [str(i) for i in range(self.options.gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = names[gpu]
        handle, log = tempfile.mkstemp(suffix=".log", dir=self.folder)
        process = Process(environment, self.cpus(gpu), handle, Path(log))
        self._started.append(process)
        return process

    def cpus(self, gpu: int) -> set[int]:
        """The processors of one GPU's engine: an equal share of those there are, side by side."""
        allowed = sorted(os.sched_getaffinity(0))
        share = max(len(allowed) // self.options.gpus, 1)
        return set(allowed[gpu * share : (gpu + 1) * share]) or set(allowed)

    def engine(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` that all contestants have in common."""
        return {
            "model": str(self.model),
            "dtype": self.options.dtype,
            "load_format": self.options.load_format,
            "skip_tokenizer_init": True,
            "enforce_eager": self.options.eager,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": int(self.options.kv_gib * 2**30),
            # What others take on the GPU counts as an engine's own, and has to be free of what is
            # asked for here too.
            "gpu_memory_utilization": 0.9 if self.options.together == 1 else 0.5,
            "seed": 0,
        }

    def _model(self) -> Path:
        if self.options.model in models.MODELS:
            layers = self.options.layers or 24
            target = self.folder / "model"
            return models.write_config(self.options.model, layers, self.options.format, target)
        folder = Path(self.options.model).resolve()
        if not (folder / "config.json").is_file():
            known = ", ".join(models.MODELS)
            raise SystemExit(f"--model {self.options.model}: not one of {known}, and no folder")
        if self.options.layers is not None:
            raise SystemExit("--layers cuts the models known by name; a folder is taken as it is")
        return folder


def reason(log: str) -> str:
    """What says most of a failed engine's output: the last line that names an error.

    With the one behind it where that says which error it is, as pydantic's do.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [
        " ".join([found[0], *(lines[at + 1 : at + 2] if _COUNTED.search(line) else [])])
        for at, line in enumerate(lines)
        if (found := _ERROR.search(line))
    ]
    return (named or lines or ["ended without a word"])[-1][:300]


def _locked(file: IO[str]) -> bool:
    """Whether this process has the file now, which one has at a time until it closes it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def session(bench: str, options: argparse.Namespace) -> Iterator[Session]:
    """A session in a temporary folder; asked to end (SIGTERM), it ends what it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix=f"bench-{bench}-") as folder:
        made = Session(bench, options, Path(folder))
        try:
            yield made
        finally:
            made.close()
