"""Which experts stay, come and go: plain data and plain Python, no tensor of a device.

What is here is the reference for every device: a device that decides on its own (inside a CUDA
graph) must make the same decisions, step by step.
"""

from vllm_moe_offload.routing.kept import LAST_TOKENS, LastUses, observe_last, plan_kept
from vllm_moe_offload.routing.lanes import LanePlan, plan_lanes, waves_needed
from vllm_moe_offload.routing.policy import POLICIES, Policy, make_policy
from vllm_moe_offload.routing.residency import Residency
from vllm_moe_offload.routing.table import SlotTable
from vllm_moe_offload.routing.waves import StepPlan, Wave, plan_step

__all__ = [
    "LAST_TOKENS",
    "POLICIES",
    "LanePlan",
    "LastUses",
    "Policy",
    "Residency",
    "SlotTable",
    "StepPlan",
    "Wave",
    "make_policy",
    "observe_last",
    "plan_kept",
    "plan_lanes",
    "plan_step",
    "waves_needed",
]
