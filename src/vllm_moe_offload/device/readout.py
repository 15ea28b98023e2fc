"""Counters of the device read beside the stream that counts, which never waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch

from vllm_moe_offload.device.snapshot import Snapshot
from vllm_moe_offload.device.streams import beside_captures


class Readout:
    """Reads tensors of one device by a stream of its own; the thread that reads waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read(self, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        """Their numbers, each as a list.

        Of a step that is under way some have been counted and some not. One copy for all. Another
        thread may be capturing a graph meanwhile.
        """
        if not tensors:
            return []
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(beside_captures())
                stack.enter_context(torch.cuda.stream(self._stream))
            numbers = Snapshot([tensor.reshape(-1) for tensor in tensors]).wait()
        ends = np.cumsum([tensor.numel() for tensor in tensors])
        return [part.tolist() for part in np.split(numbers, ends[:-1])]
