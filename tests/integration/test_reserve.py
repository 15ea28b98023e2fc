"""What is kept free beside slots that are sized automatically, of vLLM's own configurations."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402

from vllm_moe_offload.integration.reserve import reserved_bytes  # noqa: E402

LENGTH = 4096
DEEPSEEK = transformers.DeepseekV2Config(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    q_lora_rank=None,
    n_routed_experts=16,
    max_position_embeddings=LENGTH,
    architectures=["DeepseekV2ForCausalLM"],
)
QWEN = transformers.Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    max_position_embeddings=LENGTH,
    architectures=["Qwen3MoeForCausalLM"],
)


def of(tmp_path: Any, model: Any, **cache: Any) -> VllmConfig:
    model.save_pretrained(tmp_path)
    return VllmConfig(
        model_config=ModelConfig(
            str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=LENGTH
        ),
        cache_config=CacheConfig(**cache),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=LENGTH, max_num_batched_tokens=LENGTH, max_num_seqs=16
        ),
    )


@pytest.mark.parametrize(
    ("model", "row"),
    [
        (DEEPSEEK, 3 * (64 + 16) * 2),  # a latent row and its rotated part
        (QWEN, 3 * 2 * 2 * 32 * 2),  # keys and values of two heads
    ],
    ids=["MLA", "GQA"],
)
def test_the_kv_cache_is_that_of_two_of_the_longest_requests(
    model: Any, row: int, tmp_path: Any
) -> None:
    told = reserved_bytes(of(tmp_path, model, kv_cache_memory_bytes=0), [])
    assert reserved_bytes(of(tmp_path, model), []) - told == 2 * LENGTH * row


def test_a_draft_model_has_room_for_its_cache_and_its_dense_weights(tmp_path: Any) -> None:
    plain, drafting = of(tmp_path, QWEN), of(tmp_path, QWEN)
    draft = copy.copy(plain.model_config)
    drafting.speculative_config = SimpleNamespace(method="mtp", draft_model_config=draft)  # type: ignore[assignment]
    cache = 2 * LENGTH * 3 * 2 * 2 * 32 * 2
    assert reserved_bytes(drafting, []) - reserved_bytes(plain, []) == cache
    inner = QWEN.intermediate_size
    dense = 3 * (6 * 256 * 256 + 3 * 256 * inner) + 2 * 256 * 512
    assert reserved_bytes(drafting, [], draft) - reserved_bytes(drafting, []) == 2 * dense
