"""CPU lanes that answer a mailbox, one of them simple enough to be its own oracle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from vllm_moe_offload.device.mailbox import ANSWER, DONE, REQUEST, TOKENS, Mailbox

SECONDS = 20


@dataclass(frozen=True)
class Seen:
    """What lay in the mailbox when the request came."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    cpu_map: torch.Tensor


def partial_sum(seen: Seen) -> torch.Tensor:
    """float32 [T, H]: expert e multiplies a row by e + 1, if the CPU has it."""
    of_cpu = seen.cpu_map[seen.ids.long()]
    factors = torch.where(of_cpu >= 0, of_cpu + 1, 0) * seen.weights
    return factors.sum(1, keepdim=True) * seen.x.float()


def wait_for_answer(mailbox: Mailbox) -> None:
    """As a GPU's stream waits, where there is none."""
    until = time.monotonic() + SECONDS
    while mailbox.control[ANSWER] < DONE:
        assert time.monotonic() < until, "no answer"
        time.sleep(0)


class AnsweringLane:
    """Answers a mailbox from a thread, as long as it is entered.

    `compute` is given the mailbox and the rows that are asked for, and writes them to `partial`.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        compute: Callable[[Mailbox, slice], None],
        answer: int = DONE,
        delay: float = 0,
    ) -> None:
        self.requests = 0
        self._mailbox = mailbox
        self._compute = compute
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
        control = self._mailbox.control.numpy()
        while not self._stop.is_set():
            if control[REQUEST] != 1:
                time.sleep(0)
                continue
            assert control[ANSWER] == 0
            control[REQUEST] = 0
            time.sleep(self._delay)
            self._compute(self._mailbox, slice(0, int(control[TOKENS])))
            self.requests += 1
            control[ANSWER] = self._answer


class FakeLane(AnsweringLane):
    """Answers with `partial_sum`, and keeps what it was given."""

    def __init__(self, mailbox: Mailbox, answer: int = DONE, delay: float = 0) -> None:
        super().__init__(mailbox, self._sum, answer, delay)
        self.seen: list[Seen] = []

    def _sum(self, mailbox: Mailbox, rows: slice) -> None:
        seen = Seen(
            mailbox.x[rows].clone(),
            mailbox.ids[rows].clone(),
            mailbox.weights[rows].clone(),
            mailbox.cpu_map.clone(),
        )
        self.seen.append(seen)
        mailbox.partial[rows] = partial_sum(seen)
