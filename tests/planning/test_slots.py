"""Slots of each layer from a number or a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_offload import ConfigError, MemoryShortError
from vllm_moe_offload.planning import LayerShape, plan_slots

LAYERS = [LayerShape("a", 8, 100), LayerShape("b", 16, 50)]


def test_a_number_is_taken_as_it_is() -> None:
    plan = plan_slots(LAYERS, slots_per_layer=8, budget_bytes=None)
    assert (plan.slots, plan.fits) == ((8, 8), False)


def test_more_slots_than_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slots_per_layer=9, but a has 8 experts"):
        plan_slots(LAYERS, slots_per_layer=9, budget_bytes=None)


def test_a_budget_below_one_slot_each_is_refused_with_both_numbers() -> None:
    layers = [LayerShape("a", 8, 24576), LayerShape("b", 16, 49152)]
    with pytest.raises(
        MemoryShortError,
        match=r"10\.5 KiB for slots do not hold one expert for each of 2 layers, which needs 72\.0 "
        r"KiB: the slots alone need at least gpu_memory_gib=0\.0000687; or use mode='cpu'",
    ):
        plan_slots(layers, slots_per_layer=None, budget_bytes=10737)
    assert plan_slots(layers, slots_per_layer=None, budget_bytes=int(0.0000687 * 2**30)).slots


def test_exactly_one_size_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="one of them"):
        plan_slots(LAYERS, slots_per_layer=None, budget_bytes=None)


@given(budget=st.integers(150, 4000))
def test_a_budget_is_used_and_not_exceeded(budget: int) -> None:
    plan = plan_slots(LAYERS, slots_per_layer=None, budget_bytes=budget)
    taken = sum(s * layer.expert_bytes for s, layer in zip(plan.slots, LAYERS, strict=True))
    assert taken <= budget
    assert plan.fits == (plan.slots == (8, 16))
    one_more = sum(
        min(s + 1, layer.num_experts) * layer.expert_bytes
        for s, layer in zip(plan.slots, LAYERS, strict=True)
    )
    assert plan.fits or one_more > budget
