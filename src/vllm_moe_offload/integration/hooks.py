"""What is done to a layer whose parameters are prefetched.

vLLM's operators `vllm::wait_prefetch` and `vllm::start_prefetch`, which torch.compile keeps in
their places, call the offloader of the process from inside the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.offloader.prefetch_ops  # noqa: F401  registers the two operators
from torch import nn

from vllm_moe_offload.errors import UnsupportedError


def hook(layer: nn.Module, number: int) -> None:
    """Let the layer's forward wait for its parameters, and be followed by the next copies.

    The operators say that they change the hidden states, so that the compiler leaves what reads
    parameters of the layer between them.
    """
    inner: Callable[..., Any] = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        torch.ops.vllm.wait_prefetch(_hidden_states([*args, *kwargs.values()]), number)
        output = inner(*args, **kwargs)
        found = list(output) if isinstance(output, tuple | list) else [output]
        torch.ops.vllm.start_prefetch(_hidden_states(found), number)
        return output

    layer.forward = forward


def _hidden_states(values: list[Any]) -> torch.Tensor:
    """The first tensor of floating-point numbers: not the positions, which come first."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise UnsupportedError(
        "moe_offload: a layer of this model takes or gives no hidden states, so its copies cannot "
        "be ordered: leave group_size out"
    )


def keep_as_loaded(module: nn.Module) -> None:
    """Compute plainly: vLLM's CPU build would pack a linear layer's weight out of reach.

    Raises UnsupportedError for a format other than unquantised.
    """
    method = getattr(module, "quant_method", None)
    if method is None:
        return
    if type(method).__name__ != "UnquantizedLinearMethod":
        raise UnsupportedError(
            f"moe_offload: vLLM's CPU build packs parameters by {type(method).__name__}, where "
            "they cannot be prefetched: leave them out of params, or use an unquantised checkpoint"
        )

    def process(layer: nn.Module) -> None:
        vars(layer)["cpu_linear"] = torch.nn.functional.linear

    method.process_weights_after_loading = process
