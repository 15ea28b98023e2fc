"""What the machine itself does: copy engine, memory reads of all CPU threads, both at once.

    python -m bench.rates --json FILE

Each figure is the median of timed windows, taken in turns, since a machine that others use too is
not the same a minute later. `h2d` copies pieces of the size of an expert from pinned memory; `read`
has all threads of the CPU expert engine read memory; `gpu_read` sums GPU memory; `cpu_tflop` is the
engine's arithmetic, with experts of 256 rows each; the two `computing` figures are that arithmetic
and copies, while both run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import cycle
from typing import Any

from bench.arguments import number, rows_file
from bench.common import ROOT, Row, Run, append, summary
from bench.floors import GB, TERA

METRICS = {
    "h2d_gb_per_s": "GB/s",
    "read_gb_per_s": "GB/s",
    "both_gb_per_s": "GB/s",
    "gpu_read_gb_per_s": "GB/s",
    "cpu_tflop_per_s": "TFLOP/s",
    "computing_h2d_gb_per_s": "GB/s",
    "computing_tflop_per_s": "TFLOP/s",
}
# Qwen3-30B-A3B's expert in bf16.
_HIDDEN, _INTERMEDIATE = 2048, 768
PIECE = 3 * _HIDDEN * _INTERMEDIATE * 2
# Experts of a step of the engine's arithmetic, and rows of each; so many steps of others, at most.
_EXPERTS, _ROWS, _SETS = 8, 256, 64
# GiB that are read, if they are a quarter of what is free at most: of 2 GiB a cache of 260 MiB kept
# so much that reading was a fifth faster than of 8, and experts are more than that.
_GIB = 8
# It is read in so many parts, one after the other: a part that copies have ended beside is short.
_PARTS = 8
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
        self._parts = cycle(self._memory.chunk(_PARTS))

    def read(self) -> int:
        """Read the next part; how many bytes that is."""
        part = next(self._parts)
        self._engine.read_gb_per_s(part)
        return part.nbytes

    def compute(self) -> Callable[[], float]:
        """Makes a step of the engine's; it returns the TFLOP that it has computed.

        Each is of other experts than the one before, which are in no cache.
        """
        import torch

        from vllm_moe_offload.experts import Activation, ExpertSpec, Format

        spec = ExpertSpec(_HIDDEN, _INTERMEDIATE, Activation.SILU, Format.BF16)
        count = min(_SETS * _EXPERTS, self._memory.nbytes // spec.layout.nbytes)
        shard, at = {}, 0
        for part in spec.layout.tensors:
            size = count * part.nbytes
            piece = self._memory[at : at + size].view(part.dtype)
            shard[part.name] = piece.view(count, *part.shape)
            at += size
        plan = self._engine.plan(spec, shard, max_tokens=_EXPERTS * _ROWS, top_k=1)
        x = torch.randn(_EXPERTS * _ROWS, _HIDDEN).bfloat16()
        experts = torch.arange(count, dtype=torch.int32).split(_EXPERTS)[: count // _EXPERTS]
        routings = cycle([each.repeat(_ROWS).unsqueeze(1) for each in experts])
        weights, out = torch.ones(len(x), 1), torch.empty(x.shape)
        tflop = 6 * _HIDDEN * _INTERMEDIATE * len(x) / TERA

        def step() -> float:
            plan.run(x, next(routings), weights, out)
            return tflop

        return step


def a_second(work: Callable[[], float]) -> float:
    """How much of what `work()` returns is done in a second of it."""
    began = time.perf_counter()
    done = work()
    return done / (time.perf_counter() - began)


def during(step: Callable[[], float], is_over: Callable[[], bool]) -> float:
    """What steps add up to, one at least, until that is so."""
    done = step()
    while not is_over():
        done += step()
    return done


def within(seconds: float) -> Callable[[], bool]:
    """Whether so many have passed since."""
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= until


def beside(step: Callable[[], float], work: Callable[[], float]) -> tuple[float, float]:
    """How much `work()` does in a second, and steps that another thread does meanwhile.

    Each in its own time: the last step ends behind the work. What either raises is raised.
    """
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(lambda: a_second(lambda: during(step, over.is_set)))
        try:
            worked = a_second(work)
        finally:
            over.set()
        return worked, steps.result()


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

    def window(self, seconds: float) -> float:
        """Bytes copied in at least that time."""
        return during(self._copy, within(seconds))

    def _copy(self) -> int:
        with self._torch.cuda.stream(self._stream):
            for index, piece in enumerate(self._host):
                self._gpu[index % 8].copy_(piece, non_blocking=True)
            self._copied.record()
        self._copied.synchronize()
        return int(self._host.numel())


class Windows:
    """What a `Machine` measures, ready to: memory is taken and touched once."""

    def __init__(self, piece: int) -> None:
        import torch

        reader = Reader()
        read, compute = reader.read, reader.compute()
        # Each measures metrics, for `seconds` or longer.
        self._works: list[Callable[[float], Mapping[str, float]]] = [
            lambda seconds: {"read_gb_per_s": _rate(read, seconds) / GB}
        ]
        if torch.cuda.is_available():
            copies = Copies(piece)
            memory = torch.ones(2**29, dtype=torch.float32, device="cuda")

            def both(seconds: float) -> Mapping[str, float]:
                return {"both_gb_per_s": sum(beside(read, lambda: copies.window(seconds))) / GB}

            def computing(seconds: float) -> Mapping[str, float]:
                copied, tflop = beside(compute, lambda: copies.window(seconds))
                return {"computing_h2d_gb_per_s": copied / GB, "computing_tflop_per_s": tflop}

            def sums() -> float:
                for _ in range(10):
                    memory.sum()
                torch.cuda.synchronize()
                return 10 * memory.nbytes

            self._works += [
                lambda seconds: {"h2d_gb_per_s": a_second(lambda: copies.window(seconds)) / GB},
                both,
                computing,
                lambda _: {"gpu_read_gb_per_s": a_second(sums) / GB},
            ]
        self._works.append(lambda seconds: {"cpu_tflop_per_s": _rate(compute, seconds)})
        self._round(0.0)  # warm

    def sample(self, seconds: float, repeats: int) -> Figures:
        """See `Machine.sample`."""
        rounds = [self._round(seconds) for _ in range(repeats)]
        return dict.fromkeys(METRICS, _NO_GPU) | {
            metric: [each[metric] for each in rounds] for metric in rounds[0]
        }

    def _round(self, seconds: float) -> dict[str, float]:
        rates: dict[str, float] = {}
        for work in self._works:
            rates |= work(seconds)
        return rates


def _rate(step: Callable[[], float], seconds: float) -> float:
    """What steps add up to in a second, by those of so many."""
    return a_second(lambda: during(step, within(seconds)))


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
