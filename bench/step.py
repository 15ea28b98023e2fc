"""What the parts of a captured decode step cost a layer, by themselves.

    python -m bench.step --json FILE

On a GPU. Each part runs in a graph of its own, once for each of 24 layers, timed by CUDA events
around replays: `step_us` the decisions (`DeviceStep`), by the warps of the program;
`fetch_gb_per_s` a number of experts from pinned memory, by the programs that copy; `doorbell_us`
submit, the CPU engine's answer to a request in which it has no expert to compute, wait and join;
`doorbell_idle_us` the same where the CPU is not asked.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.arguments import rows_file
from bench.common import Row, Run, append, summary
from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertLayout, ExpertSpec, Format, TensorSpec
from vllm_moe_offload.lanes import CpuLane

# Qwen3-30B-A3B's shape, with slots for 20% of its experts.
LAYERS, EXPERTS, TOP_K, SLOTS, HIDDEN, INTERMEDIATE = 24, 128, 8, 26, 2048, 768
DTYPE = torch.bfloat16
BATCHES = (1, 8, 32)
WARPS = (2, 4, 8, 16)
PROGRAMS = (4, 8, 16, 32)
FETCHED = (1, 2, 4, 8)
REPEATS, REPLAYS = 7, 20


def layer_us(work: Callable[[int], None], replays: int = REPLAYS) -> list[float]:
    """Microseconds a layer of `work(layer)`, captured once for each layer: one for each repeat.

    A repeat is the mean of so many replays.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for layer in range(LAYERS):
            work(layer)  # compiles, which capturing does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for layer in range(LAYERS):
            work(layer)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays / LAYERS)
    return times


def routing(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of every layer, [LAYERS, batch, TOP_K]: each row a top-k drawn uniformly."""
    generator = torch.Generator("cuda").manual_seed(batch)
    logits = torch.randn(LAYERS, batch, EXPERTS, generator=generator, device="cuda")
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return ids.int(), weights


def step_rows(run: Run, batch: int) -> list[Row]:
    ids, weights = routing(batch)
    rows = []
    for warps in WARPS:
        steps = [
            DeviceStep(
                EXPERTS,
                SLOTS,
                "lfru",
                top_k=TOP_K,
                cache_topk=2,
                num_waves=1,
                device=torch.device("cuda"),
            )
            for _ in range(LAYERS)
        ]
        for step in steps:
            step.num_warps = warps
        times = layer_us(lambda layer, steps=steps: steps[layer].launch(ids[layer], weights[layer]))
        rows.append(row(run, f"{warps} warps", "step_us", "us", times, batch=batch))
    return rows


def fetch_rows(run: Run) -> list[Row]:
    """One layer's experts, read by all: 1.2 GB, more than any cache holds."""
    layout = ExpertLayout(
        (
            TensorSpec("w13", (2 * INTERMEDIATE, HIDDEN), DTYPE),
            TensorSpec("w2", (HIDDEN, INTERMEDIATE), DTYPE),
        )
    )
    host = {name: tensor.pin_memory() for name, tensor in layout.empty(EXPERTS).items()}
    slots = layout.empty(SLOTS, "cuda")
    generator = torch.Generator().manual_seed(0)
    pairs = torch.stack(
        [
            torch.stack([torch.randperm(EXPERTS, generator=generator)[:SLOTS], torch.arange(SLOTS)])
            for _ in range(LAYERS)
        ]
    )
    pairs = pairs.mT.int().contiguous().cuda()
    rows = []
    for programs in PROGRAMS:
        fetch = ExpertFetch(host, slots, programs)
        for fetched in FETCHED:
            count = torch.tensor(fetched, dtype=torch.int32, device="cuda")
            times = layer_us(
                lambda layer, fetch=fetch, count=count: fetch.launch(pairs[layer], count),
                replays=2,
            )
            rates = [fetched * layout.nbytes / us / 1e3 for us in times]
            who = f"{programs} programs, {fetched} experts"
            rows.append(row(run, who, "fetch_gb_per_s", "GB/s", rates))
    return rows


def doorbell_rows(run: Run, batch: int) -> list[Row]:
    """The CPU has one expert, which no row is routed to, or none."""
    ids, weights = routing(batch)
    ids.remainder_(EXPERTS - 1)
    spec = ExpertSpec(HIDDEN, 1, Activation.SILU, Format.BF16)
    x = torch.randn(batch, HIDDEN, device="cuda").to(DTYPE)
    out = torch.empty_like(x)
    rows = []
    with CpuExpertEngine() as engine:
        lane = CpuLane(engine, max_layers=LAYERS, max_tokens=batch, device=x.device)
        plan = engine.plan(spec, spec.layout.empty(EXPERTS), max_tokens=batch, top_k=TOP_K)
        requests = [lane.add(f"layers.{layer}", plan) for layer in range(LAYERS)]
        for metric, of_cpu in (("doorbell_us", 1), ("doorbell_idle_us", 0)):
            cpu_map = torch.full((EXPERTS + 1,), -1, dtype=torch.int32, device="cuda")
            cpu_map[EXPERTS - 1 : EXPERTS - 1 + of_cpu] = EXPERTS - 1

            def work(layer: int, cpu_map: torch.Tensor = cpu_map) -> None:
                requests[layer].submit(x, ids[layer], weights[layer], cpu_map)
                requests[layer].wait()
                requests[layer].join(x, cpu_map, out)

            times = layer_us(work)
            lane.check()
            who = f"{engine.threads} threads, {engine.isa}"
            rows.append(row(run, who, metric, "us", times, batch=batch))
        lane.close()
    return rows


def row(run: Run, who: str, metric: str, unit: str, values: list[float], **figures: Any) -> Row:
    return run.row(
        model="qwen3-30b-a3b",
        layers=LAYERS,
        format="bf16",
        slots=SLOTS,
        routing="uniform",
        contestant=who,
        metric=metric,
        unit=unit,
        **summary(values),
        **figures,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=rows_file, help="file the rows are appended to")
    parser.add_argument("--commit")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    run = Run.here("step", options.commit)
    began = time.monotonic()
    parts = [
        *(functools.partial(part, run, b) for b in BATCHES for part in (step_rows, doorbell_rows)),
        functools.partial(fetch_rows, run),
    ]
    for part in parts:
        rows = part()
        for made in rows:
            batch = "" if made["batch"] is None else f"batch {made['batch']}"
            print(
                f"{made['metric']:17} {batch:9} {made['contestant']:40} {made['value']:8.2f} "
                f"{made['unit']:5} ({made['min']:.2f} to {made['max']:.2f})",
                flush=True,
            )
        if options.json:
            append(options.json, rows)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
