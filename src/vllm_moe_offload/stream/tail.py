"""The CPU's part of a streamed step: experts with few rows, computed while others are copied."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.mapped import add_mapped
from vllm_moe_offload.planning import (
    LEAST_SECONDS,
    TailRates,
    TailWorth,
    corrected_level,
    experts_for_cpu,
)

if TYPE_CHECKING:
    from vllm_moe_offload.lanes.base import Computing, LaneBeside


@dataclass(frozen=True)
class OnHost:
    """A step's x, weights and ids in host memory, until the next step of `CpuTail.read`.

    is_staged: whether they are copies of what is on another device.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    is_staged: bool


class CpuTail:
    """Reads what a layer was routed to, chooses experts for the CPU and computes them.

    Beside its caller, so that nothing waits but who asks for the sum. One for all layers of a
    stream: its host memory is used again by each.

    Args:
        rates: What an expert takes of each lane.
        corrects: Whether the CPU's rate follows what its computations take.
        alone: Seconds an expert takes where all are copied; a step of a size for which that has
            shown to be quicker is without the CPU. None: none is.
    """

    def __init__(
        self, rates: TailRates, corrects: bool = False, alone: float | None = None
    ) -> None:
        self._measured = self._rates = rates
        self._corrects = corrects
        self._alone = alone
        self._worth = TailWorth()
        # Of the step under way: its rows; the experts that its last layer lacked; when the routing
        # of that was read; the seconds from each reading to the next, and what copying those
        # layers' experts would have taken.
        self._rows = self._missing = 0
        self._read_at: float | None = None
        self._passed = self._by_copies = 0.0
        # How many times as fast as it was measured the CPU is; what its computations were expected
        # to take and took since that was looked at.
        self._level = 1.0
        self._expected = self._taken = 0.0
        self._staged: dict[str, torch.Tensor] = {}
        self._computing: Computing | None = None
        self._partial = torch.empty(0)

    def begin(self, rows: int) -> bool:
        """A step of so many rows begins: whether the CPU has a part of it."""
        if self._by_copies > 0:
            self._worth.took(self._rows, self._passed / self._by_copies)
        self._rows, self._read_at = rows, None
        self._passed = self._by_copies = 0.0
        return self._alone is None or self._worth.has_part(rows)

    def read(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> OnHost:
        """Waits for the current stream."""
        if self._computing is not None:
            # Of a step that has failed: nobody asks for its sum, and it reads the same memory.
            with suppress(Exception):
                self._computing.wait()
            self._computing = None
        read = OnHost(
            self._copied("x", x),
            self._copied("weights", topk_weights),
            self._copied("ids", topk_ids),
            x.is_cuda,
        )
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()
        before, self._read_at = self._read_at, time.perf_counter()
        if before is not None and self._alone is not None:
            self._passed += self._read_at - before
            self._by_copies += self._missing * self._alone
        return read

    def choose(
        self,
        step: OnHost,
        pending: npt.NDArray[np.int64],
        num_experts: int,
        ahead: int,
        seconds: float,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of the experts not yet copied those to copy and those for the CPU; the rest is unused.

        ahead: how many are being copied already, and `seconds` since when.
        """
        self._missing = ahead + len(pending)
        rows = np.bincount(step.topk_ids.numpy().ravel(), minlength=num_experts)[pending]
        pending, rows = pending[rows > 0], rows[rows > 0]
        on_cpu = np.zeros(len(pending), np.bool_)
        coming = max(ahead - seconds / self._rates.copy, 0.0)
        on_cpu[experts_for_cpu(self._rates, rows, coming)] = True
        self._expected += float(self._rates.on_cpu(rows[on_cpu]).sum())
        return pending[~on_cpu], pending[on_cpu]

    def start(self, cpu: LaneBeside, step: OnHost, expert_map: npt.NDArray[np.int32]) -> None:
        """Begin to compute the CPU's experts.

        cpu: the lane over host memory; expert_map: int32 [E + 1], expert -> expert for those it
        computes, else -1.
        """
        self._partial = self._staging("partial", step.x.shape, torch.float32, step.is_staged)
        self._computing = cpu.begin(
            *(step.x, step.topk_weights, step.topk_ids),
            *(torch.from_numpy(expert_map), self._partial),
        )

    def add(self, out: torch.Tensor) -> torch.Tensor:
        """`out`, whose computation is under way, and what `start` has begun, which this waits for.

        Float32, in `out` itself where that is. Raises what computing has raised.
        """
        assert self._computing is not None, "start comes first"
        computing, self._computing = self._computing, None
        self._taken += computing.wait()
        self._correct()
        total = out.to(torch.float32)
        add_mapped(total, self._partial)
        return total

    def _correct(self) -> None:
        """Let the CPU's rate be what it has shown, once that says something."""
        if not self._corrects or self._taken < LEAST_SECONDS:
            return
        self._level = corrected_level(self._level, self._expected, self._taken)
        self._rates = self._measured.with_cpu(self._level)
        self._expected = self._taken = 0.0

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        return self._staging(name, tensor.shape, tensor.dtype, True).copy_(
            tensor, non_blocking=True
        )

    def _staging(
        self, name: str, shape: torch.Size, dtype: torch.dtype, pinned: bool
    ) -> torch.Tensor:
        """Host memory by this name, uninitialised; what was there before has been read."""
        there = self._staged.get(name)
        if there is None or there.dtype != dtype or there.numel() < shape.numel():
            # An ordinary tensor: it is written to in and out of inference mode.
            with torch.inference_mode(False):
                there = torch.empty(shape.numel(), dtype=dtype, pin_memory=pinned)
            self._staged[name] = there
        return there[: shape.numel()].view(shape)
