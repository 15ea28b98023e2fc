"""What an expert is: what it computes, which tensors it is made of, how its numbers are stored.

Shape letters used in every docstring of the project: T tokens, K experts routed to per token,
E experts of a layer, S slots of a layer, H hidden size, I intermediate size.
"""

from vllm_moe_offload.experts.activation import Activation
from vllm_moe_offload.experts.format import Format
from vllm_moe_offload.experts.layout import ExpertLayout, TensorSpec
from vllm_moe_offload.experts.spec import ExpertSpec

__all__ = ["Activation", "ExpertLayout", "ExpertSpec", "Format", "TensorSpec"]
