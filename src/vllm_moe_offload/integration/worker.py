"""Turning offload on where a worker loads its model, guarding its steps, and reading it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_moe_offload.errors import ConfigError, InactiveError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_moe_offload.config import OffloadConfig
    from vllm_moe_offload.integration.runtime import OffloadRuntime

_RUNTIME = "_moe_offload_runtime"
# Those of this process whose code is compiled and whose graphs are captured.
_warm: weakref.WeakSet[WorkerWrapperBase] = weakref.WeakSet()


def install() -> None:
    """Give every worker's wrapper the methods below; executors call them by name.

    The wrapper has none of its own by these names (it passes unknown ones on to the worker), but
    for `execute_model` and `shutdown`, which are wrapped.
    ``llm.collective_rpc("moe_offload_stats")`` reaches the last four.
    """
    if hasattr(WorkerWrapperBase.execute_model, "__moe_offload__"):
        return
    added: dict[str, Callable[..., Any]] = {
        "load_model": _load_model,
        "compile_or_warm_up_model": _warm_up,
        "sample_tokens": _guarded(lambda self, *a, **k: self.worker.sample_tokens(*a, **k)),
        "execute_model": _announced(_guarded(WorkerWrapperBase.execute_model)),
        "shutdown": _shutdown(WorkerWrapperBase.shutdown),
        "moe_offload_stats": _stats,
        "moe_offload_reset_stats": _reset_stats,
        "moe_offload_resize": _resize,
        "moe_offload_measure": _measure,
    }
    for name, method in added.items():
        setattr(WorkerWrapperBase, name, method)


def _guarded(step: Callable[..., Any]) -> Callable[..., Any]:
    """This part of a step after `wake`, and no output of it where the CPU has failed.

    An output that is waited for later is checked after that wait too: until then the GPU may still
    be asking the lane. Who waits may be another thread, while this one computes the next step.
    """

    @functools.wraps(step)
    def guarded(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> Any:
        runtime = self.__dict__.get(_RUNTIME)
        if runtime is None:
            return step(self, *args, **kwargs)
        runtime.wake()
        output = step(self, *args, **kwargs)
        runtime.check()
        if isinstance(output, AsyncModelRunnerOutput):
            wait = output.get_output

            def get_output() -> Any:
                waited = wait()
                runtime.check_lane()
                return waited

            output.get_output = get_output  # type: ignore[method-assign]
        return output

    guarded.__moe_offload__ = True  # type: ignore[attr-defined]
    return guarded


def _announced(execute: Callable[..., Any]) -> Callable[..., Any]:
    """This step, of whose size the offloaded layers hear before it is made ready."""

    @functools.wraps(execute)
    def announced(self: WorkerWrapperBase, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = self.__dict__.get(_RUNTIME)
        if runtime is not None:
            runtime.expect(
                scheduler_output.total_num_scheduled_tokens,
                bool(scheduler_output.scheduled_cached_reqs.req_ids),
            )
        return execute(self, scheduler_output, *args, **kwargs)

    return announced


def _shutdown(original: Callable[[WorkerWrapperBase], None]) -> Callable[[WorkerWrapperBase], None]:
    @functools.wraps(original)
    def shutdown(self: WorkerWrapperBase) -> None:
        try:
            original(self)
        finally:
            runtime = self.__dict__.get(_RUNTIME)
            if runtime is not None:
                runtime.close()

    return shutdown


def _warm_up(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> Any:
    """The worker's own warm-up, whose steps are not counted."""
    times = self.worker.compile_or_warm_up_model(*args, **kwargs)
    _warm.add(self)
    runtime = self.__dict__.get(_RUNTIME)
    if runtime is not None:
        runtime.warmed_up()
    return times


