"""What the expert engine reaches on this machine, beside what the machine could do at most."""

from __future__ import annotations

import datetime
import itertools
import math
import platform
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_moe_offload.engine._engine import MOST_PLAN_TOKENS
from vllm_moe_offload.engine.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.host.pages import available_memory, map_pages

Row = dict[str, Any]

SHAPES = ((2048, 768), (7168, 2048))
FORMATS = (Format.BF16, Format.FP8_BLOCK, Format.INT4, Format.MXFP4)
ROWS = (1, 2, 4, 16, 64, 256, 1024)

# A step of the models these shapes come from routes a token to 8 experts.
TOP_K = 8
REPEATS = 7

# Bytes of the random numbers that the memory repeats.
_BLOCK = 1 << 23

# Bytes of a cache line.
_LINE = 64

# What `CpuExpertEngine.phase_seconds` tells of a call, the rest of which is overhead; and what
# Python adds to it.
PHASES = ("prepare_ms", "up_ms", "down_ms", "python_ms")

# What rows of other benchmarks have and this one's leave open.
_OPEN = dict.fromkeys(
    (
        *("commit", "card", "vllm", "model", "layers", "format", "slots", "tensor_parallel"),
        *("routing", "batch", "tokens", "rows", "isa"),
    )
)


def bench_cpu(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    formats: Sequence[Format] = FORMATS,
    rows: Sequence[int] = ROWS,
    isas: Iterable[str] | None = None,
    threads: Iterable[int] | None = None,
    gib: float = 4.0,
    beside_torch: bool = True,
    labels: Mapping[str, str] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measures the engine; returns rows as the project's benchmarks write them.

    Each call routes `rows` tokens to the same 8 experts, the next call to 8 others, so that every
    expert has that many rows and its weights are not in a cache. `weight_gb_per_s` counts the bytes
    of those experts; `tflop_per_s` counts 6 H I operations for each row and expert. A call is timed
    by the engine: as a doorbell makes it, without Python, of which nothing is in a cache either.

    Args:
        shapes: (hidden, intermediate) of an expert.
        formats: Number formats of the weights.
        rows: Rows per expert.
        isas: Instruction sets; None: what VLLM_MOE_OFFLOAD_ISA names, or the fastest this host has.
        threads: Thread counts; None: all physical cores.
        gib: GiB of experts to rotate over: more than any cache.
        beside_torch: Also time torch's bf16 `linear` on the same experts.
        labels: What every row says besides: ``card`` and ``commit``.
        on_row: Called with each row as soon as it is measured.

    Returns:
        One row for each figure: a median, with `min` and `max` beside it, and `threads` besides
        the keys of all benchmarks; of the engine also the phases of a call (`PHASES`). The ceilings
        come first, as contestant ``floor``: read bandwidth, and AMX's peak where the instruction
        set is AMX.

    Raises:
        ValueError: Nothing to measure or no such thing: sizes below 1, an instruction set or thread
            count this host lacks, or `gib` too small for a call's experts or more than there is.
            Raised before anything is measured.
    """
    with CpuExpertEngine(threads=1, isa="scalar") as engine:
        counts = (engine.cores,) if threads is None else tuple(threads)
    names = (None,) if isas is None else tuple(isas)
    specs = [[_spec(*shape, format) for format in formats] for shape in shapes]
    beside = [_spec(*shape, Format.BF16) for shape in shapes] if beside_torch else []
    _check(counts, names, rows, gib, [*itertools.chain(*specs), *beside])

    result: list[Row] = []
    common: Row = {
        **_OPEN,
        **(labels or {}),
        "bench": "cpu",
        "run": uuid.uuid4().hex[:12],
        "date": datetime.date.today().isoformat(),
        "host_cpu": _cpu_name(),
        "torch": torch.__version__,
    }

    def add(**figure: Any) -> None:
        row = common | figure
        result.append(row)
        if on_row is not None:
            on_row(row)

    memory = _memory(gib)
    for count in counts:
        for isa in names:
            with CpuExpertEngine(count, isa) as engine:
                _bench_engine(engine, memory, itertools.chain(*specs), rows, add)
        for spec in beside:
            _bench_torch(memory, spec, rows, count, add)
    return result


def _spec(hidden: int, intermediate: int, format: Format) -> ExpertSpec:
    group = 128 if format in (Format.INT4, Format.INT4_ZEROS) else None
    return ExpertSpec(hidden, intermediate, Activation.SILU, format, group_size=group)


def _check(
    threads: Sequence[int],
    isas: Sequence[str | None],
    rows: Sequence[int],
    gib: float,
    specs: Sequence[ExpertSpec],
) -> None:
    """Raises ValueError for what cannot be measured."""
    if not (threads and isas and rows and specs):
        raise ValueError(
            "there is nothing to measure: give at least one shape, format, row count, thread count "
            "and instruction set"
        )
    for count in rows:
        if not 1 <= count <= MOST_PLAN_TOKENS:
            raise ValueError(
                f"{count} rows an expert were asked for: give at least 1 and at most "
                f"{MOST_PLAN_TOKENS}"
            )
    for count, isa in itertools.product(threads, isas):
        CpuExpertEngine(count, isa).close()
    available = available_memory() / 2**30
    if not 0 < gib < available:
        raise ValueError(
            f"{gib} GiB of experts were asked for, and {available:.1f} GiB of memory are "
            "available: give more than 0 and less than that"
        )
    calls = max(max(rows) * _row_bytes(spec) for spec in specs) / 2**30
    if gib + calls >= available:
        raise ValueError(
            f"{max(rows)} rows an expert take {calls:.1f} GiB beside the experts' {gib}, and "
            f"{available:.1f} GiB of memory are available: give fewer rows"
        )
    largest = max(spec.layout.nbytes for spec in specs)
    if min(_experts(spec, _memory_bytes(gib)) for spec in specs) < TOP_K:
        raise ValueError(
            f"{gib} GiB do not hold the {TOP_K} experts of a call, "
            f"{TOP_K * largest / 2**30:.2f} GiB: raise gib"
        )


def _row_bytes(spec: ExpertSpec) -> int:
    """What a row of a call takes at most, all of it as numbers of four bytes.

    Itself drawn, converted, as the kernels want it and summed up; of each of its experts both
    products, the activated one, and the number in the lists of all calls.
    """
    return 4 * (4 * spec.hidden + TOP_K * (3 * spec.intermediate + REPEATS + 1))


def _bench_engine(
    engine: CpuExpertEngine,
    memory: torch.Tensor,
    specs: Iterable[ExpertSpec],
    rows: Sequence[int],
    add: Callable[..., None],
) -> None:
    who = {"isa": engine.isa, "threads": engine.threads}
    rates = [engine.read_gb_per_s(memory) for _ in range(REPEATS)]
    add(contestant="floor", metric="read_gb_per_s", unit="GB/s", **who, **_median(rates))
    peaks = [peak for _ in range(REPEATS) if (peak := engine.tile_peak_tflop_per_s()) is not None]
    if peaks:
        add(contestant="floor", metric="tflop_per_s", unit="TFLOP/s", **who, **_median(peaks))
    for spec in specs:
        shard, experts = _shard(spec, memory)
        plan = engine.plan(spec, shard, max_tokens=max(rows), top_k=TOP_K)
        # Goes on from one row count to the next: going back would find experts in the cache.
        turn = itertools.count(step=TOP_K)
        for count in rows:
            x = torch.randn(count, spec.hidden).to(spec.activation_dtype)
            weights = torch.rand(count, TOP_K)
            out = torch.empty(count, spec.hidden)
            times, phases = [], []
            # Made before, so that the threads watch for the next call and need not be woken.
            calls = [
                (torch.arange(first, first + TOP_K) % experts).int().repeat(count, 1)
                for first in itertools.islice(turn, REPEATS + 1)
            ]
            for ids in calls:
                start = time.perf_counter()
                plan.run(x, ids, weights, out)
                in_python = time.perf_counter() - start
                *of_phases, call = engine.phase_seconds
                times.append(call)
                phases.append([1e3 * seconds for seconds in (*of_phases, in_python - call)])
            figure = _add_times(add, "cpu", spec, count, times[1:], who)
            for phase, milliseconds in zip(PHASES, zip(*phases[1:], strict=True), strict=True):
                add(metric=phase, unit="ms", **figure, **_median(milliseconds))


def _bench_torch(
    memory: torch.Tensor,
    spec: ExpertSpec,
    rows: Sequence[int],
    threads: int,
    add: Callable[..., None],
) -> None:
    """The same experts by torch's `linear`, one after another."""
    shard, experts = _shard(spec, memory)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        turn = itertools.count(step=TOP_K)
        for count in rows:
            x = torch.randn(count, spec.hidden, dtype=torch.bfloat16)
            times = []
            for first in itertools.islice(turn, REPEATS + 1):
                start = time.perf_counter()
                for k in range(TOP_K):
                    expert = (first + k) % experts
                    gate, up = torch.nn.functional.linear(x, shard["w13_weight"][expert]).chunk(
                        2, 1
                    )
                    inner = torch.nn.functional.silu(gate) * up
                    torch.nn.functional.linear(inner, shard["w2_weight"][expert])
                times.append(time.perf_counter() - start)
            who = {"threads": torch.get_num_threads()}
            _add_times(add, "torch", spec, count, times[1:], who)
    finally:
        torch.set_num_threads(before)


def _add_times(
    add: Callable[..., None],
    contestant: str,
    spec: ExpertSpec,
    rows: int,
    times: list[float],
    who: Row,
) -> Row:
    figure = {
        "contestant": contestant,
        "model": f"{spec.hidden}x{spec.intermediate}",
        "format": spec.format.value,
        "rows": rows,
        **who,
    }
    gigabytes = TOP_K * spec.layout.nbytes / 1e9
    teraflop = TOP_K * rows * 6 * spec.hidden * spec.intermediate / 1e12
    rates = [gigabytes / seconds for seconds in times]
    add(metric="weight_gb_per_s", unit="GB/s", **figure, **_median(rates))
    rates = [teraflop / seconds for seconds in times]
    add(metric="tflop_per_s", unit="TFLOP/s", **figure, **_median(rates))
    return figure


def _median(values: Sequence[float]) -> Row:
    return {
        "value": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def _memory_bytes(gib: float) -> int:
    """`gib`, in whole blocks."""
    return math.ceil(gib * 2**30 / _BLOCK) * _BLOCK


def _memory(gib: float) -> torch.Tensor:
    """Bytes that are sane numbers in every format, touched: small bf16 values, valid e4m3.

    In huge pages, as served experts are: by small ones every row costs a walk of the page tables.
    """
    block = (torch.rand(_BLOCK // 2) * 0.02).bfloat16().view(torch.uint8)
    memory = torch.frombuffer(map_pages(_memory_bytes(gib)), dtype=torch.uint8)
    memory.view(-1, _BLOCK).copy_(block)
    return memory


def _shard(spec: ExpertSpec, memory: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """As many experts as fit into `memory`, and their number."""
    experts = _experts(spec, memory.numel())
    shard, at = {}, 0
    for part in spec.layout.tensors:
        size = experts * part.nbytes
        if part.name.endswith("_scale"):
            # FP8 codes are up to 480. With a larger scale gates are hundreds, what the activation
            # makes of them subnormal floats, and a product with one takes 200 times as long.
            most = 1e-4 if part.dtype == torch.float32 else 0.01
            # No two alike, as in a checkpoint: a kernel may keep what it has made of one.
            values = torch.rand((experts, *part.shape)).add_(1).mul_(most / 2)
            # e8m0 codes exponents: 2^-8 or 2^-7
            shard[part.name] = (
                values.mul_(4 / most).add_(117).byte()
                if part.dtype == torch.uint8
                else values.to(part.dtype)
            )
            continue
        piece = memory[at : at + size].view(part.dtype)
        shard[part.name] = piece.view(experts, *part.shape)
        at += -(-size // _LINE) * _LINE
    return shard, experts


def _experts(spec: ExpertSpec, nbytes: int) -> int:
    """As many as fit, each of their tensors from a cache line on."""
    return (nbytes - _LINE * len(spec.layout.tensors)) // spec.layout.nbytes


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def format_table(result: list[Row]) -> str:
    """The rows of one run as text: each figure beside the ceiling that holds for it."""
    ceilings: dict[tuple[int, str], float] = {}
    for row in result:
        if row["contestant"] == "floor":
            key = (row["threads"], row["metric"])
            ceilings[key] = max(row["value"], ceilings.get(key, 0.0))
    lines = []
    for (threads, metric), value in ceilings.items():
        what = "GB/s of memory read" if metric == "read_gb_per_s" else "TFLOP/s of AMX bf16 tiles"
        lines.append(f"{threads} threads: {value:.2f} {what}")
    layout = "{:>10} {:>12} {:>12} {:>7} {:>5} {:>8} {:>8} {:>8} {:>8}" + " {:>10}" * len(PHASES)
    heads = ("expert", "format", "who", "threads", "rows", "GB/s", "of read", "TFLOP/s", "of AMX")
    lines += ["", layout.format(*heads, *PHASES)]
    figures: dict[tuple[Any, ...], dict[str, float | None]] = {}
    for row in result:
        if row["contestant"] != "floor":
            who = row["isa"] if row["contestant"] == "cpu" else row["contestant"]
            place = (row["model"], row["format"], who, row["threads"], row["rows"])
            figures.setdefault(place, {})[row["metric"]] = row["value"]
    for place, figure in figures.items():
        cells: list[str] = []
        for metric, ceiling, digits in (
            ("weight_gb_per_s", "read_gb_per_s", 1),
            ("tflop_per_s", "tflop_per_s", 2),
        ):
            rate = figure.get(metric)
            most = ceilings.get((place[3], ceiling))
            cells.append("-" if rate is None else f"{rate:.{digits}f}")
            cells.append("" if rate is None or most is None else f"{rate / most:.0%}")
        for phase in PHASES:
            milliseconds = figure.get(phase)
            cells.append("" if milliseconds is None else f"{milliseconds:.3f}")
        lines.append(layout.format(*place, *cells))
    return "\n".join(lines)
