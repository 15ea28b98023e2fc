"""Copies layers' tensors into the buffers of a pool, each ahead of its layer's turn.

The computing stream and the copy stream are ordered by marks: a copy waits until the layer that has
the buffer has been computed, a layer waits until its own copies have been made. Under the capture
of a CUDA graph both go into the graph, by marks of their own: one that was recorded in a graph is
of no use outside of it, nor the other way round. So what was copied before a capture or a replay
has to have arrived (`settle`), and what a capture copies has to be joined before it ends (`join`).

The host remembers what it has asked for. A graph that holds all layers leaves the buffers as it
found them, so that this stays true when it is replayed. A step that ends before its last layer does
not: then they are filled anew (`restart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_moe_offload.device.copies import CopyStream, Pairs
from vllm_moe_offload.device.streams import is_capturing
from vllm_moe_offload.errors import UnsupportedError
from vllm_moe_offload.stream.memory import aligned
from vllm_moe_offload.stream.pool import PoolPlan

_NOBODY = -1


class _Marks:
    """One set for work that is launched, one for work that is captured."""

    def __init__(self, copies: CopyStream, num_layers: int) -> None:
        self.here = copies.mark()
        self.copied = [copies.mark() for _ in range(num_layers)]


@dataclass(frozen=True)
class _Fill:
    """Copies of tensors of the layer `number` into these buffers."""

    number: int
    buffers: Sequence[int]
    pairs: Pairs


class LayerPrefetcher:
    """The layers of one stack, which runs from its first layer to its last, again and again.

    `not_run`: those that have not been waited for yet.

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
        self._refills = [self._plan_refill(number) for number in range(len(host))]
        self._holder = [_NOBODY] * len(buffers)
        self._launched = _Marks(copies, len(host))
        self._captured = _Marks(copies, len(host))
        # Layers whose copies the graph that is being captured has to wait for.
        self._unjoined: set[int] = set()
        self.not_run = set(range(len(host)))

    @property
    def step_bytes(self) -> int:
        """Bytes that are copied each time all layers run."""
        return sum(
            self._sources[fill.number][buffer][1].nbytes
            for refill in self._refills
            for fill in refill
            for buffer in fill.buffers
        )

    def start(self) -> None:
        """Copy what the first run of the layers finds in the buffers."""
        for number, used in enumerate(self._plan.of_layer):
            self._copy(self._fill(number, [b for b in used if self._holder[b] == _NOBODY]))

    def restart(self) -> None:
        """After a step that has not come to its end: the buffers are as `start` leaves them again.

        A graph that is replayed next relies on that.
        """
        self._holder = [_NOBODY] * len(self._holder)
        self._unjoined.clear()
        self.start()

    def wait(self, number: int) -> None:
        """Before this layer: what comes next on the current stream finds its tensors.

        A layer out of turn finds others in its buffers: its own are copied first. Raises
        UnsupportedError where that would have to go into a graph.
        """
        self.not_run.discard(number)
        stale = [b for b in self._plan.of_layer[number] if self._holder[b] != number]
        if is_capturing():
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
            self._copy(self._fill(number, stale))
        self._launched.copied[number].wait()

    def refill(self, number: int) -> None:
        """Behind this layer: its buffers go to the layers that have them next."""
        for fill in self._refills[number]:
            self._copy(fill)

    def settle(self) -> None:
        """Before a graph is captured or replayed: what was copied so far has arrived."""
        self._copies.join()

    def join(self) -> None:
        """Before a capture ends: the graph waits for all copies that it has begun."""
        for number in self._unjoined:
            self._captured.copied[number].wait()
        self._unjoined.clear()

    def _plan_refill(self, number: int) -> list[_Fill]:
        """What is copied behind this layer, heir by heir; nothing into a buffer it has alone."""
        taken: dict[int, list[int]] = {}
        for buffer, heir in zip(self._plan.of_layer[number], self._plan.heirs[number], strict=True):
            if heir != number:
                taken.setdefault(heir, []).append(buffer)
        return [self._fill(heir, buffers) for heir, buffers in taken.items()]

    def _fill(self, number: int, buffers: Sequence[int]) -> _Fill:
        return _Fill(number, buffers, _merged([self._sources[number][b] for b in buffers]))

    def _copy(self, fill: _Fill) -> None:
        """Once all that has been launched is done."""
        if not fill.buffers:
            return
        marks = self._launched
        if is_capturing():
            marks = self._captured
            self._unjoined.add(fill.number)
        # An error in between leaves a buffer that holds nobody's.
        for buffer in fill.buffers:
            self._holder[buffer] = _NOBODY
        marks.here.record()
        self._copies.copy(fill.pairs, after=marks.here, done=marks.copied[fill.number])
        for buffer in fill.buffers:
            self._holder[buffer] = fill.number


def _merged(pairs: Pairs) -> Pairs:
    """The same copies, those of tensors that lie side by side on both sides made one."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for to, source in pairs:
        if found and _follows(*found[-1], to, source):
            start, source_start = found[-1]
            size = (to.data_ptr() - start.data_ptr() + to.nbytes,)
            found[-1] = (start.as_strided(size, (1,)), source_start.as_strided(size, (1,)))
        else:
            found.append((to, source))
    return found


def _follows(
    start: torch.Tensor, source_start: torch.Tensor, to: torch.Tensor, source: torch.Tensor
) -> bool:
    """Whether `to` begins where `start` ends, but for its alignment, and so do the sources."""
    shift = to.data_ptr() - start.data_ptr()
    return (
        shift == aligned(start.nbytes)
        and shift == source.data_ptr() - source_start.data_ptr()
        and to.untyped_storage().data_ptr() == start.untyped_storage().data_ptr()
        and source.untyped_storage().data_ptr() == source_start.untyped_storage().data_ptr()
    )
