"""Copies beside the computing stream, ordered with it by marks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.streams import Stopwatch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
# (from, to): rows of one tensor and as many of another.
Runs = Sequence[tuple[slice, slice]]


class RowCopies:
    """Copies of rows between tensors of the same names, whose addresses are taken once.

    A copy as torch makes it costs the host several times what the driver's own does, and a streamed
    layer has a hundred, between which the GPU waits.

    Args:
        source: name -> ``[E, ...]`` in host memory.
        to: name -> ``[B, ...]``; where it is on a GPU, `source` is page-locked.

    Both contiguous, and both are kept. Raises ValueError where their rows are not alike.
    """

    def __init__(self, source: Mapping[str, torch.Tensor], to: Mapping[str, torch.Tensor]) -> None:
        self._pairs = [(tensor, to[name]) for name, tensor in source.items()]
        self._places = []
        for name, tensor in source.items():
            other = to[name]
            if tensor.shape[1:] != other.shape[1:] or tensor.dtype != other.dtype:
                raise ValueError(
                    f"{name}: rows of {tuple(tensor.shape[1:])} {tensor.dtype} cannot be copied to "
                    f"rows of {tuple(other.shape[1:])} {other.dtype}"
                )
            if not (tensor.is_contiguous() and other.is_contiguous()):
                raise ValueError(
                    f"{name}: rows of a tensor that is not contiguous cannot be copied: give both "
                    "as contiguous()"
                )
            row_bytes = tensor.nbytes // len(tensor)
            self._places.append((tensor.data_ptr(), other.data_ptr(), row_bytes))
        self._is_cuda = any(other.is_cuda for _, other in self._pairs)

    def pairs(self, runs: Runs) -> Pairs:
        """(to, from) of each run of each tensor."""
        return [(to[rows], source[taken]) for source, to in self._pairs for taken, rows in runs]

    def launch(self, runs: Runs) -> None:
        """Copy on the current stream; may be captured.

        Raises RuntimeError if the driver refuses.
        """
        if not self._is_cuda:
            copy(self.pairs(runs))
            return
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        for source, to, nbytes in self._places:
            for taken, rows in runs:
                (code,) = driver.cuMemcpyHtoDAsync(
                    to + rows.start * nbytes,
                    source + taken.start * nbytes,
                    (taken.stop - taken.start) * nbytes,
                    stream,
                )
                if code != driver.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"CUDA cannot copy experts to the GPU: {code.name}")


@dataclass(frozen=True)
class Rows:
    """Runs of rows to be copied."""

    copies: RowCopies
    runs: Runs


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

    def synchronize(self) -> None:
        """Return when the last `record` has been passed."""
        if self._event is not None:
            self._event.synchronize()


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
        self,
        pairs: Pairs,
        *,
        after: Mark,
        done: Mark,
        watch: Stopwatch | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Once `after` has been passed copy each (to, from), one by one; then `done` is passed.

        watch: started when the first copy is about to begin; rows: copied first.
        """
        if self._stream is None:
            if watch is not None:
                watch.start()
            _copy_both(rows, pairs)
            return
        with torch.cuda.stream(self._stream):
            after.wait()
            if watch is not None:
                watch.start()
            _copy_both(rows, pairs)
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


def _copy_both(rows: Rows | None, pairs: Pairs) -> None:
    if rows is not None:
        rows.copies.launch(rows.runs)
    copy(pairs)


def copy(pairs: Pairs) -> None:
    """Copy each (to, from) on the current stream."""
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
