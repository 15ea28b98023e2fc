"""What the device keeps of a streamed step is what is planned, on the state it shares.

Compiled where there is a CUDA device, elsewhere by Triton's interpreter (see `kernels`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import DEVICE, INTERPRETED, SIZES, marked, run_interpreted
from tests.device.test_step import Pair
from tests.routing.steps import Layer, layers, steps
from vllm_moe_offload.device.keep import DeviceKeep
from vllm_moe_offload.routing import LAST_TOKENS, POLICIES, LastUses, plan_kept

EXAMPLES = 12 if INTERPRETED else 300


class Kept(Pair):
    """A layer whose steps are decided and whose prompts are kept, both ways."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.keep = DeviceKeep(self.device)
        self.kept = 0

    def stream(
        self, ids: np.ndarray, requests: np.ndarray, at_hand: np.ndarray | None = None
    ) -> None:
        experts = self.layer.num_experts
        mapped = None
        if at_hand is not None:
            mapped = torch.from_numpy(np.where(at_hand, 3, -1).astype(np.int32)).to(DEVICE)
        self.keep.launch(
            torch.from_numpy(ids).to(DEVICE),
            torch.from_numpy(requests.astype(np.int32)).to(DEVICE),
            mapped,
        )
        last = LastUses.of(ids, requests, experts)
        here = np.ones(experts, np.bool_) if at_hand is None else at_hand
        pairs = plan_kept(self.table, self.policy, last, here)
        self.kept += len(pairs)
        listed = self.keep.kept[: int(self.keep.kept_count)].tolist()
        assert sorted(map(tuple, listed)) == sorted(pairs)
        np.testing.assert_array_equal(self.device.slot_of.cpu(), self.table.slot_of)
        np.testing.assert_array_equal(self.device.last_used.cpu(), self.policy.last_used)
        np.testing.assert_array_equal(self.device.value.cpu(), self.policy.value)
        assert int(self.device.step) == self.policy.step
        assert int(self.keep.counter) == self.kept


def drawn(layer: Layer, rng: np.random.Generator, rows: int) -> np.ndarray:
    """Int32 [T, K], some experts more often than others, some rows padding."""
    scores = rng.exponential(size=(rows, layer.num_experts)) * rng.exponential(
        size=layer.num_experts
    )
    ids = np.argsort(-scores, axis=1)[:, : layer.top_k].astype(np.int32)
    ids[rng.random(rows) < 0.1] = layer.num_experts
    return ids


@marked
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_prompts_between_decodes_are_kept_as_planned(
    policy: str, data: st.DataObject, seed: int
) -> None:
    pair = Kept(data.draw(layers(policy, sizes=SIZES)))
    lengths = st.lists(st.sampled_from([0, 1, 2, 5, LAST_TOKENS, 50]), max_size=4)
    rng = np.random.default_rng(seed)
    for step in steps(pair.layer, rng, 3):
        requests = np.cumsum([0, *data.draw(lengths)])
        at_hand = None
        if rng.random() < 0.5:
            at_hand = rng.random(pair.layer.num_experts) < 0.6
        # Rows behind the last request are padding that names experts.
        pair.stream(drawn(pair.layer, rng, int(requests[-1]) + 3), requests, at_hand)
        pair.step(*step)


@marked
@pytest.mark.parametrize("policy", ["lfru", "static"])
def test_the_biggest_layer_and_many_requests(policy: str) -> None:
    pair = Kept(Layer(512, 101, policy, 16, 16, 1))
    rng = np.random.default_rng(1)
    for lengths in ([2000], [1] * 20 + [300]):
        requests = np.cumsum([0, *lengths])
        pair.stream(drawn(pair.layer, rng, int(requests[-1])), requests)
    assert pair.kept > 101


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
