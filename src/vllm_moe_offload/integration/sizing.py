"""How much of the device's memory layers get for slots and buffers: decided, and not yet taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_moe_offload.amounts import amount
from vllm_moe_offload.config import MISS_SETTINGS, SLOTLESS_MODES, OffloadConfig
from vllm_moe_offload.device import Device
from vllm_moe_offload.errors import PREFIX, ConfigError, MemoryShortError, UnsupportedError
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.host import HostStore
from vllm_moe_offload.integration.prefetch import GroupOffloader
from vllm_moe_offload.integration.reserve import layers_of_experts, reserved_bytes
from vllm_moe_offload.planning import (
    LayerShape,
    larger_stream_experts,
    plan_with_buffers,
    stream_experts,
)
from vllm_moe_offload.stream import buffer_bytes

if TYPE_CHECKING:
    from vllm_moe_offload.integration.layers import OffloadedRoutedExperts

logger = init_logger(f"vllm.{__name__}")

_GIB = 2**30


@dataclass(frozen=True)
class Taken:
    """How many layers have been sized before, and the bytes that their slots and buffers take."""

    layers: int
    slot_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Sizes:
    """What layers get.

    `slots`: of each, in order; None where every expert fits and the layer stays vLLM's own.
    `buffer_bytes`: of two buffers to be made for streamed layers; 0 where none are.
    `needs`: what all that needs of the device's memory, in words; "" for nothing.
    """

    slots: tuple[int | None, ...]
    buffer_bytes: int
    needs: str


class Sizing:
    """Sizes the layers of one worker: those of its model, and then those of a draft model."""

    def __init__(
        self,
        config: OffloadConfig,
        vllm_config: VllmConfig,
        device: Device,
        store: HostStore,
        prefetch: GroupOffloader | None,
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._device = device
        self._store = store
        self._prefetch = prefetch

    def size(
        self, modules: list[OffloadedRoutedExperts], taken: Taken, to_come: ModelConfig | None
    ) -> Sizes:
        """What these layers get, when the device holds the rest of their model.

        to_come: a draft model that is still to be loaded; slots sized automatically leave its
        layers their share. Raises MemoryShortError where the memory does not suffice, ConfigError
        where a setting says what these layers have not, UnsupportedError where mode='stream' would
        have to pass a second model's.
        """
        if self._config.mode == "cpu":
            return Sizes((0,) * len(modules), buffer_bytes=0, needs="")
        if self._config.mode == "stream":
            return self._ping_pong(modules, taken)
        shapes = [
            LayerShape(
                module.layer_name,
                module.moe_config.num_experts,
                ExpertLayout.of(module.host).nbytes,
            )
            for module in modules
        ]
        slots, gib = self._config.slots_per_layer, self._config.gpu_memory_gib
        prefetched = self._prefetch.pending_bytes if self._prefetch is not None else 0
        free = budget = max(self._free_memory - prefetched, 0)
        if isinstance(gib, float):
            budget = int(gib * _GIB) - taken.slot_bytes - taken.buffer_bytes
        elif not isinstance(slots, int) and current_platform.is_cuda():
            moe_configs = [module.moe_config for module in modules]
            free = budget = max(free - reserved_bytes(self._vllm_config, moe_configs, to_come), 0)
        threshold, experts = self._config.stream_threshold, self._config.stream_experts
        is_wanted = isinstance(threshold, int) or isinstance(experts, int)
        # Those of a draft model get what these leave: as much as if they were like the largest.
        more = layers_of_experts(self._vllm_config, to_come) if not isinstance(slots, int) else 0
        largest = max(shapes, key=lambda shape: shape.num_experts * shape.expert_bytes)
        wanted, larger = self._wanted_buffers(modules, shapes, taken)
        try:
            plan, buffers = plan_with_buffers(
                [*shapes, *[largest] * more],
                slots_per_layer=slots if isinstance(slots, int) else None,
                budget_bytes=budget,
                buffer_bytes=wanted,
                is_wanted=is_wanted,
                larger_bytes=larger,
            )
        except MemoryShortError as error:
            self._store.require(also_needed=str(error).removeprefix(f"{PREFIX}: "))
            if not taken.layers:
                raise
            raise MemoryShortError(
                f"{error}. The slots of {taken.layers} layers that were loaded before "
                f"{shapes[0].name} are taken already: leave it room with slots_per_layer, which "
                "is for every layer of both models"
            ) from None
        counts = plan.slots[: len(shapes)]
        needed = buffers + sum(
            count * shape.expert_bytes for count, shape in zip(counts, shapes, strict=True)
        )
        and_buffers = f" and {amount(buffers)} in buffers" if buffers else ""
        needs = _needs(
            f"{max(counts)} slots in each of {len(shapes)} layers{and_buffers}", needed, free
        )
        if needed > free:
            self._store.require(also_needed=needs)
            raise MemoryShortError(f"{needs}: give fewer, or 'auto' ({self._store.needs()})")
        if plan.fits:
            self._say_all_fit()
        stays = self._is_automatic and plan.fits
        return Sizes((None,) * len(counts) if stays else counts, buffers, needs)

    @property
    def _is_automatic(self) -> bool:
        """Whether slots are sized by the memory there is, and not by a setting."""
        return self._config.mode not in SLOTLESS_MODES and not any(
            isinstance(size, int | float)
            for size in (self._config.slots_per_layer, self._config.gpu_memory_gib)
        )

    def _say_all_fit(self) -> None:
        """Which settings decide nothing then, and that offload stays on where a size was given.

        ConfigError where streaming was asked for beside slots for every expert.
        """
        slots = self._config.slots_per_layer
        idle = [
            name
            for name in MISS_SETTINGS
            if self._config.says(name) and getattr(self._config, name) != "off"
        ]
        streaming = ", ".join(name for name in idle if name.startswith("stream_"))
        if isinstance(slots, int) and streaming:
            raise ConfigError(
                f"slots_per_layer={slots} has every expert in a slot, so nothing is streamed and "
                f"{streaming} would decide nothing: leave one of them out"
            )
        if idle:
            logger.warning(
                "moe_offload: every expert fits on the device, so %s decide%s nothing",
                ", ".join(idle),
                "s" if len(idle) == 1 else "",
            )
        if self._is_automatic:
            return
        name = "slots_per_layer" if isinstance(slots, int) else "gpu_memory_gib"
        logger.info(
            "moe_offload: with %s=%s every expert has a slot, and offload stays on; without it "
            "(automatic) a model whose experts all fit is served by stock vLLM",
            name,
            getattr(self._config, name),
        )

    def _ping_pong(self, modules: list[OffloadedRoutedExperts], taken: Taken) -> Sizes:
        """No slots, and the buffers through which every layer passes every step."""
        if taken.buffer_bytes:
            raise UnsupportedError(
                f"moe_offload on {modules[0].layer_name}: mode='stream' passes the layers of one "
                "model through its buffers, and a graph of that one model: use another mode with "
                "a draft model that has experts"
            )
        counts = [module.moe_config.num_experts for module in modules]
        asked = self._asked_experts(modules)
        if asked is not None and asked < max(counts):
            raise ConfigError(
                f"stream_experts={asked} with mode='stream', whose graphs compute a layer of "
                f"{max(counts)} experts by one launch, whole in its buffer: leave stream_experts "
                "out, or use mode='cache'"
            )
        buffers, free = _buffers_for(modules, counts), self._free_memory
        needs = _needs("two buffers, each for the largest layer,", buffers, free)
        if buffers > free:
            self._store.require(also_needed=needs)
            raise MemoryShortError(
                f"{needs}: use mode='cache', which needs less, or mode='cpu' "
                f"({self._store.needs()})"
            )
        return Sizes((0,) * len(modules), buffers, needs)

    def _wanted_buffers(
        self, modules: list[OffloadedRoutedExperts], shapes: list[LayerShape], taken: Taken
    ) -> tuple[int, int]:
        """Bytes of two buffers for any of these layers, and where there is more memory.

        0 where none are to be made. Layers that come later (those of a draft model) take turns in
        the buffers there are.
        """
        threshold = self._config.stream_threshold
        if taken.buffer_bytes or threshold == "off":
            return 0, 0
        asked = self._asked_experts(modules)
        if threshold == "auto" and current_platform.is_cpu():
            return 0, 0  # a copy from memory to memory runs beside nothing
        if asked is not None:
            counts = [min(asked, shape.num_experts) for shape in shapes]
            return _buffers_for(modules, counts), 0
        wanted = _buffers_for(modules, [stream_experts(shape.num_experts) for shape in shapes])
        if current_platform.is_cpu():
            return wanted, 0  # nor do launches take time there, which larger ones would save
        counts = [larger_stream_experts(shape.num_experts, shape.expert_bytes) for shape in shapes]
        return wanted, _buffers_for(modules, counts)

    def _asked_experts(self, modules: list[OffloadedRoutedExperts]) -> int | None:
        """`stream_experts` where it is a number; ConfigError where no layer has so many."""
        asked = self._config.stream_experts
        if asked == "auto":
            return None
        largest = max(modules, key=lambda module: module.moe_config.num_experts)
        if asked > largest.moe_config.num_experts:
            raise ConfigError(
                f"stream_experts={asked}, but {largest.layer_name} has "
                f"{largest.moe_config.num_experts} experts, and no layer has more: give at most "
                f"{largest.moe_config.num_experts}"
            )
        return asked

    @property
    def _free_memory(self) -> int:
        """Bytes that slots and buffers could take beside the experts that are to be loaded."""
        return self._device.free_memory(self._store.pending_bytes)


def _buffers_for(modules: list[OffloadedRoutedExperts], counts: list[int]) -> int:
    """Bytes of two buffers, each of which holds so many experts of any of these layers."""
    return 2 * max(
        buffer_bytes(ExpertLayout.of(module.host), count)
        for module, count in zip(modules, counts, strict=True)
    )


def _needs(what: str, needed: int, free: int) -> str:
    return (
        f"{what} need {amount(needed)} of device memory and {amount(free)} are left for them after "
        "the rest of the model"
    )
