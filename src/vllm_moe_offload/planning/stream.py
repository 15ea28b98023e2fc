"""When layers are streamed: from how many rows on, through what, and whether it has room."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_moe_offload.amounts import amount, gib_for
from vllm_moe_offload.errors import MemoryShortError
from vllm_moe_offload.planning.slots import LayerShape, SlotPlan, plan_slots

# Of memory that is to be divided, buffers nobody asked for by name take one part in so many at
# most: what they speed up is prefill, and every slot less slows down every step of decoding.
_SHARE = 2
# A buffer holds one part in so many of a layer's experts, unless it is said. Copying them takes ten
# times as long as computing them, so a part is computed while the next one is copied, and what
# larger buffers would take slots can have.
_PART = 8
# Of small experts it holds more, up to so many bytes. To launch a wave takes the host more than a
# millisecond, in which the bus copies some 60 MB: where the CPU takes half of a layer's experts and
# waves are an eighth of it, both lanes wait for the launches.
_LARGER_BYTES = 256 << 20
# If both buffers are then no more than one part in so many of the memory for slots and buffers.
_OF_MEMORY = 10


def stream_experts(num_experts: int) -> int:
    """How many of a layer's experts each of two buffers holds, unless it is said."""
    return -(-num_experts // _PART)


def larger_stream_experts(num_experts: int, expert_bytes: int) -> int:
    """The same where the buffers are small beside the slots; see `are_small`."""
    return min(num_experts, max(stream_experts(num_experts), _LARGER_BYTES // expert_bytes))


def are_small(buffers: int, slots: int) -> bool:
    """Whether buffers of so many bytes, or experts, take little beside so many in slots."""
    return buffers * _OF_MEMORY <= buffers + slots


def stream_threshold(
    num_experts: int, top_k: int, *, waves_seconds: float, stream_seconds: float
) -> int | None:
    """The most rows of a step that waves serve no slower than streaming; None: of any step.

    A step by waves takes its share of `waves_seconds`, which one that uses every expert takes:
    with T rows ``1 - (1 - K/E)^T`` of the experts are expected to be used, if all are used alike.
    A streamed step takes `stream_seconds`, whatever it uses.
    """
    if stream_seconds >= waves_seconds:
        return None
    unused = 1 - top_k / num_experts
    if unused <= 0:
        return 0
    return int(math.log1p(-stream_seconds / waves_seconds) / math.log(unused))


def plan_with_buffers(
    layers: Sequence[LayerShape],
    *,
    slots_per_layer: int | None,
    budget_bytes: int,
    buffer_bytes: int,
    is_wanted: bool,
    larger_bytes: int = 0,
) -> tuple[SlotPlan, int]:
    """Slots of each layer, and bytes for all buffers: one of those given, or 0 for none.

    Where buffers of `larger_bytes` fit and are small beside the slots they are taken instead of
    those of `buffer_bytes`.

    `slots_per_layer` are taken from `budget_bytes` first, and the buffers if they fit into the
    rest; sized automatically (None) the slots get what the buffers leave. Buffers that are not
    wanted by name (`is_wanted`) are left out where they would take more than half of what is
    divided, and none are needed where every expert has a slot. Raises as `plan_slots`, and
    MemoryShortError where there is no room for buffers that are wanted.
    """
    alone = plan_slots(
        layers,
        slots_per_layer=slots_per_layer,
        budget_bytes=budget_bytes if slots_per_layer is None else None,
    )
    if alone.fits or not buffer_bytes:
        return alone, 0
    least = (slots_per_layer or 1) * sum(layer.expert_bytes for layer in layers)
    slots = least if slots_per_layer is not None else budget_bytes - larger_bytes
    room = budget_bytes - least
    if larger_bytes <= room and are_small(larger_bytes, slots):
        buffer_bytes = max(buffer_bytes, larger_bytes)
    fits = buffer_bytes <= room
    if slots_per_layer is None and not is_wanted:
        fits = fits and buffer_bytes * _SHARE <= budget_bytes
    if not fits and is_wanted:
        advice = "give more memory, fewer slots,"
        if slots_per_layer is None:
            enough = gib_for(buffer_bytes + least)
            advice = f"with one slot a layer gpu_memory_gib={enough} would do; or give"
        raise MemoryShortError(
            f"two buffers for streamed layers need {amount(buffer_bytes)} beside "
            f"{amount(least)} of slots, and there are {amount(budget_bytes)} for both: {advice} "
            "smaller buffers (stream_experts), or leave stream_threshold out"
        )
    if not fits:
        return alone, 0
    if slots_per_layer is None:
        alone = plan_slots(layers, slots_per_layer=None, budget_bytes=budget_bytes - buffer_bytes)
    return alone, buffer_bytes
