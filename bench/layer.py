"""What an offloaded layer of a captured step costs, by how its lanes are arranged.

    python -m bench.layer --json FILE

On a GPU, with vLLM's kernel and without its engine: a graph of 8 layers of Qwen3-30B-A3B's shape
with slots for 20% of the experts, a pause in place of each attention, routings played back.
`layer_us` is a layer with its pause. `vllm` is the same kernel over all experts on the GPU;
``hits`` is a routing that never misses. Printed beside it: what of a step hit, was fetched and was
the CPU's, and the time that the missed bytes take at both lanes' rates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import fused_experts

from bench.arguments import numbers, rows_file
from bench.common import Run, append, summary
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import Lane
from vllm_moe_offload.lanes.captured import CapturedLayer
from vllm_moe_offload.lanes.cpu import CpuLane
from vllm_moe_offload.lanes.rates import measure_rates
from vllm_moe_offload.planning import fetch_limits, promotion_limits
from vllm_moe_offload.routing.simulate import simulate

LAYERS, EXPERTS, TOP_K, SLOTS, HIDDEN, INTERMEDIATE = 8, 128, 8, 26, 2048, 768
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2
STEPS, WARM, REPEATS, REPLAYS = 400, 150, 7, 15
PAUSE_US = 50
_CYCLES_A_US = 1755  # of these GPUs' clock
CUDA = torch.device("cuda")

Forward = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Limits = npt.NDArray[np.integer[Any]]


class Resident(Lane):
    """vLLM's kernel over some experts, as a lane."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self._weights = w13, w2

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `lanes.base.Lane.output`."""
        return fused_experts(
            x,
            *self._weights,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            global_num_experts=EXPERTS + (expert_map is not None),
        )


class Played:
    """A routing of every layer, the table's next one at each replay."""

    def __init__(self, routing: str, batch: int) -> None:
        if routing == "hits":
            ids = np.tile(np.arange(TOP_K, dtype=np.int32), (1, LAYERS, batch, 1))
            weights = np.full(ids.shape, 1 / TOP_K, np.float32)
        else:
            sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
            table = simulate(routing, steps=STEPS, layers=LAYERS, rows=batch, **sizes)
            ids, weights = table.ids, table.weights
        self._ids, self._weights = torch.from_numpy(ids).cuda(), torch.from_numpy(weights).cuda()
        self._step = torch.zeros(1, dtype=torch.int64, device=CUDA)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights, [LAYERS, batch, TOP_K]."""
        self._step.add_(1).remainder_(len(self._ids))
        tables = self._ids, self._weights
        ids, weights = (table.index_select(0, self._step)[0] for table in tables)
        return ids, weights


def layer_us(forward: Forward, routing: str, batch: int, wake: Callable[[], None]) -> list[float]:
    """Microseconds a layer of ``forward(layer, x, weights, ids)``, one for each repeat."""
    played = Played(routing, batch)
    x = torch.randn(batch, HIDDEN, device=CUDA).bfloat16()

    def step() -> None:
        ids, weights = played.next()
        for layer in range(LAYERS):
            torch.cuda._sleep(PAUSE_US * _CYCLES_A_US)
            forward(layer, x, weights[layer], ids[layer])

    def replay(times: int) -> None:
        for _ in range(times):
            wake()
            graph.replay()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        wake()
        step()  # compiles, which capturing does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    replay(WARM)
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay(REPLAYS)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPLAYS / LAYERS)
    return times


@dataclass(frozen=True)
class Arrangement:
    """Arguments of `CapturedLayer`, and the split: without limits every miss is fetched.

    `waits`: each layer waits for what it promotes, not only the last one.
    """

    limits: Limits | None
    promotions: Limits | None = None
    waits: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def arrangements(split: Limits, promotions: Limits) -> dict[str, Arrangement]:
    """What is compared. `split`, `promotions`: those of the measured rates."""
    misses = np.arange(EXPERTS + 1)
    one = np.minimum(misses, 1)
    few = misses <= 2
    return {
        "hybrid": Arrangement(split),
        "hybrid, promotions": Arrangement(split, promotions),
        "hybrid, promotions waited for": Arrangement(split, promotions, waits=True),
        "hybrid, a promotion each step": Arrangement(split, np.minimum(one, misses - split)),
        "hybrid, few are promoted only": Arrangement(
            np.where(few, 0, split), np.where(few, one, promotions)
        ),
        "hybrid, cache_topk 2": Arrangement(split, None, {"cache_topk": 2}),
        "hybrid, a fetch fewer": Arrangement(np.maximum(split - 1, 0)),
        "hybrid, a fetch more": Arrangement(np.minimum(split + 1, misses)),
        "hybrid, a single miss fetched": Arrangement(np.maximum(split, misses == 1)),
        "cache": Arrangement(None),
    }


class Machine:
    """The experts in host memory and on the GPU, and what computes them."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=CUDA) / 40).bfloat16()

        self.on_gpu = [
            (weights(EXPERTS, 2 * INTERMEDIATE, HIDDEN), weights(EXPERTS, HIDDEN, INTERMEDIATE))
            for _ in range(LAYERS)
        ]
        self.host = [
            {"w13_weight": w13.cpu().pin_memory(), "w2_weight": w2.cpu().pin_memory()}
            for w13, w2 in self.on_gpu
        ]
        self.engine = CpuExpertEngine()
        self.lane = CpuLane(self.engine, max_layers=1024, max_tokens=64, device=CUDA)
        spec = ExpertSpec(HIDDEN, INTERMEDIATE, Activation.SILU, Format.BF16)
        self.plans = [
            self.engine.plan(spec, tensors, max_tokens=64, top_k=TOP_K) for tensors in self.host
        ]
        self._side = SideStream(CUDA)

    def layers(self, arrangement: Arrangement) -> list[CapturedLayer]:
        """One for each layer, with empty slots."""
        made = []
        for number, (host, plan) in enumerate(zip(self.host, self.plans, strict=True)):
            ends = arrangement.waits or number == LAYERS - 1
            slots = {
                name: torch.empty(SLOTS, *tensor.shape[1:], dtype=tensor.dtype, device=CUDA)
                for name, tensor in host.items()
            }
            layer = CapturedLayer(
                host,
                slots,
                Resident(*slots.values()),
                self._side,
                None if arrangement.limits is None else self.lane.add("layer", plan),
                policy="lfru",
                top_k=TOP_K,
                ends_step=lambda ends=ends: ends,
                **arrangement.arguments,
            )
            if arrangement.limits is not None:
                layer.split(arrangement.limits, arrangement.promotions)
            made.append(layer)
        return made

    def vllm(self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
        """The layer with all its experts on the GPU."""
        return Resident(*self.on_gpu[layer]).output(x, weights, ids, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=rows_file, help="file the rows are appended to")
    parser.add_argument("--commit")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    run = Run.here("layer", options.commit)
    began = time.monotonic()
    machine = Machine()
    first = machine.layers(Arrangement(np.zeros(EXPERTS + 1, np.int64)))[0]
    rates = measure_rates(first.fetch, SLOTS, machine.plans[0], CUDA)
    split = fetch_limits(rates, EXPERTS)
    promotions = promotion_limits(rates, split)
    print(
        f"{rates}\nof 1 to 16 misses are fetched {split[1:17]}, promoted {promotions[1:17]}",
        flush=True,
    )
    both = rates.fetch_beside_cpu + rates.cpu_beside_fetch

    def note(who: str, routing: str, batch: int, times: list[float], beside: str = "") -> None:
        made = run.row(
            model="qwen3-30b-a3b",
            layers=LAYERS,
            format="bf16",
            slots=SLOTS,
            routing=routing,
            batch=batch,
            contestant=who,
            metric="layer_us",
            unit="us",
            **summary(times),
        )
        low, high = made["min"], made["max"]
        figures = f"{made['value']:7.1f} us ({low:.1f} to {high:.1f}) {beside}"
        print(f"{routing:8} batch {batch:2} {who:30} {figures}", flush=True)
        if options.json:
            append(options.json, [made])

    for batch in options.batches:
        for routing in ("hits", "local", "uniform"):
            wake = machine.lane.wake
            note("vllm", routing, batch, layer_us(machine.vllm, routing, batch, wake))
            for name, arrangement in arrangements(split, promotions).items():
                layers = machine.layers(arrangement)

                def forward(
                    layer: int,
                    x: torch.Tensor,
                    weights: torch.Tensor,
                    ids: torch.Tensor,
                    layers: list[CapturedLayer] = layers,
                ) -> torch.Tensor:
                    return layers[layer].forward(x, weights, ids)

                times = layer_us(forward, routing, batch, wake)
                machine.lane.check()
                counted = [layer.read_counters() for layer in layers]
                steps = sum(each.steps for each in counted)
                hits, misses, cpu = (
                    sum(getattr(each, what) for each in counted) / steps
                    for what in ("hits", "misses", "cpu_experts")
                )
                lanes = misses * EXPERT_BYTES / both * 1e6
                note(
                    *(name, routing, batch, times),
                    f"{hits:.2f} hit, {misses - cpu:.2f} fetched, {cpu:.2f} on the CPU; the missed "
                    f"bytes alone {lanes:.0f} us",
                )
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        main()
