"""How many slots each layer gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_moe_offload.amounts import amount, gib_for
from vllm_moe_offload.errors import ConfigError, MemoryShortError


@dataclass(frozen=True)
class LayerShape:
    """What sizing needs to know of a layer. `expert_bytes`: bytes of one expert."""

    name: str
    num_experts: int
    expert_bytes: int


@dataclass(frozen=True)
class SlotPlan:
    """Slots of each layer, in order. `fits`: every expert of every layer has its own slot."""

    slots: tuple[int, ...]
    fits: bool


def check_slots(slots_per_layer: int, layer: str, num_experts: int) -> None:
    """ConfigError where these are more slots than the layer has experts."""
    if slots_per_layer > num_experts:
        raise ConfigError(
            f"slots_per_layer={slots_per_layer}, but {layer} has {num_experts} experts: give at "
            f"most {num_experts}"
        )


def plan_slots(
    layers: Sequence[LayerShape],
    *,
    slots_per_layer: int | None,
    budget_bytes: int | None,
) -> SlotPlan:
    """The same number of slots for every layer: given, or as many as `budget_bytes` holds.

    Give one of the two. A layer that has a slot for each expert leaves the rest of the budget to
    the others. Raises ConfigError when more slots are asked for than a layer has experts,
    MemoryShortError when the budget does not hold one slot for each layer.
    """
    if (slots_per_layer is None) == (budget_bytes is None):
        raise ValueError("give slots_per_layer or budget_bytes, one of them")
    if slots_per_layer is not None:
        for layer in layers:
            check_slots(slots_per_layer, layer.name, layer.num_experts)
        slots = [slots_per_layer for _ in layers]
    else:
        assert budget_bytes is not None
        slots = _fill(layers, budget_bytes)
    fits = all(n == layer.num_experts for n, layer in zip(slots, layers, strict=True))
    return SlotPlan(tuple(slots), fits)


def _fill(layers: Sequence[LayerShape], budget_bytes: int) -> list[int]:
    one_each = sum(layer.expert_bytes for layer in layers)
    if budget_bytes < one_each:
        # In one unit, but for what would be nothing in the other's.
        needed = amount(one_each, like=budget_bytes if one_each < 1000 * budget_bytes else None)
        raise MemoryShortError(
            f"{amount(budget_bytes)} for slots do not hold one expert for each of "
            f"{len(layers)} layers, which needs {needed}: the slots alone need at least "
            f"gpu_memory_gib={gib_for(one_each)}; or use mode='cpu', which needs no slots"
        )
    slots = [0 for _ in layers]
    left = budget_bytes
    while growing := [i for i, layer in enumerate(layers) if slots[i] < layer.num_experts]:
        row = sum(layers[i].expert_bytes for i in growing)
        rows = min(left // row, min(layers[i].num_experts - slots[i] for i in growing))
        if not rows:
            break
        for i in growing:
            slots[i] += rows
        left -= rows * row
    return slots
