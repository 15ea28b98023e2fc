"""How vLLM's formats keep experts: which the CPU engine reads, and how slots get under a kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

from vllm_moe_offload.errors import UnsupportedError
from vllm_moe_offload.experts import Activation, ExpertLayout, ExpertSpec, Format
from vllm_moe_offload.host import HostStore
from vllm_moe_offload.lanes import Lane
from vllm_moe_offload.stream import BufferMemory

Tensors = dict[str, torch.Tensor]

# What is less than one part in so many of a buffer may be outside it.
_SMALL = 64


@dataclass(frozen=True)
class EngineView:
    """What an expert computes, and under which vLLM name each tensor of the engine is kept."""

    spec: ExpertSpec
    names: Mapping[str, str]

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """The engine's tensors among a layer's (name -> ``[N, ...]``)."""
        return {ours: tensors[theirs] for ours, theirs in self.names.items()}


def engine_view(layer: Any) -> EngineView:
    """How the CPU engine reads the experts of this RoutedExperts, in the layout of its kernel.

    Raises UnsupportedError for a format that is not known.
    """
    method = layer.quant_method
    kind = type(method).__name__
    if kind == "UnquantizedFusedMoEMethod":
        format_, scale = Format.of(layer.params_dtype), None
    elif kind == "Fp8MoEMethod" and method.block_quant:
        format_, scale = Format.FP8_BLOCK, "weight_scale_inv"
    elif kind == "Fp8MoEMethod":
        format_, scale = Format.FP8_TENSOR, "weight_scale"
    elif kind == "CompressedTensorsW8A8Fp8MoEMethod":
        strategy = str(getattr(method.weight_quant.strategy, "value", method.weight_quant.strategy))
        formats = {
            "channel": Format.FP8_CHANNEL,
            "tensor": Format.FP8_TENSOR,
            "block": Format.FP8_BLOCK,
        }
        if strategy not in formats:
            raise _unsupported(layer, f"{kind} with the strategy {strategy!r}")
        format_, scale = formats[strategy], "weight_scale"
    else:
        raise _unsupported(layer, kind)
    spec = ExpertSpec(
        hidden=layer.moe_config.hidden_dim,
        intermediate=layer.moe_config.intermediate_size_per_partition,
        activation=Activation.parse(layer.moe_config.activation.value),
        format=format_,
        bias=layer.moe_config.has_bias,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
        dtype=layer.params_dtype if format_.quantised else None,
    )
    names = {}
    for name in spec.layout.names:
        matrix, _, part = name.partition("_")
        names[name] = f"{matrix}_{scale}" if part == "scale" else name
    return EngineView(spec, names)


def _unsupported(layer: Any, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"moe_offload on {layer.layer_name}: experts quantised by {what} are not supported (bf16, "
        "fp16, fp32 and, on a GPU, FP8 checkpoints are): serve this model without moe_offload"
    )


class SlotBinder:
    """Puts slots under the kernel of a layer's format, on the GPU.

    The format's own processing runs on as many experts as there are slots, never on all: first to
    bring the experts in host memory into the kernel's layout, a slot-full at a time (not needed
    where that changes nothing, as for bf16 and FP8 with Triton), then once more on the slots
    themselves, so that the kernel is built over them with their scales.

    `loaded`: name -> ``[E, ...]`` in host memory, as the checkpoint has them.
    """

    def __init__(
        self,
        layer: Any,
        process: Callable[[torch.nn.Module], None],
        loaded: Tensors,
        device: torch.device,
    ) -> None:
        self._layer = layer
        self._process = process
        self._loaded = loaded
        self._device = device
        self._num_experts = next(iter(loaded.values())).shape[0]
        for name, tensor in loaded.items():
            if name.endswith("input_scale"):
                # A kernel takes one scale for all experts, the largest: of all, not of a slot-full.
                tensor.fill_(tensor.max())

    def convert(self, store: HostStore, num_slots: int) -> Tensors:
        """The experts in the kernel's layout: `loaded` itself when that is the same.

        A tensor that keeps its shape and dtype is converted where it is; others are allocated.
        """
        first = self.bind(0, num_slots)
        if all(name in self._loaded for name in first) and all(
            self._is_as_loaded(name, tensor) for name, tensor in first.items()
        ):
            return {name: self._loaded[name] for name in first}
        kept = {
            name: self._loaded[name]
            for name, tensor in first.items()
            if name in self._loaded
            and self._loaded[name].shape[1:] == tensor.shape[1:]
            and self._loaded[name].dtype == tensor.dtype
        }
        changed = {name: tensor for name, tensor in first.items() if name not in kept}
        new = store.allocate(ExpertLayout.of(changed), self._num_experts)
        store.prepare()
        store.wait(new.values())
        converted = kept | new
        for start in range(0, self._num_experts, num_slots):
            count = min(num_slots, self._num_experts - start)
            for name, tensor in self.bind(start, num_slots).items():
                converted[name][start : start + count].copy_(tensor[:count])
        return {name: converted[name] for name in first}

    def bind_buffer(self, memory: BufferMemory) -> Tensors:
        """Build the layer's kernel over as many experts as this memory holds; returns them.

        Raises UnsupportedError where the format's processing moves them out of it, and ValueError
        where it does not hold one.
        """
        layout = ExpertLayout.of(self._loaded)
        count = memory.capacity(layout, self._num_experts)
        bound = self.bind(0, count, memory.tensors(layout, count))
        outside = {name: t.nbytes for name, t in bound.items() if not memory.holds(t)}
        # Scales that are put into another form may be each layer's own.
        if sum(outside.values()) * _SMALL > memory.nbytes:
            raise UnsupportedError(
                f"moe_offload on {self._layer.layer_name}: this format's kernel wants "
                f"{', '.join(outside)} in memory of its own, so layers cannot take turns in a "
                "buffer: use stream_threshold='off'"
            )
        return bound

    def bind(self, start: int, num_slots: int, onto: Tensors | None = None) -> Tensors:
        """Build the layer's kernel over new slots; returns the slots.

        They hold the experts from `start` on; slots past the last expert hold the last one again.
        onto: name -> ``[S, ...]`` as loaded, the memory they take; None: their own.
        """
        layer = self._layer
        # A new one: the parameters there were belong to the lane that was bound to them.
        layer._parameters = {}
        count = min(num_slots, self._num_experts - start)
        for name, tensor in self._loaded.items():
            # Expert by expert from where it lies: gathered first it would be copied twice.
            data = (
                torch.empty((num_slots, *tensor.shape[1:]), dtype=tensor.dtype, device=self._device)
                if onto is None
                else onto[name]
            )
            data[:count].copy_(tensor[start : start + count], non_blocking=True)
            if count < num_slots:
                data[count:] = data[count - 1]
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        layer.local_num_experts = num_slots
        method = layer.quant_method
        method.moe_kernel = method.moe_quant_config = None
        whole, method.moe = method.moe, self._shard(method.moe, num_slots)
        try:
            self._process(layer)
        finally:
            method.moe = whole
        return {
            name: parameter.data
            for name, parameter in layer._parameters.items()
            if parameter is not None
            and not name.endswith("input_scale")
            and parameter.ndim
            and parameter.shape[0] == num_slots
        }

    def _is_as_loaded(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the first slots hold, byte for byte, what the checkpoint has for them."""
        loaded = self._loaded[name]
        return (
            loaded.shape[1:] == tensor.shape[1:]
            and loaded.dtype == tensor.dtype
            and all(
                torch.equal(
                    tensor[i : i + 1].view(torch.uint8),
                    loaded[i : i + 1].to(tensor.device).view(torch.uint8),
                )
                for i in range(min(len(tensor), len(loaded)))
            )
        )

    def _shard(self, moe: Any, num_slots: int) -> Any:
        """The layer's FusedMoEConfig as a kernel over so many slots has to see it.

        Some allocate by it: the experts of the shard, and as many as the map has entries, which is
        one more for rows of padding (no map, and so no more, with a slot for every expert).
        """
        shard = copy.copy(moe)
        shard.num_local_experts = num_slots
        shard.num_experts = self._num_experts + (num_slots < self._num_experts)
        return shard


