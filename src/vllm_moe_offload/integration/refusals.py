"""What does not go with offload, by name, and what to do instead."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_moe_offload.config import SPLIT_SETTINGS, OffloadConfig
from vllm_moe_offload.errors import ConfigError, UnsupportedError
from vllm_moe_offload.integration.compat import loses_errors_of_outputs

# Of vLLM's worker: what writes all parameters, and what reads them all.
_RELOADING = (
    "reload_weights",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
)
_SAVING = ("compute_weight_checksums", "save_sharded_state", "save_tensorized_model")


@dataclass(frozen=True)
class Refusal:
    """A vLLM feature that offload is not started with."""

    feature: str
    is_on: Callable[[VllmConfig], bool]
    instead: str


REFUSALS = (
    Refusal(
        "a platform that is neither CUDA nor vLLM's CPU build",
        lambda c: not (current_platform.is_cpu() or current_platform.is_cuda()),
        "serve without the moe_offload settings there",
    ),
    Refusal(
        "expert parallelism (--enable-expert-parallel)",
        lambda c: c.parallel_config.enable_expert_parallel,
        "leave it out: the slots already take the place of an expert-parallel shard",
    ),
    Refusal(
        "expert load balancing (--enable-eplb)",
        lambda c: c.parallel_config.enable_eplb,
        "leave it out: slots follow the load by themselves",
    ),
    Refusal(
        "dual batch overlap (--enable-dbo) or micro-batching",
        lambda c: c.parallel_config.use_ubatching,
        "leave it out",
    ),
    Refusal(
        "tensor parallelism",
        lambda c: c.parallel_config.tensor_parallel_size > 1,
        "use --tensor-parallel-size 1",
    ),
    Refusal(
        "pipeline parallelism",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "use --pipeline-parallel-size 1",
    ),
    Refusal(
        "prefill context parallelism",
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "use --prefill-context-parallel-size 1",
    ),
    Refusal(
        "data parallelism",
        lambda c: c.parallel_config.data_parallel_size > 1,
        "start one server for each replica",
    ),
    Refusal(
        "batch-invariant kernels (VLLM_BATCH_INVARIANT)",
        lambda c: os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"),
        "leave it out: where an expert is computed depends on what is in the slots, and so do the "
        "last bits of the output",
    ),
    Refusal(
        "asynchronous scheduling by the multiprocess executor of this vLLM",
        lambda c: (
            loses_errors_of_outputs()
            and bool(c.scheduler_config.async_scheduling)
            and c.parallel_config.distributed_executor_backend == "mp"
        ),
        "use --no-async-scheduling, or vLLM 0.25 or later: a failed step would stall the engine",
    ),
    Refusal(
        "LoRA (--enable-lora)",
        lambda c: c.lora_config is not None,
        "merge the adapter into the checkpoint",
    ),
    Refusal(
        "sleep mode (--enable-sleep-mode)",
        lambda c: c.model_config is not None and c.model_config.enable_sleep_mode,
        "leave it out: the experts are in host memory already",
    ),
    Refusal(
        "vLLM's own offloading of weights (--cpu-offload-gb)",
        lambda c: c.offload_config.uva.cpu_offload_gb > 0,
        "leave it out, and size the experts with slots_per_layer or gpu_memory_gib",
    ),
    Refusal(
        "vLLM's own prefetching of weights (--offload-group-size)",
        lambda c: c.offload_config.prefetch.offload_group_size > 0,
        "leave it out: group_size of the moe_offload settings does the same beside offloaded "
        "experts, and those are sized with slots_per_layer or gpu_memory_gib",
    ),
)


def refuse_features(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError that names each feature that is on and does not go with offload."""
    found = [refusal for refusal in REFUSALS if refusal.is_on(vllm_config)]
    if found:
        raise UnsupportedError(
            "moe_offload does not work with "
            + "; nor with ".join(f"{refusal.feature} ({refusal.instead})" for refusal in found)
        )


def refuse_whole_weights(worker: Any, reason: str) -> None:
    """From now on raise UnsupportedError, and change nothing, where weights are loaded or saved.

    Parameters stand for slots or buffers then, of which several share one. reason: why they do, in
    the words of the error.
    """
    refuse_reloading(worker, reason)
    _refuse_methods(worker, _SAVING, f"saved or summed up {reason}: do so without moe_offload")


def refuse_reloading(worker: Any, reason: str) -> None:
    """From now on raise UnsupportedError, and change nothing, where weights are loaded.

    By the worker, or by the model's own loader, which a trainer calls.
    """
    what = f"loaded again {reason}: restart the engine"
    _refuse_methods(worker, _RELOADING, what)
    _refuse_methods(worker.get_model(), ("load_weights",), what)


def _refuse_methods(owner: Any, names: Iterable[str], what: str) -> None:
    for name in names:
        if hasattr(owner, name):
            message = f"moe_offload: {name}: weights cannot be {what}"
            setattr(owner, name, functools.partial(_refuse, message))


def after_reloading(worker: Any, done: Callable[[], None]) -> None:
    """Call `done` whenever the worker has loaded weights again, and where it failed at that.

    Not every way of it goes through the layers' own loaders. done: a method, whose object this does
    not keep.
    """
    for name in _RELOADING:
        if hasattr(worker, name):
            method = getattr(worker, name)
            original = getattr(method, "followed", method)  # by a model that was loaded before
            setattr(worker, name, _followed(original, WeakMethod(done)))


def _followed(
    method: Callable[..., Any], done: WeakMethod[Callable[[], None]]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            call = done()
            if call is not None:
                call()

    both.followed = method  # type: ignore[attr-defined]
    return both


def _refuse(message: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(message)


def refuse_settings(config: OffloadConfig) -> None:
    """Raise an error for settings that need a GPU where there is none, or do nothing there."""
    if not current_platform.is_cpu():
        return
    split = [n for n in SPLIT_SETTINGS if getattr(config, n) != "auto"]
    instead = [f"leave out {', '.join(split)}"] if split else []
    if config.mode == "hybrid":
        split.insert(0, "mode='hybrid'")
        instead.append("use mode='cache', 'cpu' or 'stream'")
    if split:
        raise UnsupportedError(
            f"moe_offload: {', '.join(split)}: vLLM's CPU build has no bus to share the missing "
            f"experts with: {', and '.join(instead)} there"
        )
    if (
        isinstance(config.stream_experts, int)
        and config.stream_threshold == "auto"
        and config.mode != "stream"
    ):
        raise ConfigError(
            f"moe_offload: stream_experts={config.stream_experts}, but in vLLM's CPU build nothing "
            "is streamed unless stream_threshold says from how many rows on: give it, or leave out "
            "stream_experts"
        )
