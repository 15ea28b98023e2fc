"""The step of an offloaded layer as one opaque operator, so that torch.compile does not look in."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import library
from vllm.forward_context import get_forward_context

_library = library.Library("moe_offload", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "routed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, str layer) -> Tensor"
)


def _routed_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: str
) -> torch.Tensor:
    runner: Any = get_forward_context().no_compile_layers[layer]
    return cast(torch.Tensor, runner.routed_experts.forward_offloaded(x, topk_weights, topk_ids))


def _fake(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: str
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl(  # type: ignore[no-untyped-call]
    "routed_experts", _routed_experts, "CompositeExplicitAutograd"
)
library.register_fake("moe_offload::routed_experts", _fake, lib=_library)


def routed_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: str
) -> torch.Tensor:
    """The routed output [T, H] of the offloaded layer called `layer` in vLLM's forward context."""
    return cast(
        torch.Tensor, torch.ops.moe_offload.routed_experts(x, topk_weights, topk_ids, layer)
    )
