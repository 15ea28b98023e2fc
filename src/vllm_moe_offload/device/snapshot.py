"""Numbers of the device on their way to the host, for which no stream waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


class Snapshot:
    """What some small tensors hold where the current stream has come to."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start: one launch and one copy on the current stream. tensors: int64 [n], of one device.

        Not to be captured.
        """
        joined = torch.cat(list(tensors))
        self._event: torch.cuda.Event | None = None
        self._host = joined
        if joined.is_cuda:
            self._host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            self._host.copy_(joined, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def numbers(self) -> npt.NDArray[np.int64] | None:
        """All numbers, in the tensors' order; None while they are on their way."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return None
        return self._numbers()

    def wait(self) -> npt.NDArray[np.int64]:
        """The same, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers()

    def _numbers(self) -> npt.NDArray[np.int64]:
        numbers: npt.NDArray[np.int64] = self._host.numpy()
        return numbers
