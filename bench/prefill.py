"""Prefill: the time to the first token of one prompt, prefilled in one step.

    python -m bench.prefill --layers 24 --tokens 512,4096 --json FILE

Prefix caching is off and every prompt is another; one to warm up, then five.
"""

from __future__ import annotations

import argparse

from bench import floors, report, runner
from bench.runner import Cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.arguments(parser)
    parser.add_argument("--tokens", type=runner.numbers, default=[512, 4096])
    parser.add_argument("--routing", type=runner.words, default=["uniform"])
    options = parser.parse_args()
    cells = [Cell(r, tokens=t) for r in options.routing for t in options.tokens]
    session, folder = runner.session("prefill", options)
    with folder:
        session.measure_rates()
        engine = {
            "max_model_len": max(options.tokens) + 16,
            "max_num_seqs": 1,
            "max_num_batched_tokens": max(options.tokens) + 16,
        }
        if not options.eager:
            engine["cudagraph_capture_sizes"] = [1]
        for name in options.contestants:
            session.compete(name, "ttft_ms", cells, engine)
        for cell in cells:
            session.floor("ttft_ms", cell, _floor(session, cell))
    print(report.table(session.rows, "ttft_ms"))


def _floor(session: runner.Session, cell: Cell) -> float | str:
    both = session.value("machine", "both_gb_per_s")
    if both is None or cell.tokens is None:
        return "the rate of both lanes was not measured"
    return floors.prefill_ms(
        session.shape,
        tokens=cell.tokens,
        slots=session.slots,
        both_gb_per_s=both,
        gpu_ms=session.value("vllm-gpu", "ttft_ms", routing=cell.routing, tokens=cell.tokens),
    )


if __name__ == "__main__":
    main()
