"""Layers and steps, for the plan of the lanes and for every device that decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from vllm_moe_offload.routing import POLICIES

# Ids, weights, and the limits of fetches and of promotions.
Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Layer:
    num_experts: int
    num_slots: int
    policy: str
    top_k: int
    cache_topk: int
    num_waves: int

    @property
    def lanes(self) -> dict[str, Any]:
        """The keywords of `plan_lanes`."""
        return dict(cache_topk=self.cache_topk, num_waves=self.num_waves)


@st.composite
def layers(
    draw: st.DrawFn,
    policy: str | None = None,
    max_experts: int = 24,
    sizes: Sequence[tuple[int, int, int]] | None = None,
) -> Layer:
    """sizes: the (num_experts, top_k, cache_topk) that may be, any by default."""
    if sizes:
        num_experts, top_k, cache_topk = draw(st.sampled_from(sizes))
    else:
        num_experts = draw(st.integers(1, max_experts))
        top_k = draw(st.integers(1, min(num_experts, 16)))
        cache_topk = draw(st.integers(1, top_k))
    return Layer(
        num_experts=num_experts,
        num_slots=draw(st.integers(1, num_experts)),
        policy=policy or draw(st.sampled_from(list(POLICIES))),
        top_k=top_k,
        cache_topk=cache_topk,
        num_waves=draw(st.integers(1, 4)),
    )


def steps(layer: Layer, rng: np.random.Generator, count: int, max_tokens: int = 6) -> list[Step]:
    """`count` times ids [T, K], weights [T, K] with equal ones, and two tables of limits [E + 1].

    Some experts are drawn more often than others, but in some steps less often: the valued ones
    are in slots then and unused. Some rows are padding. Now and then the limits are another table:
    all misses, none, or numbers that need not even be monotone.
    """
    experts, k = layer.num_experts, layer.top_k
    popularity = rng.exponential(size=experts) ** 4
    limits, promotions = np.arange(experts + 1), np.zeros(experts + 1, np.int64)
    drawn = []
    for _ in range(count):
        tokens = int(rng.integers(0, max_tokens + 1))
        likely = 1 / popularity if rng.random() < 0.3 else popularity
        scores = rng.exponential(size=(tokens, experts)) * likely
        ids = np.argsort(-scores, axis=1)[:, :k].astype(np.int32)
        ids[rng.random(tokens) < 0.2] = experts
        weights = rng.integers(0, 4, (tokens, k)).astype(np.float32) / 4
        if rng.random() < 0.2:
            tables = [np.arange(experts + 1), np.zeros(experts + 1, np.int64)]
            tables.append(rng.integers(0, experts + 1, experts + 1))
            limits, promotions = (tables[rng.integers(len(tables))] for _ in range(2))
        drawn.append((ids, weights, limits, promotions))
    return drawn


def used_by(ids: np.ndarray, num_experts: int) -> set[int]:
    return {e for e in ids.ravel().tolist() if e < num_experts}
