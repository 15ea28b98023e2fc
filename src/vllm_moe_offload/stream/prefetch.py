"""Copies layers' tensors into the buffers of a pool, each ahead of its layer's turn.

The computing stream and the copy stream are ordered by marks: a copy waits until the layer that has
the buffer has been computed, a layer waits until its own copies have been made. Under the capture
of a CUDA graph both go into the graph, by marks of their own: one that was recorded in a graph is
of no use outside of it, nor the other way round. So what was copied before a capture or a replay
has to have arrived (`settle`), and what a capture copies has to be joined before it ends (`join`).

The host remembers what it has asked for. A graph that holds all layers leaves the buffers as it
found them, so that this stays true when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_moe_offload.device.copies import CopyStream
from vllm_moe_offload.errors import UnsupportedError
from vllm_moe_offload.stream.pool import PoolPlan

_NOBODY = -1


class _Marks:
    """One set for work that is launched, one for work that is captured."""

    def __init__(self, copies: CopyStream, num_layers: int) -> None:
        self.here = copies.mark()
        self.copied = [copies.mark() for _ in range(num_layers)]


class LayerPrefetcher:
    """The layers of one stack, which runs from its first layer to its last, again and again.

    Args:
        plan: Which buffer a layer's tensors are in, and who has it next.
        buffers: uint8, the memory of each buffer.
        host: Of every layer, uint8 of each of its tensors, which the copy engine reads.
        copies: Makes the copies.
    """

    def __init__(
        self,
        plan: PoolPlan,
        buffers: Sequence[torch.Tensor],
        host: Sequence[Sequence[torch.Tensor]],
        copies: CopyStream,
    ) -> None:
        self._plan = plan
        self._copies = copies
        self._sources = [
            {b: (buffers[b], source) for b, source in zip(used, tensors, strict=True)}
            for used, tensors in zip(plan.of_layer, host, strict=True)
        ]
        self._refills: list[dict[int, list[int]]] = []
        for number, (used, heirs) in enumerate(zip(plan.of_layer, plan.heirs, strict=True)):
            refill: dict[int, list[int]] = {}
            for buffer, heir in zip(used, heirs, strict=True):
                if heir != number:
                    refill.setdefault(heir, []).append(buffer)
            self._refills.append(refill)
        self._holder = [_NOBODY] * len(buffers)
        self._launched = _Marks(copies, len(host))
        self._captured = _Marks(copies, len(host))
        # Layers whose copies the graph that is being captured has to wait for.
        self._unjoined: set[int] = set()

    @property
    def step_bytes(self) -> int:
        """Bytes that are copied each time all layers run."""
        return sum(
            self._sources[heir][buffer][1].nbytes
            for refill in self._refills
            for heir, buffers in refill.items()
            for buffer in buffers
        )

    def start(self) -> None:
        """Copy what the first run of the layers finds in the buffers."""
        for number, used in enumerate(self._plan.of_layer):
            self._copy(number, [b for b in used if self._holder[b] == _NOBODY])

    def wait(self, number: int) -> None:
        """Before this layer: what comes next on the current stream finds its tensors.

        A layer out of turn finds others in its buffers: its own are copied first. Raises
        UnsupportedError where that would have to go into a graph.
        """
        stale = [b for b in self._plan.of_layer[number] if self._holder[b] != number]
        if _is_capturing():
            if stale:
                raise UnsupportedError(
                    "moe_offload: the layers of this model do not run one after another, each once "
                    "a step, so prefetching cannot be captured: use --enforce-eager, or leave "
                    "group_size out"
                )
            if number in self._unjoined:
                self._captured.copied[number].wait()
                self._unjoined.remove(number)
            return
        if stale:
            self._copy(number, stale)
        self._launched.copied[number].wait()

    def refill(self, number: int) -> None:
        """Behind this layer: its buffers go to the layers that have them next."""
        for heir, buffers in self._refills[number].items():
            self._copy(heir, buffers)

    def settle(self) -> None:
        """Before a graph is captured or replayed: what was copied so far has arrived."""
        self._copies.join()

    def join(self) -> None:
        """Before a capture ends: the graph waits for all copies that it has begun."""
        for number in self._unjoined:
            self._captured.copied[number].wait()
        self._unjoined.clear()

    def _copy(self, number: int, buffers: Sequence[int]) -> None:
        """Once all that has been launched is done, copy these tensors of a layer."""
        if not buffers:
            return
        marks = self._launched
        if _is_capturing():
            marks = self._captured
            self._unjoined.add(number)
        marks.here.record()
        pairs = [self._sources[number][buffer] for buffer in buffers]
        self._copies.copy(pairs, after=marks.here, done=marks.copied[number])
        for buffer in buffers:
            self._holder[buffer] = number


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