class FormatLane(Lane):
    """A lane on a GPU: the format's own kernel over what the layer is bound to when this is made.

    A layer may be bound to slots and to buffers, with a lane for each.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        method = layer.quant_method
        self._parameters = layer._parameters
        self._local_num_experts = layer.local_num_experts
        self._kernel, self._config = method.moe_kernel, method.moe_quant_config

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `lanes.base.Lane.output`: what the kernel returns, in x's dtype."""
        layer = self._layer
        self._activate()
        layer._expert_map = expert_map
        layer.global_num_experts = (
            layer.moe_config.num_experts if expert_map is None else len(expert_map)
        )
        with override_config(self._configuration(x, topk_ids)):
            part: torch.Tensor = layer.quant_method.apply(
                layer, x, topk_weights, topk_ids, None, None
            )
        return part

    def _activate(self) -> None:
        """Put in place what the format's method looks up in the layer and in itself."""
        layer, method = self._layer, self._layer.quant_method
        if layer._parameters is not self._parameters:
            layer._parameters = self._parameters
            layer.local_num_experts = self._local_num_experts
            method.moe_kernel, method.moe_quant_config = self._kernel, self._config

    def _configuration(self, x: torch.Tensor, topk_ids: torch.Tensor) -> dict[str, int] | None:
        """Tile sizes of vLLM's Triton kernel for the layer's experts; None for another kernel.

        vLLM looks them up by ``w1.shape[0]``, which for slots is not the number of experts.
        """
        chosen = self._layer.quant_method.moe_kernel.fused_experts
        # Some kernels leave batches of some sizes to another.
        among = (
            chosen,
            getattr(chosen, "experts", None),
            getattr(chosen, "fallback_experts", None),
        )
        experts = next((kernel for kernel in among if isinstance(kernel, TritonExperts)), None)
        if experts is None:
            return None
        num_experts = self._layer.moe_config.num_experts
        configuration: dict[str, int] = try_get_optimal_moe_config(
            (num_experts, *self._layer.w13_weight.shape[1:]),
            (num_experts, *self._layer.w2_weight.shape[1:]),
            topk_ids.shape[1],
            experts.quant_config.config_name(x.dtype),
            len(x),
            block_shape=experts.block_shape,
        )
        return configuration
