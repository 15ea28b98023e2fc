"""Decode: the time of an engine step in which every request of a batch gets one token.

    python -m bench.decode --layers 24 --batches 1,8,32 --routing uniform,local --json FILE

The same method for every contestant: a batch is prefilled in one step, caches are filled by up to
64 steps, then seven times the mean of up to 16 steps is taken.
"""

from __future__ import annotations

import argparse

from bench import floors, report, runner
from bench.runner import SIMULATED, Cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.arguments(parser)
    parser.add_argument("--batches", type=runner.numbers, default=[1, 8, 32])
    parser.add_argument("--routing", type=runner.words, default=["uniform", "local"])
    options = parser.parse_args()
    cells = [Cell(r, batch=b) for r in options.routing for b in options.batches]
    session, folder = runner.session("decode", options)
    with folder:
        session.measure_rates()
        engine = {
            "max_model_len": 512,
            "max_num_seqs": max(options.batches),
            "max_num_batched_tokens": max(1024, 16 * max(options.batches)),
        }
        if not options.eager:
            engine["cudagraph_capture_sizes"] = sorted(options.batches)
        for name in options.contestants:
            session.compete(name, "step_ms", cells, engine)
        for cell in cells:
            session.floor("step_ms", cell, _floor(session, cell))
    print(report.table(session.rows, "step_ms"))


def _floor(session: runner.Session, cell: Cell) -> float | str:
    both = session.value("machine", "both_gb_per_s")
    if both is None:
        return "the rate of both lanes was not measured"
    if cell.routing not in SIMULATED or cell.batch is None:
        return f"what is missed under routing {cell.routing} is not known beforehand"
    shape, slots = session.shape, session.slots
    needed, missed = floors.experts_of_a_step(shape, cell.routing, cell.batch, slots)
    return floors.decode_ms(
        shape,
        needed=needed,
        missed=missed,
        both_gb_per_s=both,
        gpu_ms=session.value("vllm-gpu", "step_ms", routing=cell.routing, batch=cell.batch),
        gpu_read_gb_per_s=session.value("machine", "gpu_read_gb_per_s"),
    )


if __name__ == "__main__":
    main()
