"""Layers through buffers of the device: experts for large steps, other parameters always."""

from vllm_moe_offload.stream.layer import InSlots, Keep, Streamed, StreamedLayer
from vllm_moe_offload.stream.memory import BufferMemory, buffer_bytes
from vllm_moe_offload.stream.pool import BufferPool, PoolPlan, TensorKind
from vllm_moe_offload.stream.prefetch import LayerPrefetcher
from vllm_moe_offload.stream.streamer import LayerStreamer
from vllm_moe_offload.stream.tail import CpuTail, TailTimes

__all__ = [
    "BufferMemory",
    "BufferPool",
    "CpuTail",
    "InSlots",
    "Keep",
    "LayerPrefetcher",
    "LayerStreamer",
    "PoolPlan",
    "Streamed",
    "StreamedLayer",
    "TailTimes",
    "TensorKind",
    "buffer_bytes",
]
