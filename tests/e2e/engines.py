"""Running vLLM in this process: the same prompts, generated from and read back."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams, TokensPrompt

CHUNK = 64  # tokens of one step: longer prompts are prefilled in several
NEW_TOKENS = 12
ALLOWED = 1.25  # how much further from float32 than stock is still the same


@contextmanager
def engine(model: Path, *, dtype: str = "float32", **arguments: Any) -> Iterator[LLM]:
    """A running engine over `model`; gone, with its memory, afterwards."""
    llm = LLM(
        str(model),
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
        **(
            {
                "max_model_len": 512,
                "max_num_seqs": 16,
                "enforce_eager": True,
                "kv_cache_memory_bytes": 64 << 20,
                "max_num_batched_tokens": CHUNK,
            }
            | arguments
        ),
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@dataclass(frozen=True)
class Prompts:
    """Batches of 1, 5 and 16 prompts; some are longer than a step's tokens."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def draw(cls, vocabulary: int, seed: int = 1) -> Prompts:
        rng = np.random.default_rng(seed)

        def prompt(length: int) -> tuple[int, ...]:
            return tuple(int(t) for t in rng.integers(3, vocabulary, length))

        return cls(
            (
                (prompt(150),),
                tuple(prompt(n) for n in (1, 7, 70, 20, 33)),
                tuple(prompt(n) for n in rng.integers(2, 40, 16)),
            )
        )


def greedy(llm: LLM, prompts: Prompts) -> list[list[int]]:
    """The tokens that follow each prompt, batch by batch."""
    parameters = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    return [
        list(output.outputs[0].token_ids)
        for batch in prompts.batches
        for output in llm.generate(
            [TokensPrompt(prompt_token_ids=list(p)) for p in batch], parameters, use_tqdm=False
        )
    ]


def log_probabilities(llm: LLM, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """log p(token | those before it) of every token but the first of every sequence."""
    parameters = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(s)) for s in sequences], parameters, use_tqdm=False
    )
    values: list[float] = []
    for sequence, output in zip(sequences, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(sequence[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            values.append(entry[token].logprob)
    return np.array(values)


def decoded(
    llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int | None = None
) -> tuple[list[list[int]], np.ndarray]:
    """Tokens after each prompt, all prompts at once, and log p of each as it was drawn.

    Greedily, or by chance: the same chance in every engine that is given the same seed.
    """
    parameters = [
        SamplingParams(
            temperature=0 if seed is None else 1,
            seed=None if seed is None else seed + number,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        for number in range(len(prompts))
    ]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(p)) for p in prompts], parameters, use_tqdm=False
    )
    drawn = [output.outputs[0] for output in outputs]
    tokens = [list(one.token_ids) for one in drawn]
    values = [
        entry[token].logprob
        for one in drawn
        for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)
    ]
    return tokens, np.array(values)


def stats(llm: LLM) -> dict[str, Any]:
    """What the offloaded layers have done since the last reset."""
    (result,) = llm.collective_rpc("moe_offload_stats")
    return result


def resize(llm: LLM, slots: int) -> None:
    """Give every layer `slots` empty slots and start counting again."""
    llm.collective_rpc("moe_offload_resize", args=(slots,))
    llm.collective_rpc("moe_offload_reset_stats")


def sequences_for(vocabulary: int, draws: int = 8) -> list[list[int]]:
    """Random sequences, some 5000 tokens: the 99th percentile of one draw's is six numbers'."""
    prompts = [Prompts.draw(vocabulary, seed) for seed in range(1, 1 + draws)]
    return [list(p) for one in prompts for batch in one.batches for p in batch]


def errors(of: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Mean and 99th percentile of the absolute error."""
    error = np.abs(of - reference)
    return float(error.mean()), float(np.percentile(error, 99))


def is_no_further(ours: np.ndarray, stock: np.ndarray, reference: np.ndarray) -> bool:
    """Whether both figures of ours are at most `ALLOWED` of stock's."""
    return all(
        mine <= ALLOWED * theirs
        for mine, theirs in zip(errors(ours, reference), errors(stock, reference), strict=True)
    )
