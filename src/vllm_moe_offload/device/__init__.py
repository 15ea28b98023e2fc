"""The device that computes the model, as the rest of the package sees it."""

from vllm_moe_offload.device.base import Device, SlotCache
from vllm_moe_offload.device.host import HostDevice

__all__ = ["Device", "HostDevice", "SlotCache"]
