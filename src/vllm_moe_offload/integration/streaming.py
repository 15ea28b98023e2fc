"""Streamed steps of one worker: the buffers' memory, the layers that take turns in it, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_moe_offload.amounts import amount
from vllm_moe_offload.device.copies import CopyStream
from vllm_moe_offload.device.streams import Stopwatch
from vllm_moe_offload.errors import UnsupportedError
from vllm_moe_offload.integration.graphs import captures_a_piece
from vllm_moe_offload.lanes import MAX_CAPTURED, Computing, Lane, LaneBeside, OffloadedLayer
from vllm_moe_offload.planning import TailRates, stream_threshold
from vllm_moe_offload.stream import BufferMemory, CpuTail, LayerStreamer, TailTimes

logger = init_logger(f"vllm.{__name__}")

# Rows of the steps that are checked and timed: the least that no device decides on, twice over.
TRIED_ROWS = 2 * MAX_CAPTURED
_TIMES = 3
# Rows of an expert at which the CPU is timed beside one: it computes there, and no longer reads.
_MANY_ROWS = 64

# x, weights and ids on the device.
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Gives a layer's tensors in a buffer, name -> [B, ...], and the lane over them.
Bind = Callable[[BufferMemory], tuple[dict[str, torch.Tensor], Lane]]


class Streaming:
    """The streamer and its two buffers, of `nbytes` together.

    `threshold`: as set, or None for the one that is measured. `most_captured`: rows of the largest
    streamed step that a graph may replay, which makes its own first copies. `corrects`: whether the
    CPU's rate follows what it takes while serving. `is_asked`: whether a setting says how to
    stream, so that a layer which cannot be streamed is an error; a threshold does too.
    """

    def __init__(
        self,
        threshold: int | None,
        nbytes: int,
        device: torch.device,
        most_captured: int = 0,
        corrects: bool = False,
        is_asked: bool = False,
    ) -> None:
        self._threshold = threshold
        self._corrects = corrects
        self._is_asked = is_asked or threshold is not None
        self._device = device
        self._most_captured = most_captured
        self._memory = tuple(BufferMemory(nbytes // 2, device) for _ in range(2))
        self._streamer = LayerStreamer(CopyStream(device), is_alone=captures_a_piece)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory the buffers take."""
        return sum(memory.nbytes for memory in self._memory)

    @property
    def threshold(self) -> int | None:
        """The most rows of a step that is not streamed; None: no step is."""
        return self._streamer.threshold

    @property
    def is_measured(self) -> bool:
        """Whether `settle` has measured by what steps are streamed: the threshold, or rates."""
        return self._streamer.num_layers > 0 and (
            self._threshold is None or self._streamer.tail is not None
        )

    def tail_stats(self) -> dict[str, Any] | None:
        """The CPU's part of streamed steps: rates, and `TailTimes`; None where it has none."""
        tail = self._streamer.tail
        if tail is None:
            return None
        return {
            "rates": asdict(tail.rates),
            "rates_now": asdict(tail.rates_now),
            **asdict(tail.times),
        }

    def reset_stats(self) -> None:
        """Set the times of `tail_stats` to zero."""
        if self._streamer.tail is not None:
            self._streamer.tail.times = TailTimes()

    def add(self, name: str, layer: OffloadedLayer, bind: Bind) -> None:
        """Let a layer take its turns; layers come in the order in which a step runs them.

        Raises UnsupportedError where its format does not go with it and streaming was asked for.
        """
        if layer.num_slots == layer.num_experts:
            return
        try:
            buffers = [bind(memory) for memory in self._memory]
        except UnsupportedError as error:
            if self._is_asked:
                raise
            logger.warning("the layer is not streamed: %s", error)  # which says whose word it is
            return
        except ValueError as error:
            logger.warning("moe_offload: %s is not streamed: %s", name, error)
            return
        layer.stream_through(self._streamer, buffers, name)

    def check(self) -> None:
        """As `LayerStreamer.check`."""
        self._streamer.check()

    def settle(
        self,
        layers: Mapping[str, OffloadedLayer],
        cpu: Mapping[str, LaneBeside],
        check: Callable[[str], None],
        step: Callable[[str, int], Step],
        has_tail: bool,
        most_rows: int,
    ) -> None:
        """Once all layers are there: do they compute the same, and from how many rows on it pays.

        Or again, between steps; after an error the streamer then goes on by what it knew.

        cpu: the lanes over host memory; check: compares a step of `TRIED_ROWS` of the layer of this
        name with the CPU's; step: gives one of at least so many rows that uses every expert;
        has_tail: whether the CPU may have a part, or every missing expert is to be copied;
        most_rows: of any step (max_num_batched_tokens).
        """
        streamed = {name: layer for name, layer in layers.items() if layer.is_streamed}
        if not streamed:
            return
        with self._kept_after_errors():
            both = list(streamed)[:2]  # one after another they pass through either buffer
            self._streamer.threshold = 0
            self._streamer.tail = None
            for name in both:
                check(name)
            # The last layer: behind it no copies are started for another.
            name, layer = list(streamed.items())[-1]
            tried = step(name, TRIED_ROWS)
            seconds = self._seconds(layer, tried, 0)
            if has_tail:
                rates = self._tail_rates(layer, tried, seconds, cpu[name], step(name, 1))
                self._streamer.tail = CpuTail(rates, self._corrects, layer.layout.nbytes)
                for other in both:
                    check(other)
                seconds = self._seconds(layer, tried, 0)
            threshold = self._threshold
            if threshold is None:
                threshold = stream_threshold(
                    layer.num_experts,
                    tried[2].shape[1],
                    waves_seconds=self._seconds(layer, tried, None),
                    stream_seconds=seconds,
                )
            if threshold is not None and layer.decides_on_device:
                threshold = max(threshold, MAX_CAPTURED)
            self._streamer.threshold = threshold
        # Buffers that nothing passes through are memory that slots could have.
        is_idle = threshold is None or threshold >= most_rows
        log = logger.warning if is_idle else logger.info
        if layer.num_slots:
            set_by = " (stream_experts)"
            which = f"steps of {_sizes(threshold, most_rows)} are streamed (stream_threshold)"
        else:  # the mode says both
            set_by, which = "", "every step is streamed"
        log(
            "moe_offload: %s in two buffers of %d experts%s; a streamed layer of %d takes %.2f ms, "
            "and %s",
            amount(self.device_bytes),
            layer.buffer_experts,
            set_by,
            layer.num_experts,
            1e3 * seconds,
            which,
        )

    @contextmanager
    def _kept_after_errors(self) -> Iterator[None]:
        """What the streamer goes by is as before where an error ends what is inside."""
        before = self._streamer.threshold, self._streamer.tail
        try:
            yield
        except BaseException:
            self._streamer.threshold, self._streamer.tail = before
            raise

    def expect(self, rows: int) -> bool:
        """A step of so many rows comes next: the first copies of a streamed one start now.

        Whether it is one, out of graphs.
        """
        is_streamed = self._streamer.takes(rows) and rows > self._most_captured
        if is_streamed:
            self._streamer.begin(rows)
        else:
            self._streamer.end()
        return is_streamed

    def _tail_rates(
        self,
        layer: OffloadedLayer,
        step: Step,
        seconds: float,
        cpu: LaneBeside,
        once: Step,
    ) -> TailRates:
        """What an expert takes of each lane.

        step: a streamed one, that copies every expert and takes `seconds` by itself; once: names
        every expert about once.
        """
        x, weights, ids = (tensor.cpu() for tensor in once)
        every = torch.arange(layer.num_experts + 1, dtype=torch.int32)
        every[-1] = -1
        done = torch.zeros(1, dtype=torch.int32)
        taken = []
        for turns in (1, _MANY_ROWS):
            xs, ws, names = (tensor.repeat(turns, 1) for tensor in (x, weights, ids))
            out = torch.empty(xs.shape, dtype=torch.float32)
            begin = partial(cpu.begin, xs, ws, names, every, out, done)
            each = [self._beside(layer, step, begin) for _ in range(_TIMES)]
            taken.append([min(lane) for lane in zip(*each, strict=True)])
        # Of a row each the CPU hardly but reads: that is what slows copies.
        (copying, reading), (_, computing) = taken
        row = max((computing - reading) / layer.num_experts / (_MANY_ROWS - 1), 0.0)
        return TailRates(
            copy=seconds / layer.num_experts,
            cpu=max(reading / layer.num_experts - row, 0.0),
            cpu_row=row,
            slowed=max(copying / seconds, 1.0),
        )

    def _beside(
        self, layer: OffloadedLayer, step: Step, begin: Callable[[], Computing]
    ) -> tuple[float, float]:
        """Seconds of a step and of what the CPU is given to compute during it, over and over."""
        layer.invalidate()
        watch = Stopwatch(self._device)
        computing = begin()
        watch.start()
        layer.forward(*step)
        watch.stop()
        seconds = computing.wait()
        while not watch.is_done():
            begin().wait()
        return watch.seconds(), seconds

    def _seconds(
        self,
        layer: OffloadedLayer,
        step: Step,
        threshold: int | None,
    ) -> float:
        """The least of a few steps."""
        self._streamer.threshold = threshold
        watch, taken = Stopwatch(self._device), []
        for _ in range(_TIMES):
            # Nothing is in slots, which is how a prompt of another kind finds them.
            layer.invalidate()
            watch.start()
            layer.forward(*step)
            watch.stop()
            taken.append(watch.seconds())
        layer.invalidate()
        layer.reset_counters()
        return min(taken)


def _sizes(threshold: int | None, most_rows: int) -> str:
    """Of the steps that are streamed, in words."""
    if threshold is None:
        return "no size"
    if threshold >= most_rows:
        return f"more than {threshold} rows, which none has (max_num_batched_tokens={most_rows}),"
    return f"more than {threshold} rows" if threshold else "any size"
