"""How many slots each layer gets, from the model's shape and the memory there is."""

from vllm_moe_offload.planning.slots import LayerShape, SlotPlan, plan_slots

__all__ = ["LayerShape", "SlotPlan", "plan_slots"]
