"""What the streamer knows of a layer, and what a layer hands it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_moe_offload.device.copies import RowCopies
    from vllm_moe_offload.lanes.base import Lane, LaneBeside
    from vllm_moe_offload.stream.streamer import LayerStreamer

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class InSlots:
    """What of a layer is in slots: name -> ``[S, ...]``; int32 [E], slot or -1; the lane over them.

    lane: None where there are no slots.
    """

    tensors: Tensors
    slot_of: torch.Tensor
    lane: Lane | None


@dataclass(frozen=True)
class Keep:
    """What a step leaves in the slots of a layer.

    `decide`: called once, when all that reads the slots has been launched, with int32 [E], -1 for
    used experts that come into no buffer, or None where all do. `take`: then called for each wave,
    before its buffer is free again, with the buffer's number and its map, int32 [E + 1], expert ->
    row or -1, or None where expert e is in row e: copies what was decided and is there to slots.
    """

    decide: Callable[[torch.Tensor | None], None]
    take: Callable[[int, torch.Tensor | None], None]


@dataclass(frozen=True)
class InBuffer:
    """A layer's place in one of the buffers.

    `tensors`: name -> ``[B, ...]``; `copies`: to these, from the layer's in host memory; `lane`:
    computes from them; `expert_map` and `at_hand`: int32 [E + 1], on the lane's device.
    """

    tensors: Tensors
    copies: RowCopies
    lane: Lane
    expert_map: torch.Tensor
    at_hand: torch.Tensor


@dataclass(frozen=True)
class StreamedLayer:
    """What the streamer knows of a layer, which errors call `name`.

    `host`: name -> ``[E, ...]``, every expert, which the copy engine reads. `buffers`: both. `cpu`:
    computes from `host`. `in_slots`: what is in slots now, the tables on the device that the lanes
    run on; read when a step begins.
    """

    streamer: LayerStreamer
    number: int
    name: str
    host: Tensors
    buffers: tuple[InBuffer, InBuffer]
    cpu: LaneBeside
    in_slots: Callable[[], InSlots]
    num_experts: int
    expert_bytes: int

    @property
    def size(self) -> int:
        """B: how many experts each buffer holds."""
        return next(iter(self.buffers[0].tensors.values())).shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether that is every expert of the layer."""
        return self.size == self.num_experts

    def takes(self, rows: int) -> bool:
        """Whether a step of so many rows is streamed."""
        return self.streamer.takes(rows)

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        routed: torch.Tensor,
        topk_ids: torch.Tensor,
        keep: Keep | None,
    ) -> Streamed:
        """As `LayerStreamer.output`."""
        return self.streamer.output(self, x, topk_weights, routed, topk_ids, keep)

    def forget(self) -> None:
        """As `LayerStreamer.end`."""
        self.streamer.end()


@dataclass(frozen=True)
class Streamed:
    """A layer's output [T, H] in floats, how many experts were copied and on the CPU, and waves."""

    out: torch.Tensor
    copied: int
    computed: int
    waves: int
