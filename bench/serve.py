"""Serving: what a long prompt does to requests that are being answered.

    python -m bench.serve --layers 24 --decodes 8 --tokens 16384 --chunk 2048 --json FILE

Each contestant is a `vllm serve` that is spoken to over HTTP. Some requests are answered, token by
token; then a prompt arrives, which is prefilled in chunks of up to `--chunk` tokens beside them.
Measured: the time to that prompt's first token, and the time between two tokens of the others
before and meanwhile. What a chunk takes by itself is measured in the same server: the prompt's time
to the first token when nothing else runs, over its number of chunks. Every prompt is another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from bench import arguments, models, report, runner
from bench.child import PROMPT, ROUTING_VARIABLE
from bench.common import MIN_REPEATS, SIMULATED, Row, summary
from bench.contestants import make
from bench.runner import Session
from bench.server import call, metrics, server, stream

METRICS = {
    "ttft_ms": "ms",
    "chunk_ms": "ms",
    "itl_p50_ms": "ms",
    "itl_p99_ms": "ms",
    "itl_p99_chunks": "chunks",
}
_WARM = 4  # tokens of every request before anything is timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.arguments(parser)
    parser.add_argument(
        "--decodes", type=arguments.number, default=8, help="requests being answered"
    )
    parser.add_argument(
        "--tokens", type=arguments.number, default=16384, help="of the prompt that arrives"
    )
    parser.add_argument(
        "--chunk", type=arguments.number, default=2048, help="tokens of a step, at most"
    )
    parser.add_argument("--room", type=arguments.number, default=1024, help="tokens of an answer")
    parser.add_argument("--routing", type=runner.routings, default=["uniform"], help="one of them")
    options = parser.parse_args()
    for name in ("gpus", "together"):
        if getattr(options, name) > 1:
            parser.error(
                f"--{name}: servers are measured one after another, on one GPU: leave it out"
            )
    if len(options.routing) > 1:
        parser.error("--routing: a server has one: give one")
    if options.chunk <= options.decodes:
        parser.error(f"--chunk {options.chunk}: give more than --decodes, {options.decodes}")
    with runner.session("serve", options) as session:
        session.check_length(_sizes(options)["max_model_len"], "--tokens and --room")
        if options.model in models.MODELS:
            models.write_tokenizer(session.model)
        for name in options.contestants:
            session.add(figures(session, name))
        for metric in METRICS:
            print(report.TITLES[metric], report.table(session.rows, metric), sep="\n\n")


def figures(session: Session, name: str) -> list[Row]:
    """The rows of one contestant; where it fails, rows without a value that say why."""
    options = session.options
    routing = options.routing[0]
    keys = session.common() | {"contestant": name, "routing": routing}
    log = session.folder / f"{name}.log"
    try:
        contestant = make(name, session.shape, session.slots)
        keys["slots"] = contestant.slots
        engine = session.engine() | contestant.engine | _sizes(options)
        engine.pop("skip_tokenizer_init")
        # Where engines of other runs are on its GPU as well.
        engine["gpu_memory_utilization"] /= options.runs
        left = min(options.timeout, session.seconds_left)
        environment = _environment(routing, options.runner)
        with server(engine, environment, log, left) as url, session.turn():
            if options.runs > 1 and contestant.name in ("auto", "hybrid"):
                call(url, "moe_offload_measure")  # it has started beside others
            measured = asyncio.run(_within(session, url))
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"metrics-{name}.txt").write_text(metrics(url))
    except (RuntimeError, OSError, TimeoutError, ValueError) as error:
        note = (str(error) or "the run took too long")[:300]
        return [
            session.run.row(**keys, metric=metric, unit=unit, note=note, **where)
            for metric, unit, where in _rows(options)
        ]
    finally:
        if options.logs and log.is_file():
            options.logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, options.logs / f"serve-{name}.log")
    return [
        session.run.row(**keys, metric=metric, unit=unit, **measured.of(metric, where), **where)
        for metric, unit, where in _rows(options)
    ]


def _rows(options: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Metric, unit and the keys of what it is measured at."""
    alone, loaded = {"tokens": options.tokens}, {"batch": options.decodes}
    both = alone | loaded
    places = {
        "ttft_ms": (alone, both),
        "chunk_ms": (alone,),
        "itl_p50_ms": (loaded, both),
        "itl_p99_ms": (loaded, both),
        "itl_p99_chunks": (both,),
    }
    return [(m, METRICS[m], where) for m, found in places.items() for where in found]


