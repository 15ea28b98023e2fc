"""What the machine itself does: copy engine, memory reads of all CPU threads, both at once.

    python -m bench.rates --json FILE

Each figure is the median of timed windows, taken in turns, since a machine that others use too is
not the same a minute later. `h2d` copies pieces of the size of an expert from pinned memory; `read`
has all threads of the CPU expert engine read memory; `gpu_read` sums GPU memory; `cpu_tflop` is the
engine's arithmetic, with experts of 256 rows each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from bench.arguments import number, rows_file
from bench.common import ROOT, Row, Run, append, summary

METRICS = {
    "h2d_gb_per_s": "GB/s",
    "read_gb_per_s": "GB/s",
    "both_gb_per_s": "GB/s",
    "gpu_read_gb_per_s": "GB/s",
    "cpu_tflop_per_s": "TFLOP/s",
}
# Qwen3-30B-A3B's expert in bf16.
_HIDDEN, _INTERMEDIATE = 2048, 768
PIECE = 3 * _HIDDEN * _INTERMEDIATE * 2
# Experts of a step of the engine's arithmetic, and rows of each.
_EXPERTS, _ROWS = 8, 256
# GiB that are read, if they are a quarter of what is free at most: of 2 GiB a cache of 260 MiB kept
# so much that reading was a fifth faster than of 8, and experts are more than that.
_GIB = 8
# Bytes of a bf16 of 0.0115. Ones would be subnormal numbers, whose products take far longer.
_SMALL = 0x3C
_NO_GPU = "no CUDA device"


Figures = dict[str, Any]


class Machine:
    """Measures this machine, in a process of its own that lives until `close`.

    Args:
        piece: Bytes of a copy.
        cpus: The processors that it may use, by default all of this process's.
    """

    def __init__(self, piece: int = PIECE, cpus: set[int] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.rates", "--serve", str(piece)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
        )

    def sample(self, seconds: float = 0.25, repeats: int = 3) -> Figures:
        """Of each of `METRICS` so many windows of `seconds`, or a text that says why none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps([seconds, repeats])}\n")
            self._process.stdin.flush()
        said = "failed"
        for line in self._process.stdout:
            if line.startswith("{"):
                figures: Figures = json.loads(line)
                return figures
            said = line.strip() or said
        return dict.fromkeys(METRICS, said)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def pooled(samples: Sequence[Figures]) -> Figures:
    """The windows of all samples; why there are none, where none has any."""
    together: Figures = {}
    for metric in METRICS:
        got = [sample[metric] for sample in samples]
        windows = [window for each in got if not isinstance(each, str) for window in each]
        together[metric] = windows or next(iter(got), "not measured")
    return together


def rows(run: Run, figures: Figures, **common: Any) -> list[Row]:
    """The figures of a sample, or of several pooled, as rows of the contestant ``machine``."""
    made = []
    for metric, unit in METRICS.items():
        got = figures[metric]
        value = {"note": got} if isinstance(got, str) else summary(got)
        made.append(run.row(contestant="machine", metric=metric, unit=unit, **common, **value))
    return made


