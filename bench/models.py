"""Models to measure on, as a config.json (vLLM makes the weights up) or a random checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
    "mixtral-8x7b": dict(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
}
MODELS["qwen3-235b-a22b"] = MODELS["qwen3-30b-a3b"] | dict(
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_hidden_layers=94,
    num_attention_heads=64,
)
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8-block": dict(
        quant_method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
    ),
}


@dataclass(frozen=True)
class Shape:
    """What is measured. `expert_bytes`: one expert of one layer, its scales included."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    expert_bytes: int

    @property
    def expert_bytes_total(self) -> int:
        """All experts of all layers."""
        return self.layers * self.experts * self.expert_bytes

    @classmethod
    def of(cls, folder: Path, dtype: str = "auto") -> Shape:
        """Read from the config.json in `folder`. `dtype`: as vLLM's, for unquantised experts."""
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{folder}/config.json is no JSON object")

        def first(*names: str) -> Any:
            for name in names:
                if config.get(name) is not None:
                    return config[name]
            raise ValueError(f"{folder}/config.json has none of {', '.join(names)}")

        hidden = first("hidden_size")
        intermediate = first("moe_intermediate_size", "intermediate_size")
        numbers = 3 * hidden * intermediate
        quantised = config.get("quantization_config")
        if quantised is None:
            dtype = first("dtype", "torch_dtype") if dtype == "auto" else dtype
            expert_bytes = numbers * (4 if dtype in ("float", "float32") else 2)
        elif block := quantised.get("weight_block_size"):
            expert_bytes = numbers + numbers // (block[0] * block[1]) * 4
        else:
            raise ValueError(f"{folder}: no bytes an expert known for {quantised}")
        return cls(
            layers=first("num_hidden_layers") - config.get("first_k_dense_replace", 0),
            experts=first("num_experts", "num_local_experts", "n_routed_experts"),
            top_k=first("num_experts_per_tok"),
            hidden=hidden,
            intermediate=intermediate,
            expert_bytes=expert_bytes,
        )


def write_config(name: str, layers: int | None, format: str, folder: Path) -> Path:
    """Write config.json of the model `name` cut to `layers` in `format`; returns `folder`."""
    import transformers

    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; what exists: {', '.join(MODELS)}, or a folder")
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; what exists: {', '.join(FORMATS)}")
    fields = dict(MODELS[name])
    if layers is not None:
        fields["num_hidden_layers"] = layers
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    if FORMATS[format] is not None:
        written["quantization_config"] = FORMATS[format]
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of as many words as the config.json there has, for a server to start."""
    import tokenizers
    import transformers

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = tokenizers.models.WordLevel({f"w{i} ": i for i in range(size)}, unk_token="w0 ")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="w0 ", eos_token="w1 "
    ).save_pretrained(folder)


def write_checkpoint(name: str, layers: int, folder: Path, *, seed: int = 0) -> Path:
    """Write a bf16 checkpoint of random weights with that config; returns `folder`.

    For timing how files are loaded, so the weights repeat a block of random numbers: drawing them
    all would take minutes. A layer of 30B-A3B is 1.2 GB.
    """
    import torch
    import transformers

    write_config(name, layers, "bf16", folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(1 << 22, generator=generator).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = parameter.view(-1)
            for part in numbers.split(len(block)):
                part.copy_(block[: len(part)])
            numbers.mul_(parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder
