"""Host memory that holds what is offloaded, and who else is on the host."""

from vllm_moe_offload.host.dummy import fill_dummy
from vllm_moe_offload.host.neighbours import Neighbours
from vllm_moe_offload.host.pages import available_memory
from vllm_moe_offload.host.store import HostStore, not_mapped

__all__ = ["HostStore", "Neighbours", "available_memory", "fill_dummy", "not_mapped"]
