"""What has to stay free of the GPU's memory after loading, so that the engine can start.

vLLM measures what a step takes after the model is loaded, and gives what is left to the KV cache.
Slots that are sized automatically have to be chosen before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig

from vllm_moe_offload.lanes import MAX_CAPTURED

# Beside what is counted below: CUDA graphs, attention's and NCCL's workspaces, fragmentation.
_REST = 1 << 30


def reserved_bytes(
    vllm_config: VllmConfig, moe_configs: Sequence[Any], to_come: ModelConfig | None = None
) -> int:
    """Bytes for the KV cache, the largest step and the layers' tables.

    `moe_configs`: FusedMoEConfigs of the layers; `to_come`: a draft model that is still to be
    loaded, for whose weights but the experts there is to be room too.
    """
    tables = sum(_tables(moe) for moe in moe_configs)
    weights = _dense_weights(vllm_config, to_come) if to_come is not None else 0
    return _kv_cache(vllm_config) + _step(vllm_config, moe_configs) + tables + weights + _REST


def draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
    """The model that proposes tokens, where there is one: it is loaded after the other."""
    speculative = vllm_config.speculative_config
    # Ways to propose that have no layers name the model itself, or a copy of its configuration.
    if speculative is None or speculative.method == "extract_hidden_states":
        return None
    draft: ModelConfig | None = speculative.draft_model_config
    return None if draft is vllm_config.model_config else draft


def layers_of_experts(vllm_config: VllmConfig, model: ModelConfig | None) -> int:
    """How many layers of experts this model may have: all of its layers, if any has experts."""
    if model is None or not model.get_num_experts():
        return 0
    return int(model.get_num_layers(vllm_config.parallel_config))


def _dense_weights(vllm_config: VllmConfig, model: ModelConfig) -> int:
    """About what a model takes beside its experts.

    In each layer attention, one MLP and what joins a draft's layer to the model; an embedding and
    a head, which drafts share with the model only when they have been loaded.
    """
    hidden = model.get_hidden_size()
    inner = getattr(model.hf_text_config, "intermediate_size", None) or 4 * hidden
    layers = model.get_num_layers(vllm_config.parallel_config)
    numbers = layers * (6 * hidden * hidden + 3 * hidden * inner)
    numbers += 2 * hidden * model.get_vocab_size()
    assert isinstance(model.dtype, torch.dtype)
    return int(numbers * model.dtype.itemsize)


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
    model, draft = vllm_config.model_config, draft_model(vllm_config)
    token = sum(_kv_bytes(vllm_config, each) for each in (model, draft) if each is not None)
    return 2 * token * int(model.max_model_len)


def _kv_bytes(vllm_config: VllmConfig, model: ModelConfig) -> int:
    """What all layers of a model keep of one token."""
    heads = model.get_num_kv_heads(vllm_config.parallel_config)
    layers = model.get_num_layers(vllm_config.parallel_config)
    assert isinstance(model.dtype, torch.dtype)
    # Keys and values; of MLA one latent row is both, and the head's size that row's.
    rows = 1 if model.use_mla else 2
    return int(layers * rows * heads * model.get_head_size() * model.dtype.itemsize)


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
