"""vLLM's container of routed experts, with the experts offloaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.model_loader import dummy_loader, weight_utils
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.platforms import current_platform

from vllm_moe_offload.device.step import MAX_EXPERTS
from vllm_moe_offload.errors import UnsupportedError
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.host import not_mapped
from vllm_moe_offload.integration import op
from vllm_moe_offload.integration.runtime import OffloadRuntime
from vllm_moe_offload.lanes import OffloadedLayer

logger = init_logger(f"vllm.{__name__}")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
# What a checkpoint of separate experts fills in each layer: the last where experts are gated.
_WEIGHTS = (("w2_weight", "w2"), ("w13_weight", "w1"), ("w13_weight", "w3"))
# Quantisation methods that are offloaded on a GPU; vLLM's CPU build keeps to unquantised experts.
UNQUANTISED = ("UnquantizedFusedMoEMethod",)
FP8 = ("Fp8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod")
# Large tensors that a checkpoint fills: what create_weights left in them is not worth a copy.
_FILLED_BY_CHECKPOINT = ("w13_weight", "w2_weight")
# What torch says of memory on the CPU that the system does not even promise: bytes and cause.
_REFUSED_BY_SYSTEM = re.compile(
    r"DefaultCPUAllocator: .* allocate (\d+) bytes\. Error code \d+ \((.*)\)"
)

# Fills one tensor with dummy numbers; imported by name into the modules that call it.
_DUMMY_WEIGHT = "initialize_single_dummy_weight"

# Set while a worker loads a model with offload on: vLLM constructs the layers, so they can be
# handed nothing.
_loading: OffloadRuntime | None = None


class OffloadedRoutedExperts(RoutedExperts):
    """Routed experts in host memory. vLLM makes one wherever it would make a RoutedExperts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        runtime = _loading
        if runtime is None:
            raise RuntimeError("OffloadedRoutedExperts is made by vLLM while a model is loaded")
        self._runtime = runtime
        # vLLM makes weights on the device by default; these never go there whole.
        try:
            with torch.device("cpu"):
                super().__init__(*args, **kwargs)
        except RuntimeError as error:
            refused = _REFUSED_BY_SYSTEM.search(str(error))
            if refused is None:
                raise
            raise not_mapped(int(refused[1]), refused[2]) from error
        self.offload: OffloadedLayer | None = None
        self._is_bound = False
        # Until it is bound: what a checkpoint may fill, and the experts whose numbers have come by
        # parameter and shard of it.
        self._names = {parameter: name for name, parameter in self.named_parameters()}
        self._arrived: dict[tuple[str, str], set[int]] = {}
        self._check_supported()
        made = {name: p.data for name, p in self.named_parameters()}
        self.host = runtime.store.allocate(ExpertLayout.of(made), self.moe_config.num_experts)
        for name, tensor in self.host.items():
            if name not in _FILLED_BY_CHECKPOINT:
                tensor.copy_(made[name])
            self.get_parameter(name).data = tensor
        self.stock_process = self.quant_method.process_weights_after_loading
        self.quant_method.process_weights_after_loading = (  # type: ignore[method-assign]
            self._process_weights
        )
        runtime.adopt(self)

    def weight_loader(  # type: ignore[override]
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """As RoutedExperts.weight_loader, into host memory; what is in slots is stale after it.

        With its parameters by name: reloading binds arguments to them.
        """
        if self._is_bound and not current_platform.is_cpu():
            raise UnsupportedError(
                f"moe_offload on {self.layer_name}: weights cannot be loaded again on a GPU, where "
                "the slots have taken the place of the parameters: restart the engine"
            )
        self._make_ready()
        if self.offload is not None:
            self.offload.invalidate()
        self._note_arrival(param, loaded_weight, shard_id, expert_id)
        return super().weight_loader(  # type: ignore[call-overload, no-any-return]
            param, loaded_weight, weight_name, shard_id, expert_id, return_success
        )

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loaders of sharded checkpoints write into the tensors that a state dict gives them."""
        if not self._is_bound:
            self._make_ready()
        super()._save_to_state_dict(*args, **kwargs)

    def _make_ready(self) -> None:
        self._runtime.prepare()
        self._runtime.store.wait(self.host.values())

    def _get_quant_method(self, *args: Any, **kwargs: Any) -> FusedMoEMethodBase:
        """The format's method; refused before it makes weights when its format is not supported."""
        method = super()._get_quant_method(*args, **kwargs)
        known = UNQUANTISED if current_platform.is_cpu() else UNQUANTISED + FP8
        if type(method).__name__ not in known:
            raise UnsupportedError(
                f"moe_offload on {self.layer_name}: experts quantised by {type(method).__name__} "
                "are not supported on this device (bf16, fp16 and fp32 are; on a GPU FP8 "
                "checkpoints too): use such a checkpoint, or serve this one without moe_offload"
            )
        return method

    def _check_supported(self) -> None:
        where = f"moe_offload on {self.layer_name}"
        if self.quant_method.is_monolithic:
            raise UnsupportedError(
                f"{where}: the chosen MoE kernel routes inside and never shows which experts it "
                "uses: choose a decomposed one with --moe-backend (vLLM's CPU build has one from "
                "0.32 on)"
            )
        activation = self.moe_config.activation.value
        if activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"{where}: the activation {activation!r} is not one that is offloaded (those are: "
                f"{', '.join(ACTIVATIONS)}): serve this model without moe_offload"
            )
        unexpected = [
            n for n in ("swiglu_limit", "swiglu_alpha", "swiglu_beta") if getattr(self, n)
        ]
        if unexpected:
            raise UnsupportedError(
                f"{where}: the model sets {', '.join(unexpected)}, which the expert engine does "
                "not compute: serve it without moe_offload"
            )
        if current_platform.is_cuda() and self.moe_config.num_experts > MAX_EXPERTS:
            raise UnsupportedError(
                f"{where}: the layer has {self.moe_config.num_experts} experts, and a step on the "
                f"GPU decides over {MAX_EXPERTS} at most: serve this model without moe_offload"
            )
        odd = {
            name: tuple(parameter.shape)
            for name, parameter in self.named_parameters()
            if parameter.device.type != "cpu"
            or not parameter.ndim
            or parameter.shape[0] != self.moe_config.num_experts
        }
        if odd:
            raise UnsupportedError(
                f"{where}: the layer has parameters that are not one row an expert ({odd}): "
                "serve this model without moe_offload"
            )

    def _process_weights(self, layer: torch.nn.Module) -> None:
        """Instead of the format's own processing: slots over what has been loaded.

        vLLM calls this again after a reload of weights, which are then already in host memory.
        """
        if self._is_bound:
            if self.offload is not None:
                self.offload.invalidate()
            else:
                self.stock_process(layer)
            return
        self._is_bound = True
        self._say_what_is_missing()
        self.offload = self._runtime.bind(self)

    def _note_arrival(
        self, param: torch.nn.Parameter, loaded: torch.Tensor, shard_id: str, expert_id: int
    ) -> None:
        """Numbers of an expert, or of all in one tensor, which begins with their dimension."""
        name = self._names.get(param)
        if name is None:  # a reload's
            return
        count = self.moe_config.num_experts
        is_whole = loaded.ndim >= max(param.ndim, 1) and len(loaded) == count
        experts = range(count) if is_whole else [expert_id]
        self._arrived.setdefault((name, shard_id), set()).update(experts)
        self._runtime.arrived.add((name, shard_id))

    def _say_what_is_missing(self) -> None:
        """Whether every expert of a checkpoint is there nobody else asks.

        Of what came for any layer: which parameters a checkpoint fills depends on its format. And
        of the weights, where any came so.
        """
        own = set(self._names.values())
        expected = set(self._runtime.arrived)
        if any(part in expected for part in _WEIGHTS):
            expected.update(_WEIGHTS if self.moe_config.is_act_and_mul else _WEIGHTS[:2])
        for name, shard_id in sorted(expected):
            here = self._arrived.get((name, shard_id), set())
            missing = sorted(set(range(self.moe_config.num_experts)) - here)
            if missing and name in own:
                logger.warning(
                    "moe_offload: the checkpoint has no %s (%s) of %d of %d experts of %s, which "
                    "compute with what was there before it came, weights of zero: %s",
                    name,
                    shard_id,
                    len(missing),
                    self.moe_config.num_experts,
                    self.layer_name,
                    ", ".join(map(str, missing)),
                )
        self._names.clear()
        self._arrived.clear()

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
        return self.offload.forward(x, topk_weights, topk_ids, padding_rows(len(x)), requests())


