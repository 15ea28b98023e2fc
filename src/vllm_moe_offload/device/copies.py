"""Copies beside the computing stream, ordered with it by marks alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.streams import Stopwatch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Mark:
    """A place in the work of a stream that another stream can wait for.

    On a device without streams, where work is done when its call returns, it is nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Here, on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """What comes next on the current stream comes after the last `record`, if there was one."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class CopyStream:
    """A stream of copies; on a device without streams they are made where they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """A mark that has not been recorded."""
        return Mark(self._device)

    def stopwatch(self) -> Stopwatch:
        """One for `copy`, to be stopped on the current stream."""
        return Stopwatch(self._device)

    def copy(
        self, pairs: Pairs, *, after: Mark, done: Mark, watch: Stopwatch | None = None
    ) -> None:
        """Once `after` has been passed copy each (to, from), one by one; then `done` is passed.

        watch: started when the first copy is about to begin.
        """
        if self._stream is None:
            if watch is not None:
                watch.start()
            copy(pairs)
            return
        with torch.cuda.stream(self._stream):
            after.wait()
            if watch is not None:
                watch.start()
            copy(pairs)
            done.record()

    def join(self) -> None:
        """What comes next on the current stream comes after all copies so far.

        Not to be captured.
        """
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def sendable(numbers: npt.NDArray[np.int32], to: torch.Tensor) -> torch.Tensor:
    """These numbers where they are copied to `to` from without the host's waiting."""
    source = torch.from_numpy(numbers)
    return source.pin_memory() if to.is_cuda else source


def copy(pairs: Pairs) -> None:
    """Copy each (to, from) on the current stream."""
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
