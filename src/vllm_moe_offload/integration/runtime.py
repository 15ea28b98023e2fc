"""All that the offloaded layers of one worker share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
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
from vllm_moe_offload.errors import ConfigError, InactiveError, UnsupportedError
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.host import HostStore, Neighbours, fill_dummy
from vllm_moe_offload.integration.formats import EngineView, FormatLane, SlotBinder, engine_view
from vllm_moe_offload.integration.frontend import asked_by_model, of_setting
from vllm_moe_offload.integration.graphs import (
    captures_a_piece,
    limit_capture_sizes,
    most_captured,
)
from vllm_moe_offload.integration.metrics import (
    DecodeClock,
    FloorClock,
    Reporter,
    Totals,
    clock,
    reporter,
)
from vllm_moe_offload.integration.prefetch import GroupOffloader
from vllm_moe_offload.integration.refusals import (
    after_reloading,
    refuse_reloading,
    refuse_whole_weights,
)
from vllm_moe_offload.integration.reserve import draft_model
from vllm_moe_offload.integration.selfcheck import check_layer, random_step
from vllm_moe_offload.integration.share import CpuShare, check_limits
from vllm_moe_offload.integration.sizing import Sizing, Taken
from vllm_moe_offload.integration.statistics import worker_stats, worker_totals
from vllm_moe_offload.integration.streaming import TRIED_ROWS, Streaming
from vllm_moe_offload.lanes import (
    MAX_CAPTURED,
    AskingLayer,
    CapturedLayer,
    EngineLane,
    Lane,
    OffloadedLayer,
)
from vllm_moe_offload.stream import BufferMemory

if TYPE_CHECKING:
    from vllm_moe_offload.integration.layers import OffloadedRoutedExperts

# Below "vllm", whose handlers and level apply: a logger of another name would print nothing.
logger = init_logger(f"vllm.{__name__}")
# In vLLM's CPU build torch's OpenMP threads wait actively, for milliseconds after each operation:
# a thread of the engine that shares a CPU with one of them runs a time slice late, and the others
# wait for it. On fewer CPUs than these one thread does all: the demo model on two, with everything
# in one process, 515 tokens a second instead of 100.
_FEW_CPUS = 4
# Of the CPUs, what others may have without a word while rates are measured.
_QUIET = 0.1


class OffloadRuntime:
    """Engine, host memory, device and plan of one worker, and its layers by name."""

    def __init__(self, config: OffloadConfig, vllm_config: VllmConfig, worker: Any) -> None:
        self.config = config
        self._vllm_config = vllm_config
        self.device = _device(vllm_config, worker)
        self.store = HostStore(self.device.register, self.device.unregister)
        # What a checkpoint has filled in any layer: parameters and shards of them.
        self.arrived: set[tuple[str, str]] = set()
        self.prefetch = (
            GroupOffloader(config, self.store) if config.group_size is not None else None
        )
        self._sizing = Sizing(config, vllm_config, self.device, self.store, self.prefetch)
        self.engine = _engine(config)
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.is_dummy = vllm_config.load_config.load_format == "dummy"
        self._modules: dict[str, OffloadedRoutedExperts] = {}
        self._views: dict[str, EngineView] = {}
        self._cpu_lanes: dict[str, EngineLane] = {}
        self._side_stream: SideStream | None = None
        # Whether a step has begun that has not come to its end.
        self._is_under_way = False
        # Layers behind which a step may end.
        self._ends: set[str] = set()
        # On a GPU, from its first layer on.
        self._share: CpuShare | None = None
        # Where layers are streamed, from when the first ones are planned.
        self._streaming: Streaming | None = None
        self._clock = DecodeClock(MAX_CAPTURED)
        self._floor = FloorClock()
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
        taken = Taken(len(self._slots), self._slot_bytes, self._buffer_bytes)
        to_come = None if self._are_the_drafts else draft_model(self._vllm_config)
        sizes = self._sizing.size(new, taken, to_come)
        if sizes.buffer_bytes:
            self._streaming = self._make_streaming(sizes.buffer_bytes)
        self.store.prepare(also_needed=sizes.needs)
        for module, slots in zip(new, sizes.slots, strict=True):
            self._slots[module.layer_name] = slots

    def _make_streaming(self, nbytes: int) -> Streaming:
        """Take the memory of the buffers; in mode='stream' every step passes through them."""
        device = torch.device(current_platform.device_type)
        if self.config.mode == "stream":
            return Streaming(0, nbytes, device, most_captured(self._vllm_config))
        threshold = self.config.stream_threshold
        return Streaming(
            threshold if isinstance(threshold, int) else None,
            nbytes,
            device,
            corrects=self.config.correct_rates == "auto",
            is_asked=self.config.stream_experts != "auto",
        )

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
            refuse_whole_weights(worker, "while some of them are prefetched (group_size)")
        elif self._layers() and not current_platform.is_cpu():
            refuse_whole_weights(worker, "on a GPU where the experts are offloaded")
        elif self._modules and not current_platform.is_cpu():
            refuse_reloading(worker, "on a GPU where moe_offload has loaded the experts")
        else:
            after_reloading(worker, self._invalidate)
        self._check_active()

    def _invalidate(self) -> None:
        """The experts in host memory have changed."""
        for layer in self._layers().values():
            layer.invalidate()

    def _check_active(self) -> None:
        """Say what is offloaded; InactiveError when nothing is and should be.

        Then let the slots and the engine compute the same rows, of every expert for each kind of
        layer and of some for the others.
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
                if layer.num_slots or layer.decides_on_device:
                    check_layer(
                        name,
                        layer,
                        self._views[name].spec,
                        self._cpu_lanes[name],
                        self._modules[name].top_k,
                        is_brief=kind in seen,
                    )
                    seen.add(kind)
            self._measure(layers)
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
            asked_by = asked_by_model(self._vllm_config.model_config)
            if asked_by is not None:
                of_experts = [asked_by, *(name for name in of_experts if name != "mode")]
            if self.prefetch is None or of_experts:
                names = ", ".join(of_experts)
                by = f" by {names}" if names else ""
                instead = "serve a mixture-of-experts model, or prefetch layers (group_size)"
                if self.prefetch is not None:
                    instead = "or serve a mixture-of-experts model"
                raise InactiveError(
                    "moe_offload is configured, but this model has no mixture-of-experts layer "
                    f"built on vLLM's RoutedExperts, so nothing would be offloaded{by}: leave out "
                    f"{names or 'the settings'}, {instead}"
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
                f"{'/'.join(map(str, slots))} slot{'' if slots == [1] else 's'} a layer",
                f"{amount(self._slot_bytes)} in slots",
                f"policy {self.config.policy}",
            ]
        elif self._buffer_bytes:
            parts.append(f"{amount(self._buffer_bytes)} in two buffers")
        if current_platform.is_cpu() or self.config.mode not in ("cache", "stream"):
            threads = self.engine.threads
            plural = "" if threads == 1 else "s"
            parts.append(f"{threads} CPU thread{plural} ({self.engine.isa})")
        return parts

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

        And vLLM's offloader is this engine's, whichever other one the process has. Of a step that
        an error has ended copies into slots may be under way, which nothing has waited for, and
        prefetched layers may be others than the next step begins with.
        """
        is_behind_an_error, self._is_under_way = self._is_under_way, True
        if is_behind_an_error:
            self._join_copies()
        if self.prefetch is not None:
            self.prefetch.activate()
            if is_behind_an_error:
                self.prefetch.restart()
        if self._share is not None and self._asks:
            self._share.wake()

    def check(self) -> None:
        """When a step has been launched, by the thread that did: an error where it has failed.

        CpuLaneError: the CPU lane, or the CPU's part of a streamed step. UnsupportedError: see
        `GroupOffloader.end`.
        """
        self.check_lane()
        if self._streaming is not None:
            self._streaming.check()
        if self.prefetch is not None:
            self.prefetch.end()
        self._is_under_way = False

    def _join_copies(self) -> None:
        """Let what is launched next come behind all copies into slots."""
        if self._side_stream is not None:
            self._side_stream.join_all()

    def check_lane(self) -> None:
        """Before a step's output is used, by any thread: CpuLaneError when the lane has failed."""
        if self._share is not None:
            self._share.check()

    def close(self) -> None:
        """No weight and no step comes any more: the CPU lane ends. May be called twice."""
        self.store.close()
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
        self._join_copies()  # an error may have ended the last step
        reporting = self._reporter.waiting() if self._reporter else contextlib.nullcontext()
        try:
            with reporting:
                _resize(layers, slots_per_layer)
        finally:
            if self._share is not None:
                self._share.restart()
        if self._share is not None and self._share.rates is None:
            self._share.measure(self._layers(), self._cpu_lanes)

    def measure(self) -> None:
        """Measure again what start-up has measured, and go by that; counting begins anew.

        For a machine that was busy at the start, or has others on it now. Between steps only: takes
        some seconds, and empties slots of the layers it measures by. ValueError where nothing is
        measured. After another error what was known before holds.
        """
        if not self._is_measured:
            raise ValueError(
                "nothing is measured in this engine that decides anything, so nothing can be "
                "again: without a GPU nothing ever does; with one, the rates of the bus and the "
                "CPU do in the modes auto and hybrid with fewer slots than experts, and the "
                "stream_threshold where it is 'auto'"
            )
        if current_platform.is_cuda():
            torch.cuda.synchronize()
        if self.prefetch is not None:
            self.prefetch.activate()
        with self._counting_anew():
            try:
                # As steps are: what vLLM's kernels keep has been made by some.
                with torch.inference_mode():
                    self._measure(self._layers())
            finally:
                self._clock = DecodeClock(MAX_CAPTURED)  # the time that has passed was no step's

    @property
    def _is_measured(self) -> bool:
        """Whether rates of this machine decide anything here."""
        if all(layer.num_slots == layer.num_experts for layer in self._layers().values()):
            return False
        if self._share is not None and self._share.rates is not None:
            return True
        return self._streaming is not None and self._streaming.is_measured

    def _measure(self, layers: dict[str, OffloadedLayer]) -> None:
        """The lanes' rates, and from how many rows on streaming pays."""
        neighbours = Neighbours()
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
        share = neighbours.share()
        if self._is_measured and share > _QUIET:
            logger.warning(
                "moe_offload: other processes had %.0f %% of the %d CPUs while the rates of this "
                "machine were measured: if they have less when this engine serves, let it measure "
                "again then (collective_rpc, moe_offload_measure)",
                100 * share,
                neighbours.cpus,
            )

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
        return worker_totals(layers, self._readout, self._share, self._clock, self._floor)

    def reset_stats(self) -> None:
        """Set every layer's counters to zero, and the clock of decode steps."""
        with self._counting_anew():
            pass

    @contextlib.contextmanager
    def _counting_anew(self) -> Iterator[None]:
        """What has been counted before is reported; what is counted inside is not."""
        reporting = self._reporter.restarting() if self._reporter else contextlib.nullcontext()
        with reporting:
            try:
                yield
            finally:
                self._clock.seconds = 0.0
                self._floor = FloorClock()
                for layer in self._layers().values():
                    layer.reset_counters()
        if self._share is not None:
            self._share.restart()
        if self._streaming is not None:
            self._streaming.reset_stats()

    def stats(self) -> dict[str, Any]:
        """What has been counted, and what there is: see `worker_stats`."""
        return worker_stats(
            self._layers(),
            mode=self._mode,
            engine=self.engine,
            share=self._share,
            streaming=self._streaming,
            prefetch=self.prefetch,
        )

    @property
    def _mode(self) -> str:
        """What `auto` is here."""
        if self.config.mode != "auto":
            return self.config.mode
        return "cache" if current_platform.is_cpu() else "hybrid"

    def _layers(self) -> dict[str, OffloadedLayer]:
        return {
            name: module.offload
            for name, module in self._modules.items()
            if module.offload is not None
        }

    @property
    def _are_the_drafts(self) -> bool:
        """Whether the layers that are planned next are a draft model's."""
        model = self._vllm_config.model_config
        has_draft = draft_model(self._vllm_config) is not None
        return bool(self._slots) or (has_draft and not model.get_num_experts())

    @property
    def _buffer_bytes(self) -> int:
        """Bytes that the buffers of streamed layers take."""
        return self._streaming.device_bytes if self._streaming is not None else 0

    @property
    def _slot_bytes(self) -> int:
        """Bytes that slots of layers bound so far take."""
        return sum(layer.device_bytes for layer in self._layers().values())


