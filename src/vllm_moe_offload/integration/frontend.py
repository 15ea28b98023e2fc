"""Reading and refusing the configuration where the engine's own configuration is made."""

from __future__ import annotations

import functools
import os
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_moe_offload.config import ADDITIONAL_CONFIG_KEY, OffloadConfig
from vllm_moe_offload.errors import ConfigError
from vllm_moe_offload.integration.compat import check_version
from vllm_moe_offload.integration.refusals import refuse_features


def install() -> None:
    """Check the settings as soon as vLLM has made its configuration, before any process starts."""
    original = EngineArgs.create_engine_config
    if hasattr(original, "__moe_offload__"):
        return

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        vllm_config = original(self, *args, **kwargs)
        configure(vllm_config)
        return vllm_config

    create_engine_config.__moe_offload__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def configure(vllm_config: VllmConfig) -> OffloadConfig | None:
    """The offload configuration asked for, or None; refuses what does not go with it.

    Writes the settings, those of the environment included, into `additional_config`, which every
    worker receives: a worker on another host sees what this process saw.
    """
    config = OffloadConfig.resolve(vllm_config.additional_config, os.environ)
    if config is None:
        return None
    check_version()
    refuse_features(vllm_config)
    if not isinstance(vllm_config.additional_config, dict):
        raise ConfigError(
            "additional_config is a "
            f"{type(vllm_config.additional_config).__name__}, which cannot carry the moe_offload "
            "settings to the workers: give a mapping"
        )
    vllm_config.additional_config[ADDITIONAL_CONFIG_KEY] = config.settings()
    return config