def padding_rows(num_rows: int) -> torch.Tensor | None:
    """Which rows of this step are padding (bool [T]), or None when all are tokens.

    A row without a place in the KV cache is padding (``slot_mapping < 0``); a step without a
    mapping, such as a profiling run, has tokens only.
    """
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    mapping = context.slot_mapping
    if not isinstance(mapping, dict):
        return None
    for name, places in mapping.items():
        # Mamba's groups have no places (what stands there is old), and those of encoder-only
        # attention are made anew every step, where no graph finds them.
        layer = context.no_compile_layers.get(name)
        if isinstance(layer, MambaBase) or getattr(layer, "attn_type", None) == "encoder_only":
            continue
        return places < 0 if len(places) == num_rows else None
    return None


def requests() -> torch.Tensor | None:
    """Where the rows of each request of this step begin, and the last one's end: int32 [R + 1].

    None where there are no requests (a profiling run), or the attention's metadata does not say.
    """
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return None
    for one in metadata.values():
        starts = getattr(one, "query_start_loc", None)
        if isinstance(starts, torch.Tensor):
            return starts
    return None


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

    original_dummy = getattr(weight_utils, _DUMMY_WEIGHT)

    @functools.wraps(original_dummy)
    def dummy_weight(param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # The runtime fills the experts: here one thread would fill all of them.
        if runtime.store.owns(param):
            return
        if param.device.type == "cpu" and not current_platform.is_cpu():
            # Prefetched: drawn as vLLM would, on the device.
            host, param.data = param.data, param.data.to(current_platform.device_type)
            original_dummy(param, *args, **kwargs)
            host.copy_(param.data)
            param.data = host
        else:
            original_dummy(param, *args, **kwargs)

    original_context = loader_utils.device_loading_context

    @contextmanager
    def loading_context(module: torch.nn.Module, target_device: torch.device) -> Iterator[Any]:
        # It moves the parameters of a module to the device and back: not all experts of a layer.
        if isinstance(module, OffloadedRoutedExperts):
            yield module
            return
        context: Callable[..., Any] = original_context
        if runtime.prefetch is not None and target_device.type != "cpu":
            context = runtime.prefetch.on_device
        with context(module, target_device):
            yield module

    op_registry_oot[name] = OffloadedRoutedExperts
    loader_utils.device_loading_context = loading_context
    RoutedExperts.__init__ = guarded_init  # type: ignore[method-assign]
    _set_dummy_weight(dummy_weight)
    _loading = runtime
    try:
        yield
    finally:
        _set_dummy_weight(original_dummy)
        loader_utils.device_loading_context = original_context
        _loading = None
        RoutedExperts.__init__ = original_init  # type: ignore[method-assign]
        del op_registry_oot[name]


def _set_dummy_weight(function: Callable[..., None]) -> None:
    """Let every module that fills dummy weights use this function."""
    for module in (weight_utils, dummy_loader):
        if hasattr(module, _DUMMY_WEIGHT):
            setattr(module, _DUMMY_WEIGHT, function)
