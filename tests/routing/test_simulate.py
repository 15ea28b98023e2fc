"""Made-up routings: a real top-k, rows that know nothing of each other, fitted hit rates."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_moe_offload.routing import Residency
from vllm_moe_offload.routing.simulate import ROUTINGS, RoutingTable, simulate

E, K = 128, 8
WARM = 100


def draw(routing: str, **changes: int) -> RoutingTable:
    arguments = dict(steps=300, layers=6, rows=2, num_experts=E, top_k=K, seed=3)
    return simulate(routing, **(arguments | changes))  # type: ignore[arg-type]


def hit_rate(table: RoutingTable, slots: int, rows: int = 1) -> float:
    hits = needed = 0
    for layer in range(table.ids.shape[1]):
        residency = Residency(E, slots, "lru")
        for step, used in enumerate(table.used(layer, rows, E)):
            plan = residency.step(used)
            if step >= WARM:
                hits += plan.hits
                needed += plan.hits + plan.misses
    return hits / needed


@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_of_a_row_are_different_and_weights_are_shares(routing: str) -> None:
    table = draw(routing)
    assert table.ids.dtype == np.int32 and table.weights.dtype == np.float32
    assert table.ids.shape == table.weights.shape == (300, 6, 2, K)
    assert table.ids.min() >= 0 and table.ids.max() < E
    assert (np.diff(np.sort(table.ids, -1), axis=-1) > 0).all(), "drawn without replacement"
    assert (table.weights > 0).all()
    np.testing.assert_allclose(table.weights.sum(-1), 1, rtol=1e-5)
    assert (np.diff(table.weights, axis=-1) <= 0).all(), "the heaviest first"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_same_arguments_give_the_same_table(routing: str) -> None:
    one, same, other = draw(routing), draw(routing), draw(routing, seed=4)
    np.testing.assert_array_equal(one.ids, same.ids)
    np.testing.assert_array_equal(one.weights, same.weights)
    assert (one.ids != other.ids).any()


@pytest.mark.parametrize(("slots", "expected"), [(20, 0.68), (28, 0.76), (42, 0.87)])
def test_local_hits_as_real_models_do_at_batch_1(slots: int, expected: float) -> None:
    """20, 28 and 42 of 128 are 16, 22 and 33 %."""
    assert hit_rate(draw("local", layers=16, rows=1), slots) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("slots", [20, 28, 42])
def test_uniform_hits_by_chance(slots: int) -> None:
    assert hit_rate(draw("uniform"), slots) == pytest.approx(slots / E, abs=0.02)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_expert_is_as_popular_as_another(routing: str) -> None:
    """5 deviations: a local row keeps to its favourites for some 66 steps, so it counts once."""
    layers, rows = 24, 8
    counts = np.bincount(draw(routing, layers=layers, rows=rows).ids.ravel(), minlength=E)
    choices = layers * rows * 300 / (66 if routing == "local" else 1) * K / E
    assert abs(counts / counts.mean() - 1).max() < 5 / choices**0.5


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_and_layers_are_independent(routing: str) -> None:
    """Two streams share as many experts in a step as two random choices do: K * K / E."""
    table = draw(routing, layers=12, rows=6)

    def shared(one: np.ndarray, other: np.ndarray) -> float:
        return float((one[..., :, None] == other[..., None, :]).sum((-1, -2)).mean())

    ids = table.ids
    assert shared(ids[:, :, :-1], ids[:, :, 1:]) == pytest.approx(K * K / E, rel=0.1)
    assert shared(ids[:, :-1], ids[:, 1:]) == pytest.approx(K * K / E, rel=0.1)
    with_itself = shared(ids[:-1], ids[1:])
    assert (with_itself > 3) if routing == "local" else (with_itself < 0.6)


def test_a_row_forgets_within_the_table() -> None:
    """What `Playback` relies on: rows taken from 397 steps later have nothing in common."""
    ids = draw("local", steps=600).ids
    same = (ids[:-397, ..., :, None] == ids[397:, ..., None, :]).sum((-1, -2)).mean()
    assert same == pytest.approx(K * K / E, rel=0.2)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown routing 'zipf'; what exists: uniform, local"):
        draw("zipf")
    with pytest.raises(ValueError, match=r"top_k is 129: give 1 to 128"):
        draw("uniform", top_k=129)
