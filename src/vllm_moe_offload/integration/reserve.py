"""What has to stay free of the GPU's memory after loading, so that the engine can start.

vLLM measures what a step takes after the model is loaded, and gives what is left to the KV cache.
Slots that are sized automatically have to be chosen before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_moe_offload.lanes import MAX_CAPTURED

# Beside what is counted below: CUDA graphs, attention's and NCCL's workspaces, fragmentation.
_REST = 1 << 30


def reserved_bytes(vllm_config: VllmConfig, moe_configs: Sequence[Any]) -> int:
    """Bytes for the KV cache, the largest step and the layers' tables.

    `moe_configs`: FusedMoEConfigs of the layers.
    """
    tables = sum(_tables(moe) for moe in moe_configs)
    return _kv_cache(vllm_config) + _step(vllm_config, moe_configs) + tables + _REST


def _tables(moe: Any) -> int:
    """What a layer's decisions take: a map and a list of pairs each wave, in int32.

    As for one slot: how many waves there are follows from the slots, which are not chosen yet.
    """
    waves = min(moe.num_experts, MAX_CAPTURED * moe.experts_per_token)
    return int(waves * 3 * moe.num_experts * 4)


def _kv_cache(vllm_config: VllmConfig) -> int:
    """As told; or one request of the longest length, and as much again."""
    told = vllm_config.cache_config.kv_cache_memory_bytes
    if told is not None:
        return told
    model = vllm_config.model_config
    heads = model.get_num_kv_heads(vllm_config.parallel_config)
    layers = model.get_num_layers(vllm_config.parallel_config)
    assert isinstance(model.dtype, torch.dtype)
    # Keys and values; of MLA one latent row is both, and the head's size that row's.
    rows = 1 if model.use_mla else 2
    row = rows * heads * model.get_head_size() * model.dtype.itemsize
    return 2 * layers * row * int(model.max_model_len)


def _step(vllm_config: VllmConfig, moe_configs: Iterable[Any]) -> int:
    """The MoE kernel's two workspaces and its output, or the logits and their sorted copies."""
    scheduler = vllm_config.scheduler_config
    hidden = vllm_config.model_config.get_hidden_size()
    tokens = scheduler.max_num_batched_tokens
    experts = max(
        (
            moe.experts_per_token
            * (2 * max(moe.intermediate_size_per_partition, hidden) + hidden)
            * moe.in_dtype.itemsize
            for moe in moe_configs
        ),
        default=0,
    )
    # A float32 sum and a few rows of the residual stream beside the experts.
    moe_step = tokens * (experts + 16 * hidden)
    logits = 4 * 4 * scheduler.max_num_seqs * vllm_config.model_config.get_vocab_size()
    return int(max(moe_step, logits))