@dataclass
class Measured:
    """Seconds of each repeat. `gaps`: between tokens, before the prompt came and meanwhile."""

    chunks: int
    ttft_alone: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    gaps: list[tuple[list[float], list[float]]] = field(default_factory=list)

    def of(self, metric: str, where: dict[str, Any]) -> dict[str, float | int]:
        """The figure as keys of a row."""
        loaded = "tokens" in where and "batch" in where
        chunk = float(np.median(self.ttft_alone)) / self.chunks
        if metric == "ttft_ms":
            return summary([1e3 * s for s in (self.ttft if loaded else self.ttft_alone)])
        if metric == "chunk_ms":
            return summary([1e3 * s / self.chunks for s in self.ttft_alone])
        percentile = 50 if metric == "itl_p50_ms" else 99
        scale = 1 / chunk if metric == "itl_p99_chunks" else 1e3
        return summary([float(np.percentile(g[loaded], percentile)) * scale for g in self.gaps])


async def _within(session: Session, url: str) -> Measured:
    async with asyncio.timeout(min(session.options.timeout, session.seconds_left)):
        return await measure(url, session.options, session.vocabulary)


async def measure(url: str, options: argparse.Namespace, vocabulary: int) -> Measured:
    """One repeat to warm up, then those that count."""
    import aiohttp

    rng = np.random.default_rng(0)

    def prompt(tokens: int) -> list[int]:
        drawn: list[int] = rng.integers(3, vocabulary, tokens).tolist()
        return drawn

    measured = Measured(-(-options.tokens // options.chunk))
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=unlimited) as client:

        async def first_token() -> tuple[float, float]:
            began, times = time.perf_counter(), []  # type: float, list[float]
            await stream(client, url, prompt(options.tokens), 1, times)
            return began, times[0]

        for repeat in range(1 + MIN_REPEATS):
            began, ended = await first_token()
            alone = ended - began
            arrivals: list[list[float]] = [[] for _ in range(options.decodes)]
            tasks = [
                asyncio.create_task(stream(client, url, prompt(PROMPT), options.room, times))
                for times in arrivals
            ]
            try:
                await _until(tasks, arrivals, _WARM)
                since = time.perf_counter()
                await _until(tasks, arrivals, 2 * _WARM, options.seconds / MIN_REPEATS)
                began, ended = await first_token()
                await _until(tasks, arrivals, 0)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if repeat:
                measured.ttft_alone.append(alone)
                measured.ttft.append(ended - began)
                before = _gaps(arrivals, since, began)
                measured.gaps.append((before, _gaps(arrivals, began, ended)))
    return measured


async def _until(
    tasks: list[asyncio.Task[None]], arrivals: list[list[float]], count: int, seconds: float = 0.0
) -> None:
    """Wait until every request has so many tokens and `seconds` have passed; none may end."""
    until = time.perf_counter() + seconds
    while min(map(len, arrivals)) < count or time.perf_counter() < until:
        await asyncio.sleep(0.002)
        _check(tasks)
    _check(tasks)


def _check(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError(
                "a request has got all its tokens before the prompt was answered: give more --room"
            )


def _gaps(arrivals: list[list[float]], since: float, until: float) -> list[float]:
    """Seconds between two tokens of a request, of those that ended between these times."""
    gaps = [
        later - earlier
        for times in arrivals
        for earlier, later in pairwise(times)
        if since < later <= until
    ]
    if not gaps:
        raise RuntimeError("no token came meanwhile: give a longer prompt (--tokens)")
    return gaps


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_model_len": max(options.tokens + 1, PROMPT + options.room),
        "max_num_seqs": options.decodes + 1,
        "max_num_batched_tokens": options.chunk,
    }


def _environment(routing: str, model_runner: str) -> dict[str, str]:
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if model_runner == "v2" else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # which has what `call` asks for
    }
    environment.pop(ROUTING_VARIABLE, None)
    if routing in SIMULATED:
        environment[ROUTING_VARIABLE] = routing
    return environment


if __name__ == "__main__":
    main()
