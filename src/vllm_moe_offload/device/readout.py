"""Counters of the device read beside the stream that counts, which never waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Readout:
    """Reads tensors of one device by a stream of its own; the thread that reads waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read(self, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        """Their numbers, each as a list.

        Of a step that is under way some have been counted and some not. One copy for all.
        """
        sizes = [tensor.numel() for tensor in tensors]
        if not sizes:
            return []
        if self._stream is None:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        else:
            with torch.cuda.stream(self._stream):
                both = torch.cat([tensor.reshape(-1) for tensor in tensors])
                flat = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
                flat.copy_(both, non_blocking=True)
            self._stream.synchronize()
        return [part.tolist() for part in torch.split(flat, sizes)]
