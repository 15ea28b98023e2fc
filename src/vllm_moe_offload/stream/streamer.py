"""Whole layers through two buffers: one is filled while the other is computed from.

A buffer holds every expert of a layer, each in the row of its own number, so that the layer is
computed by one launch of its kernel, without a map, as if nothing were offloaded. Experts that are
in slots come from there, on the device; the others come from host memory by the copy engine. The
slots are read; what a step leaves in them is copied there when the layer has been computed, before
its buffer is free again.

Layers take the buffers in turns, by their number. The copies of layer l + 1 are enqueued before the
computation of layer l is. Two marks order the streams at each buffer: `free`, behind its last
reader, which the next copies wait for, and `full`, behind the copies, which the next reader waits
for.

Layers without slots may be captured, in one graph or each in its own. A mark means something only
within the capture it was recorded in, or outside of all: so a step records `free` anew when it
begins, behind everything before it, a replay of a graph included, and it ends with all of its
copies waited for.

With a CPU lane the copies of a layer are enqueued in two parts: a first one before it is known what
the layer is routed to, and the rest when it is, less the experts with few rows: the CPU computes
them meanwhile, and a map keeps the kernel from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.copies import CopyStream, Mark, Pairs, copy
from vllm_moe_offload.stream.tail import CpuTail

if TYPE_CHECKING:
    from vllm_moe_offload.lanes.base import Lane

Tensors = Mapping[str, torch.Tensor]
Experts = npt.NDArray[np.int64]
# Is called when a layer's computation has been enqueued, before its buffer is free again, with
# int32 [E], -1 for used experts that are not in the buffer, or None where all are.
Keep = Callable[[torch.Tensor | None], None]

# With a CPU lane, one of so many missing experts is copied before the routing is known. A CPU that
# reads 95 GB/s beside a bus of 54 leaves the bus a third, and a third of section 1's layer keeps
# the bus busy for 6 ms, in which the layer before is computed and this one's routing is read.
_AHEAD = 3


@dataclass(frozen=True)
class InSlots:
    """Which experts of a layer are in slots: name -> ``[S, ...]``, and int32 [E], slot or -1."""

    tensors: Tensors
    slot_of: torch.Tensor


@dataclass(frozen=True)
class StreamedLayer:
    """What the streamer knows of a layer.

    `host`: name -> ``[E, ...]``, every expert, which the copy engine reads. `buffer`: the same in
    the memory of buffer `number % 2`. `lane`: computes from `buffer`; `cpu`: from `host`.
    `in_slots`: what is in slots now, the tables on the device that the lane runs on; read when a
    step begins.
    """

    streamer: LayerStreamer
    number: int
    host: Tensors
    buffer: Tensors
    lane: Lane
    cpu: Lane
    in_slots: Callable[[], InSlots]

    def takes(self, rows: int) -> bool:
        """Whether a step of so many rows is streamed."""
        return self.streamer.takes(rows)

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        routed: torch.Tensor,
        topk_ids: torch.Tensor,
        keep: Keep,
    ) -> Streamed:
        """As `LayerStreamer.output`."""
        return self.streamer.output(self, x, topk_weights, routed, topk_ids, keep)

    def forget(self) -> None:
        """As `LayerStreamer.end`."""
        self.streamer.end()


@dataclass(frozen=True)
class Streamed:
    """A layer's output [T, H] in floats, and how many experts were copied and on the CPU."""

    out: torch.Tensor
    copied: int
    computed: int


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
        self._buffers = (
            _Buffer(copies.mark(), copies.mark()),
            _Buffer(copies.mark(), copies.mark()),
        )
        self._slot_of: list[npt.NDArray[np.int32]] = []
        # The layer that the step goes on with; None between steps.
        self._next: int | None = None

    def takes(self, rows: int) -> bool:
        """Whether a step of so many rows is streamed."""
        return self.threshold is not None and rows > self.threshold

    @property
    def num_layers(self) -> int:
        """How many layers have been added."""
        return len(self._layers)

    def add(
        self,
        host: Tensors,
        buffer: Tensors,
        lane: Lane,
        cpu: Lane,
        in_slots: Callable[[], InSlots],
    ) -> StreamedLayer:
        """Take in the next layer of a step: see `StreamedLayer`."""
        self.end()
        layer = StreamedLayer(self, len(self._layers), host, buffer, lane, cpu, in_slots)
        self._layers.append(layer)
        return layer

    def begin(self, first: int = 0) -> None:
        """A step will go on with the layer of this number: its copies start now.

        Waits for the device where it has to be read which experts are in slots.
        """
        self._slot_of = self._read_tables()
        for buffer in self._buffers:
            buffer.free.record()
        self._next = first
        self._start(first)

    def end(self) -> None:
        """The step is over, or slots change: what has been copied for later layers is not used.

        These copies come before what is enqueued next, which may be a graph that fills the buffers.
        """
        if self._next is not None:
            self._next = None
            self._copies.join()

    def output(
        self,
        layer: StreamedLayer,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        routed: torch.Tensor,
        topk_ids: torch.Tensor,
        keep: Keep,
    ) -> Streamed:
        """The layer's output.

        x: [T, H]; topk_weights: float32 [T, K]; routed: int32 [T, K] in 0..E-1, rows of padding
        too; topk_ids: the same with E for these; keep: may copy from the buffer to the slots.
        """
        if self._next != layer.number:
            self.begin(layer.number)
        is_last = layer.number + 1 == self.num_layers or self._is_alone()
        following = None if is_last else layer.number + 1
        # Set again at the end: after an error the step does not go on.
        self._next = None
        buffer, tail = self._buffers[layer.number % 2], self.tail
        slot_of = self._slot_of[layer.number]
        ahead, rest = self._parts(slot_of)
        on_cpu = rest[:0]
        if tail is not None:
            step = tail.read(x, topk_weights, topk_ids)
            rest, on_cpu = tail.choose(step, rest, len(slot_of), len(ahead))
        if len(rest):
            self._copy(layer, rest)
        if following is not None:
            self._start(following)
        expert_map = None
        if len(on_cpu):
            others = np.setdiff1d(np.arange(len(slot_of)), on_cpu)
            # Without the sentinel's entry: a kernel takes as many as it was built for.
            expert_map = _sent(_map_of(others, len(slot_of))[:-1], x.device)
        buffer.full.wait()
        try:
            self._copy_here(_from_slots(layer, slot_of))
            out = layer.lane.output(x, topk_weights, routed, expert_map)
            keep(expert_map)
        finally:
            buffer.free.record()
        if tail is not None and len(on_cpu):
            out = tail.add(out, layer.cpu, step, _map_of(on_cpu, len(slot_of)))
        self._next = following
        return Streamed(out, len(ahead) + len(rest), len(on_cpu))

    def _start(self, number: int) -> None:
        """Enqueue the first copies of this layer: all without a CPU lane."""
        ahead, _ = self._parts(self._slot_of[number])
        self._copy(self._layers[number], ahead)

    def _parts(self, slot_of: npt.NDArray[np.int32]) -> tuple[Experts, Experts]:
        """The experts that are in no slot: those copied ahead of the routing, and the rest."""
        missing = np.flatnonzero(slot_of < 0)
        ahead = len(missing) if self.tail is None else -(-len(missing) // _AHEAD)
        return missing[:ahead], missing[ahead:]

    def _copy(self, layer: StreamedLayer, experts: Experts) -> None:
        """Enqueue copies; the buffer is full behind the last ones."""
        buffer = self._buffers[layer.number % 2]
        self._copies.copy(_from_host(layer, experts), after=buffer.free, done=buffer.full)

    def _copy_here(self, pairs: Pairs) -> None:
        copy(pairs)

    def _read_tables(self) -> list[npt.NDArray[np.int32]]:
        """For each layer int32 [E], the slot of each expert or -1; one copy for all layers."""
        tables = [layer.in_slots().slot_of for layer in self._layers]
        ends = np.cumsum([len(table) for table in tables])
        return np.split(torch.cat(tables).cpu().numpy(), ends[:-1])


@dataclass(frozen=True)
class _Buffer:
    """The marks of a buffer; see the module."""

    free: Mark
    full: Mark


def _from_slots(layer: StreamedLayer, slot_of: npt.NDArray[np.int32]) -> Pairs:
    slots = layer.in_slots().tensors
    return [
        (layer.buffer[name][expert], tensor[slot_of[expert]])
        for name, tensor in slots.items()
        for expert in np.flatnonzero(slot_of >= 0).tolist()
    ]


def _from_host(layer: StreamedLayer, experts: Experts) -> Pairs:
    """Neighbours together: the larger a copy, the nearer it comes to the bus's rate."""
    runs = _runs(experts)
    return [
        (layer.buffer[name][start:end], tensor[start:end])
        for name, tensor in layer.host.items()
        for start, end in runs
    ]


def _map_of(experts: Experts, num_experts: int) -> torch.Tensor:
    """Int32 [E + 1]: expert -> expert for these, else -1."""
    entries = torch.full((num_experts + 1,), -1, dtype=torch.int32)
    entries[torch.from_numpy(experts)] = torch.from_numpy(experts.astype(np.int32))
    return entries


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it: the copies beside the CPU's work are under way."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _runs(numbers: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending numbers as runs of neighbours, each from its first to behind its last one."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    return [
        (int(numbers[start]), int(numbers[end - 1]) + 1)
        for start, end in pairwise(edges)
        if end > start
    ]
