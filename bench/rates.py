"""What the machine itself does: copy engine, memory reads of all CPU threads, both at once.

    python -m bench.rates --json FILE

Each figure is the median of timed windows. `h2d` copies pieces of the size of an expert from pinned
memory; `read` has every CPU of the process read its own memory; `gpu_read` sums GPU memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.arguments import number, rows_file
from bench.common import MIN_REPEATS, ROOT, Row, Run, append, summary

METRICS = ("h2d_gb_per_s", "read_gb_per_s", "both_gb_per_s", "gpu_read_gb_per_s")
# Qwen3-30B-A3B's expert in bf16.
PIECE = 3 * 2048 * 768 * 2
_NO_GPU = "no CUDA device"


def measure(
    piece: int = PIECE, seconds: float = 0.6, repeats: int = 7, cpus: set[int] | None = None
) -> dict[str, Any]:
    """Metric -> its repeats in GB/s, or a text that says why there are none.

    In a process of its own: NumPy's BLAS must run on the threads that are given it, and no other.
    `cpus`: the processors it may use, all of this process's by default.
    """
    order = json.dumps([piece, seconds, max(repeats, MIN_REPEATS)])
    done = subprocess.run(
        [sys.executable, "-m", "bench.rates", "--measure", order],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["failed"])[-1]
        return dict.fromkeys(METRICS, reason)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out


def rows(run: Run, figures: dict[str, Any], **common: Any) -> list[Row]:
    """The figures of `measure` as rows of the contestant ``machine``."""
    made = []
    for metric in METRICS:
        got = figures[metric]
        value = {"note": got} if isinstance(got, str) else summary(got)
        made.append(run.row(contestant="machine", metric=metric, unit="GB/s", **common, **value))
    return made


class Readers:
    """One thread a CPU of this process, each with memory of its own to read."""

    def __init__(self, megabytes_each: int = 256) -> None:
        self.read = [0] * len(os.sched_getaffinity(0))
        self._numbers = megabytes_each * 2**20 // 4

    def run(self, windows: Callable[[], list[float]]) -> list[float]:
        """`windows()` while every thread reads; what it returns."""
        stop = threading.Event()
        ready = threading.Barrier(len(self.read) + 1)
        threads = [
            threading.Thread(target=self._read, args=(index, cpu, ready, stop))
            for index, cpu in enumerate(sorted(os.sched_getaffinity(0)))
        ]
        for thread in threads:
            thread.start()
        ready.wait()
        try:
            return windows()
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _read(self, index: int, cpu: int, ready: threading.Barrier, stop: threading.Event) -> None:
        import numpy as np

        os.sched_setaffinity(0, {cpu})  # of this thread: so the memory is on its node
        memory = np.ones(self._numbers, np.float32)
        piece = 1 << 20
        ready.wait()
        while not stop.is_set():
            for start in range(0, len(memory), piece):
                part = memory[start : start + piece]
                np.dot(part, part)  # one read of memory; NumPy leaves the lock
                self.read[index] += part.nbytes
                if stop.is_set():
                    break


class Copies:
    """Copies of `piece` bytes from pinned memory by the copy engine, on a stream of their own."""

    def __init__(self, piece: int) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        count = max(4, 2**30 // piece)
        self._host = torch.ones(count, piece, dtype=torch.uint8).pin_memory()
        self._gpu = torch.empty(8, piece, dtype=torch.uint8, device="cuda")

    def window(self, seconds: float) -> int:
        """Bytes copied in at least that time."""
        until, copied = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            with self._torch.cuda.stream(self._stream):
                for index, piece in enumerate(self._host):
                    self._gpu[index % 8].copy_(piece, non_blocking=True)
            self._stream.synchronize()
            copied += self._host.numel()
        return copied


def _measure(piece: int, seconds: float, repeats: int) -> dict[str, Any]:
    readers = Readers()

    def windows(work: Callable[[], int], counts_reads: bool) -> list[float]:
        rates = []
        for _ in range(repeats + 1):
            before, began = sum(readers.read), time.perf_counter()
            moved = work()
            elapsed = time.perf_counter() - began
            moved += sum(readers.read) - before if counts_reads else 0
            rates.append(moved / elapsed / 1e9)
        return rates[1:]

    def pause() -> int:
        time.sleep(seconds)
        return 0

    out: dict[str, Any] = {"read_gb_per_s": readers.run(lambda: windows(pause, True))}
    try:
        import torch

        has_gpu = torch.cuda.is_available()
    except ImportError:
        has_gpu = False
    if not has_gpu:
        return dict.fromkeys(METRICS, _NO_GPU) | out
    copies = Copies(piece)
    out["h2d_gb_per_s"] = windows(lambda: copies.window(seconds), False)
    out["both_gb_per_s"] = readers.run(lambda: windows(lambda: copies.window(seconds), True))
    memory = torch.ones(2**30, dtype=torch.float32, device="cuda")

    def sums() -> int:
        for _ in range(10):
            memory.sum()
        torch.cuda.synchronize()
        return 10 * memory.nbytes

    out["gpu_read_gb_per_s"] = windows(sums, False)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=rows_file, help="file the rows are appended to")
    parser.add_argument("--piece", type=number, default=PIECE, help="bytes of a copy")
    parser.add_argument("--commit")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measure(*json.loads(options.measure))))
        return
    made = rows(Run.here("rates", options.commit), measure(options.piece))
    for row in made:
        print(f"{row['metric']:20}", row.get("note") or f"{row['value']:.1f}")
    if options.json:
        append(options.json, made)


if __name__ == "__main__":
    main()