def _load_model(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> None:
    """Load the model; with offload configured, with its weights offloaded."""
    from vllm_moe_offload.integration.frontend import configure

    global _loading
    loading = None
    try:
        with ExitStack() as stack:
            loading = _loading = _Loading(self, stack)
            stack.callback(_end_loading)
            config = configure(self.vllm_config)
            if config is not None:
                loading.offload(config)
            self.worker.load_model(*args, **kwargs)
        if loading.runtime is not None:
            loading.runtime.finish_loading(self.worker)
            setattr(self, _RUNTIME, loading.runtime)
    except BaseException:
        if loading is not None and loading.runtime is not None:
            loading.runtime.close()
        raise


def warm_config(layer_name: str, experts: object) -> VllmConfig | None:
    """The configuration of the engine that has been warmed up with this layer of experts.

    None while it has not been, or of an engine of another process.
    """
    for wrapper in _warm:
        context = wrapper.vllm_config.compilation_config.static_forward_context
        if getattr(context.get(layer_name), "routed_experts", None) is experts:
            return wrapper.vllm_config
    return None


def ask_for_offload(asked_by: str) -> None:
    """For a model's code: offload is on from here, with mode='stream' if nothing is configured.

    asked_by: who asks, in the words of an error. Raises InactiveError where no worker is loading a
    model, ConfigError and UnsupportedError as settings would.
    """
    from vllm_moe_offload.integration.frontend import configure

    if _loading is None:
        raise InactiveError(
            f"{asked_by} is made where no worker of vLLM loads a model, so nothing would be "
            "offloaded: load the model with vLLM, and the plugin with it (VLLM_PLUGINS)"
        )
    if _loading.runtime is None:
        config = configure(_loading.wrapper.vllm_config, asked_by)
        assert config is not None
        _loading.offload(config)
    elif "mode" not in _loading.runtime.config.model_fields_set:
        raise ConfigError(
            f"{asked_by} asks for mode='stream', and the moe_offload settings say nothing of a "
            "mode: add mode='stream' to them, or another mode that is to be in its place"
        )


@dataclass
class _Loading:
    """A model being loaded. `stack`: ends with it; `runtime`: once offload is on."""

    wrapper: WorkerWrapperBase
    stack: ExitStack
    runtime: OffloadRuntime | None = None

    def offload(self, config: OffloadConfig) -> None:
        """From here until the loading ends layers are made offloaded."""
        # Only now: a server without offload neither imports nor registers any of it.
        from vllm_moe_offload.integration.layers import offloaded_layers
        from vllm_moe_offload.integration.runtime import OffloadRuntime

        self.runtime = OffloadRuntime(config, self.wrapper.vllm_config, self.wrapper.worker)
        if self.runtime.prefetch is not None:
            self.runtime.prefetch.activate()
        self.stack.enter_context(offloaded_layers(self.runtime))


# Set while a worker loads a model: vLLM constructs it, so its code can be handed nothing.
_loading: _Loading | None = None


def _end_loading() -> None:
    global _loading
    _loading = None


def _runtime(self: WorkerWrapperBase) -> Any:
    runtime = self.__dict__.get(_RUNTIME)
    if runtime is None:
        raise RuntimeError(
            "this engine was started without moe_offload settings: give some in additional_config "
            "under moe_offload"
        )
    return runtime


def _stats(self: WorkerWrapperBase) -> dict[str, Any]:
    """What the layers of this worker have done, as plain numbers: see `statistics.worker_stats`."""
    stats: dict[str, Any] = _runtime(self).stats()
    return stats


def _reset_stats(self: WorkerWrapperBase) -> None:
    """Set every counter of this worker to zero."""
    _runtime(self).reset_stats()


def _resize(self: WorkerWrapperBase, slots_per_layer: int) -> None:
    """Give every layer of this worker that many slots, empty ones; between steps only."""
    _runtime(self).resize(slots_per_layer)


def _measure(self: WorkerWrapperBase) -> None:
    """Measure this worker's rates again, as at start-up; between steps only."""
    _runtime(self).measure()
