"""The CPU engine beside kt-kernel: the same experts, rows and threads in one run.

    python -m bench.kt --json FILE

kt-kernel (0.7.2) is found on the path. Its compiled module is loaded by itself: its Python package
imports more than the arithmetic needs. Each expert size and format is computed in a process of its
own, and what fails there is a row without a value. A figure counts only when the result is right.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.arguments import known, number, numbers, positive, rows_file
from bench.common import KEYS, MIN_REPEATS, ROOT, Row, append, card, ended_by, summary
from vllm_moe_offload.engine import bench
from vllm_moe_offload.experts import Activation, ExpertSpec, Format

# The class of kt-kernel that computes a format, and the columns that share a scale there.
CLASSES = {
    Format.BF16: ("AMXBF16_MOE", None),
    Format.FP8_BLOCK: ("AMXFP8_MOE", 128),
    Format.INT4: ("AMXInt4_KGroup_MOE", 32),
    Format.MXFP4: ("AMXFP4_KGroup_MOE", 32),
}
ROWS = (1, 4, 16)
# Experts of a layer at most. More than a few hundred end its INT4 with a fault.
LAYER = 128
# What rounding explains: it computes INT4 with inputs rounded to int8 as well.
TOLERANCE = 0.03
SECONDS = 120
# By name: codes and scales as kt-kernel takes them, and their values in float32.
Matrices = dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def measure(spec: ExpertSpec, rows: Sequence[int], threads: int, gib: float) -> dict[int, Any]:
    """Seconds of each repeat by rows an expert, after a first call that is not counted.

    Raises RuntimeError where kt-kernel is not there or its result is wrong.
    """
    kt = _load(_variant())
    top_k = bench.TOP_K
    experts = max(top_k, round(gib * 2**30 / spec.layout.nbytes) // top_k * top_k)
    size = min(experts, LAYER)
    matrices = {
        "gate": _matrix(spec, spec.intermediate, spec.hidden),
        "up": _matrix(spec, spec.intermediate, spec.hidden),
        "down": _matrix(spec, spec.hidden, spec.intermediate),
    }
    workers = kt.WorkerPoolConfig()
    workers.subpool_count = 1
    workers.subpool_numa_map = [0]
    workers.subpool_thread_count = [threads]
    cpu = kt.CPUInfer(workers)
    layers = [_layer(kt, cpu, spec, matrices, size, max(rows)) for _ in range(-(-experts // size))]

    times: dict[int, list[float]] = {}
    turn = itertools.count(step=top_k)
    for count in rows:
        x = torch.randn(count, spec.hidden).bfloat16()
        weights = torch.rand(count, top_k)
        out = torch.empty(count, spec.hidden, dtype=torch.bfloat16)
        tokens = torch.tensor([count], dtype=torch.int32)
        times[count] = []
        for first in itertools.islice(turn, bench.REPEATS + 1):
            moe, _ = layers[first // size % len(layers)]
            ids = (torch.arange(first, first + top_k) % size).repeat(count, 1)
            pointers = [tensor.data_ptr() for tensor in (ids, weights, x, out)]
            start = time.perf_counter()
            cpu.submit(moe.forward_task(tokens.data_ptr(), top_k, *pointers, False))
            cpu.sync()
            times[count].append(time.perf_counter() - start)
        _check(matrices, x, weights, out)
    return {count: values[1:] for count, values in times.items()}


def _layer(
    kt: Any, cpu: Any, spec: ExpertSpec, matrices: Matrices, experts: int, max_rows: int
) -> tuple[Any, Any]:
    """A layer and what must live with it. It copies what it is given: one original does for all."""
    on_gpu = torch.zeros(experts, dtype=torch.bool)
    config = kt.moe.MOEConfig(
        experts, bench.TOP_K, spec.hidden, spec.intermediate, on_gpu.data_ptr()
    )
    config.layer_idx = 0
    config.pool = cpu.backend_
    config.max_len = max_rows
    for name, (codes, scale, _) in matrices.items():
        setattr(config, f"{name}_projs", [[codes.data_ptr()] * experts])
        setattr(config, f"{name}_scales", [[0 if scale is None else scale.data_ptr()] * experts])
    name, group = CLASSES[spec.format]
    if group is not None:
        config.quant_config.bits = 8 if spec.format is Format.FP8_BLOCK else 4
        config.quant_config.group_size = group
        config.quant_config.zero_point = False
    moe = getattr(kt.moe, name)(config)
    order = torch.arange(experts)
    cpu.submit(moe.load_weights_task(order.data_ptr()))
    cpu.sync()
    # The mask is read in every call, by its address.
    return moe, on_gpu


def _variant() -> str:
    """The build that kt-kernel would take here, of those for AVX512-BF16 and above."""
    flags = Path("/proc/cpuinfo").read_text()
    default = "amx" if "amx_tile" in flags else "avx512_bf16"
    return os.environ.get("KT_KERNEL_CPU_VARIANT", default)


def _load(variant: str) -> ModuleType:
    package = importlib.util.find_spec("kt_kernel")
    if package is None:
        raise RuntimeError("there is no kt-kernel on the path")
    folders = list(package.submodule_search_locations or [])
    found = [path for at in folders for path in Path(at).glob(f"_kt_kernel_ext_{variant}.*.so")]
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", found[0]) if found else None
    if spec is None or spec.loader is None:
        raise RuntimeError(f"kt-kernel has no build for {variant} in {folders}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _matrix(
    spec: ExpertSpec, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """One of `Matrices`, [rows, columns]."""
    gain = columns**-0.5
    if spec.format is Format.BF16:
        codes = (torch.randn(rows, columns) * gain).bfloat16()
        return codes, None, codes.float()
    if spec.format is Format.FP8_BLOCK:
        codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        scale = torch.full((-(-rows // 128), -(-columns // 128)), gain)
        return codes, scale, codes.float() * gain
    nibbles = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    values = _E2M1[nibbles.int()] if spec.format is Format.MXFP4 else nibbles.float() - 8
    # A power of two, which e8m0 has too: kt-kernel takes scales of both formats as bf16.
    power = 2.0 ** round(torch.tensor(gain / values.std()).log2().item())
    scale = torch.full((rows, columns // 32), power, dtype=torch.bfloat16)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scale, values * power


def _check(
    matrices: Matrices,
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    gate, up, down = (matrices[name][2] for name in ("gate", "up", "down"))
    inner = torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)
    expected = inner @ down.T * weights.sum(1, keepdim=True)
    error = ((out.float() - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"a wrong result for {x.shape[0]} rows: relative error {error:.3g}")


def _spec(hidden: int, intermediate: int, format: Format) -> ExpertSpec:
    group = CLASSES[format][1] if format is Format.INT4 else None
    return ExpertSpec(hidden, intermediate, Activation.SILU, format, group_size=group)


def _rows(
    common: Row, spec: ExpertSpec, rows: Sequence[int], threads: int, gib: float
) -> list[Row]:
    """Measured in a child, whatever becomes of it."""
    about = common | {
        "contestant": "kt-kernel",
        "isa": _variant(),
        "threads": threads,
        "model": f"{spec.hidden}x{spec.intermediate}",
        "format": spec.format.value,
    }
    if spec.format is Format.INT4:
        about["note"] = "groups of 32 columns, the one size that it computes"
    arguments = [spec.hidden, spec.intermediate, spec.format.value, threads, gib, *rows]
    command = [sys.executable, "-m", "bench.kt", "--child", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
        lines = done.stdout.splitlines()
        result = next((line for line in lines if line.startswith("{")), None)
        why = _reason(done)
    except subprocess.TimeoutExpired:
        result, why = None, f"not done in {SECONDS} s"
    times = json.loads(result) if result is not None else {}
    found = []
    for count in rows:
        bytes_ = bench.TOP_K * spec.layout.nbytes
        operations = bench.TOP_K * count * 6 * spec.hidden * spec.intermediate
        for metric, unit, amount in (
            ("weight_gb_per_s", "GB/s", bytes_ / 1e9),
            ("tflop_per_s", "TFLOP/s", operations / 1e12),
        ):
            seconds = times.get(str(count), [])
            enough = len(seconds) >= MIN_REPEATS
            figure: Row = (
                summary([amount / s for s in seconds]) if enough else {"value": None, "note": why}
            )
            found.append(about | {"rows": count, "metric": metric, "unit": unit} | figure)
    return found


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if killed := ended_by(done.returncode):
        return killed
    last = done.stderr.strip().splitlines()[-1:]
    return last[0] if last else f"ended with {done.returncode} and without a word"


def _child(arguments: Sequence[str]) -> None:
    hidden, intermediate, format, threads, gib, *rows = arguments
    spec = _spec(int(hidden), int(intermediate), Format(format))
    times = measure(spec, [int(count) for count in rows], int(threads), float(gib))
    print("\n" + json.dumps(times), flush=True)
    # Its threads do not always end by themselves.
    os._exit(0)


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape) for shape in text.split(",")]
    if None in shapes:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give hidden and intermediate sizes, like 2048x768,7168x2048"
        )
    return [(int(shape[1]), int(shape[2])) for shape in shapes if shape]


def _formats(text: str) -> list[Format]:
    return [Format(name) for name in known(text, [format.value for format in CLASSES])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=rows_file, help="file the rows are appended to")
    parser.add_argument(
        "--shapes", type=_shapes, default="2048x768,7168x2048", help="hidden x intermediate"
    )
    parser.add_argument(
        "--formats", type=_formats, default=",".join(format.value for format in CLASSES)
    )
    parser.add_argument(
        "--rows", type=numbers, default=",".join(map(str, ROWS)), help="rows an expert"
    )
    parser.add_argument("--threads", type=number, help="of both; default: all physical cores")
    parser.add_argument("--isas", help="of ours; default: the fastest")
    parser.add_argument("--gib", type=positive, default=4.0, help="experts to rotate over")
    parser.add_argument("--card", default=card())
    parser.add_argument("--commit", default="?")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child)
    try:
        result = bench.bench_cpu(
            shapes=options.shapes,
            formats=options.formats,
            rows=options.rows,
            isas=options.isas.split(",") if options.isas else None,
            threads=[options.threads] if options.threads else None,
            gib=options.gib,
            labels={"card": options.card, "commit": options.commit},
        )
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        append(options.json, result)
    shared = ("bench", "run", "commit", "date", "card", "host_cpu", "torch")
    common = dict.fromkeys(KEYS) | {key: result[0][key] for key in shared}
    for shape, format in itertools.product(options.shapes, options.formats):
        spec = _spec(*shape, format)
        found = _rows(common, spec, options.rows, result[0]["threads"], options.gib)
        result += found
        if options.json:
            append(options.json, found)
    print(bench.format_table(result))
    for note in dict.fromkeys(
        f"kt-kernel, {row['model']} {row['format']}: {row['note']}"
        for row in result
        if row.get("note")
    ):
        print(note)


if __name__ == "__main__":
    main()
