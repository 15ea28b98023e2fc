"""The CPU expert engine on this machine: `python bench/cpu.py --json results.json`.

`moe-offload bench cpu` is the same with the defaults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from vllm_moe_offload.engine import bench
from vllm_moe_offload.experts import Format


def shape(text: str) -> tuple[int, int]:
    hidden, intermediate = text.split("x")
    return int(hidden), int(intermediate)


def commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    where = Path(__file__).parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=where, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--shapes", nargs="+", type=shape, default=bench.SHAPES, metavar="HxI")
    parser.add_argument("--formats", nargs="+", type=Format, default=bench.FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=bench.ROWS)
    parser.add_argument("--isas", nargs="+", help="default: the fastest this host has")
    parser.add_argument("--threads", nargs="+", type=int, help="default: all physical cores")
    parser.add_argument("--gib", type=float, default=4.0, help="experts to rotate over")
    parser.add_argument("--card", help="name of the machine in the rows, such as h100 or epyc-2c")
    parser.add_argument("--no-torch", action="store_true", help="leave torch's linear out")
    arguments = parser.parse_args()
    rows = bench.bench_cpu(
        shapes=arguments.shapes,
        formats=arguments.formats,
        rows=arguments.rows,
        isas=arguments.isas,
        threads=arguments.threads,
        gib=arguments.gib,
        beside_torch=not arguments.no_torch,
    )
    print(bench.format_table(rows))
    if arguments.json is not None:
        labels = {"commit": commit(), "card": arguments.card}
        arguments.json.write_text(json.dumps([labels | row for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
