"""The ways to serve an expert, and the layer that sums them.

resident: the expert is in a slot and the device computes it; cpu: the engine computes it from host
memory. A layer's output is the sum of what its lanes return.
"""

from vllm_moe_offload.lanes.base import Computing, Lane, LaneBeside
from vllm_moe_offload.lanes.captured import MAX_CAPTURED, AskingLayer, CapturedLayer
from vllm_moe_offload.lanes.counters import Counters
from vllm_moe_offload.lanes.cpu import CpuLane
from vllm_moe_offload.lanes.engine import EngineLane
from vllm_moe_offload.lanes.layer import OffloadedLayer

__all__ = [
    "MAX_CAPTURED",
    "AskingLayer",
    "CapturedLayer",
    "Computing",
    "Counters",
    "CpuLane",
    "EngineLane",
    "Lane",
    "LaneBeside",
    "OffloadedLayer",
]
