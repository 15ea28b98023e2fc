"""Reading and refusing the configuration where the engine's own configuration is made."""

from __future__ import annotations

import functools
import os
from typing import Any

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_moe_offload.config import (
    ADDITIONAL_CONFIG_KEY,
    ENGINE_VARIABLES,
    OFFLOAD_ARCHITECTURE,
    PING_PONG_QUANTIZATION,
    OffloadConfig,
    variable_names,
)
from vllm_moe_offload.errors import ConfigError
from vllm_moe_offload.integration.compat import check_version
from vllm_moe_offload.integration.metrics import FOLDER_VARIABLE, offer
from vllm_moe_offload.integration.refusals import refuse_features, refuse_settings


def install() -> None:
    """Check the settings as soon as vLLM has made its configuration, before any process starts."""
    original = EngineArgs.create_engine_config
    if hasattr(original, "__moe_offload__"):
        return

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        vllm_config = original(self, *args, **kwargs)
        config = configure(vllm_config)
        if config is not None:
            _check_engine(config)
            if self.disable_log_stats:
                os.environ.pop(FOLDER_VARIABLE, None)
            else:
                offer()
        return vllm_config

    for name in (*variable_names(), *ENGINE_VARIABLES):
        # Known to vLLM, which otherwise warns of them, or refuses them where it is told to.
        envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))
    create_engine_config.__moe_offload__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def _check_engine(config: OffloadConfig) -> None:
    """Refuse an instruction set or a number of threads that this host lacks, before any worker."""
    from vllm_moe_offload.engine import CpuExpertEngine

    try:
        CpuExpertEngine(config.engine_threads).close()
    except ValueError as error:
        raise ConfigError(f"moe_offload settings: {of_setting(config, error)}") from None


def of_setting(config: OffloadConfig, error: ValueError) -> str:
    """What the CPU expert engine refuses, under the setting or variable that asked for it."""
    text = str(error)
    if config.engine_threads is None or text.startswith(tuple(ENGINE_VARIABLES)):
        return text
    return f"cpu_threads={config.cpu_threads}: {text}"


def configure(vllm_config: VllmConfig, asked_by: str | None = None) -> OffloadConfig | None:
    """The offload configuration asked for, or None; refuses what does not go with it.

    Writes the settings, those of the environment included, into `additional_config`, which every
    worker receives: a worker on another host sees what this process saw. asked_by: who else asks
    for offload, with mode="stream", in the words of an error.
    """
    _refuse_draft_model(vllm_config)
    config = OffloadConfig.resolve(vllm_config.additional_config, os.environ)
    asked_by = asked_by or asked_by_model(vllm_config.model_config)
    if asked_by is not None:
        config = OffloadConfig.streaming(config, asked_by)
    if config is None:
        return None
    check_version()
    refuse_settings(config)
    refuse_features(vllm_config)
    if not isinstance(vllm_config.additional_config, dict):
        raise ConfigError(
            "additional_config is a "
            f"{type(vllm_config.additional_config).__name__}, which cannot carry the moe_offload "
            "settings to the workers: give a mapping"
        )
    vllm_config.additional_config[ADDITIONAL_CONFIG_KEY] = config.settings()
    return config


def _refuse_draft_model(vllm_config: VllmConfig) -> None:
    """mode="stream" passes the layers of one model through its buffers."""
    speculative = vllm_config.speculative_config
    asked_by = asked_by_model(getattr(speculative, "draft_model_config", None))
    if asked_by is not None:
        raise ConfigError(
            f"{asked_by} asks for offload with mode='stream' for a draft model, which that mode "
            "does not take: leave it out of the speculative settings"
        )


def asked_by_model(model_config: Any) -> str | None:
    """What of the model's configuration asks for offload."""
    if model_config is None:
        return None
    if model_config.quantization == PING_PONG_QUANTIZATION:
        return f"quantization={PING_PONG_QUANTIZATION!r}"
    if OFFLOAD_ARCHITECTURE in model_config.architectures:
        return f"the architecture {OFFLOAD_ARCHITECTURE}"
    return None
