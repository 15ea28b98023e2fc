"""Small random checkpoints of four mixture-of-experts architectures, in the Hugging Face form."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

VOCAB = 512
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def qwen3_moe() -> transformers.PreTrainedConfig:
    """16 experts, top-4, renormalised weights."""
    return transformers.Qwen3MoeConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )


def mixtral() -> transformers.PreTrainedConfig:
    """8 experts, top-2."""
    return transformers.MixtralConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


def olmoe() -> transformers.PreTrainedConfig:
    """16 experts, top-4, weights not renormalised."""
    return transformers.OlmoeConfig(
        **(COMMON | {"num_attention_heads": 2}),
        num_key_value_heads=2,
        intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=False,
    )


def deepseek_v2() -> transformers.PreTrainedConfig:
    """12 experts in 3 groups of which 2 are chosen, top-4, shared experts, one dense layer."""
    return transformers.DeepseekV2Config(
        **COMMON,
        num_key_value_heads=4,
        intermediate_size=128,
        moe_intermediate_size=32,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=4,
        n_group=3,
        topk_group=2,
        topk_method="group_limited_greedy",
        norm_topk_prob=False,
        routed_scaling_factor=2.0,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        # The sizes that vLLM's attention on a GPU is made for.
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        aux_loss_alpha=0.0,
    )


NUM_EXPERTS = {"qwen3_moe": 16, "mixtral": 8, "olmoe": 16, "deepseek_v2": 12}
ARCHITECTURES = {f.__name__: f for f in (qwen3_moe, mixtral, olmoe, deepseek_v2)}


def write(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the architecture `name` with random float32 weights to `folder`; returns `folder`.

    Routers are drawn wider than the rest, so that few routings are near a tie.
    """
    config = ARCHITECTURES[name]()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                width = 4.0 if parameter_name.endswith("gate.weight") else 1.0
                parameter.normal_(0.0, width / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return folder
