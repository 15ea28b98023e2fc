"""Memory of streamed layers that shows what was not copied to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_moe_offload.lanes import OffloadedLayer


def poison(shard: Mapping[str, torch.Tensor]) -> None:
    """Every byte becomes part of a NaN."""
    for tensor in shard.values():
        tensor.view(torch.uint8).fill_(0xFF)


def poison_buffers(layer: OffloadedLayer) -> None:
    """Those of both buffers; what was copied there ahead is to be forgotten."""
    assert layer._streamed is not None
    for buffer in layer._streamed.buffers:
        poison(buffer.tensors)