class Reader:
    """Reads memory with all threads of the CPU expert engine, as its kernels do, and computes."""

    def __init__(self, gib: int | None = None) -> None:
        import psutil
        import torch

        from vllm_moe_offload.engine import CpuExpertEngine
        from vllm_moe_offload.host.pages import map_pages

        self._engine = CpuExpertEngine()
        if gib is None:
            gib = max(1, min(_GIB, psutil.virtual_memory().available >> 32))
        # In huge pages, as served experts are.
        self._memory = torch.frombuffer(map_pages(gib << 30), dtype=torch.uint8)
        self._memory.fill_(_SMALL)
        self.read = 0

    def window(self, seconds: float) -> int:
        """Bytes read in at least that time."""
        before, until = self.read, time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._pass()
        return self.read - before

    def beside(self, work: Callable[[], int]) -> int:
        """Bytes that `work()` moves, and those read meanwhile."""
        done, before = threading.Event(), self.read

        def passes() -> None:
            while not done.is_set():
                self._pass()

        thread = threading.Thread(target=passes)
        thread.start()
        try:
            moved = work()
        finally:
            done.set()
            thread.join()
        return moved + self.read - before

    def compute(self) -> Callable[[], float]:
        """Makes a step of the engine's; it returns the TFLOP that it has computed."""
        import torch

        from vllm_moe_offload.experts import Activation, ExpertSpec, Format

        spec = ExpertSpec(_HIDDEN, _INTERMEDIATE, Activation.SILU, Format.BF16)
        shard, at = {}, 0
        for part in spec.layout.tensors:
            size = _EXPERTS * part.nbytes
            piece = self._memory[at : at + size].view(part.dtype)
            shard[part.name] = piece.view(_EXPERTS, *part.shape)
            at += size
        plan = self._engine.plan(spec, shard, max_tokens=_EXPERTS * _ROWS, top_k=1)
        x = torch.randn(_EXPERTS * _ROWS, _HIDDEN).bfloat16()
        ids = torch.arange(_EXPERTS, dtype=torch.int32).repeat(_ROWS).unsqueeze(1)
        weights, out = torch.ones(ids.shape), torch.empty(x.shape)
        tflop = 6 * _HIDDEN * _INTERMEDIATE * len(x) / 1e12

        def step() -> float:
            plan.run(x, ids, weights, out)
            return tflop

        return step

    def _pass(self) -> None:
        self._engine.read_gb_per_s(self._memory)
        self.read += self._memory.nbytes


class Copies:
    """Copies of `piece` bytes from pinned memory by the copy engine, on a stream of their own."""

    def __init__(self, piece: int) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._copied = torch.cuda.Event(blocking=True)  # waiting for it takes no CPU
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
                self._copied.record()
            self._copied.synchronize()
            copied += self._host.numel()
        return copied


class Windows:
    """What a `Machine` measures, ready to: memory is taken and touched once."""

    def __init__(self, piece: int) -> None:
        import torch

        reader = Reader()
        self._works: dict[str, tuple[Callable[[float], float], float]] = {
            "read_gb_per_s": (reader.window, 1e9)
        }
        self._without: dict[str, Any] = dict.fromkeys(METRICS, _NO_GPU)
        if torch.cuda.is_available():
            copies = Copies(piece)
            memory = torch.ones(2**29, dtype=torch.float32, device="cuda")

            def both(seconds: float) -> float:
                return reader.beside(lambda: copies.window(seconds))

            def sums(seconds: float) -> float:
                for _ in range(10):
                    memory.sum()
                torch.cuda.synchronize()
                return 10 * memory.nbytes

            self._works["h2d_gb_per_s"] = copies.window, 1e9
            self._works["both_gb_per_s"] = both, 1e9
            self._works["gpu_read_gb_per_s"] = sums, 1e9
        step = reader.compute()

        def steps(seconds: float) -> float:
            until, done = time.perf_counter() + seconds, step()
            while time.perf_counter() < until:
                done += step()
            return done

        self._works["cpu_tflop_per_s"] = steps, 1.0
        self._round(0.0)  # warm

    def sample(self, seconds: float, repeats: int) -> Figures:
        """See `Machine.sample`."""
        rounds = [self._round(seconds) for _ in range(repeats)]
        return self._without | {name: [each[name] for each in rounds] for name in self._works}

    def _round(self, seconds: float) -> dict[str, float]:
        rates = {}
        for name, (work, unit) in self._works.items():
            began = time.perf_counter()
            done = work(seconds)
            rates[name] = done / (time.perf_counter() - began) / unit
        return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=rows_file, help="file the rows are appended to")
    parser.add_argument("--piece", type=number, default=PIECE, help="bytes of a copy")
    parser.add_argument("--commit")
    parser.add_argument("--serve", type=number, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        windows = Windows(options.serve)
        for line in sys.stdin:
            print(json.dumps(windows.sample(*json.loads(line))), flush=True)
        return
    with closing(Machine(options.piece)) as machine:
        made = rows(Run.here("rates", options.commit), machine.sample(0.6, 7))
    for row in made:
        print(f"{row['metric']:20}", row.get("note") or f"{row['value']:.3g} {row['unit']}")
    if options.json:
        append(options.json, made)


if __name__ == "__main__":
    main()
