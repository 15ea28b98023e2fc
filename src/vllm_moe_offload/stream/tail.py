"""The CPU's part of a streamed step: experts with few rows, computed while others are copied."""

from __future__ import annotations

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
    """A step's x, weights and ids in host memory, until the next step of `CpuTail.read`."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


class CpuTail:
    """Reads what a layer was routed to, chooses experts for the CPU and computes them.

    One for all layers of a stream: its host memory is used again by each.
    """

    def __init__(self, rates: TailRates) -> None:
        self._rates = rates
        self._staged: dict[str, torch.Tensor] = {}

    def read(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> OnHost:
        """Waits for the current stream."""
        read = OnHost(
            self._copied("x", x),
            self._copied("weights", topk_weights),
            self._copied("ids", topk_ids),
        )
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()
        return read

    def choose(
        self, step: OnHost, pending: npt.NDArray[np.int64], num_experts: int, ahead: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of the experts not yet copied those to copy and those for the CPU; the rest is unused.

        ahead: how many are being copied already.
        """
        rows = np.bincount(step.topk_ids.numpy().ravel(), minlength=num_experts)[pending]
        pending, rows = pending[rows > 0], rows[rows > 0]
        on_cpu = np.zeros(len(pending), np.bool_)
        on_cpu[experts_for_cpu(self._rates, rows, ahead)] = True
        return pending[~on_cpu], pending[on_cpu]

    def add(
        self, out: torch.Tensor, cpu: Lane, step: OnHost, expert_map: torch.Tensor
    ) -> torch.Tensor:
        """`out`, whose computation is under way, and what the CPU's experts add to it; float32.

        cpu: the lane over host memory; expert_map: int32 [E + 1], expert -> expert for those it
        computes, else -1.
        """
        partial = self._staging("partial", step.x.shape, torch.float32, out.is_cuda)
        cpu.compute(step.x, step.topk_weights, step.topk_ids, expert_map, partial, False)
        return out.to(torch.float32).add(partial.to(out.device, non_blocking=True))

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
