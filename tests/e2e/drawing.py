"""Tokens drawn in batches of several sizes, with the log-probability each was drawn with.

By chance, which is the same for every engine: a model that draws greedily soon repeats itself, and
what it repeats counts as one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm import LLM

from tests.e2e import checkpoints
from tests.e2e.engines import decoded

BATCHES, NEW, SEEDS = (1, 3, 8, 32), 40, (0, 100)


@dataclass(frozen=True)
class Drawn:
    """What an engine generated: prompts with what followed, and log p of what followed."""

    sequences: list[list[int]]
    values: np.ndarray

    def of_the_new(self, values: np.ndarray) -> np.ndarray:
        """Of log-probabilities of all tokens but each first, those of the generated ones."""
        ends = np.cumsum([len(sequence) - 1 for sequence in self.sequences])
        return np.concatenate([values[end - NEW : end] for end in ends])


def prompts(batches: Sequence[int] = BATCHES) -> list[list[list[int]]]:
    """A batch of each size."""
    rng = np.random.default_rng(4)
    return [
        [rng.integers(3, checkpoints.VOCAB, rng.integers(4, 20)).tolist() for _ in range(size)]
        for size in batches
    ]


def draw(llm: LLM, seeds: Sequence[int] = SEEDS, batches: Sequence[int] = BATCHES) -> Drawn:
    """`NEW` tokens after each prompt, once for each seed."""
    sequences, values = [], []
    for seed in seeds:
        for batch in prompts(batches):
            tokens, those = decoded(llm, batch, NEW, seed)
            sequences += [p + t for p, t in zip(batch, tokens, strict=True)]
            values.append(those)
    return Drawn(sequences, np.concatenate(values))
