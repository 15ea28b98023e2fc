"""Random checkpoints with the experts of Qwen3-30B-A3B (128 of 2048x768, top-8), and a dense one.

The numbers of an FP8 checkpoint are codes and scales that are powers of two, so that the same
weights exist exactly in bf16: the float32 reference reads those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 128, 2048, 768, 512
KINDS = ("bf16", "fp8_block", "fp8_tensor", "fp8_channel")
_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 6144,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_OF_EXPERTS = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def write(kind: str, folder: Path, *, seed: int = 0, layers: int = LAYERS) -> tuple[Path, Path]:
    """Write a checkpoint of this kind and one of the same weights in bf16; returns both folders."""
    generator = torch.Generator("cuda").manual_seed(seed)
    quantised, plain = folder / kind, folder / f"{kind}-as-bf16"
    for target, settings in ((quantised, _quantisation(kind)), (plain, None)):
        target.mkdir(parents=True, exist_ok=True)
        config = _CONFIG | {"num_hidden_layers": layers}
        config |= {"quantization_config": settings} if settings else {}
        (target / "config.json").write_text(json.dumps(config))
    if kind == "bf16":
        plain = quantised
    shared = _shared(generator, layers)
    for target in {quantised, plain}:
        save_file(shared, target / "shared.safetensors")
    for layer in range(layers):
        codes: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}
        for name, weight in _experts(layer, generator):
            code, scale, exact = _quantise(weight, kind, generator)
            values[f"{name}.weight"] = exact.cpu()
            codes[f"{name}.weight"] = code.cpu()
            if scale is not None:
                suffix = "weight_scale_inv" if kind == "fp8_block" else "weight_scale"
                codes[f"{name}.{suffix}"] = scale.cpu()
        save_file(codes, quantised / f"layer{layer}.safetensors")
        if plain != quantised:
            save_file(values, plain / f"layer{layer}.safetensors")
    return quantised, plain


def write_dense(folder: Path, *, layers: int, seed: int = 0) -> Path:
    """Write a dense model in bf16, 385 MB a layer, norms of random numbers; returns its folder."""
    generator = torch.Generator("cuda").manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    hidden, intermediate, heads, kv_heads, head = 4096, 12288, 32, 8, 128
    config = {name: value for name, value in _CONFIG.items() if name not in _OF_EXPERTS} | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }
    (folder / "config.json").write_text(json.dumps(config))

    def norm(size: int) -> torch.Tensor:
        drawn = torch.rand(size, generator=generator, device="cuda") + 0.5
        return drawn.to(torch.bfloat16).cpu()

    shared = {
        "model.embed_tokens.weight": _random((VOCABULARY, hidden), generator, 40.0).cpu(),
        "lm_head.weight": _random((VOCABULARY, hidden), generator).cpu(),
        "model.norm.weight": norm(hidden),
    }
    save_file(shared, folder / "shared.safetensors")
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (kv_heads * head, hidden),
            "self_attn.v_proj": (kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        tensors = {name: _random(shape, generator).cpu() for name, shape in shapes.items()}
        tensors |= {f"self_attn.{name}": norm(head) for name in ("q_norm", "k_norm")}
        tensors |= {n: norm(hidden) for n in ("input_layernorm", "post_attention_layernorm")}
        prefix = f"model.layers.{layer}"
        named = {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}
        save_file(named, folder / f"layer{layer}.safetensors")
    return folder


def _random(shape: tuple[int, ...], generator: torch.Generator, width: float = 1.0) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, device="cuda")
    return (values * width / shape[-1] ** 0.5).to(torch.bfloat16)


def _shared(generator: torch.Generator, layers: int) -> dict[str, torch.Tensor]:
    tensors = {
        "model.embed_tokens.weight": _random((VOCABULARY, HIDDEN), generator, 40.0),
        "lm_head.weight": _random((VOCABULARY, HIDDEN), generator),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q_proj", 2048, HIDDEN),
            ("k_proj", 512, HIDDEN),
            ("v_proj", 512, HIDDEN),
            ("o_proj", HIDDEN, 2048),
        ):
            tensors[f"{prefix}.self_attn.{name}.weight"] = _random((rows, columns), generator)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = torch.ones(128, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        tensors[f"{prefix}.mlp.gate.weight"] = _random((EXPERTS, HIDDEN), generator, 4.0)
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _experts(layer: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    for expert in range(EXPERTS):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        yield f"{prefix}.gate_proj", _random((INTERMEDIATE, HIDDEN), generator)
        yield f"{prefix}.up_proj", _random((INTERMEDIATE, HIDDEN), generator)
        yield f"{prefix}.down_proj", _random((HIDDEN, INTERMEDIATE), generator)


def _quantise(
    weight: torch.Tensor, kind: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Codes, scales (None for bf16) and exactly what they stand for."""
    if kind == "bf16":
        return weight, None, weight
    rows, columns = weight.shape
    shape = {
        "fp8_block": (rows // 128, columns // 128),
        "fp8_channel": (rows, 1),
        "fp8_tensor": (1, 1),
    }[kind]
    exponent = torch.randint(-10, -7, shape, generator=generator, device="cuda")
    scale = torch.exp2(exponent.float())
    full = scale.repeat_interleave(rows // shape[0], 0).repeat_interleave(columns // shape[1], 1)
    code = (weight.float() / full).clamp(-440, 440).to(torch.float8_e4m3fn)
    exact = (code.float() * full).to(torch.bfloat16)
    return code, scale.reshape(()) if kind == "fp8_tensor" else scale, exact


def _quantisation(kind: str) -> dict | None:
    dense = [
        f"model.layers.{layer}.{name}"
        for layer in range(LAYERS)
        for name in (
            *(f"self_attn.{p}_proj" for p in ("q", "k", "v", "o", "qkv")),
            "mlp.gate",
        )
    ]
    if kind == "bf16":
        return None
    if kind in ("fp8_block", "fp8_tensor"):
        settings: dict = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": [*dense, "lm_head"],
        }
        return settings | ({"weight_block_size": [128, 128]} if kind == "fp8_block" else {})
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": [*dense, "lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
    }
