"""Host memory that holds every expert."""

from vllm_moe_offload.host.store import HostStore

__all__ = ["HostStore"]
