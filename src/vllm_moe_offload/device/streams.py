"""Work beside the current stream, and how long work on it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def beside_captures() -> Iterator[None]:
    """What this thread does on a GPU inside is allowed while another thread captures a graph.

    A capture, as torch begins it, otherwise forbids every thread to allocate or to ask an event,
    and is spoilt where one does. For a thread that captures nothing itself.
    """
    from cuda.bindings import driver

    def exchange(mode: Any) -> Any:
        code, before = driver.cuThreadExchangeStreamCaptureMode(mode)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA does not let this thread work beside captures: {code.name}")
        return before

    before = exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        yield
    finally:
        exchange(before)


def is_capturing() -> bool:
    """Whether what is launched on the current stream goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def shared_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory, at a multiple of 64 bytes, that `device` reads and writes too."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def wait_for_word(word: torch.Tensor, least: int, device: torch.device) -> None:
    """Let the current stream of `device` go on when `word` is `least` or more.

    No thread of the GPU spins. Where there are no streams the caller waits. word: int32 [1] of
    `shared_zeros`, which the CPU writes. Raises RuntimeError if the driver refuses.
    """
    if device.type != "cuda":
        while word.item() < least:
            time.sleep(0)
        return
    from cuda.bindings import driver

    (code,) = driver.cuStreamWaitValue32(
        torch.cuda.current_stream().cuda_stream,
        word.data_ptr(),
        least,
        driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ,
    )
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA cannot make a stream wait for the CPU: {code.name}")


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
            self._followed = torch.cuda.Event()  # type: ignore[no-untyped-call]

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

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Launches inside come after those of the last `fork`, and `join` waits for none of them.

        The next `fork`'s come after them. `join_followed` has to be called before what they write
        is used, and before a capture ends.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._followed.record()

    def join_followed(self) -> None:
        """Let the current stream wait for what was launched in each `follow` so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._followed)

    def join_all(self) -> None:
        """Let the current stream wait for all that was launched, outside of captures.

        What an error has ended may not have come to the joins that were due.
        """
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class Stopwatch:
    """Times what is launched on the current stream between `start` and `stop`.

    On a device without streams, what the host does between them.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._began = self._ended = 0.0
        if self._is_cuda:
            self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """From here, when what was launched before has run."""
        if self._is_cuda:
            self._start.record()
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        """To here."""
        if self._is_cuda:
            self._stop.record()
        else:
            self._ended = time.perf_counter()

    def is_done(self) -> bool:
        """Whether all between has run; does not wait."""
        return not self._is_cuda or bool(self._stop.query())  # type: ignore[no-untyped-call]

    def has_begun(self) -> bool:
        """Whether all before `start` has run; does not wait."""
        return not self._is_cuda or bool(self._start.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """How long it took; waits."""
        if not self._is_cuda:
            return self._ended - self._began
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3
