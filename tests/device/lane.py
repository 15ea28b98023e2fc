"""A CPU lane that answers a request's mailbox, simple enough to be its own oracle."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from vllm_moe_offload.device.request import CpuRequest, Operands
from vllm_moe_offload.device.streams import shared_zeros
from vllm_moe_offload.engine import ASKED, DONE, Doorbell, Mailbox

SECONDS = 20


@dataclass(frozen=True)
class Seen:
    """What the operands were when the request came."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    cpu_map: torch.Tensor


def partial_sum(seen: Seen) -> torch.Tensor:
    """float32 [T, H]: expert e multiplies a row by e + 1, if the CPU has it."""
    of_cpu = seen.cpu_map[seen.ids.long()]
    factors = torch.where(of_cpu >= 0, of_cpu + 1, 0) * seen.weights
    return factors.sum(1, keepdim=True) * seen.x.float()


class Rig:
    """A request, the memory behind it, and the flags as both sides see them.

    Its mailbox is one of several on the board, and none of the first.
    """

    MAILBOXES, INDEX = 20, 17

    def __init__(self, operands: Operands, device: torch.device) -> None:
        self.operands = operands
        self.board = shared_zeros(
            Doorbell.board_bytes(self.MAILBOXES), dtype=torch.uint8, device=device
        )
        mailbox = Mailbox.at(self.INDEX, self.MAILBOXES)
        self.request = CpuRequest(self.board, mailbox, operands, device)
        self.asked, self.tokens, self.answer = (
            self.board[at : at + 4].view(torch.int32).numpy()
            for at in (mailbox.request, mailbox.tokens, mailbox.answer)
        )

    def wait(self) -> None:
        """As the stream waits; where there is none, not for ever."""
        if self.board.is_pinned():
            self.request.wait()
            return
        until = time.monotonic() + SECONDS
        while self.answer[0] < DONE:
            assert time.monotonic() < until, "no answer"
            time.sleep(0)


class FakeLane:
    """Answers from a thread, as long as it is entered, with `partial_sum`; keeps what it saw."""

    def __init__(self, rig: Rig, answer: int = DONE, delay: float = 0) -> None:
        self.seen: list[Seen] = []
        self._rig = rig
        self._answer = answer
        self._delay = delay
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        rig, operands = self._rig, self._rig.operands
        while not self._stop.is_set():
            if rig.asked[0] != ASKED:
                time.sleep(0)
                continue
            assert rig.answer[0] == 0
            rig.asked[0] = 0
            time.sleep(self._delay)
            rows = slice(0, int(rig.tokens[0]))
            seen = Seen(
                operands.x[rows].clone(),
                operands.ids[rows].clone(),
                operands.weights[rows].clone(),
                operands.cpu_map.clone(),
            )
            self.seen.append(seen)
            operands.partial[rows] = partial_sum(seen)
            rig.answer[0] = self._answer