def _resize(layers: Collection[OffloadedLayer], num_slots: int) -> None:
    """All of them, or none: what one has raised is raised."""
    before = [layer.num_slots for layer in layers]
    try:
        for layer in layers:
            layer.resize(num_slots)
    except BaseException:
        for layer, slots in zip(layers, before, strict=True):
            if slots and layer.num_slots != slots:
                # What it raises would hide why there are not the slots that were asked for.
                with contextlib.suppress(Exception):
                    layer.resize(slots)
        raise


def _engine(config: OffloadConfig) -> CpuExpertEngine:
    """Made in the worker, which may be bound to fewer cores than the process that checked it."""
    threads = config.engine_threads
    if threads is None and current_platform.is_cpu() and len(os.sched_getaffinity(0)) < _FEW_CPUS:
        threads = 1
    try:
        return CpuExpertEngine(threads)
    except ValueError as error:
        raise ConfigError(
            "moe_offload settings: in the worker, whose cores vLLM chooses: "
            f"{of_setting(config, error)} (vLLM's CPU build binds a worker by "
            "VLLM_CPU_OMP_THREADS_BIND)"
        ) from None


def _device(vllm_config: VllmConfig, worker: Any) -> Device:
    if current_platform.is_cpu():
        return HostDevice()
    from vllm_moe_offload.device.cuda import CudaDevice

    return CudaDevice(
        memory_fraction=vllm_config.cache_config.gpu_memory_utilization,
        free_at_start=worker.init_snapshot.free_memory,
    )
