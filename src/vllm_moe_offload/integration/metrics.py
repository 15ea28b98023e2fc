"""Counters while serving: a line in the log, and metrics beside vLLM's own.

The layers count in the worker's process, and vLLM answers ``/metrics`` in that of the API server.
A thread of the worker reads the counters once an interval and writes them to a file; a collector of
the API server's registry reads it when it is asked. The folder of the file is handed down in the
environment. With several API servers vLLM has set PROMETHEUS_MULTIPROC_DIR, through which
prometheus_client then does the same.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import vllm.envs as envs
from prometheus_client import REGISTRY, Counter, values
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override
from vllm.logger import init_logger

from vllm_moe_offload.amounts import amount

logger = init_logger(f"vllm.{__name__}")

# Not one of vLLM's by its name: those are part of the key of compiled graphs, and this is another
# at every start.
FOLDER_VARIABLE = "MOE_OFFLOAD_METRICS_DIR"
_PREFIX = "vllm_moe_offload"
# Engines of one process have a number each.
_numbers = itertools.count()


@dataclass(frozen=True)
class Totals:
    """Sums over the layers since they began to count, but for steps and tokens: of one layer.

    `bytes_cpu`: of the experts that the CPU computed. `decode_seconds`: of steps that the device
    decided on and that others followed at once; `floor_seconds`: what the bytes that these steps
    missed take at the rates of both lanes together, 0 where they have not been measured.
    """

    steps: int = 0
    tokens: int = 0
    streamed_steps: int = 0
    hits: int = 0
    misses: int = 0
    bytes_fetched: int = 0
    bytes_cpu: int = 0
    bytes_streamed: int = 0
    bytes_kept: int = 0
    decode_seconds: float = 0.0
    floor_seconds: float = 0.0


@dataclass(frozen=True)
class _Metric:
    """A counter of Prometheus and the fields that are its values, by the value of its label."""

    name: str
    text: str
    fields: dict[str, str]

    @property
    def labels(self) -> list[str]:
        return ["engine", *(["lane"] if "" not in self.fields else [])]

    def values(self, engine: str, totals: dict[str, Any]) -> Iterator[tuple[list[str], float]]:
        for lane, field in self.fields.items():
            yield [engine, *([lane] if lane else [])], totals[field]


METRICS = (
    _Metric("steps", "Steps of an offloaded layer.", {"": "steps"}),
    _Metric("tokens", "Tokens that passed through an offloaded layer.", {"": "tokens"}),
    _Metric("streamed_steps", "Steps that streamed layers.", {"": "streamed_steps"}),
    _Metric(
        "hits",
        "Used experts that were in a slot, summed over layers; streamed steps count none.",
        {"": "hits"},
    ),
    _Metric(
        "misses",
        "Used experts that were in no slot, of the same steps; none in the modes cpu and stream.",
        {"": "misses"},
    ),
    _Metric(
        "bytes",
        "Bytes of experts, summed over layers: fetched into slots, computed on the CPU, streamed "
        "through buffers, kept of these in slots.",
        {
            "fetched": "bytes_fetched",
            "cpu": "bytes_cpu",
            "streamed": "bytes_streamed",
            "kept": "bytes_kept",
        },
    ),
    _Metric("decode_seconds", "Seconds of decode steps.", {"": "decode_seconds"}),
    _Metric(
        "decode_floor_seconds",
        "Seconds that the bytes missed in them take at the measured rates of both lanes.",
        {"": "floor_seconds"},
    ),
)


class DecodeClock:
    """How long decode steps take, from one to the next, idle times left out.

    most: rows of the largest step that counts.
    """

    def __init__(self, most: int) -> None:
        self.seconds = 0.0
        self._most = most
        self._rows = 0
        self._began = 0.0

    def begin(self, rows: int, goes_on: bool, now: float) -> None:
        """A step begins. goes_on: some of its requests have been running, so that none was idle."""
        if goes_on and 0 < self._rows <= self._most:
            self.seconds += now - self._began
        self._rows, self._began = rows, now


class FloorClock:
    """Seconds that missed bytes take, each at the rate that was known when they were missed."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._missed = 0

    def seconds(self, missed: int, rate: float) -> float:
        """Of all bytes missed, `missed`; those since the last call at `rate` a second, 0: none."""
        if rate:
            self._seconds += (missed - self._missed) / rate
        self._missed = missed
        return self._seconds


