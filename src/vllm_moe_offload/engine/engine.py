"""The engine: threads, kernels and scratch, shared by the plans made with it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from types import TracebackType

import torch

from vllm_moe_offload.engine import _engine
from vllm_moe_offload.engine.doorbell import Doorbell
from vllm_moe_offload.engine.plan import ExpertPlan
from vllm_moe_offload.experts import ExpertSpec

ISA_VARIABLE = "VLLM_MOE_OFFLOAD_ISA"


class CpuExpertEngine:
    """A pool of pinned threads and the kernels of one instruction set.

    Engines of one process with as many threads share one pool; calls take turns. Between calls the
    threads watch for work for about 100 microseconds (2 milliseconds from the first doorbell on),
    then sleep. The thread that calls `ExpertPlan.run` works too, so `threads` threads occupy
    `threads` cores.

    An engine cannot be used in a forked child, which has none of the threads: make one there.

    Args:
        threads: How many, from 1 to the number of physical cores the process may use (its CPU
            affinity counts, SMT siblings do not). None takes as many, or as many as the CPUs
            of its container's limit if these are fewer, and leaves one of them to vLLM's own
            process where there are four or more.
        isa: An instruction set among `isas_available`. None takes the one that the environment
            variable `VLLM_MOE_OFFLOAD_ISA` names, else the fastest.

    Raises:
        ValueError: More threads than cores, or an instruction set this host or build lacks; the
            message lists what there is.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        cores = self.cores
        if threads is not None and not 1 <= threads <= cores:
            raise ValueError(
                f"an engine of {threads} threads was asked for, and this process may use {cores} "
                f"physical core{'s' * (cores > 1)}: ask for {'1 to ' * (cores > 1)}{cores}, or "
                "widen the process's CPU affinity"
            )
        name = isa if isa is not None else os.environ.get(ISA_VARIABLE, "")
        try:
            native = _engine.Engine(threads or 0, name)
        except ValueError as error:
            source = ISA_VARIABLE if isa is None else "isa"
            raise ValueError(f"{source}={name}: {error}") from None
        self._native: _engine.Engine | None = native
        self._plans: weakref.WeakSet[ExpertPlan] = weakref.WeakSet()
        self._doorbells: weakref.WeakSet[Doorbell] = weakref.WeakSet()

    @property
    def cores(self) -> int:
        """Physical cores this process may use: the most threads an engine can have."""
        return len(_engine.physical_cores())

    @property
    def threads(self) -> int:
        """Threads that compute, the caller's included."""
        return self._open().threads

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._open().isa

    @property
    def isas_available(self) -> tuple[str, ...]:
        """Instruction sets this build has and this host runs, the slowest first."""
        return tuple(_engine.isas_available())

    def plan(
        self,
        spec: ExpertSpec,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_tokens: int,
        top_k: int,
    ) -> ExpertPlan:
        """Prepares to compute one layer's shard; allocates everything `ExpertPlan.run` needs.

        Args:
            spec: What one expert computes.
            tensors: The shard's weights by `spec.layout`'s names, each ``[N, *shape]``, on the CPU
                and contiguous. They are read in place: the plan keeps them alive, and what is
                written into them between runs counts in the next.
            max_tokens: The batch size to size scratch for, 2^24 at most. Larger batches run too, in
                chunks.
            top_k: The most experts a token is routed to, 1024 at most.

        Raises:
            ValueError: A tensor is missing, unknown, or not as described, or a number is not.
        """
        plan = ExpertPlan(self._open(), spec, tensors, max_tokens=max_tokens, top_k=top_k)
        self._plans.add(plan)
        return plan

    def doorbell(
        self, board: torch.Tensor, mailboxes: int, *, timeout: float = 3.0, idle: float = 0.02
    ) -> Doorbell:
        """A doorbell that computes its requests with this engine; see `Doorbell`.

        Args:
            board: uint8 ``[Doorbell.board_bytes(mailboxes)]`` on the CPU, contiguous, at an address
                that is a multiple of 64. Its mailboxes are cleared as they are added.
            mailboxes: How many the board has room for.
            timeout: Seconds without any answer to what was asked after which the service thread
                counts as stalled.
            idle: Seconds after the last request or `wake` that the service thread goes on spinning.

        Raises:
            ValueError: The board is not as described, a number of mailboxes is not positive, or
                seconds are not from 0.001 to 3600.
        """
        doorbell = Doorbell(self._open(), board, mailboxes, timeout=timeout, idle=idle)
        self._doorbells.add(doorbell)
        return doorbell

    def read_gb_per_s(self, memory: torch.Tensor) -> float:
        """Reads a contiguous CPU tensor once with all threads: the rate in GB/s (10^9 bytes)."""
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError("memory to read must be a contiguous tensor on the CPU")
        return memory.nbytes / self._open().read_seconds(memory.data_ptr(), memory.nbytes) / 1e9

    def tile_peak_tflop_per_s(self) -> float | None:
        """What AMX tiles multiply with all threads when they wait for nothing; None without AMX."""
        rate = self._open().tile_multiply_adds(4_000_000)
        return 2 * rate / 1e12 if rate else None

    @property
    def phase_seconds(self) -> tuple[float, float, float, float]:
        """Seconds of the last call that computed: of its three phases, and of all of it.

        The tokens' operands, 0 where that was too little to be shared out; w13 and the activation;
        w2 and the sums; the call, without what Python does for it. Waits for a call in progress.
        """
        return self._open().phase_seconds

    def close(self) -> None:
        """Closes doorbells, ends the threads no other engine shares, frees scratch and plans.

        May be called twice. A later use of the engine or its plans raises RuntimeError; calls that
        have begun in other threads end as ever, and keep what they use until then.
        """
        for doorbell in list(self._doorbells):
            doorbell.close()
        for plan in list(self._plans):
            plan.close()
        self._native = None

    def __enter__(self) -> CpuExpertEngine:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> _engine.Engine:
        if self._native is None:
            raise RuntimeError("this CPU expert engine is closed: make another")
        return self._native
