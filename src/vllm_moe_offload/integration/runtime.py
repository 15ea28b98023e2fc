"""All that the offloaded layers of one worker share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_moe_offload.amounts import amount
from vllm_moe_offload.config import (
    ADDITIONAL_CONFIG_KEY,
    PREFETCH_SETTINGS,
    SLOTLESS_MODES,
    OffloadConfig,
)
from vllm_moe_offload.device import Device, HostDevice
from vllm_moe_offload.device.readout import Readout
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.errors import ConfigError, InactiveError, MemoryShortError, UnsupportedError
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.host import HostStore, fill_dummy
from vllm_moe_offload.integration.formats import EngineView, FormatLane, SlotBinder, engine_view
from vllm_moe_offload.integration.graphs import (
    captures_a_piece,
    limit_capture_sizes,
    most_captured,
)
from vllm_moe_offload.integration.metrics import DecodeClock, Reporter, Totals, clock, reporter
from vllm_moe_offload.integration.prefetch import GroupOffloader
from vllm_moe_offload.integration.refusals import refuse_reloading
from vllm_moe_offload.integration.reserve import draft_model, layers_of_experts, reserved_bytes
from vllm_moe_offload.integration.selfcheck import check_layer, random_step
from vllm_moe_offload.integration.share import CpuShare, check_limits
from vllm_moe_offload.integration.streaming import TRIED_ROWS, Streaming
from vllm_moe_offload.lanes import (
    MAX_CAPTURED,
    AskingLayer,
    CapturedLayer,
    Counters,
    EngineLane,
    Lane,
    OffloadedLayer,
)
from vllm_moe_offload.planning import (
    LayerShape,
    SlotPlan,
    plan_with_buffers,
    stream_experts,
)
from vllm_moe_offload.stream import BufferMemory, buffer_bytes

if TYPE_CHECKING:
    from vllm_moe_offload.integration.layers import OffloadedRoutedExperts

# Below "vllm", whose handlers and level apply: a logger of another name would print nothing.
logger = init_logger(f"vllm.{__name__}")
_GIB = 2**30
# In vLLM's CPU build torch's OpenMP threads wait actively, for milliseconds after each operation:
# a thread of the engine that shares a CPU with one of them runs a time slice late, and the others
# wait for it. On fewer CPUs than these one thread does all: the demo model on two, with everything
# in one process, 515 tokens a second instead of 100.
_FEW_CPUS = 4


class OffloadRuntime:
    """Engine, host memory, device and plan of one worker, and its layers by name."""

    def __init__(self, config: OffloadConfig, vllm_config: VllmConfig, worker: Any) -> None:
        self.config = config
        self._vllm_config = vllm_config
        self.device = _device(vllm_config, worker)
        self.store = HostStore(self.device.register, self.device.unregister)
        self.prefetch = (
            GroupOffloader(config, self.store) if config.group_size is not None else None
        )
        self.engine = _engine(config)
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.is_dummy = vllm_config.load_config.load_format == "dummy"
        self._modules: dict[str, OffloadedRoutedExperts] = {}
        self._views: dict[str, EngineView] = {}
        self._cpu_lanes: dict[str, EngineLane] = {}
        self._side_stream: SideStream | None = None
        # Layers behind which a step may end.
        self._ends: set[str] = set()
        # On a GPU, from its first layer on.
        self._share: CpuShare | None = None
        # Where layers are streamed, from when the first ones are planned.
        self._streaming: Streaming | None = None
        self._clock = DecodeClock(MAX_CAPTURED)
        # Whether the step that comes next may ask the CPU lane for something.
        self._asks = True
        self._reporter: Reporter | None = None
        # Slots of each layer; None where every expert fits and the layer stays vLLM's own.
        self._slots: dict[str, int | None] = {}

    def adopt(self, module: OffloadedRoutedExperts) -> None:
        """Take in a layer when it is constructed, before any weight is loaded.

        ConfigError where a setting is above what it has. To a draft model's layers, which come when
        others have been planned, such a limit is none.
        """
        if not self._slots:
            experts = module.moe_config.num_experts
            check_limits(self.config, module.layer_name, experts, module.top_k)
        self._modules[module.layer_name] = module

    def prepare(self) -> None:
        """Before the first weight is written: plan the slots, check all memory, begin to take it.

        Every layer of the model is known then, and the device holds the rest of the model. The
        layers of a draft model come later and are planned by themselves, over the share that slots
        sized automatically leave them.
        """
        if len(self._slots) == len(self._modules):
            return  # called for every tensor that is loaded
        new = [module for name, module in self._modules.items() if name not in self._slots]
        # Layers of a draft model may run one at a time.
        ends = new if self._are_the_drafts else new[-1:]
        self._ends.update(module.layer_name for module in ends)
        plan, needs = self._make_plan(new)
        stays = self._sized_automatically and plan.fits
        self.store.prepare(also_needed=needs)
        for module, slots in zip(new, plan.slots, strict=True):
            self._slots[module.layer_name] = None if stays else slots

    def bind(self, module: OffloadedRoutedExperts) -> OffloadedLayer | None:
        """The offloaded layer over the loaded experts of `module`.

        None when the plan is that every expert fits on the device: the layer is then vLLM's own.
        """
        self.prepare()
        self.store.wait(module.host.values())
        if self.is_dummy:
            number = list(self._modules).index(module.layer_name)
            # Apart by more than a layer counts on, expert by expert; 32 bits of a seed are used.
            fill_dummy(module.host, current_platform.device_type, seed=number << 16)
        num_slots = self._slots[module.layer_name]
        if num_slots is None:
            for name, tensor in module.host.items():
                module.get_parameter(name).data = tensor.to(current_platform.device_type)
            module.stock_process(module)
            # Of no use any more: the layer has the experts on the device.
            module.host = {}
            return None
        if current_platform.is_cpu():
            return self._on_host(module, num_slots)
        return self._on_gpu(module, num_slots)

    def _on_host(self, module: OffloadedRoutedExperts, num_slots: int) -> OffloadedLayer:
        host = module.host
        view = engine_view(module)

        def resident(slots: Any) -> Lane:
            return self._engine_lane(module, view, slots)

        cpu = self._engine_lane(module, view, host)
        layout = ExpertLayout.of(host)
        layer = self._layer(module, host, view, layout.empty, resident, num_slots, cpu)

        def bind(memory: BufferMemory) -> tuple[dict[str, torch.Tensor], Lane]:
            buffer = memory.tensors(layout, memory.capacity(layout, layer.num_experts))
            return buffer, resident(buffer)

        if self._streaming is not None:
            self._streaming.add(module.layer_name, layer, bind)
        return layer

    def _on_gpu(self, module: OffloadedRoutedExperts, num_slots: int) -> OffloadedLayer:
        device = torch.device(current_platform.device_type, torch.cuda.current_device())
        binder = SlotBinder(module, module.stock_process, module.host, device)
        # Without slots the layout is still the kernel's: the self-check needs one of them.
        host = binder.convert(self.store, max(num_slots, 1))

        def allocate(count: int) -> Any:
            return binder.bind(0, count)

        def resident(slots: Any) -> Lane:
            return FormatLane(module)

        view = engine_view(module)
        cpu = self._engine_lane(module, view, host)
        share = self._shared(device)
        request = share.request(module.layer_name, cpu)

        def capture(slots: Any, lane: Lane) -> CapturedLayer:
            captured = CapturedLayer(
                host,
                slots,
                lane,
                self._side(device),
                request,
                policy=self.config.policy,
                top_k=module.top_k,
                cache_topk=share.cache_topk,
                ends_step=lambda: module.layer_name in self._ends or captures_a_piece(),
            )
            if request is not None:
                captured.split(*share.split(captured.step.num_experts))
            return captured

        asking = None
        if request is not None and not num_slots:
            asking = AskingLayer(module.moe_config.num_experts, module.top_k, request, device)
        layer = self._layer(module, host, view, allocate, resident, num_slots, cpu, capture, asking)

        def bind(memory: BufferMemory) -> tuple[dict[str, torch.Tensor], Lane]:
            return binder.bind_buffer(memory), FormatLane(module)

        if self._streaming is not None:
            self._streaming.add(module.layer_name, layer, bind)
        return layer

    def _shared(self, device: torch.device) -> CpuShare:
        """The CPU's share in the steps of all layers."""
        if self._share is None:
            self._share = CpuShare(self.config, self.engine, device)
        return self._share

    def _side(self, device: torch.device) -> SideStream:
        """The stream beside the computing one, of all layers."""
        if self._side_stream is None:
            self._side_stream = SideStream(device)
        return self._side_stream

    def _layer(
        self,
        module: OffloadedRoutedExperts,
        host: dict[str, torch.Tensor],
        view: EngineView,
        allocate: Callable[[int], Any],
        resident: Callable[[Any], Lane],
        num_slots: int,
        cpu: EngineLane,
        capture: Callable[[Any, Lane], CapturedLayer] | None = None,
        asking: AskingLayer | None = None,
    ) -> OffloadedLayer:
        self._views[module.layer_name] = view
        self._cpu_lanes[module.layer_name] = cpu
        return OffloadedLayer(
            host,
            self.device,
            allocate,
            resident,
            cpu,
            num_slots=num_slots,
            policy=self.config.policy,
            capture=capture,
            asking=asking,
        )

    def _engine_lane(
        self, module: OffloadedRoutedExperts, view: EngineView, tensors: Any
    ) -> EngineLane:
        try:
            return EngineLane(
                self.engine, view.spec, view.of(tensors), module.top_k, self._max_tokens
            )
        except (KeyError, ValueError) as error:
            raise UnsupportedError(
                f"moe_offload on {module.layer_name}: the layout of this format is not one that "
                f"the CPU engine reads: {error}"
            ) from None

    def finish_loading(self, worker: Any) -> None:
        """After loading: prefetch what is to be, and check what is offloaded, see `_check_active`.

        Not every model runner tells its offloader that the weights are loaded.
        """
        if self.prefetch is not None:
            self.prefetch.post_init()
            refuse_reloading(worker, "while some of them are prefetched (group_size)")
        elif self._layers() and not current_platform.is_cpu():
            refuse_reloading(worker, "on a GPU where the experts are offloaded")
        self._check_active()

    def _check_active(self) -> None:
        """Say what is offloaded; InactiveError when nothing is and should be.

        Then let the slots and the engine compute the same rows, once for each kind of layer.
        """
        layers = self._layers()
        if layers:
            logger.info("moe_offload: %s", ", ".join(self._summary(list(layers.values()))))
            if (
                current_platform.is_cuda()
                and self.config.mode != "stream"
                and any(layer.num_slots < layer.num_experts for layer in layers.values())
            ):
                limit_capture_sizes(self._vllm_config, MAX_CAPTURED)
            seen: set[tuple[Any, ...]] = set()
            for name, layer in layers.items():
                kind = (self._views[name].spec, layer.layout, layer.num_slots)
                if kind not in seen and (layer.num_slots or layer.decides_on_device):
                    check_layer(
                        name,
                        layer,
                        self._views[name].spec,
                        self._cpu_lanes[name],
                        self._modules[name].top_k,
                    )
                    seen.add(kind)
            if self._share is not None:
                self._share.measure(layers, self._cpu_lanes)
            if self._streaming is not None:
                self._streaming.settle(
                    layers,
                    self._cpu_lanes,
                    self._check_streamed,
                    self._random_step,
                    self._share is not None and self._share.rates is not None,
                    self._max_tokens,
                )
            self.check()
        elif self._modules:
            logger.info(
                "moe_offload: every expert of %d layers fits on the device, so offload %s",
                len(self._modules),
                "is off and vLLM runs as without it"
                if self.prefetch is None
                else "of experts is off; prefetching stays on",
            )
            if self.prefetch is None:
                # vLLM's key of compiled graphs counts this section: the graph is stock vLLM's now.
                assert isinstance(self._vllm_config.additional_config, dict)
                del self._vllm_config.additional_config[ADDITIONAL_CONFIG_KEY]
        else:
            of_experts = sorted(self.config.model_fields_set - set(PREFETCH_SETTINGS))
            if self.prefetch is None or of_experts:
                raise InactiveError(
                    "moe_offload is configured, but this model has no mixture-of-experts layer "
                    "built on vLLM's RoutedExperts, so nothing would be offloaded"
                    + (f" by {', '.join(of_experts)}" if of_experts else "")
                    + ": remove the settings, serve a mixture-of-experts model, or prefetch layers "
                    "(group_size)"
                )

    def _summary(self, layers: list[OffloadedLayer]) -> list[str]:
        """What is offloaded and through what, in words."""
        parts = [
            f"mode={self._mode}",
            f"{len(layers)} layers",
            f"{amount(sum(layer.host_bytes for layer in layers))} of experts in host memory",
        ]
        if self.config.mode not in SLOTLESS_MODES:
            slots = sorted({layer.num_slots for layer in layers})
            parts += [
                f"{'/'.join(map(str, slots))} slots a layer",
                f"{amount(self._slot_bytes)} in slots",
                f"policy {self.config.policy}",
            ]
        elif self._buffer_bytes:
            parts.append(f"{amount(self._buffer_bytes)} in two buffers")
        threads = self.engine.threads
        plural = "" if threads == 1 else "s"
        return [*parts, f"{threads} CPU thread{plural} ({self.engine.isa})"]

    def _check_streamed(self, name: str) -> None:
        check_layer(
            name,
            self._layers()[name],
            self._views[name].spec,
            self._cpu_lanes[name],
            self._modules[name].top_k,
            rows=TRIED_ROWS,
        )

    def _random_step(self, name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        module = self._modules[name]
        step = random_step(
            module.moe_config.num_experts, self._views[name].spec, module.top_k, rows
        )
        x, weights, ids = (tensor.to(current_platform.device_type) for tensor in step)
        return x, weights, ids

    def expect(self, rows: int, goes_on: bool) -> None:
        """A step of so many rows comes next; goes_on: as for `DecodeClock.begin`."""
        self._clock.begin(rows, goes_on, clock())
        if self._share is not None:
            self._share.correct()
        # A lane that watched for requests would have the core that streamed steps compute on; but
        # after such a step a draft model may ask.
        is_streamed = self._streaming is not None and self._streaming.expect(rows)
        self._asks = not is_streamed or draft_model(self._vllm_config) is not None

    def wake(self) -> None:
        """Before a step is launched: the CPU lane watches for its requests, if it will ask any.

        And vLLM's offloader is this engine's, whichever other one the process has.
        """
        if self.prefetch is not None:
            self.prefetch.activate()
        if self._share is not None and self._asks:
            self._share.wake()

    def check(self) -> None:
        """When a step has been launched, by the thread that did: CpuLaneError where it has failed.

        The CPU lane, or the CPU's part of a streamed step.
        """
        self.check_lane()
        if self._streaming is not None:
            self._streaming.check()

    def check_lane(self) -> None:
        """Before a step's output is used, by any thread: CpuLaneError when the lane has failed."""
        if self._share is not None:
            self._share.check()

    def close(self) -> None:
        """No step comes any more: the CPU lane ends. May be called twice."""
        if self.prefetch is not None:
            self.prefetch.close()
        if self._reporter is not None:
            self._reporter.close()
        if self._share is not None:
            self._share.close()

    def warmed_up(self) -> None:
        """After the worker's own steps, which are checked and not counted; what follows is."""
        self.check()
        if self.prefetch is not None and current_platform.is_cuda():  # a CPU may not have run any
            self.prefetch.check_run()
        self.reset_stats()
        self._report()

    def resize(self, slots_per_layer: int) -> None:
        """Give every layer that many slots, or none of them: ValueError when it does not go.

        Where the device lacks the memory, that error is raised, and all have as many as before.
        """
        layers = self._layers().values()
        if not layers:
            raise ValueError(
                "this engine has every expert on the device: it has no slots to resize"
            )
        if self.config.mode in SLOTLESS_MODES:
            raise ValueError(
                f"this engine has mode={self.config.mode!r}, which "
                f"{SLOTLESS_MODES[self.config.mode]}: it has no slots to resize"
            )
        for layer in layers:
            layer.check_resize(slots_per_layer)
        before = [layer.num_slots for layer in layers]
        try:
            for layer in layers:
                layer.resize(slots_per_layer)
        except Exception:
            for layer, slots in zip(layers, before, strict=True):
                if slots and layer.num_slots != slots:
                    # What it raises would hide why there are not the slots that were asked for.
                    with contextlib.suppress(Exception):
                        layer.resize(slots)
            raise
        finally:
            if self._share is not None:
                self._share.restart()
        if self._share is not None and self._share.rates is None:
            self._share.measure(self._layers(), self._cpu_lanes)

    def _report(self) -> None:
        """From now on report what is counted, where somebody has asked for it."""
        if self._reporter is None and self._layers():
            self._reporter = reporter(self.totals)
            if self._reporter is not None:
                self._readout = Readout(torch.device(current_platform.device_type))
                self._reporter.start()

    def totals(self) -> Totals:
        """What has been counted, for the reporter's thread; no step waits for it."""
        layers = list(self._layers().values())
        readings = [layer.readings() for layer in layers]
        flat = iter(self._readout.read([t for named in readings for t in named.values()]))
        values = [{name: next(flat) for name in named} for named in readings]
        counted = [layer.counted(v) for layer, v in zip(layers, values, strict=True)]
        nbytes = [layer.layout.nbytes for layer in layers]
        both = 0.0
        if self._share is not None and (rates := self._share.rates) is not None:
            both = rates.fetch_beside_cpu + rates.cpu_beside_fetch
        missed = sum(one.misses * n for (_, one), n in zip(counted, nbytes, strict=True))
        every = [one for one, _ in counted]
        return Totals(
            steps=max(one.steps for one in every),
            tokens=max(one.tokens for one in every),
            streamed_steps=max(one.streamed for one in every),
            hits=sum(one.hits for one in every),
            misses=sum(one.misses for one in every),
            bytes_fetched=sum(one.bytes_fetched for one in every),
            bytes_cpu=sum(one.cpu_experts * n for one, n in zip(every, nbytes, strict=True)),
            bytes_streamed=sum(one.bytes_streamed for one in every),
            bytes_kept=sum(one.bytes_kept for one in every),
            decode_seconds=self._clock.seconds,
            floor_seconds=missed / both if both else 0.0,
        )

    def reset_stats(self) -> None:
        """Set every layer's counters to zero, and the clock of decode steps."""
        self._clock.seconds = 0.0
        for layer in self._layers().values():
            layer.reset_counters()
        if self._share is not None:
            self._share.restart()

    def stats(self) -> dict[str, Any]:
        """Totals and, under `layers`, each layer: the fields of `Counters`, sizes and bytes.

        The totals are sums over the layers, but for steps and tokens: every layer sees each once.
        `buffer_experts`: how many experts of a layer each buffer of streamed layers holds;
        `rates`: bytes a second of the lanes as measured at start-up, None where nothing is split;
        `rates_now`: those the split is made by, after so many `rate_corrections` in service;
        `buffer_bytes`: what the buffers of streamed layers take of the device's memory beside
        `device_bytes`; `stream_threshold`: the most rows of a step that is not streamed, or None;
        `prefetch`: see `GroupOffloader.stats`, None without group prefetch.
        """
        total = Counters()
        layers = {}
        for name, layer in self._layers().items():
            counters = layer.counters
            total += counters
            layers[name] = {
                **asdict(counters),
                "slots": layer.num_slots,
                "experts": layer.num_experts,
                "buffer_experts": layer.buffer_experts,
                "policy": layer.policy,
                "expert_bytes": layer.layout.nbytes,
                "device_bytes": layer.device_bytes,
                "host_bytes": layer.host_bytes,
            }
        total.steps = max((layer["steps"] for layer in layers.values()), default=0)
        total.tokens = max((layer["tokens"] for layer in layers.values()), default=0)
        share = self._share
        rates = share.rates if share is not None else None
        rates_now = share.rates_now if share is not None else None
        return {
            **asdict(total),
            "mode": self._mode,
            "rates": asdict(rates) if rates is not None else None,
            "rates_now": asdict(rates_now) if rates_now is not None else None,
            "rate_corrections": share.corrections if share is not None else 0,
            "cpu_threads": self.engine.threads,
            "isa": self.engine.isa,
            "device_bytes": sum(layer["device_bytes"] for layer in layers.values()),
            "buffer_bytes": self._buffer_bytes,
            "stream_threshold": self._streaming.threshold if self._streaming is not None else None,
            "host_bytes": sum(layer["host_bytes"] for layer in layers.values()),
            "prefetch": self.prefetch.stats() if self.prefetch is not None else None,
            "layers": layers,
        }

    @property
    def _mode(self) -> str:
        """What `auto` is here."""
        if self.config.mode != "auto":
            return self.config.mode
        return "cache" if current_platform.is_cpu() else "hybrid"

    @property
    def _sized_automatically(self) -> bool:
        return self.config.mode not in SLOTLESS_MODES and not any(
            isinstance(size, int | float)
            for size in (self.config.slots_per_layer, self.config.gpu_memory_gib)
        )

    def _layers(self) -> dict[str, OffloadedLayer]:
        return {
            name: module.offload
            for name, module in self._modules.items()
            if module.offload is not None
        }

    def _make_plan(self, modules: list[OffloadedRoutedExperts]) -> tuple[SlotPlan, str]:
        """The slots of these layers, and what they need of the device's memory in words."""
        shapes = [
            LayerShape(
                module.layer_name,
                module.moe_config.num_experts,
                ExpertLayout.of(module.host).nbytes,
            )
            for module in modules
        ]
        if self.config.mode == "cpu":
            return _no_slots(shapes), ""
        if self.config.mode == "stream":
            return _no_slots(shapes), self._make_ping_pong(modules)
        slots, gib = self.config.slots_per_layer, self.config.gpu_memory_gib
        prefetched = self.prefetch.pending_bytes if self.prefetch is not None else 0
        free = budget = max(self._free_memory - prefetched, 0)
        draft = None if self._are_the_drafts else draft_model(self._vllm_config)
        if isinstance(gib, float):
            budget = int(gib * _GIB) - self._slot_bytes - self._buffer_bytes
        elif not isinstance(slots, int) and current_platform.is_cuda():
            moe_configs = [module.moe_config for module in modules]
            free = budget = max(free - reserved_bytes(self._vllm_config, moe_configs, draft), 0)
        threshold = self.config.stream_threshold
        is_wanted = isinstance(threshold, int) or isinstance(self.config.stream_experts, int)
        # Those of a draft model get what these leave: as much as if they were like the largest.
        to_come = layers_of_experts(self._vllm_config, draft) if not isinstance(slots, int) else 0
        largest = max(shapes, key=lambda shape: shape.num_experts * shape.expert_bytes)
        try:
            plan, buffers = plan_with_buffers(
                [*shapes, *[largest] * to_come],
                slots_per_layer=slots if isinstance(slots, int) else None,
                budget_bytes=budget,
                buffer_bytes=self._wanted_buffers(modules),
                is_wanted=is_wanted,
            )
        except MemoryShortError as error:
            if not self._slots:
                raise
            raise MemoryShortError(
                f"{error}. The slots of {len(self._slots)} layers that were loaded before "
                f"{shapes[0].name} are taken already: leave it room with slots_per_layer, which "
                "is for every layer of both models"
            ) from None
        plan = SlotPlan(plan.slots[: len(shapes)], plan.fits)
        if plan.fits and is_wanted and not self._sized_automatically:
            self._say_nothing_is_streamed()
        needed = buffers + sum(
            count * shape.expert_bytes for count, shape in zip(plan.slots, shapes, strict=True)
        )
        and_buffers = f" and {amount(buffers)} in buffers" if buffers else ""
        needs = _needs(
            f"{max(plan.slots)} slots in each of {len(shapes)} layers{and_buffers}", needed, free
        )
        if needed > free:
            raise MemoryShortError(f"{needs}: give fewer, or 'auto' ({self.store.needs()})")
        if buffers:
            self._streaming = Streaming(
                threshold if isinstance(threshold, int) else None,
                buffers,
                torch.device(current_platform.device_type),
                corrects=self.config.correct_rates == "auto",
            )
        return plan, needs

    @property
    def _are_the_drafts(self) -> bool:
        """Whether the layers that are planned next are a draft model's."""
        model = self._vllm_config.model_config
        has_draft = draft_model(self._vllm_config) is not None
        return bool(self._slots) or (has_draft and not model.get_num_experts())

    def _say_nothing_is_streamed(self) -> None:
        """ConfigError where slots for every expert were asked for; a warning where they fit."""
        settings = ("stream_threshold", "stream_experts")
        asked = ", ".join(name for name in settings if isinstance(getattr(self.config, name), int))
        if isinstance(self.config.slots_per_layer, int):
            raise ConfigError(
                f"slots_per_layer={self.config.slots_per_layer} has every expert in a slot, so "
                f"nothing is streamed and {asked} would decide nothing: leave one of them out"
            )
        logger.warning(
            "moe_offload: every expert has a slot, so nothing is streamed and %s decides nothing",
            asked,
        )

    def _make_ping_pong(self, modules: list[OffloadedRoutedExperts]) -> str:
        """Take the buffers through which every layer passes every step; what they need in words."""
        if self._streaming is not None:
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
            raise MemoryShortError(
                f"{needs}: use mode='cache', which needs less, or mode='cpu' ({self.store.needs()})"
            )
        device = torch.device(current_platform.device_type)
        self._streaming = Streaming(0, buffers, device, most_captured(self._vllm_config))
        return needs

    def _wanted_buffers(self, modules: list[OffloadedRoutedExperts]) -> int:
        """Bytes of two buffers for any of these layers; 0 where none are to be made.

        Layers that come later (those of a draft model) take turns in the buffers there are.
        """
        threshold = self.config.stream_threshold
        if self._streaming is not None or threshold == "off":
            return 0
        asked = self._asked_experts(modules)
        if threshold == "auto" and current_platform.is_cpu():
            if asked is not None:
                raise ConfigError(
                    f"stream_experts={asked}, but in vLLM's CPU build nothing is streamed unless "
                    "stream_threshold says from how many rows on: give it, or leave out "
                    "stream_experts"
                )
            return 0  # a copy from memory to memory runs beside nothing
        counts = [module.moe_config.num_experts for module in modules]
        return _buffers_for(
            modules, [stream_experts(n) if asked is None else min(asked, n) for n in counts]
        )

    def _asked_experts(self, modules: list[OffloadedRoutedExperts]) -> int | None:
        """`stream_experts` where it is a number; ConfigError where no layer has so many."""
        asked = self.config.stream_experts
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
        return self.device.free_memory(self.store.pending_bytes)

    @property
    def _buffer_bytes(self) -> int:
        """Bytes that the buffers of streamed layers take."""
        return self._streaming.device_bytes if self._streaming is not None else 0

    @property
    def _slot_bytes(self) -> int:
        """Bytes that slots of layers bound so far take."""
        return sum(layer.device_bytes for layer in self._layers().values())


def _no_slots(layers: list[LayerShape]) -> SlotPlan:
    return SlotPlan(tuple(0 for _ in layers), fits=False)


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


def _engine(config: OffloadConfig) -> CpuExpertEngine:
    """Made in the worker, which may be bound to fewer cores than the process that checked it."""
    threads = config.engine_threads
    if threads is None and current_platform.is_cpu() and len(os.sched_getaffinity(0)) < _FEW_CPUS:
        threads = 1
    try:
        return CpuExpertEngine(threads)
    except ValueError as error:
        raise ConfigError(
            f"moe_offload settings: in the worker, whose cores vLLM chooses: {error} (vLLM's CPU "
            "build binds a worker by VLLM_CPU_OMP_THREADS_BIND)"
        ) from None


def _device(vllm_config: VllmConfig, worker: Any) -> Device:
    if current_platform.is_cpu():
        return HostDevice()
    from vllm_moe_offload.device.cuda import CudaDevice

    return CudaDevice(
        memory_fraction=vllm_config.cache_config.gpu_memory_utilization,
        free_at_start=worker.init_snapshot.free_memory,
    )
