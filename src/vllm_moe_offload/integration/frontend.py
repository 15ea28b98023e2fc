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
        raise ConfigError(f"moe_offload settings: {error}") from None


def configure(vllm_config: VllmConfig) -> OffloadConfig | None:
    """The offload configuration asked for, or None; refuses what does not go with it.

    Writes the settings, those of the environment included, into `additional_config`, which every
    worker receives: a worker on another host sees what this process saw.
    """
    config = OffloadConfig.resolve(vllm_config.additional_config, os.environ)
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