class Reporter:
    """A thread of the worker that reports at first and then once an interval.

    What it reports are sums since it began, which no reset of what it reads takes anything from.

    read: gives what has been counted; folder: where the file is written.
    """

    def __init__(self, read: Callable[[], Totals], folder: Path) -> None:
        self._read = read
        self._file = folder / f"{os.getpid()}-{next(_numbers)}.json"
        self._interval = envs.VLLM_LOG_STATS_INTERVAL
        self._before = Totals()
        self._sums = asdict(Totals())
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._shared = _shared() if "PROMETHEUS_MULTIPROC_DIR" in os.environ else {}
        self._thread = threading.Thread(target=self._run, name="moe-offload-metrics", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def close(self) -> None:
        """Report no more. May be called twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def report(self) -> None:
        """Once."""
        with self._lock:
            self._report()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, nothing is read: what is counted in is exchanged."""
        with self._lock:
            yield

    @contextmanager
    def restarting(self) -> Iterator[None]:
        """Inside, what is read is set to zero; what has been counted until then is reported."""
        with self._lock:
            try:
                self._report()
            except Exception:
                logger.exception("moe_offload: what was counted last is in no metric")
            try:
                yield
            finally:
                self._before = Totals()

    def _report(self) -> None:
        totals = self._read()
        before = asdict(self._before)
        since = {name: value - before[name] for name, value in asdict(totals).items()}
        self._before = totals
        for name, value in since.items():
            self._sums[name] += value
        half = self._file.with_suffix(".part")
        half.write_text(json.dumps(self._sums))
        half.replace(self._file)
        for metric in METRICS if self._shared else ():
            for labels, value in metric.values("0", since):
                self._shared[metric.name].labels(*labels).inc(value)
        if since["steps"]:
            logger.info("moe_offload: %s", line(Totals(**since)))

    def _run(self) -> None:
        try:
            self.report()
            while not self._stop.wait(self._interval):
                self.report()
        except Exception:
            logger.exception("moe_offload: no metrics from now on")


def line(since: Totals) -> str:
    """What was done in an interval, in words."""
    used = since.hits + since.misses
    words = [_steps(since.steps)]
    if used:
        words.append(f"{100 * since.hits / used:.1f}% of the used experts in slots")
    words.append(
        f"{amount(since.bytes_fetched)} fetched, {amount(since.bytes_cpu)} on the CPU, "
        f"{amount(since.bytes_streamed)} streamed in {_steps(since.streamed_steps)}"
    )
    if since.floor_seconds and since.decode_seconds:
        share = 100 * since.floor_seconds / since.decode_seconds
        words.append(f"decode at {share:.0f}% of its floor")
    return ", ".join(words)


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


class FolderCollector(Collector):
    """Metrics out of the files of this process's engines; the first one's label is ``0``."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    @override
    def collect(self) -> Iterator[CounterMetricFamily]:
        found = []
        for folder in self.folders:
            for file in sorted(folder.glob("*.json")):
                found.append(asdict(Totals()) | json.loads(file.read_text()))
        for metric in METRICS if found else ():
            family = CounterMetricFamily(
                f"{_PREFIX}_{metric.name}", metric.text, labels=metric.labels
            )
            for number, totals in enumerate(found):
                for labels, value in metric.values(str(number), totals):
                    family.add_metric(labels, value)
            yield family


_collector: FolderCollector | None = None


def offer() -> None:
    """In the process that makes an engine's configuration: offer its metrics, and let it report."""
    global _collector
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ and _is_offered():
        # By the process that started this one, an API server, which vLLM ends by killing it: a
        # folder of its own would be left, and nobody reads it.
        return
    folder = Path(tempfile.mkdtemp(prefix="moe-offload-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[FOLDER_VARIABLE] = str(folder)
    if _collector is None:
        _collector = FolderCollector()
        REGISTRY.register(_collector)
    _collector.folders.append(folder)


def reporter(read: Callable[[], Totals]) -> Reporter | None:
    """In the worker: what reports, or None where nobody has asked for it."""
    return Reporter(read, Path(os.environ[FOLDER_VARIABLE])) if _is_offered() else None


def _is_offered() -> bool:
    folder = os.environ.get(FOLDER_VARIABLE, "")
    return bool(folder) and Path(folder).is_dir()


def clock() -> float:
    """Seconds, for `DecodeClock.begin`."""
    return time.perf_counter()


def _shared() -> dict[str, Counter]:
    """Counters that prometheus_client shares between processes; it may have been loaded before."""
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
    return {
        metric.name: Counter(f"{_PREFIX}_{metric.name}", metric.text, metric.labels, registry=None)
        for metric in METRICS
    }
