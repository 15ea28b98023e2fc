"""Requests a GPU makes through memory; csrc/engine/doorbell.h has layout, order and failure."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Final

import torch

from vllm_moe_offload.engine import _engine
from vllm_moe_offload.engine.plan import ExpertPlan, batch_size, check_map, check_tensor

# Values of a mailbox's request and answer; 0 is idle, and no answer yet.
ASKED: Final = _engine.ASKED
DONE: Final = _engine.DONE
FAILED: Final = _engine.FAILED

BOARD_ALIGN: Final = _engine.BOARD_ALIGN


@dataclass(frozen=True)
class Mailbox:
    """Where one mailbox's fields are, in bytes from the board's begin.

    Attributes:
        index: Its place among the mailboxes.
        request: uint32, set to ASKED by the GPU after all else is written and fenced.
        tokens: int32, rows of the request; written by the GPU.
        answer: uint32, set to 0 by the GPU before it asks, to DONE or FAILED by the CPU.
        seen_ns: int64, when the CPU took the request, as `time.monotonic_ns` counts.
        done_ns: int64, when it was done; both are written before the answer DONE.
    """

    index: int
    request: int
    tokens: int
    answer: int
    seen_ns: int
    done_ns: int

    @classmethod
    def at(cls, index: int, mailboxes: int) -> Mailbox:
        """The mailbox of this index on a board for so many."""
        return cls(index=index, **_engine.doorbell_offsets(mailboxes, index))


@dataclass(frozen=True)
class MailboxStats:
    """What a mailbox was served, since it was added.

    Attributes:
        requests: How many requests were answered with DONE.
        tokens: The tokens of those.
        busy_seconds: The time from seeing them to their being done, summed.
    """

    requests: int
    tokens: int
    busy_seconds: float


class Doorbell:
    """Mailboxes in which a GPU asks for a layer's experts; made by `CpuExpertEngine.doorbell`.

    A thread watches them and computes with the engine, another one watches over the first. Neither
    needs the GIL. When anything fails, `error` says what, and every request from then on is
    answered with FAILED, without having been computed: check `error` before using a step's output.

    Tensors given to a doorbell are kept until it is closed.
    """

    def __init__(
        self,
        engine: _engine.Engine,
        board: torch.Tensor,
        mailboxes: int,
        *,
        timeout: float,
        idle: float,
    ) -> None:
        if mailboxes < 1:
            raise ValueError(f"mailboxes={mailboxes}: a doorbell needs at least 1")
        check_tensor("board", board, (self.board_bytes(mailboxes),), torch.uint8)
        native = _engine.Doorbell(
            engine=engine,
            board=board.data_ptr(),
            mailboxes=mailboxes,
            timeout=timeout,
            idle=idle,
        )
        self._native: _engine.Doorbell | None = native
        self._mailboxes = mailboxes
        self._tensors = [board]
        # Before the tensors go, also when the interpreter exits: the threads read them.
        self._close = weakref.finalize(self, _stop, native, self._tensors)

    @staticmethod
    def board_bytes(mailboxes: int) -> int:
        """Size of the board of so many mailboxes."""
        return _engine.board_bytes(mailboxes)

    def add(
        self,
        layer: str,
        plan: ExpertPlan,
        *,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor,
        out: torch.Tensor,
    ) -> Mailbox:
        """A new mailbox, at any time; best in the order in which a step asks.

        All tensors are on the CPU and contiguous. A request uses their first `tokens` rows; T is
        the most it may have. Mailboxes that are never outstanding together may share tensors.

        Args:
            layer: What errors call it.
            plan: Computes the requests: a plan of the doorbell's engine.
            x: ``[T, H]`` in the layer's dtype.
            topk_ids: ``[T, K]`` int32; -1 contributes nothing.
            topk_weights: ``[T, K]`` float32.
            expert_map: ``[E + 1]`` int32, id to row of the plan's shard, or -1.
            out: ``[T, H]`` float32, overwritten by each request in its rows.

        Raises:
            ValueError: A tensor is not as described, K is above the plan's top_k, the plan is
                another engine's, or the board is full.
            RuntimeError: The doorbell or the plan's engine is closed.
        """
        native = self._open()
        spec = plan.spec
        tokens, top_k = batch_size(x, topk_ids)
        check_tensor("x", x, (tokens, spec.hidden), spec.activation_dtype)
        check_tensor("topk_ids", topk_ids, (tokens, top_k), torch.int32)
        check_tensor("topk_weights", topk_weights, (tokens, top_k), torch.float32)
        check_map(expert_map)
        check_tensor("out", out, (tokens, spec.hidden), torch.float32)
        native_plan, weights = plan.open()
        # Kept first: once it is added, the mailbox is in use.
        self._tensors.extend((x, topk_ids, topk_weights, expert_map, out, *weights.values()))
        index = native.add(
            layer=layer,
            plan=native_plan,
            x=x.data_ptr(),
            ids=topk_ids.data_ptr(),
            weights=topk_weights.data_ptr(),
            top_k=top_k,
            map=expert_map.data_ptr(),
            map_size=expert_map.numel(),
            out=out.data_ptr(),
            max_tokens=tokens,
        )
        return Mailbox.at(index, self._mailboxes)

    def start(self) -> None:
        """Starts serving; nothing to do where that is so.

        Raises:
            RuntimeError: The doorbell has failed or is closed, or this is a forked child.
        """
        self._open().start()

    def wake(self) -> None:
        """Call before work that asks is launched: the service thread watches without a break."""
        self._open().wake()

    def stop(self) -> None:
        """Ends the threads; requests not yet begun are answered with FAILED, later ones not at all.

        Call it when nothing that asks can run any more. A computation that does not end within the
        timeout is left to itself, and is an error: `error` then says so. `start` goes on otherwise.
        """
        _stop(self._open(), self._tensors)

    def close(self) -> None:
        """Stops for good and lets go of the engine and the tensors.

        May be called twice. A later use of the doorbell raises RuntimeError.
        """
        self._close()
        self._native = None
        self._tensors = []

    @property
    def error(self) -> str | None:
        """The layer that failed and the cause; None while all is well.

        Any thread may ask. It reads one flag while all is well; when the CPU's thread failed while
        no layer asked, it waits up to a second for the one that asks next, and names that.
        """
        return self._open().error or None

    @property
    def stats(self) -> tuple[MailboxStats, ...]:
        """What every mailbox was served, in the order in which they were added."""
        return tuple(
            MailboxStats(requests, tokens, busy_ns / 1e9)
            for requests, tokens, busy_ns in self._open().stats
        )

    def _open(self) -> _engine.Doorbell:
        if self._native is None:
            raise RuntimeError("this doorbell is closed: make another")
        return self._native


def _stop(native: _engine.Doorbell, tensors: list[torch.Tensor]) -> None:
    if not native.stop():
        # The thread that was left to itself reads and writes them, also while the interpreter
        # exits, which clears what modules hold: one reference more than is ever given back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensors))
