"""vLLM's container of routed experts, with the experts offloaded."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_moe_offload.errors import UnsupportedError
from vllm_moe_offload.integration import op
from vllm_moe_offload.integration.runtime import OffloadRuntime, spec_of
from vllm_moe_offload.lanes import OffloadedLayer

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

# Set while a worker loads a model with offload on: vLLM constructs the layers, so they can be
# handed nothing.
_loading: OffloadRuntime | None = None


class OffloadedRoutedExperts(RoutedExperts):
    """Routed experts in host memory. vLLM makes one wherever it would make a RoutedExperts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        runtime = _loading
        if runtime is None:
            raise RuntimeError("OffloadedRoutedExperts is made by vLLM while a model is loaded")
        # vLLM makes weights on the device by default; these never go there whole.
        with torch.device("cpu"):
            super().__init__(*args, **kwargs)
        self.offload: OffloadedLayer | None = None
        self._runtime = runtime
        self._check_supported()
        self.spec = spec_of(self)
        host = runtime.store.allocate(self.spec.layout, self.global_num_experts)
        for name, tensor in host.items():
            self.get_parameter(name).data = tensor
        self._stock_process = self.quant_method.process_weights_after_loading
        self.quant_method.process_weights_after_loading = (  # type: ignore[method-assign]
            self._process_weights
        )
        runtime.adopt(self)

    def host_tensors(self) -> dict[str, torch.Tensor]:
        """The experts in host memory, name -> ``[E, ...]``."""
        return {name: self.get_parameter(name).data for name in self.spec.layout.names}

    def _get_quant_method(self, *args: Any, **kwargs: Any) -> FusedMoEMethodBase:
        """The format's method; refused before it makes weights when its format is not supported."""
        method = super()._get_quant_method(*args, **kwargs)
        if type(method) is not UnquantizedFusedMoEMethod:
            raise UnsupportedError(
                f"moe_offload on {self.layer_name}: experts quantised by {type(method).__name__} "
                "are not supported on this device, which has bf16, fp16 and fp32: use an "
                "unquantised checkpoint"
            )
        return method

    def _check_supported(self) -> None:
        where = f"moe_offload on {self.layer_name}"
        if self.quant_method.is_monolithic:
            raise UnsupportedError(
                f"{where}: the chosen MoE kernel routes inside and never shows which experts it "
                "uses: choose a decomposed one with --moe-backend"
            )
        activation = self.moe_config.activation.value
        if activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"{where}: the activation {activation!r} is not one that is offloaded (those are: "
                f"{', '.join(ACTIVATIONS)}): serve this model without moe_offload"
            )
        spec = spec_of(self)
        unexpected = [
            n for n in ("swiglu_limit", "swiglu_alpha", "swiglu_beta") if getattr(self, n)
        ]
        if unexpected:
            raise UnsupportedError(
                f"{where}: the model sets {', '.join(unexpected)}, which the expert engine does "
                "not compute: serve it without moe_offload"
            )
        expected = {t.name: (self.global_num_experts, *t.shape) for t in spec.layout.tensors}
        found = {name: tuple(p.shape) for name, p in self.named_parameters()}
        if found != expected:
            raise UnsupportedError(
                f"{where}: the layer has parameters {found}, the expert engine needs {expected}: "
                "serve it without moe_offload"
            )

    def _process_weights(self, layer: torch.nn.Module) -> None:
        """Instead of the format's own processing: slots over what has been loaded.

        vLLM calls this again after a reload of weights, which are then already in host memory.
        """
        if self.offload is not None:
            self.offload.invalidate()
            return
        self.offload = self._runtime.bind(self)
        if self.offload is None:
            self._stock_process(layer)

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """As RoutedExperts.forward_modular; the runner runs shared experts itself."""
        if self.offload is None:
            return super().forward_modular(
                x, topk_weights, topk_ids, shared_experts, shared_experts_input
            )
        return op.routed_experts(x, topk_weights, topk_ids, self.layer_name)

    def forward_offloaded(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """What `op.routed_experts` computes for this layer."""
        assert self.offload is not None
        return self.offload.forward(x, topk_weights, topk_ids, padding_rows(len(x)))


def padding_rows(num_rows: int) -> torch.Tensor | None:
    """Bool [T], the rows of this step that are padding, or None when all are tokens.

    A row without a place in the KV cache is padding (``slot_mapping < 0``); a step without a
    mapping, such as a profiling run, has tokens only.
    """
    if not is_forward_context_available():
        return None
    mapping = get_forward_context().slot_mapping
    if not isinstance(mapping, dict) or not mapping:
        return None
    places = next(iter(mapping.values()))
    if len(places) != num_rows:
        return None
    return places < 0


@contextmanager
def offloaded_layers(runtime: OffloadRuntime) -> Iterator[None]:
    """Inside, vLLM makes OffloadedRoutedExperts; outside, nothing of vLLM is changed."""
    global _loading
    name = RoutedExperts.__name__
    if name in op_registry_oot:
        raise UnsupportedError(
            f"another plugin ({op_registry_oot[name].__module__}) has replaced vLLM's {name}, "
            "which moe_offload has to: remove that plugin with VLLM_PLUGINS"
        )
    original_init = RoutedExperts.__init__

    @functools.wraps(original_init)
    def guarded_init(self: RoutedExperts, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, OffloadedRoutedExperts):
            raise UnsupportedError(
                f"moe_offload does not know the expert layer {type(self).__name__} of this model "
                "(it replaces RoutedExperts alone), so its experts would not be offloaded: "
                "serve this model without moe_offload"
            )
        original_init(self, *args, **kwargs)

    op_registry_oot[name] = OffloadedRoutedExperts
    RoutedExperts.__init__ = guarded_init  # type: ignore[method-assign]
    _loading = runtime
    try:
        yield
    finally:
        _loading = None
        RoutedExperts.__init__ = original_init  # type: ignore[method-assign]
        del op_registry_oot[name]
