"""How fast each lane reads the experts of a layer, alone and beside the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.streams import Stopwatch
from vllm_moe_offload.engine import ExpertPlan
from vllm_moe_offload.planning import LaneRates

# Of each measurement: long enough for clocks to rise and for noise to average out.
_SECONDS = 0.12
# How often each is taken: what else runs meanwhile makes a lane slower, so the best one counts.
_ROUNDS = 3


def measure_rates(
    fetch: ExpertFetch, num_slots: int, plan: ExpertPlan, device: torch.device
) -> LaneRates:
    """Fetch a layer's experts into its slots, and compute them on the CPU, a row at a time.

    fetch: into `num_slots` slots on `device`, whose contents are lost; plan: over the same experts
    in host memory. Takes about a second.
    """
    lanes = _Lanes(fetch, num_slots, plan, device)
    lanes.fetch_for(1)  # compiles
    passes = max(int(_SECONDS / lanes.fetch_for(1)), 1)
    fetch_alone, cpu_alone, pairs = 0.0, 0.0, []
    for _ in range(_ROUNDS):
        fetch_alone = max(fetch_alone, passes * lanes.pass_bytes / lanes.fetch_for(passes))
        cpu_alone = max(cpu_alone, lanes.compute_for(_SECONDS))
        pairs.append(lanes.both(passes))
    # Not by their sum: where one lane stalls the other is faster.
    beside = max(pairs, key=lambda pair: min(pair[0] / fetch_alone, pair[1] / cpu_alone))
    return LaneRates(fetch_alone, cpu_alone, *beside)


class _Lanes:
    """The work of both, in turns over all experts of the layer."""

    def __init__(
        self, fetch: ExpertFetch, num_slots: int, plan: ExpertPlan, device: torch.device
    ) -> None:
        num_experts, top_k = plan.experts, plan.top_k
        self._fetch = fetch
        self._plan = plan
        self._watch = Stopwatch(device)
        every = torch.arange(num_experts, dtype=torch.int32)
        self._pairs = torch.stack([every, every % num_slots], 1).contiguous().to(device)
        self._count = torch.tensor(num_experts, dtype=torch.int32, device=device)
        self.pass_bytes = num_experts * fetch.expert_bytes
        # Rows that name every expert once, but for some that the last one may name again.
        rows = -(-num_experts // top_k)
        named = torch.arange(rows * top_k, dtype=torch.int32) % num_experts
        self._ids = itertools.cycle(named.view(rows, 1, top_k).unbind())
        self._row_bytes = top_k * fetch.expert_bytes
        spec = plan.spec
        self._x = torch.full((1, spec.hidden), 0.01, dtype=spec.activation_dtype)
        self._weights = torch.full((1, top_k), 1 / top_k, dtype=torch.float32)
        self._out = torch.empty((1, spec.hidden), dtype=torch.float32)

    def fetch_for(self, passes: int) -> float:
        """Seconds of fetching all experts so many times."""
        self._launch(passes)
        return self._watch.seconds()

    def compute_for(self, seconds: float) -> float:
        """Bytes a second of the CPU's, by itself."""
        ends = time.perf_counter() + seconds
        return self._compute_while(lambda: time.perf_counter() < ends)

    def both(self, passes: int) -> tuple[float, float]:
        """Bytes a second of fetching so many times, and of the CPU's meanwhile."""
        self._launch(passes)
        computed = self._compute_while(lambda: not self._watch.is_done())
        return passes * self.pass_bytes / self._watch.seconds(), computed

    def _launch(self, passes: int) -> None:
        self._watch.start()
        for _ in range(passes):
            self._fetch.launch(self._pairs, self._count)
        self._watch.stop()

    def _compute_while(self, goes_on: Callable[[], bool]) -> float:
        began, rows = time.perf_counter(), 0
        while not rows or goes_on():
            self._plan.run(self._x, next(self._ids), self._weights, self._out)
            rows += 1
        return rows * self._row_bytes / (time.perf_counter() - began)
