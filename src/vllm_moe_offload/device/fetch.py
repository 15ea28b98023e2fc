"""Experts copied into slots by the device itself, from a list that only the device knows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from vllm_moe_offload.experts import ExpertLayout

# A thread reads 16 bytes at a time, which a word of 4 bytes allows and a wider one does not exceed.
_WORDS = (torch.int32, torch.uint8)


class ExpertFetch:
    """Copies the listed experts of one layer, all their tensors, in one launch.

    A tensor whose experts are not whole words of 4 bytes goes byte by byte, which is slow: in
    practice those are a few bytes an expert.

    Args:
        host: name -> ``[E, ...]``, every expert, or some in rows that each launch says. The device
            must be able to read this memory at the addresses the host uses: its own, pinned, or
            registered with `Device.register`.
        slots: The same names -> ``[S, ...]``, on the device that launches.
        num_programs: How many blocks of threads copy. A few fill the bus, and each one takes a
            multiprocessor from what runs beside it.
        block: How many words a program has on the way at once, a power of two.

    `busy_ns`, int64 ``[1]`` on the device: how long all launches that had something to copy took,
    in nanoseconds.

    Raises ValueError for tensors that are not contiguous or do not agree, or no program.

    Both sets of tensors are kept; a graph that captured a launch needs this object to live.
    """

    def __init__(
        self,
        host: Mapping[str, torch.Tensor],
        slots: Mapping[str, torch.Tensor],
        num_programs: int = 16,
        block: int = 8192,
    ) -> None:
        layouts = ExpertLayout.of(host), ExpertLayout.of(slots)
        if layouts[0] != layouts[1]:
            raise ValueError(f"host memory holds {layouts[0]}, the slots are for {layouts[1]}")
        if num_programs < 1:
            raise ValueError(f"{num_programs} programs copy nothing: give 1 or more")
        for name in host:
            if not (host[name].is_contiguous() and slots[name].is_contiguous()):
                raise ValueError(f"{name} must be contiguous, in host memory and in the slots")
        self.expert_bytes = layouts[0].nbytes
        self.num_programs = num_programs
        self.block = block
        pairs = [_as_words(host[name], slots[name]) for name in layouts[0].names]
        self._host = tuple(host for host, _ in pairs)
        self._slots = tuple(slots for _, slots in pairs)
        self._words = tuple(host.shape[1] for host in self._host)
        device = next(iter(slots.values())).device
        with torch.inference_mode(False):
            self.busy_ns = torch.zeros(1, dtype=torch.int64, device=device)
        self._is_cuda = device.type == "cuda"
        self._kernel = _kernel()

    def launch(
        self, pairs: torch.Tensor, count: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        """Copy on the current stream; may be captured. Launches of one object do not overlap.

        pairs: int32 [N, 2], contiguous, (expert, slot); count: int32, one number, how many of them
        are copied; rows: int32 by the experts' numbers, the row of `host` that each is in, -1 for
        those that are not copied; None: each is in the row of its number. They are read when the
        launch runs, and trusted.
        """
        began = time.perf_counter_ns()
        self._kernel[(self.num_programs,)](
            pairs,
            count,
            pairs if rows is None else rows,
            self.busy_ns,
            self._host,
            self._slots,
            WORDS=self._words,
            BLOCK=self.block,
            HAS_ROWS=rows is not None,
            IS_TIMED=self._is_cuda,
            num_warps=8,
        )
        if not self._is_cuda:
            self.busy_ns += (time.perf_counter_ns() - began) * (count > 0)


def _as_words(host: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as [E, n] and [S, n] of the widest word that experts of either are a whole number of."""
    nbytes = host[0].nbytes
    for word in _WORDS:
        if not any(n % word.itemsize for n in (nbytes, host.data_ptr(), slots.data_ptr())):
            break
    shape = (-1, nbytes // word.itemsize)
    host, slots = (
        tensor.detach().reshape(-1).view(torch.uint8).view(word).view(shape)
        for tensor in (host, slots)
    )
    return host, slots


def _kernel() -> Any:
    """The kernel; imported late, since only a CUDA device has Triton for certain."""
    from vllm_moe_offload.device.fetch_kernel import fetch_kernel

    return fetch_kernel
