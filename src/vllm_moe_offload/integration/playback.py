"""A table of routings on the device, played back by a counter that is there too.

In a captured CUDA graph no Python runs, so what a step is routed to is read from the table at a
place that the step itself moves on. Layers call in turn, so entry ``step * layers + layer`` holds
what a layer sees in a step. No host synchronisation, eager or captured.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_moe_offload.routing.simulate import RoutingTable, simulate

STEPS = 1024
# 32 rows of 24 layers, top-8: 48 MiB on the device, 3 s to draw.
ROWS = 32
# Row r + ROWS * n of a step is row r of the step STRIDE * n later: odd, so that it meets every step
# of the table once, and far more than the memory of a routing, so that such rows are independent.
STRIDE = 397

_BLOCK = 256


class Playback:
    """The table of `layers` equal layers; the routing in it can be exchanged under a graph."""

    def __init__(
        self,
        routing: str,
        *,
        layers: int,
        num_experts: int,
        top_k: int,
        device: torch.device,
        steps: int = STEPS,
        rows: int = ROWS,
    ) -> None:
        self.layers, self.num_experts, self.top_k = layers, num_experts, top_k
        self.steps, self.rows = steps, rows
        self._tables: dict[str, RoutingTable] = {}
        # Made inside a step, which is in inference mode; changed outside of it.
        with torch.inference_mode(False):
            shape = (steps * layers, rows, top_k)
            self.ids = torch.empty(shape, dtype=torch.int32, device=device)
            self.weights = torch.empty(shape, dtype=torch.float32, device=device)
            # Counts calls; int64, so it need not wrap.
            self.calls = torch.zeros(1, dtype=torch.int64, device=device)
        self.select(routing)

    def select(self, routing: str, goes_on: bool = False) -> None:
        """Play `routing` from its start, or from where it is; graphs read the same memory."""
        table = self._tables.get(routing)
        if table is None:
            table = self._tables[routing] = simulate(
                routing,
                steps=self.steps,
                layers=self.layers,
                rows=self.rows,
                num_experts=self.num_experts,
                top_k=self.top_k,
            )
        with torch.inference_mode(False):
            self.ids.copy_(torch.from_numpy(table.ids).view(self.ids.shape))
            self.weights.copy_(torch.from_numpy(table.weights).view(self.weights.shape))
            if not goes_on:
                self.calls.zero_()

    def play(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next layer's routing: weights float32 [T, K] and ids int32 [T, K], both fresh."""
        out = self._launch(num_rows) if self.ids.is_cuda else self._gather(num_rows)
        self.calls.add_(1)
        return out

    def _gather(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`play` in plain operations: what the kernel is tested against."""
        row = torch.arange(num_rows, device=self.ids.device)
        later = row // self.rows * (STRIDE * self.layers)
        place = (self.calls + later) % len(self.ids) * self.rows + row % self.rows
        return (
            self.weights.view(-1, self.top_k).index_select(0, place),
            self.ids.view(-1, self.top_k).index_select(0, place),
        )

    def _launch(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`play` as one kernel: six small ones a layer would be 0.3 ms of a 24-layer step."""
        weights = self.weights.new_empty((num_rows, self.top_k))
        ids = self.ids.new_empty((num_rows, self.top_k))
        total = num_rows * self.top_k
        if total:
            _kernel()[(-(-total // _BLOCK),)](
                self.weights,
                self.ids,
                self.calls,
                weights,
                ids,
                total,
                len(self.ids),
                STRIDE * self.layers,
                ROWS=self.rows,
                K=self.top_k,
                BLOCK=_BLOCK,
            )
        return weights, ids


def _kernel() -> Any:
    """The compiled kernel; imported late, since only a CUDA device has Triton for certain."""
    from vllm_moe_offload.integration.playback_kernel import play_kernel

    return play_kernel
