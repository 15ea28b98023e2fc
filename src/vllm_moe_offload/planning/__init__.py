"""How many slots each layer gets, and what each lane: from shapes, memory and measured rates."""

from vllm_moe_offload.planning.correction import (
    LEAST_SECONDS,
    LaneTrials,
    LaneUse,
    correct_rates,
    corrected_level,
)
from vllm_moe_offload.planning.slots import LayerShape, SlotPlan, check_slots, plan_slots
from vllm_moe_offload.planning.split import LaneRates, fetch_limits, promotion_limits
from vllm_moe_offload.planning.stream import (
    are_small,
    larger_stream_experts,
    plan_with_buffers,
    stream_experts,
    stream_threshold,
)
from vllm_moe_offload.planning.tail import (
    CopiesAhead,
    TailRates,
    TailWorth,
    experts_for_cpu,
)

__all__ = [
    "LEAST_SECONDS",
    "CopiesAhead",
    "LaneRates",
    "LaneTrials",
    "LaneUse",
    "LayerShape",
    "SlotPlan",
    "TailRates",
    "TailWorth",
    "are_small",
    "check_slots",
    "correct_rates",
    "corrected_level",
    "experts_for_cpu",
    "fetch_limits",
    "larger_stream_experts",
    "plan_slots",
    "plan_with_buffers",
    "promotion_limits",
    "stream_experts",
    "stream_threshold",
]
