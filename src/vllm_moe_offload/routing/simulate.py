"""Routings made up for measuring: what is known of real ones, without a trained model.

Each row (a request, or a token of a prompt) of each layer has a state of its own, independent of
every other row and layer: a score for each expert that drifts, ``z' = memory * z + noise`` with
unit variance, plus fresh noise of each step. The row's experts of a step are its K highest scores,
highest first, and their weights the softmax of those.

Two numbers make ``local``: `memory` is how slowly a row's favourites change, `noise` how much of a
step is chance. They were fitted (grid of 0.96-0.99 by 0.55-0.8, float32, 128 experts, top-8) to the
hit rates that LRU reaches on real models at batch 1: 68, 76 and 87 % with 16, 22 and 33 % of the
experts in slots; the fit gives 67.5, 77 and 86 %. Popularity that does not drift was left out: it
needs a third number and is shared by requests, which here have nothing in common.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RoutingModel:
    """How scores move from step to step. `memory` 0 and `noise` 0: each step is drawn anew."""

    memory: float
    noise: float


ROUTINGS = {
    "uniform": RoutingModel(memory=0.0, noise=0.0),
    "local": RoutingModel(memory=0.98, noise=0.69),
}


@dataclass(frozen=True)
class RoutingTable:
    """A routing for each row of each layer of each step.

    `ids`: int32 ``[steps, layers, rows, K]``, the K different experts of a row, heaviest first.
    `weights`: float32 of the same shape, positive, the sum of each row is 1.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    def used(self, layer: int, rows: int, num_experts: int) -> npt.NDArray[np.bool_]:
        """Bool ``[steps, E]``: the experts that `layer` needs for the first `rows` rows."""
        steps = len(self.ids)
        marks = np.zeros((steps, num_experts), np.bool_)
        marks[np.arange(steps)[:, None], self.ids[:, layer, :rows].reshape(steps, -1)] = True
        return marks


def simulate(
    routing: str,
    *,
    steps: int,
    layers: int,
    rows: int,
    num_experts: int,
    top_k: int,
    seed: int = 0,
) -> RoutingTable:
    """Draw a table. The same arguments give the same table in every process.

    Raises ValueError for a routing that does not exist or a `top_k` above `num_experts`.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"unknown routing {routing!r}; what exists: {', '.join(ROUTINGS)}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}: give 1 to {num_experts}, the number of experts")
    model = ROUTINGS[routing]
    rng = np.random.default_rng(seed)
    streams = layers * rows

    def draw() -> npt.NDArray[np.float32]:
        return rng.standard_normal((streams, num_experts), np.float32)

    ids = np.empty((steps, streams, top_k), np.int32)
    weights = np.empty((steps, streams, top_k), np.float32)
    fresh = np.float32((1 - model.memory**2) ** 0.5)
    state = draw()
    for step in range(steps):
        if step:
            state = (
                draw() if model.memory == 0 else np.float32(model.memory) * state + fresh * draw()
            )
        scores = state + np.float32(model.noise) * draw() if model.noise else state
        chosen = np.argpartition(scores, num_experts - top_k, axis=1)[:, num_experts - top_k :]
        values = np.take_along_axis(scores, chosen, 1)
        order = np.argsort(-values, axis=1)
        ids[step] = np.take_along_axis(chosen, order, 1)
        values = np.take_along_axis(values, order, 1)
        shares = np.exp(values - values[:, :1])
        weights[step] = shares / shares.sum(1, keepdims=True)
    shape = (steps, layers, rows, top_k)
    return RoutingTable(ids.reshape(shape), weights.reshape(shape))
