"""A CPU lane that answers a mailbox, simple enough to be its own oracle."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType

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


class FakeLane:
    """Answers with `partial_sum`, from a thread, as long as it is entered."""

    def __init__(self, mailbox: Mailbox, answer: int = DONE, delay: float = 0) -> None:
        self.seen: list[Seen] = []
        self._mailbox = mailbox
        self._answer = answer
        self._delay = delay
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> FakeLane:
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
        mailbox, control = self._mailbox, self._mailbox.control.numpy()
        while not self._stop.is_set():
            if control[REQUEST] != 1:
                time.sleep(0)
                continue
            assert control[ANSWER] == 0
            control[REQUEST] = 0
            rows = slice(0, int(control[TOKENS]))
            time.sleep(self._delay)
            seen = Seen(
                mailbox.x[rows].clone(),
                mailbox.ids[rows].clone(),
                mailbox.weights[rows].clone(),
                mailbox.cpu_map.clone(),
            )
            self.seen.append(seen)
            mailbox.partial[rows] = partial_sum(seen)
            control[ANSWER] = self._answer
