"""The CPU's part of a streamed step: experts with few rows, computed while others are copied."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.copies import Mark
from vllm_moe_offload.device.mapped import add_mapped
from vllm_moe_offload.device.streams import shared_zeros, wait_for_word
from vllm_moe_offload.errors import CpuLaneError
from vllm_moe_offload.planning import (
    LEAST_SECONDS,
    CopiesAhead,
    TailRates,
    TailWorth,
    corrected_level,
    experts_for_cpu,
)

if TYPE_CHECKING:
    from vllm_moe_offload.lanes.base import Computing, LaneBeside

# Seconds after which the CPU has failed: these, and so many times what it was expected to take.
_TIMEOUT = 3.0
_SLACK = 10.0
# As an exponent of how far the CPU's rate is from what was measured.
_FORGET = 0.97


@dataclass(frozen=True)
class OnHost:
    """A step's x, weights and ids in host memory, until the next step of `CpuTail.read`.

    is_staged: whether they are copies of what is on another device; x is there only when the stream
    has come by.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    is_staged: bool


@dataclass
class TailTimes:
    """What layers with the CPU's part took, in seconds; how many they were.

    `ahead`: the experts that were copied ahead of the routings. `computed`: the CPU, at its
    experts. From the reading of one layer's routing to that of the next, so not of a step's last
    layer: `passed` in all, of these `waited` by the host for a routing, and what copying every
    expert would have taken, `by_copies`.
    """

    layers: int = 0
    ahead: int = 0
    computed: float = 0.0
    passed: float = 0.0
    waited: float = 0.0
    by_copies: float = 0.0


