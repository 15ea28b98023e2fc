"""Group prefetch: vLLM's offloader of whole layers' parameters, beside offloaded experts.

vLLM asks its one offloader to wrap the layers of each model as it makes them, to finish when the
weights are loaded, and to order its copies with each CUDA graph.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.offloader.base import (
    BaseOffloader,
    NoopOffloader,
    get_offloader,
    set_offloader,
)
from vllm.platforms import current_platform

from vllm_moe_offload.amounts import amount
from vllm_moe_offload.config import OffloadConfig, meant
from vllm_moe_offload.device.copies import CopyStream
from vllm_moe_offload.errors import ConfigError, InactiveError, MemoryShortError, UnsupportedError
from vllm_moe_offload.host import HostStore, available_memory
from vllm_moe_offload.integration.hooks import hook, keep_as_loaded
from vllm_moe_offload.stream import BufferPool, LayerPrefetcher, PoolPlan, TensorKind
from vllm_moe_offload.stream.memory import aligned

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class _Layer:
    """A layer that is prefetched.

    `experts`: paths of the modules whose parameters are not; `viewed`: parameters that are not,
    since a buffer of the layer is a view of them and would go on reading what was there before.
    """

    module: nn.Module
    experts: frozenset[str]
    viewed: frozenset[str]


@dataclass
class _Stack:
    """Layers that run one after another. `plan`: of their tensors as they are now."""

    layers: list[_Layer]
    plan: PoolPlan
    pool: BufferPool | None = None
    prefetcher: LayerPrefetcher | None = None


@dataclass
class _Seen:
    """What there was to choose from, for the message where nothing was chosen."""

    num_layers: int = 0
    names: dict[str, None] = field(default_factory=dict)
    unmatched: set[str] = field(default_factory=set)


class GroupOffloader(BaseOffloader):
    """Keeps parameters of some layers in host memory and copies them ahead of each layer's turn.

    Args:
        config: With a `group_size`.
        store: Holds the parameters, and the experts, which are left alone.
    """

    def __init__(self, config: OffloadConfig, store: HostStore) -> None:
        assert config.group_size is not None
        self._group_size = config.group_size
        self._num_in_group = config.num_in_group
        self._prefetch_step = config.prefetch_step
        self._params = config.params
        self._store = store
        self._device = torch.device(current_platform.device_type)
        if current_platform.is_cuda():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._copies = CopyStream(self._device)
        self._stacks: list[_Stack] = []
        # Of every prefetched layer by its number, its stack and its place in it.
        self._places: list[tuple[_Stack, int]] = []
        self._taken: set[int] = set()
        self._seen = _Seen(unmatched=set(config.params))
        self._is_finished = False
        self.predicted_bytes = 0
        self.host_bytes = 0

    def activate(self) -> None:
        """Be the one that vLLM calls."""
        if get_offloader() is not self:
            set_offloader(self)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory that the buffers take, once there are any."""
        return sum(stack.pool.nbytes for stack in self._stacks if stack.pool is not None)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the device's memory that they are going to take."""
        return 0 if self._is_finished else self.predicted_bytes

    def stats(self) -> dict[str, Any]:
        """What is prefetched, as plain numbers: `step_bytes` are copied each step."""
        return {
            "layers": len(self._places),
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "predicted_bytes": self.predicted_bytes,
            "step_bytes": sum(prefetcher.step_bytes for _, prefetcher in self._running()),
        }

    def check_run(self) -> None:
        """After steps of the whole model: UnsupportedError where layers run unknown to this."""
        counts = [(len(p.not_run), len(s.layers)) for s, p in self._running()]
        if all(left == of for left, of in counts) or any(0 < left < of for left, of in counts):
            raise UnsupportedError(
                "moe_offload: this model computes some of its layers otherwise than by calling "
                "them, so their parameters cannot be prefetched: leave group_size out"
            )

    def restart(self) -> None:
        """Before a step, behind one that an error has ended: the buffers are filled anew."""
        for _, prefetcher in self._running():
            prefetcher.restart()

    def end(self) -> None:
        """After a step: UnsupportedError where vLLM called another offloader meanwhile.

        There is one for all engines of a process, and what that one waited for was not this one's.
        """
        if get_offloader() is not self:
            raise UnsupportedError(
                "moe_offload: another engine was made or ran in this process during a step, by "
                "another thread, and vLLM has one offloader for all of them, so that parameters "
                "which are prefetched may not have come: let one thread make and run the engines, "
                "or leave group_size out"
            )

    def close(self) -> None:
        """Another engine of this process may load a model."""
        if get_offloader() is self:
            set_offloader(NoopOffloader())

    # What vLLM calls.

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        """The layers of one stack; those chosen keep their parameters in host memory from here on.

        Raises ConfigError where `params` names experts, UnsupportedError and MemoryShortError.
        """
        if self._is_finished:
            return list(modules_generator)  # of another engine of this process
        made, chosen = [], []
        for index, module in enumerate(modules_generator):
            made.append(module)
            if index % self._group_size >= self._group_size - self._num_in_group:
                layer = self._take(module)
                if layer is not None:
                    chosen.append(layer)
        self._seen.num_layers += len(made)
        if chosen:
            stack = _Stack(chosen, self._plan(chosen))
            self._stacks.append(stack)
            for place, layer in enumerate(chosen):
                hook(layer.module, len(self._places))
                self._places.append((stack, place))
            self.predicted_bytes += stack.plan.nbytes
            if self._device.type == "cuda":
                # What the layers had there, so that slots can have it.
                torch.cuda.empty_cache()
        return made

    def post_init(self) -> None:
        """When weights are loaded and processed: all that is chosen goes through buffers now.

        May be called again. Raises InactiveError where that is nothing.
        """
        if self._is_finished:
            return
        self._check_active()
        for stack in self._stacks:
            host = [self._keep(layer) for layer in stack.layers]
            stack.plan = self._plan(stack.layers)
            stack.pool = BufferPool(stack.plan, self._device)
            for layer, used in zip(stack.layers, stack.plan.of_layer, strict=True):
                for parameter, buffer in zip(self._parameters(layer).values(), used, strict=True):
                    kind = stack.plan.buffers[buffer]
                    parameter.data = kind.view(stack.pool.memory[buffer])
            stack.prefetcher = LayerPrefetcher(stack.plan, stack.pool.memory, host, self._copies)
            stack.prefetcher.start()
        self._is_finished = True
        done = self.stats()
        logger.info(
            "moe_offload: %d of %d layers are prefetched: %s in host memory, of which %s are "
            "copied each step, %s of buffers on the device (%s predicted)",
            done["layers"],
            self._seen.num_layers,
            amount(done["host_bytes"]),
            amount(done["step_bytes"]),
            amount(done["device_bytes"]),
            amount(done["predicted_bytes"]),
        )

    def sync_prev_onload(self) -> None:
        """Before a graph is captured or replayed."""
        for _, prefetcher in self._running():
            prefetcher.settle()

    def join_after_forward(self) -> None:
        """Before a capture ends."""
        for _, prefetcher in self._running():
            prefetcher.join()

    def _wait_for_layer(self, layer_idx: int) -> None:
        """Before the layer of this number."""
        stack, place = self._places[layer_idx]
        assert stack.prefetcher is not None
        stack.prefetcher.wait(place)

    def _start_prefetch(self, layer_idx: int) -> None:
        """Behind the layer of this number."""
        stack, place = self._places[layer_idx]
        assert stack.prefetcher is not None
        stack.prefetcher.refill(place)

    # Loading.

    @contextmanager
    def on_device(self, module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
        """Its parameters on the device for the processing of a format, then where they were.

        As vLLM's device_loading_context, which from 0.29 on brings them back into pinned memory of
        a power of two of bytes each.
        """
        on_host = {name for name, p in module.named_parameters() if p.device.type == "cpu"}
        for name in on_host:
            parameter = module.get_parameter(name)
            parameter.data = _moved(parameter.data, device)
        try:
            yield module
        finally:
            for name, parameter in module.named_parameters():
                if name in on_host:
                    parameter.data = _moved(parameter.data, torch.device("cpu"))

    def _take(self, module: nn.Module) -> _Layer | None:
        """This layer, its parameters in host memory; None where none of them is chosen."""
        experts = frozenset(
            name.rpartition(".")[0]
            for name, parameter in module.named_parameters()
            if self._store.owns(parameter.data)
        )
        layer = _Layer(module, experts, _viewed(module))
        self._check_names(layer)
        chosen = self._parameters(layer)
        for name, parameter in chosen.items():
            if id(parameter) in self._taken:
                raise UnsupportedError(
                    f"moe_offload: the parameter {name} is one of several layers, and prefetching "
                    "gives each layer its own: leave it out of params"
                )
            self._taken.add(id(parameter))
        if current_platform.is_cpu():
            for owner in {name.rpartition(".")[0] for name in chosen}:
                keep_as_loaded(module.get_submodule(owner))
            return layer if chosen else None
        for name, parameter in chosen.items():
            if parameter.is_meta:
                continue  # quantised while it is loaded, and made on the device then
            if parameter.nbytes > available_memory():
                raise MemoryShortError(
                    f"moe_offload: {name} of a prefetched layer needs "
                    f"{amount(parameter.nbytes)} of host memory and "
                    f"{amount(available_memory())} are available: free memory, or prefetch fewer "
                    "layers or parameters (group_size, num_in_group, params)"
                )
            parameter.data = _moved(parameter.data, torch.device("cpu"))
        return layer if chosen else None

    def _keep(self, layer: _Layer) -> list[torch.Tensor]:
        """This layer's tensors in memory of the store: uint8, one each, all of one block."""
        parameters = self._parameters(layer)
        if not parameters:
            raise InactiveError(
                "moe_offload: the format of this model has other parameters once it is loaded, and "
                f"none of these is prefetched (params={','.join(self._params) or 'all'}): name "
                "whole modules (self_attn, mlp), or leave params out"
            )
        kinds = [TensorKind.of(name, p.data) for name, p in parameters.items()]
        block = self._store.allocate_bytes(sum(aligned(kind.nbytes) for kind in kinds))
        self._store.prepare()
        self._store.wait([block])
        self.host_bytes += block.nbytes
        tensors, start = [], 0
        for kind, parameter in zip(kinds, parameters.values(), strict=True):
            memory = block[start : start + kind.nbytes]
            kept = kind.view(memory)
            kept.copy_(parameter.data)
            parameter.data = kept
            tensors.append(memory)
            start += aligned(kind.nbytes)
        return tensors

    # Choosing.

    def _parameters(self, layer: _Layer) -> dict[str, nn.Parameter]:
        """Those that are chosen, as they are now: processing may have exchanged or removed some."""
        return {
            name: parameter
            for name, parameter in layer.module.named_parameters()
            if name.rpartition(".")[0] not in layer.experts
            and name not in layer.viewed
            and parameter.numel()
            and (not self._params or any(_names(entry, name) for entry in self._params))
        }

    def _plan(self, layers: Iterable[_Layer]) -> PoolPlan:
        kinds = [
            [TensorKind.of(name, p.data) for name, p in self._parameters(layer).items()]
            for layer in layers
        ]
        return PoolPlan.of(kinds, self._prefetch_step)

    def _check_names(self, layer: _Layer) -> None:
        for name, _ in layer.module.named_parameters():
            if name in layer.viewed:
                continue
            entries = [entry for entry in self._params if _names(entry, name)]
            if name.rpartition(".")[0] not in layer.experts:
                self._seen.names[name] = None
                self._seen.unmatched.difference_update(entries)
            elif entries:
                raise ConfigError(
                    f"moe_offload settings: params has {entries[0]!r}, which names experts too "
                    f"({name}): those are offloaded by themselves (mode, slots_per_layer, "
                    "gpu_memory_gib). Name the parameters beside them"
                )

    def _check_active(self) -> None:
        what = f"moe_offload: group_size={self._group_size}, num_in_group={self._num_in_group}"
        seen = self._seen
        if not seen.num_layers:
            raise InactiveError(
                f"{what}: this model does not make its layers by vLLM's make_layers, so none would "
                "be prefetched: leave group_size out"
            )
        if not seen.names:
            raise InactiveError(
                f"{what}: the model has {seen.num_layers} layers, and none of them is among the "
                "last of a whole group: give a group_size of no more than that"
            )
        if seen.unmatched:
            known = _segments(seen.names)
            given = ", ".join(entry + meant(entry, known) for entry in sorted(seen.unmatched))
            raise ConfigError(
                f"{what}: no parameter of the layers is named by params={given}; "
                f"what there is: {', '.join(seen.names)}"
            )
        if all(stack.plan.is_static for stack in self._stacks):
            raise InactiveError(
                f"{what}, prefetch_step={self._prefetch_step}: every one of {len(self._places)} "
                "layers would have buffers of its own on the device, so nothing would be "
                "offloaded: prefetch more layers, or lower prefetch_step"
            )

    def _running(self) -> Iterator[tuple[_Stack, LayerPrefetcher]]:
        return ((stack, stack.prefetcher) for stack in self._stacks if stack.prefetcher is not None)


def _names(entry: str, parameter: str) -> bool:
    """Whether `entry` is one or more whole segments of the parameter's dotted name."""
    return f".{entry}." in f".{parameter}."


def _segments(parameters: Iterable[str]) -> list[str]:
    """Every entry that names some of these parameters: runs of whole segments."""
    found: dict[str, None] = {}
    for name in parameters:
        parts = name.split(".")
        for first in range(len(parts)):
            for end in range(first + 1, len(parts) + 1):
                found[".".join(parts[first:end])] = None
    return list(found)


def _viewed(layer: nn.Module) -> frozenset[str]:
    """The parameters whose memory a buffer has too, as the convolution of Mamba2's mixer."""
    places = {buffer.untyped_storage().data_ptr() for buffer in layer.buffers()} - {0}
    return frozenset(
        name
        for name, parameter in layer.named_parameters()
        if parameter.untyped_storage().data_ptr() in places
    )


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)
