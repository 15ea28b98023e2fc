"""Compare the trained checkpoint in transformers with the implementation it was trained with.

Loads the model folder into ``Qwen3MoeForCausalLM`` and into ``train_demo.DemoMoE``, both in
float32 on the CPU, and prints the largest difference of their logits::

    python models/check_demo.py models/demo-moe
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from train_demo import ModelConfig, load_checkpoint
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

TEXT = "The kernel keeps a list of the pages that were used last, so that it can free the others."
TOLERANCE = 1e-3


def main() -> None:
    """Exit with an error when the logits differ by more than the tolerance."""
    folder = Path(sys.argv[1])
    reference = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_checkpoint(folder, ModelConfig(vocab_size=reference.config.vocab_size))
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        difference = (reference(ids).logits - model(ids)[0]).abs().max().item()
    print(f"{ids.numel()} tokens, largest logit difference {difference:.2e}")
    if tokenizer.decode(ids[0]) != TEXT or difference > TOLERANCE:
        sys.exit("the checkpoint does not load faithfully")


if __name__ == "__main__":
    main()
