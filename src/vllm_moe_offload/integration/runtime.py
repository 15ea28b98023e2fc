"""All that the offloaded layers of one worker share."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_moe_offload.config import OffloadConfig
from vllm_moe_offload.device import Device, HostDevice, SlotCache
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.errors import InactiveError
from vllm_moe_offload.experts import ExpertSpec
from vllm_moe_offload.host import HostStore
from vllm_moe_offload.lanes import Counters, EngineLane, Lane, OffloadedLayer
from vllm_moe_offload.planning import LayerShape, SlotPlan, plan_slots

if TYPE_CHECKING:
    from vllm_moe_offload.integration.layers import OffloadedRoutedExperts

# Below "vllm", whose handlers and level apply: a logger of another name would print nothing.
logger = init_logger(f"vllm.{__name__}")
_GIB = 2**30


class OffloadRuntime:
    """Engine, host memory, device and plan of one worker, and its layers by name."""

    def __init__(self, config: OffloadConfig, vllm_config: VllmConfig) -> None:
        self.config = config
        self.store = HostStore()
        self.device: Device = HostDevice()
        self.engine = CpuExpertEngine(
            threads=None if config.cpu_threads == "auto" else config.cpu_threads
        )
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._modules: dict[str, OffloadedRoutedExperts] = {}
        self._plan: SlotPlan | None = None

    def adopt(self, module: OffloadedRoutedExperts) -> None:
        """Take in a layer when it is constructed, before any weight is loaded."""
        self._modules[module.layer_name] = module

    def bind(self, module: OffloadedRoutedExperts) -> OffloadedLayer | None:
        """The offloaded layer over the loaded experts of `module`.

        None when the plan is that every expert fits on the device: the layer is then vLLM's own.
        """
        if self._plan is None:
            self._plan = self._make_plan()
        if self._sized_automatically and self._plan.fits:
            return None
        host = module.host_tensors()
        top_k = module.top_k

        def make_resident(cache: SlotCache) -> Lane:
            return EngineLane(self.engine, module.spec, cache.tensors, top_k, self._max_tokens)

        return OffloadedLayer(
            host,
            self.device,
            make_resident,
            EngineLane(self.engine, module.spec, host, top_k, self._max_tokens),
            num_slots=self._plan.slots[list(self._modules).index(module.layer_name)],
            policy=self.config.policy,
        )

    def check_active(self) -> None:
        """After loading: say what is offloaded; InactiveError when nothing is and should be."""
        layers = self._layers()
        if layers:
            slots = sorted({layer.num_slots for layer in layers.values()})
            logger.info(
                "moe_offload: mode=%s, %d layers, %.3f GiB of experts in host memory, "
                "%s slots a layer, %.3f GiB in slots, policy %s, %d CPU threads (%s)",
                self.config.mode,
                len(layers),
                sum(layer.host_bytes for layer in layers.values()) / _GIB,
                "/".join(map(str, slots)),
                sum(layer.device_bytes for layer in layers.values()) / _GIB,
                self.config.policy,
                self.engine.threads,
                self.engine.isa,
            )
        elif self._modules and self._plan is not None and self._plan.fits:
            logger.info(
                "moe_offload: every expert of %d layers fits on the device, so offload is off "
                "and vLLM runs as without it",
                len(self._modules),
            )
        else:
            raise InactiveError(
                "moe_offload is configured, but this model has no mixture-of-experts layer built "
                "on vLLM's RoutedExperts, so nothing would be offloaded: remove the settings, or "
                "serve a mixture-of-experts model"
            )

    def resize(self, slots_per_layer: int) -> None:
        """Give every layer that many slots. Raises as `OffloadedLayer.resize` does."""
        for layer in self._layers().values():
            layer.resize(slots_per_layer)

    def reset_stats(self) -> None:
        """Set every layer's counters to zero."""
        for layer in self._layers().values():
            layer.counters = Counters()

    def stats(self) -> dict[str, Any]:
        """Totals and, under `layers`, each layer: the fields of `Counters`, slots and bytes."""
        total = Counters()
        layers = {}
        for name, layer in self._layers().items():
            total += layer.counters
            layers[name] = {
                **asdict(layer.counters),
                "slots": layer.num_slots,
                "experts": layer.num_experts,
                "expert_bytes": layer.layout.nbytes,
                "device_bytes": layer.device_bytes,
                "host_bytes": layer.host_bytes,
            }
        return {
            **asdict(total),
            "mode": self.config.mode,
            "policy": self.config.policy,
            "device_bytes": sum(layer["device_bytes"] for layer in layers.values()),
            "host_bytes": sum(layer["host_bytes"] for layer in layers.values()),
            "layers": layers,
        }

    @property
    def _sized_automatically(self) -> bool:
        return self.config.mode == "cache" and not any(
            isinstance(size, int | float)
            for size in (self.config.slots_per_layer, self.config.gpu_memory_gib)
        )

    def _layers(self) -> dict[str, OffloadedLayer]:
        return {
            name: module.offload
            for name, module in self._modules.items()
            if module.offload is not None
        }

    def _make_plan(self) -> SlotPlan:
        shapes = [
            LayerShape(name, module.global_num_experts, module.spec.layout.nbytes)
            for name, module in self._modules.items()
        ]
        if self.config.mode == "cpu":
            return SlotPlan(tuple(0 for _ in shapes), fits=False)
        slots, gib = self.config.slots_per_layer, self.config.gpu_memory_gib
        if isinstance(slots, int):
            return plan_slots(shapes, slots_per_layer=slots, budget_bytes=None)
        budget = int(gib * _GIB) if isinstance(gib, float) else self.device.free_memory()
        return plan_slots(shapes, slots_per_layer=None, budget_bytes=budget)


def spec_of(module: Any) -> ExpertSpec:
    """What an expert of this vLLM layer computes; raises ValueError for what the engine lacks."""
    from vllm_moe_offload.experts import Activation, Format

    return ExpertSpec(
        hidden=module.moe_config.hidden_dim,
        intermediate=module.moe_config.intermediate_size_per_partition,
        activation=Activation.parse(module.moe_config.activation.value),
        format=Format.of(module.params_dtype),
        bias=module.moe_config.has_bias,
        apply_router_weight_on_input=module.apply_router_weight_on_input,
    )
