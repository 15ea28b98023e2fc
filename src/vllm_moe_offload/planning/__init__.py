"""How many slots each layer gets, and what each lane: from shapes, memory and measured rates."""

from vllm_moe_offload.planning.slots import LayerShape, SlotPlan, plan_slots
from vllm_moe_offload.planning.split import LaneRates, fetch_limits, promotion_limits

__all__ = ["LaneRates", "LayerShape", "SlotPlan", "fetch_limits", "plan_slots", "promotion_limits"]
