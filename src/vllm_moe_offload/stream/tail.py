"""The CPU's part of a streamed step: experts with few rows, computed while others are copied."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.planning import TailRates, experts_for_cpu

if TYPE_CHECKING:
    from vllm_moe_offload.lanes.base import Lane


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

    In a thread of its own, so that nothing waits but who asks for the sum. One for all layers of a
    stream: its host memory is used again by each.
    """

    def __init__(self, rates: TailRates) -> None:
        self._rates = rates
        self._staged: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "moe-offload-tail")
        self._computing: Future[None] | None = None
        self._partial = torch.empty(0)

    def close(self) -> None:
        """End the thread; what it is computing is computed first. May be called twice."""
        self._thread.shutdown()

    def read(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> OnHost:
        """Waits for the current stream."""
        if self._computing is not None:
            # Of a step that has failed: nobody asks for its sum, and it reads the same memory.
            wait([self._computing])
            self._computing = None
        read = OnHost(
            self._copied("x", x),
            self._copied("weights", topk_weights),
            self._copied("ids", topk_ids),
            x.is_cuda,
        )
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()
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
        rows = np.bincount(step.topk_ids.numpy().ravel(), minlength=num_experts)[pending]
        pending, rows = pending[rows > 0], rows[rows > 0]
        on_cpu = np.zeros(len(pending), np.bool_)
        coming = max(ahead - seconds / self._rates.copy, 0.0)
        on_cpu[experts_for_cpu(self._rates, rows, coming)] = True
        return pending[~on_cpu], pending[on_cpu]

    def start(self, cpu: Lane, step: OnHost, expert_map: npt.NDArray[np.int32]) -> None:
        """Begin to compute the CPU's experts.

        cpu: the lane over host memory; expert_map: int32 [E + 1], expert -> expert for those it
        computes, else -1.
        """
        self._partial = self._staging("partial", step.x.shape, torch.float32, step.is_staged)
        self._computing = self._thread.submit(
            cpu.compute,
            *(step.x, step.topk_weights, step.topk_ids),
            *(torch.from_numpy(expert_map), self._partial, False),
        )

    def add(self, out: torch.Tensor) -> torch.Tensor:
        """`out`, whose computation is under way, and what `start` has begun, which this waits for.

        Float32, in `out` itself where that is. Raises what computing has raised.
        """
        assert self._computing is not None, "start comes first"
        computing, self._computing = self._computing, None
        computing.result()
        return out.to(torch.float32).add_(self._partial.to(out.device, non_blocking=True))

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
