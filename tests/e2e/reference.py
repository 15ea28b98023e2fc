"""A checkpoint in float32 by transformers: a reference that needs no engine, and is not ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers


class Reference:
    """The model of a checkpoint, on the CPU."""

    def __init__(self, path: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model = model.eval()

    @torch.inference_mode()
    def log_probabilities(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """As `engines.log_probabilities`: of every token but the first of every sequence."""
        longest = max(map(len, sequences))
        # Behind a sequence, where no token of it looks.
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])
        is_token = torch.tensor([[k < len(s) for k in range(longest)] for s in sequences])
        logits = self._model(input_ids=ids, attention_mask=is_token.long()).logits
        values = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
        return values[is_token[:, 1:]].numpy()