class CpuTail:
    """Reads what a layer was routed to, chooses experts for the CPU and computes them.

    Beside its caller, so that nothing waits but who asks for the sum. One for all layers of a
    stream: its host memory is used again by each.

    Args:
        rates: What an expert takes of each lane.
        corrects: Whether the CPU's rate follows what its computations take, how much is copied
            before a routing is known follows how late that is, and a step of a size for which
            copying every expert has shown to be quicker is without the CPU.
        expert_bytes: Of an expert that takes so long; others take as many times that as they have
            bytes. None: they are all alike.
    """

    def __init__(
        self,
        rates: TailRates,
        corrects: bool = False,
        expert_bytes: int | None = None,
    ) -> None:
        self.times = TailTimes()
        self._measured = self._rates = rates
        self._expert_bytes = expert_bytes
        self._corrects = corrects
        self._worth, self._copies_ahead = TailWorth(), CopiesAhead()
        # Of the step under way: its rows; what its last layer lacked, in experts of those bytes;
        # when the routing of that was read; the seconds from each reading to the next, and what
        # copying those layers' experts would have taken.
        self._rows, self._missing = 0, 0.0
        self._read_at: float | None = None
        self._passed = self._by_copies = 0.0
        # How many times as fast as it was measured the CPU is; what its computations were expected
        # to take and took since that was looked at.
        self._level = 1.0
        self._expected = self._taken = 0.0
        self._staged: dict[str, torch.Tensor] = {}
        # What is computed now, whose it is, the seconds it is expected to take, and whether the
        # stream waits for it already.
        self._computing: Computing | None = None
        self._layer, self._promised, self._is_joined = "", 0.0, False
        self._partial = torch.empty(0)
        # Says to the stream that it is done.
        self._done: torch.Tensor | None = None
        # Behind the last weights and ids to host memory.
        self._routed = Mark(torch.device("cpu"))
        self._device = torch.device("cpu")

    @property
    def rates(self) -> TailRates:
        """As measured."""
        return self._measured

    @property
    def rates_now(self) -> TailRates:
        """As corrected since."""
        return self._rates

    def begin(self, rows: int) -> bool:
        """A step of so many rows begins: whether the CPU has a part of it."""
        if self._by_copies > 0:
            self._worth.took(self._rows, self._passed / self._by_copies)
        self._rows, self._read_at = rows, None
        self._passed = self._by_copies = 0.0
        return not self._corrects or self._worth.has_part(rows)

    def ahead(self, missing: int, expert_bytes: int) -> int:
        """Of so many missing experts of the step's next layer, how many its routing is not for."""
        copy = self._measured.copy * self._relative(expert_bytes)
        return self._copies_ahead.count(self._rows, missing, copy)

    def went_on(self, seconds: float) -> None:
        """The copies that a layer's routing has chosen are enqueued, of which some went ahead.

        seconds: as `choose` was told.
        """
        assert self._read_at is not None, "read comes first"
        if self._corrects:
            host = time.perf_counter() - self._read_at
            # What was later than all copies may have been disturbed, and asks for no more than all.
            every = self._missing * self._measured.copy
            self._copies_ahead.took(self._rows, min(seconds + host, every))

    def read(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> OnHost:
        """Waits for ids and weights, and for what comes before them; raises as `finish`."""
        if self._computing is not None and not self._is_joined:
            # Of a step that has failed: nobody asks for its sum, and it reads the same memory.
            with suppress(Exception):
                self._computing.wait()
            self._computing = None
        if self._done is None:
            self._device = x.device
            self._done = shared_zeros(1, dtype=torch.int32, device=x.device)
            self._routed = Mark(x.device)
        weights, ids = self._copied("weights", topk_weights), self._copied("ids", topk_ids)
        self._routed.record()
        read = OnHost(self._copied("x", x), weights, ids, x.is_cuda)
        self.finish()
        began = time.perf_counter()
        self._routed.synchronize()
        before, self._read_at = self._read_at, time.perf_counter()
        if before is not None:
            passed, by_copies = self._read_at - before, self._missing * self._measured.copy
            self._passed += passed
            self._by_copies += by_copies
            self.times.passed += passed
            self.times.waited += self._read_at - began
            self.times.by_copies += by_copies
        return read

    def choose(
        self,
        step: OnHost,
        pending: npt.NDArray[np.int64],
        num_experts: int,
        expert_bytes: int,
        ahead: int,
        seconds: float,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of the experts not yet copied those to copy and those for the CPU; the rest is unused.

        ahead: how many are being copied already, and `seconds` since when.
        """
        size = self._relative(expert_bytes)
        rates = self._rates.of(size)
        self._missing = size * (ahead + len(pending))
        self.times.layers += 1
        self.times.ahead += ahead
        rows = np.bincount(step.topk_ids.numpy().ravel(), minlength=num_experts)[pending]
        pending, rows = pending[rows > 0], rows[rows > 0]
        on_cpu = np.zeros(len(pending), np.bool_)
        coming = max(ahead - seconds / rates.copy, 0.0)
        on_cpu[experts_for_cpu(rates, rows, coming)] = True
        self._promised = float(rates.on_cpu(rows[on_cpu]).sum())
        if not on_cpu.any():
            self._forget()
        return pending[~on_cpu], pending[on_cpu]

    def start(
        self, layer: str, cpu: LaneBeside, step: OnHost, expert_map: npt.NDArray[np.int32]
    ) -> None:
        """Begin to compute the CPU's experts.

        layer: what errors call it; cpu: the lane over host memory; expert_map: int32 [E + 1],
        expert -> expert for those it computes, else -1.
        """
        assert self._done is not None, "read comes first"
        self._done.zero_()
        self._layer, self._is_joined = layer, False
        if step.is_staged:
            torch.cuda.current_stream().synchronize()  # x may be on its way
        # The stream reads it over the bus, which it shares with copies of experts: in bf16 where
        # the output is bf16 too, which rounds the CPU's sum once.
        dtype = torch.bfloat16 if step.x.dtype == torch.bfloat16 else torch.float32
        self._partial = self._staging("partial", step.x.shape, dtype, step.is_staged)
        self._computing = cpu.begin(
            *(step.x, step.topk_weights, step.topk_ids),
            *(torch.from_numpy(expert_map), self._partial, self._done),
        )

    def add(self, out: torch.Tensor, is_last: bool) -> torch.Tensor:
        """`out`, whose computation is under way, and what `start` has begun.

        Float32, in `out` itself where that is. The stream waits for the CPU, and the host only
        where no other layer follows: else that one's `read` does, so that what comes between them
        is launched by then. Raises as `finish`.
        """
        assert self._computing is not None and self._done is not None, "start comes first"
        total = out.to(torch.float32).contiguous()
        if is_last:
            self.finish()
        else:
            wait_for_word(self._done, 1, self._device)
            self._is_joined = True
        add_mapped(total, self._partial)
        return total

    def finish(self) -> None:
        """Return when nothing is computed; to be called before the output of a step is used.

        Raises CpuLaneError where the CPU has failed, or does not end.
        """
        if self._computing is None:
            return
        # An interrupted wait leaves it to the next one: it writes to what the next layer's would.
        try:
            seconds = self._computing.wait(_TIMEOUT + _SLACK * self._promised)
        except Exception as error:
            computing, self._computing = self._computing, None
            if isinstance(error, TimeoutError):
                computing.abandon()
                assert self._done is not None
                self._done.fill_(1)  # lets the stream go, whose work nobody will use
            raise CpuLaneError(
                f"{self._layer}: the CPU's part of a streamed step has failed: {error}. The step "
                "has no output: restart the engine"
            ) from error
        self._computing = None
        self.times.computed += seconds
        self._taken += seconds
        self._expected += self._promised
        self._correct()

    def _correct(self) -> None:
        """Let the CPU's rate be what it has shown, once that says something."""
        if not self._corrects or self._taken < LEAST_SECONDS:
            return
        self._level = corrected_level(self._level, self._expected, self._taken)
        self._rates = self._measured.with_cpu(self._level)
        self._expected = self._taken = 0.0

    def _forget(self) -> None:
        """A CPU that is given nothing shows nothing: it is believed a little more each time."""
        self._level **= _FORGET
        self._rates = self._measured.with_cpu(self._level)

    def _relative(self, expert_bytes: int) -> float:
        """How many times as large as what the rates are of such an expert is."""
        return expert_bytes / (self._expert_bytes or expert_bytes)

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
