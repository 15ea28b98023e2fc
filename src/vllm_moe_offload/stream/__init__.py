"""Whole layers through two buffers, for steps that need nearly every expert."""

from vllm_moe_offload.stream.memory import BufferMemory, buffer_bytes
from vllm_moe_offload.stream.streamer import InSlots, LayerStreamer, Streamed, StreamedLayer
from vllm_moe_offload.stream.tail import CpuTail

__all__ = [
    "BufferMemory",
    "CpuTail",
    "InSlots",
    "LayerStreamer",
    "Streamed",
    "StreamedLayer",
    "buffer_bytes",
]
