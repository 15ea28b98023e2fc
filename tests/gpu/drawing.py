"""What an engine generates, with its log-probabilities, and how far from float32 these are.

Greedy tokens in batches of 1, 3 (which vLLM pads to 4), 8 and 32. A float32 engine reads the same
tokens afterwards; stock is judged by its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from tests.e2e.engines import decoded, errors, is_no_further, log_probabilities
from tests.gpu import checkpoints

BATCHES, NEW = (1, 3, 8, 32), 40
SIZES: dict[str, Any] = {
    "gpu_memory_utilization": 0.25,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
}
# Without torch.compile, which takes most of a start.
CAPTURED: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 4, 8, 32, 128],
    },
}
RUNNERS = {"V1 runner": "0", "V2 runner": "1"}


@dataclass(frozen=True)
class Drawn:
    """What an engine generated, and with which log-probabilities."""

    sequences: list[list[int]]
    values: np.ndarray


def prompts() -> list[list[list[int]]]:
    rng = np.random.default_rng(4)
    return [
        [rng.integers(3, checkpoints.VOCABULARY, rng.integers(4, 20)).tolist() for _ in range(size)]
        for size in BATCHES
    ]


def draw(llm: LLM) -> Drawn:
    sequences, values = [], []
    for batch in prompts():
        tokens, those = decoded(llm, batch, NEW)
        sequences += [p + t for p, t in zip(batch, tokens, strict=True)]
        values.append(those)
    return Drawn(sequences, np.concatenate(values))


def is_accepted(name: str, drawn: dict[str, Drawn], reference: LLM) -> bool:
    """Whether its error is within the allowance of stock's."""
    if name not in drawn:
        pytest.skip("nothing was generated")
    ours, theirs = (
        one.values - of_the_new(log_probabilities(reference, one.sequences), one.sequences)
        for one in (drawn[name], drawn["stock"])
    )
    exact = np.zeros_like(ours)
    print(f"\n{name}: {errors(ours, exact)}, stock {errors(theirs, exact)}")
    return is_no_further(ours, theirs, exact)


def of_the_new(values: np.ndarray, sequences: list[list[int]]) -> np.ndarray:
    """Of log-probabilities of all tokens but each first, those of the generated ones."""
    ends = np.cumsum([len(sequence) - 1 for sequence in sequences])
    return np.concatenate([values[end - NEW : end] for end in ends])
