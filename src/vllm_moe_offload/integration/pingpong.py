"""A quantisation method for one layer, put there by hand, that computes from a buffer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from vllm_moe_offload.errors import ConfigError, InactiveError, UnsupportedError
from vllm_moe_offload.integration.worker import warm_config

_WEIGHT, _BUFFER = "w13_weight", "w13_buffer"


class PingpongUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's unquantised method, with the layer's `w13_buffer` in place of its `w13_weight`.

    For a layer without offload of this package, in an eager engine, whose owner fills buffers::

        experts = runner.routed_experts
        experts.quant_method = PingpongUnquantizedFusedMoEMethod(experts.moe_config)
        experts.w13_buffer = torch.empty_like(experts.w13_weight.data)

    The buffer is like `w13_weight` in shape, dtype, device and in the layout that the kernel wants,
    and another may be set before any step; its owner orders what fills it with the steps that read
    it. Without a buffer, or with None, the layer computes from its own weights.

    Put where vLLM would never call it, it raises InactiveError: on the runner, under another name,
    on a layer that is offloaded or whose kernel routes inside, in an engine whose graphs have been
    captured or, on vLLM's CPU build, whose layers have been compiled. On a layer with quantised
    experts it raises UnsupportedError, on a second layer ConfigError, and in a step whose buffer is
    unlike the weights ValueError.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        with ExitStack() as stack:
            if get_current_vllm_config_or_none() is None:
                # By hand it is made when the model has been: only the name of a method to call
                # is taken from a configuration, and it is the same one in all.
                stack.enter_context(set_current_vllm_config(VllmConfig()))
            super().__init__(moe)
        self._layer_name: str | None = None

    def apply(  # type: ignore[override]
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As UnquantizedFusedMoEMethod.apply."""
        given = (layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        buffer: torch.Tensor | None = getattr(layer, _BUFFER, None)
        if buffer is None:
            return super().apply(*given)
        own = layer.get_parameter(_WEIGHT)
        if _likeness(buffer) != _likeness(own):
            raise ValueError(
                f"{layer.layer_name}: {_BUFFER} is {_described(buffer)} and {_WEIGHT} "
                f"{_described(own)}: give a buffer like the weight, or None"
            )
        layer._parameters[_WEIGHT] = buffer  # type: ignore[assignment]
        try:
            return super().apply(*given)
        finally:
            layer._parameters[_WEIGHT] = own

    def take_over(self, layer: RoutedExperts) -> None:
        """Compute with the kernel that the layer's present method has, if it has one yet."""
        if self._layer_name not in (None, layer.layer_name):
            raise ConfigError(
                f"{layer.layer_name}: this {type(self).__name__} is that of {self._layer_name}: "
                "make one for each layer"
            )
        present = layer._modules.get("quant_method")
        if present is None:
            self._layer_name = layer.layer_name
            return
        if not isinstance(present, UnquantizedFusedMoEMethod):
            raise UnsupportedError(
                f"{layer.layer_name}: its experts are quantised ({type(present).__name__}), and "
                f"{type(self).__name__} is for those that are not: use mode='stream'"
            )
        _refuse_replays(layer, type(self).__name__)
        if present.is_monolithic:
            raise InactiveError(
                f"{layer.layer_name}: its kernel routes inside and would not call "
                f"{type(self).__name__}: choose a decomposed one with --moe-backend"
            )
        for name in ("unquantized_backend", "experts_cls", "moe_kernel", "moe_quant_config"):
            setattr(self, name, getattr(present, name))
        self._layer_name = layer.layer_name


def _refuse_replays(layer: RoutedExperts, method: str) -> None:
    """InactiveError where steps go on with what was captured or traced before."""
    config = warm_config(layer.layer_name, layer)
    if config is None:
        return
    compilation = config.compilation_config
    # Elsewhere compiled code calls the layer, which is an operator of vLLM's, in every step.
    is_traced = current_platform.is_cpu() and compilation.mode != CompilationMode.NONE
    is_captured = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    if is_captured or is_traced:
        raise InactiveError(
            f"{layer.layer_name}: the engine has {'captured' if is_captured else 'compiled'} its "
            f"steps, and they would not call a {method} that comes later: start it with "
            "enforce_eager=True, or use mode='stream'"
        )


def _likeness(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a kernel takes for granted of its weights; the order they lie in too."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _described(tensor: torch.Tensor) -> str:
    return (
        f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
    )


def _placed(module: torch.nn.Module, name: str, value: torch.nn.Module | None) -> None:
    """Called by torch before a module becomes an attribute of another."""
    if not isinstance(value, PingpongUnquantizedFusedMoEMethod):
        return
    what = f"{type(value).__name__} as {name!r} of a {type(module).__name__} would do nothing"
    if not isinstance(module, RoutedExperts):
        raise InactiveError(f"{what}: set it as .routed_experts.quant_method of the layer")
    if name != "quant_method":
        raise InactiveError(f"{what}: set it as .quant_method")
    # None where every expert fits, and the layer is vLLM's own.
    if getattr(module, "offload", None) is not None:
        raise InactiveError(
            f"{what}: {module.layer_name} is offloaded, and not computed by it: leave it out, or "
            "start without the settings of moe_offload"
        )
    value.take_over(module)


register_module_module_registration_hook(_placed)
