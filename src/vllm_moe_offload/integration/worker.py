"""Turning offload on where a worker loads its model, and reading it from outside."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import WorkerWrapperBase

_RUNTIME = "_moe_offload_runtime"


def install() -> None:
    """Give every worker's wrapper the methods below; executors call them by name.

    The wrapper has no `load_model` of its own (it passes unknown names on to the worker), so this
    adds methods and replaces none. ``llm.collective_rpc("moe_offload_stats")`` reaches the others.
    """
    WorkerWrapperBase.load_model = _load_model  # type: ignore[attr-defined]
    WorkerWrapperBase.moe_offload_stats = _stats  # type: ignore[attr-defined]
    WorkerWrapperBase.moe_offload_reset_stats = _reset_stats  # type: ignore[attr-defined]
    WorkerWrapperBase.moe_offload_resize = _resize  # type: ignore[attr-defined]


def _load_model(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> None:
    """Load the model; with offload configured, with its experts offloaded."""
    from vllm_moe_offload.integration.frontend import configure

    config = configure(self.vllm_config)
    if config is None:
        self.worker.load_model(*args, **kwargs)
        return
    # Only now: a server without offload neither imports nor registers any of it.
    from vllm_moe_offload.integration.layers import offloaded_layers
    from vllm_moe_offload.integration.runtime import OffloadRuntime

    runtime = OffloadRuntime(config, self.vllm_config, self.worker)
    with offloaded_layers(runtime):
        self.worker.load_model(*args, **kwargs)
    runtime.check_active()
    setattr(self, _RUNTIME, runtime)


def _runtime(self: WorkerWrapperBase) -> Any:
    runtime = self.__dict__.get(_RUNTIME)
    if runtime is None:
        raise RuntimeError("this engine was started without moe_offload settings")
    return runtime


def _stats(self: WorkerWrapperBase) -> dict[str, Any]:
    """What the layers of this worker have done, as plain numbers: see `OffloadRuntime.stats`."""
    stats: dict[str, Any] = _runtime(self).stats()
    return stats


def _reset_stats(self: WorkerWrapperBase) -> None:
    """Set every counter of this worker to zero."""
    _runtime(self).reset_stats()


def _resize(self: WorkerWrapperBase, slots_per_layer: int) -> None:
    """Give every layer of this worker that many slots, empty ones; between steps only."""
    _runtime(self).resize(slots_per_layer)
