"""Host memory that holds every expert."""

from vllm_moe_offload.host.dummy import fill_dummy
from vllm_moe_offload.host.store import HostStore

__all__ = ["HostStore", "fill_dummy"]
