"""Work beside the current stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream that is forked from the current one and joined by it; both may be captured.

    On a device without streams everything runs where it stands.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._forked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches inside come after all before them, and run beside what comes after them."""
        if self._stream is None:
            yield
            return
        self._forked.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._forked)
            yield
            self._done.record()

    def join(self) -> None:
        """Let the current stream wait for what was launched in the last `fork`."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done)
