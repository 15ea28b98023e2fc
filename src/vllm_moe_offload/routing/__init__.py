"""Which experts stay, come and go: plain data and plain Python, no tensor of a device.

What is here is the reference for every device: a device that decides on its own (inside a CUDA
graph) must make the same decisions, step by step.
"""

from vllm_moe_offload.routing.lanes import LanePlan, plan_lanes, waves_needed
from vllm_moe_offload.routing.policy import POLICIES, Policy, make_policy
from vllm_moe_offload.routing.residency import Residency
from vllm_moe_offload.routing.table import SlotTable
from vllm_moe_offload.routing.waves import StepPlan, Wave, plan_step

__all__ = [
    "POLICIES",
    "LanePlan",
    "Policy",
    "Residency",
    "SlotTable",
    "StepPlan",
    "Wave",
    "make_policy",
    "plan_lanes",
    "plan_step",
    "waves_needed",
]
