"""Host memory that the GPU reads where it lies, and a kernel that copies experts from there."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.host import HostDevice
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.experts.layout import TensorSpec
from vllm_moe_offload.host import HostStore

# Numbers of a program of the sum.
_BLOCK = 4096


def create_cpu_mapped_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on the CPU whose memory is page-locked and mapped for the GPU.

    It takes as many bytes as it has, to whole pages (torch's own page-locked memory goes up to the
    next power of two), and is given back with its last view. Without a GPU it is ordinary memory.
    Raises MemoryShortError where there is not enough, or not enough that may be locked, and
    ValueError for a negative size.
    """
    shape = tuple(shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape} was asked for: give sizes of 0 or more")
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if torch.cuda.is_available():
        from vllm_moe_offload.device.cuda import register, unregister
    else:
        register, unregister = HostDevice().register, HostDevice().unregister
    store = HostStore(register, unregister)
    (block,) = store.allocate(ExpertLayout((TensorSpec("mapped", shape, dtype),)), 1).values()
    store.prepare()
    store.wait([block])
    return block[0]


def copy_all_experts_to_gpu(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy `src` to `dst` by a Triton kernel on the current stream; may be captured.

    `src` has to live until the copy has ended, and as long as a graph that holds it. Without a GPU
    it is an ordinary copy.

    src: [E, ...] of `create_cpu_mapped_tensor`, or other memory that the GPU reads at the address
    the host has for it; dst: the same shape and dtype, on the GPU. Experts of whole words of 4
    bytes, which all are but for a few small tensors, are copied at the bus's rate.

    Raises ValueError for tensors that do not agree, are not contiguous, or a `src` that the GPU
    does not read.
    """
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise ValueError(
            f"src is {tuple(src.shape)} of {src.dtype} and dst {tuple(dst.shape)} of {dst.dtype}: "
            "give tensors of one shape and dtype"
        )
    # CUDA registers no memory of no bytes.
    if dst.is_cuda and src.numel() and not (src.is_cuda or src.is_pinned()):
        raise ValueError(
            "src is in memory that the GPU does not read: take create_cpu_mapped_tensor for it"
        )
    for name, tensor in (("src", src), ("dst", dst)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: give a tensor without gaps")
    if not dst.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        dst.copy_(src)
        return
    if not src.numel():
        return
    if not src.ndim:
        src, dst = src.view(1), dst.view(1)
    number = torch.arange(len(src), dtype=torch.int32, device=dst.device)
    count = torch.full((), len(src), dtype=torch.int32, device=dst.device)
    fetch = ExpertFetch({"experts": src}, {"experts": dst})
    fetch.launch(torch.stack([number, number], 1), count)


def add_mapped(total: torch.Tensor, addend: torch.Tensor) -> None:
    """`total` += `addend`, on the current stream, which reads `addend` where it lies.

    Not by a copy: that would come behind all that the copy engine has been given. `addend` has to
    be left as it is until the stream has come by. Without a GPU it is an ordinary sum.

    total: contiguous float32 of any shape; addend: the same, or bf16, in host memory, page-locked
    where `total` is on the GPU.
    """
    if total.shape != addend.shape or not (total.is_contiguous() and addend.is_contiguous()):
        raise ValueError(
            f"a sum of {tuple(total.shape)} and {tuple(addend.shape)}: give contiguous tensors of "
            "one shape"
        )
    if not total.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        total.add_(addend)
        return
    from vllm_moe_offload.device.mapped_kernel import add_kernel

    numbers = total.numel()
    if numbers:
        width = total.shape[-1]
        programs = -(-numbers // _BLOCK)
        add_kernel[(programs,)](total, addend, numbers // width, WIDTH=width, BLOCK=_BLOCK)
