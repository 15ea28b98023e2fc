"""Decode steps and prefills of every contestant, each contestant one engine, and their floors."""

from __future__ import annotations

import argparse
from typing import Any

from bench import floors, report, runner
from bench.child import PROMPT
from bench.common import SIMULATED, SWITCHING
from bench.rates import METRICS
from bench.runner import Cell, Session

_REST = 16  # tokens of room that a prompt leaves


def run(bench: str, options: argparse.Namespace, cells: list[Cell]) -> None:
    """Measure every cell of every contestant and the machine's rates; print a table a metric."""
    engine = _engine(cells, options.chunk, options.eager)
    with runner.session(bench, options) as session:
        session.check_length(engine["max_model_len"])
        session.prepare(len(options.contestants))
        session.compete(options.contestants, cells, engine)
        for cell in cells:
            session.floor(cell, _floor(session, cell, options.chunk))
    for metric in dict.fromkeys(cell.metric for cell in cells):
        print(report.table(session.rows, metric))


def _engine(cells: list[Cell], chunk: int, eager: bool) -> dict[str, Any]:
    """Arguments of an engine that holds the largest batch and the longest prompt."""
    batches = sorted({cell.batch for cell in cells if cell.batch is not None})
    tokens = max((cell.tokens for cell in cells if cell.tokens is not None), default=0)
    most = max(batches, default=1)
    engine = {
        "max_model_len": max(1024 if batches else 0, tokens + _REST),
        "max_num_seqs": most,
        "max_num_batched_tokens": max(
            1024 if batches else 0, PROMPT * most, min(tokens, chunk) if tokens else 0
        ),
    }
    return engine if eager else engine | {"cudagraph_capture_sizes": batches or [1]}


def _floor(session: Session, cell: Cell, chunk: int) -> float | str:
    rate = {metric: session.value("machine", metric, **cell.keys()) for metric in METRICS}
    both = rate["both_gb_per_s"]
    if both is None:
        return "the rate of both lanes was not measured"
    if not cell.is_simulated:
        return f"what is missed under routing {cell.routing} is not known beforehand"
    gpu_ms = session.value("vllm-gpu", cell.metric, **cell.keys())
    if cell.tokens is not None:
        return floors.prefill_ms(
            session.shape,
            tokens=cell.tokens,
            chunk=chunk,
            slots=session.slots,
            both_gb_per_s=both,
            # Each alone, or both: a CPU that computes may slow copies by more than it adds.
            lanes=[
                (h2d, tflop)
                for h2d, tflop in (
                    (rate["h2d_gb_per_s"], 0.0),
                    (rate["computing_h2d_gb_per_s"], rate["computing_tflop_per_s"]),
                    (0.0, rate["cpu_tflop_per_s"]),
                )
                if h2d is not None and tflop is not None
            ],
            gpu_ms=gpu_ms,
        )
    # Both by themselves, as often: what a switch costs the slots is not a part of it.
    turns = SIMULATED if cell.routing == SWITCHING else (cell.routing,)
    each = [
        floors.experts_of_a_step(session.shape, routing, cell.batch, session.slots)
        for routing in turns
    ]
    needed, missed = (sum(numbers) / len(turns) for numbers in zip(*each, strict=True))
    return floors.decode_ms(
        session.shape,
        needed=needed,
        missed=missed,
        both_gb_per_s=both,
        gpu_ms=gpu_ms,
        gpu_read_gb_per_s=rate["gpu_read_gb_per_s"],
    )
