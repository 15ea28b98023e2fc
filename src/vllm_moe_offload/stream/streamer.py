"""Layers through two buffers: one is filled while the other is computed from.

The experts that are in no slot come from host memory by the copy engine, in *waves*: as many as a
buffer holds, each wave into the buffer that the one before it is not in. So the buffers alternate
from wave to wave, across layers. A layer of which they hold every expert is one wave, computed by
one launch of its kernel without a map, as if nothing were offloaded: its experts that are in slots
are copied from there, on the device. Of a layer of which they hold a part the slots are a wave of
their own, the first one, and each wave has a map, copied with its experts; their sum is float32.
What a step leaves in slots is decided behind the slots' wave and copied there while it is in a
buffer.

The copies of the next wave, which may be the following layer's first, are enqueued before a wave is
computed, and those of the wave after it behind that. Two marks order the streams at each buffer:
`free`, behind its last reader, which the next copies wait for, and `full`, behind the copies, which
the next reader waits for.

Layers without slots that are whole in a buffer may be captured, in one graph or each in its own. A
mark means something only within the capture it was recorded in, or outside of all: so a step
records `free` anew when it begins, behind everything before it, a replay of a graph included, and
it ends with all of its copies waited for.

With a CPU lane the copies of a layer are enqueued in two parts: a first one before it is known what
the layer is routed to, and the rest when it is, less the experts with few rows: the CPU computes
them meanwhile, and maps keep the kernel from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.copies import CopyStream, Mark, Pairs, RowCopies, Rows, copy, sendable
from vllm_moe_offload.device.streams import Stopwatch
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.stream.layer import (
    InBuffer,
    InSlots,
    Keep,
    Streamed,
    StreamedLayer,
    Tensors,
)
from vllm_moe_offload.stream.tail import CpuTail
from vllm_moe_offload.stream.waves import Experts, Wave, plan_waves

if TYPE_CHECKING:
    from vllm_moe_offload.lanes.base import Lane, LaneBeside

# Entries of int32 that a map's memory is a multiple of: each starts as one of its own would.
_ALIGNMENT = 64


class LayerStreamer:
    """Moves the layers of a model through two buffers, in the order in which they were added.

    A step is the layers that follow one another by their numbers, from any one on. During a step
    none of its layers may change what is in its slots before it has been computed.

    Args:
        copies: Makes the copies from host memory.
        threshold: The most rows of a step that is not streamed; None: no step is.
        tail: The CPU's part; None: every expert that is in no slot is copied.
        is_alone: Whether the layer that is computed now is captured into a graph that no other
            layer's is in for certain: it is then a step by itself.
    """

    def __init__(
        self,
        copies: CopyStream,
        threshold: int | None = None,
        tail: CpuTail | None = None,
        is_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.threshold = threshold
        self.tail = tail
        self._copies = copies
        self._is_alone = is_alone
        self._layers: list[StreamedLayer] = []
        self._marks = (_Marks(copies.mark(), copies.mark()), _Marks(copies.mark(), copies.mark()))
        # The buffer of the next wave.
        self._turn = 0
        # Of each layer: int32 [E + 1], expert -> slot or -1, on the device and on the host.
        self._slot_maps: Sequence[torch.Tensor] = ()
        self._slot_of: Sequence[npt.NDArray[np.int32]] = ()
        # The CPU's part of the step; None: it has none.
        self._tail: CpuTail | None = None
        # How many experts of the layer that comes next are copied ahead of its routing.
        self._num_ahead = 0
        # From when these copies are under way until the routing is about to be read.
        self._ahead = copies.stopwatch()
        # The layer that the step goes on with; None between steps.
        self._next: int | None = None
        # Whether an error has ended the last step: its copies may be under way.
        self._is_left = False

    def takes(self, rows: int) -> bool:
        """Whether a step of so many rows is streamed."""
        return self.threshold is not None and rows > self.threshold

    def check(self) -> None:
        """When a step has been launched, by the thread that did: CpuLaneError where the CPU failed.

        What is computed then is waited for: another thread would take it from the next step.
        """
        if self.tail is not None:
            self.tail.finish()

    @property
    def num_layers(self) -> int:
        """How many layers have been added."""
        return len(self._layers)

    def add(
        self,
        host: Tensors,
        buffers: Sequence[tuple[Tensors, Lane]],
        cpu: LaneBeside,
        in_slots: Callable[[], InSlots],
        name: str,
    ) -> StreamedLayer:
        """Take in the next layer of a step.

        buffers: of each of the two, the layer's tensors in it, name -> ``[B, ...]``, and the lane
        over them; the rest as for `StreamedLayer`.
        """
        self.end()
        num_experts = next(iter(host.values())).shape[0]
        first, second = (_in_buffer(host, *buffer, num_experts) for buffer in buffers)
        layer = StreamedLayer(
            *(self, self.num_layers, name, host, (first, second), cpu, in_slots),
            num_experts=num_experts,
            expert_bytes=ExpertLayout.of(host).nbytes,
        )
        self._layers.append(layer)
        return layer

    def begin(self, rows: int, first: int = 0) -> None:
        """A step of so many rows will go on with the layer `first`: its copies start now.

        Waits for the device where it has to be read which experts are in slots.
        """
        self._read_tables()
        self._tail = self.tail if self.tail is not None and self.tail.begin(rows) else None
        for marks in self._marks:
            marks.free.record()
        self._next, self._is_left = None, True
        for _ in self._starting(self._layers[first], self._turn):
            pass
        self._next, self._is_left = first, False

    def end(self) -> None:
        """The step is over, or slots change: what has been copied for later layers is not used.

        These copies come before what is enqueued next, which may be a graph that fills the buffers.
        """
        if self._next is not None or self._is_left:
            self._next, self._is_left = None, False
            self._copies.join()

    def output(
        self,
        layer: StreamedLayer,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        routed: torch.Tensor,
        topk_ids: torch.Tensor,
        keep: Keep | None,
    ) -> Streamed:
        """The layer's output.

        x: [T, H]; topk_weights: float32 [T, K]; routed: int32 [T, K] in 0..E-1, rows of padding
        too; topk_ids: the same with E for these; keep: None where slots are to stay as they are.
        """
        if self._next != layer.number:
            self.begin(len(x), layer.number)
        is_last = layer.number + 1 == self.num_layers or self._is_alone()
        following = None if is_last else self._layers[layer.number + 1]
        # Set again at the end: after an error the step does not go on.
        self._next, self._is_left = None, True
        missing = self._missing(layer)
        ahead, rest = missing[: self._num_ahead], missing[self._num_ahead :]
        on_cpu, seconds = rest[:0], 0.0
        tail = self._tail
        if tail is not None:
            self._ahead.stop()
            step = tail.read(x, topk_weights, topk_ids)
            seconds = self._seconds_ahead()
            rest, on_cpu = tail.choose(
                *(step, rest, layer.num_experts, layer.expert_bytes),
                *(len(ahead), seconds),
            )
            if len(on_cpu):
                tail.start(layer.name, layer.cpu, step, _map_of(on_cpu, layer.num_experts))
        waves = plan_waves(np.concatenate((ahead, rest)), layer.size, layer.num_experts)
        given = _Given(x, topk_weights, routed, topk_ids)
        copies = self._copying(layer, waves, len(ahead), on_cpu, following)
        next(copies, None)
        next(copies, None)
        if tail is not None and len(ahead):
            tail.went_on(seconds)
        out = None if layer.is_whole else self._over_slots(layer, given)
        num_computed = len(waves) + (out is not None)
        for wave in waves:
            turn, self._turn = self._turn, 1 - self._turn
            buffer = layer.buffers[turn]
            self._marks[turn].full.wait()
            if layer.is_whole:
                out = self._whole(layer, buffer, given, has_map=len(on_cpu) > 0)
            else:
                out = _add(out, buffer.lane, given, buffer.expert_map)
            if keep is not None:
                if wave is waves[0]:
                    keep.decide(buffer.at_hand[:-1] if len(on_cpu) else None)
                keep.take(turn, None if layer.is_whole else buffer.expert_map)
            self._marks[turn].free.record()
            next(copies, None)
        assert out is not None, "every expert is in a slot or in a wave"
        if keep is not None and not waves:
            keep.decide(None)
        if tail is not None and len(on_cpu):
            out = tail.add(out, is_last)
        self._next = None if following is None else following.number
        self._is_left = False
        return Streamed(out, len(ahead) + len(rest), len(on_cpu), num_computed)

    def _copying(
        self,
        layer: StreamedLayer,
        waves: Sequence[Wave],
        ahead: int,
        on_cpu: Experts,
        following: StreamedLayer | None,
    ) -> Iterator[None]:
        """Enqueue copies of one wave more with each `next`, of the following layer's first at last.

        ahead: how many experts of the first waves have been enqueued.
        """
        turn = self._turn
        for number, wave in enumerate(waves):
            buffer, maps = layer.buffers[turn], []
            if not layer.is_whole:
                entries = wave.expert_map(layer.num_experts)
                maps.append((buffer.expert_map, sendable(entries, buffer.expert_map)))
            if number == 0 and len(on_cpu):
                entries = _map_of(np.arange(layer.num_experts), layer.num_experts)
                entries[on_cpu] = -1
                maps.append((buffer.at_hand, sendable(entries, buffer.at_hand)))
            enqueued = min(ahead, len(wave))
            ahead -= enqueued
            self._copy(layer, turn, wave.behind(enqueued), maps)
            turn = 1 - turn
            yield
        if following is not None:
            yield from self._starting(following, turn)

    def _starting(self, layer: StreamedLayer, turn: int) -> Iterator[None]:
        """Enqueue the first copies of this layer, those into one buffer with each `next`."""
        missing = self._missing(layer)
        ahead, watch = len(missing), None
        if self._tail is not None:
            ahead, watch = self._tail.ahead(ahead, layer.expert_bytes), self._ahead
        self._num_ahead = min(ahead, 2 * layer.size)
        for wave in plan_waves(missing[: self._num_ahead], layer.size, layer.num_experts):
            self._copy(layer, turn, wave, watch=watch)
            turn, watch = 1 - turn, None
            yield

    def _seconds_ahead(self) -> float:
        """For how long the bus had been at the copies ahead of a routing that has been read now."""
        if self._num_ahead == 0 or not self._ahead.has_begun():
            return 0.0
        return max(self._ahead.seconds(), 0.0)

    def _missing(self, layer: StreamedLayer) -> Experts:
        """The experts that are in no slot."""
        return np.flatnonzero(self._slot_of[layer.number] < 0)

    def _copy(
        self,
        layer: StreamedLayer,
        turn: int,
        wave: Wave,
        maps: Pairs = (),
        watch: Stopwatch | None = None,
    ) -> None:
        """Enqueue copies into this buffer, which is full behind the last ones."""
        marks = self._marks[turn]
        runs = wave.runs()
        if runs or maps:
            rows = Rows(layer.buffers[turn].copies, runs)
            self._copies.copy(maps, after=marks.free, done=marks.full, watch=watch, rows=rows)

    def _over_slots(self, layer: StreamedLayer, given: _Given) -> torch.Tensor | None:
        """What the experts in slots add up to; None where there are none."""
        if not (self._slot_of[layer.number] >= 0).any():
            return None
        lane = layer.in_slots().lane
        assert lane is not None
        return _add(None, lane, given, self._slot_maps[layer.number])

    def _whole(
        self, layer: StreamedLayer, buffer: InBuffer, given: _Given, has_map: bool
    ) -> torch.Tensor:
        """The output of a layer that is whole in this buffer, but for its experts in slots."""
        slot_of = self._slot_of[layer.number]
        self._copy_here(
            [
                (buffer.tensors[name][expert], tensor[slot_of[expert]])
                for name, tensor in layer.in_slots().tensors.items()
                for expert in np.flatnonzero(slot_of >= 0).tolist()
            ]
        )
        # Without the sentinel's entry: a kernel takes as many as it was built for.
        expert_map = buffer.at_hand[:-1] if has_map else None
        return buffer.lane.output(given.x, given.topk_weights, given.routed, expert_map)

    def _copy_here(self, pairs: Pairs) -> None:
        copy(pairs)

    def _read_tables(self) -> None:
        """Of all layers, which experts are in slots now; one copy to the host."""
        tables = [layer.in_slots().slot_of for layer in self._layers]
        sizes = [(len(table) // _ALIGNMENT + 1) * _ALIGNMENT for table in tables]
        nowhere = torch.full((_ALIGNMENT,), -1, dtype=torch.int32, device=tables[0].device)
        padded = [
            part
            for table, size in zip(tables, sizes, strict=True)
            for part in (table, nowhere[: size - len(table)])
        ]
        joined = torch.cat(padded)
        on_host = joined.cpu().numpy()
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        spans = [(start, start + len(table)) for start, table in zip(starts, tables, strict=True)]
        self._slot_maps = [joined[start : end + 1] for start, end in spans]
        self._slot_of = [on_host[start:end] for start, end in spans]


@dataclass(frozen=True)
class _Marks:
    """Those of a buffer; see the module."""

    free: Mark
    full: Mark


@dataclass(frozen=True)
class _Given:
    """A layer's step: as for `LayerStreamer.output`."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    routed: torch.Tensor
    topk_ids: torch.Tensor


def _add(
    out: torch.Tensor | None, lane: Lane, given: _Given, expert_map: torch.Tensor
) -> torch.Tensor:
    """`out` and what this lane's experts add to it; float32, None is nothing."""
    x = given.x
    total = torch.empty(x.shape, dtype=torch.float32, device=x.device) if out is None else out
    lane.compute(x, given.topk_weights, given.topk_ids, expert_map, total, out is not None)
    return total


def _in_buffer(host: Tensors, tensors: Tensors, lane: Lane, num_experts: int) -> InBuffer:
    device = next(iter(tensors.values())).device
    # Ordinary tensors: they are written to in and out of inference mode.
    with torch.inference_mode(False):
        maps = [torch.full((num_experts + 1,), -1, dtype=torch.int32, device=device) for _ in "01"]
    return InBuffer(tensors, RowCopies(host, tensors), lane, *maps)


def _map_of(experts: Experts, num_experts: int) -> npt.NDArray[np.int32]:
    """Int32 [E + 1]: expert -> expert for these, else -1."""
    return Wave(experts, experts).expert_map(num_experts)
