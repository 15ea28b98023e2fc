"""Mapped memory is as large as it says, and every byte of it arrives by the kernel."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import DEVICE, INTERPRETED, marked, on_host, run_interpreted
from vllm_moe_offload import MemoryShortError, copy_all_experts_to_gpu, create_cpu_mapped_tensor
from vllm_moe_offload.device.mapped import add_mapped
from vllm_moe_offload.host import pages
from vllm_moe_offload.host import store as store_module

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.complex64,
]
SHAPES = [(), (1,), (3,), (2, 1), (5, 3), (4, 7, 5), (3, 130, 3), (2, 96, 64), (0, 4), (4, 0)]
GUARD = 64


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
    tensor.view(-1).view(torch.uint8).copy_(drawn)
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


@marked
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_arrives_and_no_other_changes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source = fill(create_cpu_mapped_tensor(shape, dtype), 1)
    around = torch.full((GUARD + source.nbytes + GUARD,), 0xA5, dtype=torch.uint8, device=DEVICE)
    copied = around[GUARD : GUARD + source.nbytes].view(dtype).view(shape)
    copy_all_experts_to_gpu(source, copied)
    assert torch.equal(as_bytes(copied), as_bytes(source))
    assert (around[:GUARD] == 0xA5).all() and (around[GUARD + source.nbytes :] == 0xA5).all()


@marked
@settings(max_examples=15, deadline=None)
@given(experts=st.integers(1, 5), nbytes=st.integers(1, 70), skipped=st.integers(0, 5))
def test_where_nothing_is_aligned(experts: int, nbytes: int, skipped: int) -> None:
    memory = create_cpu_mapped_tensor((skipped + experts * nbytes,), torch.uint8)
    source = fill(memory[skipped:], 2).view(experts, nbytes)
    copied = torch.zeros_like(source, device=DEVICE)
    copy_all_experts_to_gpu(source, copied)
    assert torch.equal(copied.cpu(), source)


@marked
def test_more_than_a_block_of_every_program() -> None:
    source = fill(create_cpu_mapped_tensor((3, 16 * 8192 + 5), torch.int32), 3)
    copied = torch.zeros_like(source, device=DEVICE)
    copy_all_experts_to_gpu(source, copied)
    assert torch.equal(copied.cpu(), source)


@pytest.mark.gpu
def test_a_captured_copy_reads_what_is_there_when_it_is_replayed() -> None:
    source = create_cpu_mapped_tensor((7, 33), torch.bfloat16)
    assert source.is_pinned()
    copied = torch.zeros_like(source, device="cuda")
    copy_all_experts_to_gpu(source, copied)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_all_experts_to_gpu(source, copied)
    fill(source, 4)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(as_bytes(copied), as_bytes(source))
    with pytest.raises(ValueError, match="does not read: take create_cpu_mapped_tensor"):
        copy_all_experts_to_gpu(torch.zeros(4), torch.zeros(4, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_zero_and_takes_what_it_has(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = []
    map_pages = pages.map_pages
    monkeypatch.setattr(
        store_module, "map_pages", lambda nbytes: mapped.append(nbytes) or map_pages(nbytes)
    )
    tensor = create_cpu_mapped_tensor([3, 1025], dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((3, 1025), dtype, "cpu")
    assert tensor.is_contiguous() and not as_bytes(tensor).any()
    assert mapped == [3 * 1025 * dtype.itemsize], "not the next power of two"


def test_its_memory_is_given_back_with_its_last_view() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    create_cpu_mapped_tensor((1,), torch.uint8)
    before = resident()
    view = fill(create_cpu_mapped_tensor((1 << 26,), torch.uint8), 5)[1:]
    gc.collect()
    assert int(view[-1]) == int(view[-1:].sum()), "still there"
    assert resident() - before > 1 << 25
    del view
    gc.collect()
    assert resident() - before < 1 << 25


@marked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (1,), (37, 129), (2, 4096)], ids=str)
def test_a_sum_is_added_where_it_lies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    addend = on_host(torch.randn(shape).to(dtype))
    around = torch.randn(GUARD + addend.numel() + GUARD, device=DEVICE)
    before = around.clone()
    add_mapped(around[GUARD : GUARD + addend.numel()].view(shape), addend)
    before[GUARD : GUARD + addend.numel()] += addend.to(DEVICE).view(-1)
    assert torch.equal(around, before)


def test_a_sum_of_other_shapes_or_with_gaps_is_refused() -> None:
    for total, addend in (
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(4, 4)[:, :2], torch.zeros(4, 2)),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            add_mapped(total, addend)


def test_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "available_memory", lambda: 1 << 20)
    with pytest.raises(
        MemoryShortError, match=r"need 2.0 MiB of host memory and 1.0 MiB are avail"
    ):
        create_cpu_mapped_tensor((1 << 21,), torch.uint8)


@pytest.mark.parametrize("gib", [2**20, 2**50], ids=["much", "a number beyond the system"])
def test_far_more_than_there_is_is_refused(gib: int) -> None:
    with pytest.raises(
        MemoryShortError,
        match=rf"(need {gib}\.00 GiB|{gib}\.00 GiB of host memory cannot be mapped).*: free mem",
    ):
        create_cpu_mapped_tensor((gib, 1 << 30), torch.uint8)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(-1, 3\) was asked for: give sizes of 0 or more"):
        create_cpu_mapped_tensor((-1, 3), torch.float32)


def test_tensors_that_differ_are_refused() -> None:
    one = torch.zeros(4, 2)
    for other in (torch.zeros(2, 4), torch.zeros(4, 2, dtype=torch.float16)):
        with pytest.raises(ValueError, match="give tensors of one shape and dtype"):
            copy_all_experts_to_gpu(one, other)


def test_tensors_with_gaps_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="contiguous"):
        copy_all_experts_to_gpu(torch.zeros(4, 2), torch.zeros(4, 4)[:, ::2])


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernel runs here")
def test_without_a_gpu_it_is_a_copy() -> None:
    source = create_cpu_mapped_tensor((3, 5), torch.bfloat16)
    source.copy_(torch.arange(15).view(3, 5))
    target = torch.zeros_like(source)
    copy_all_experts_to_gpu(source, target)
    assert torch.equal(target, source)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that runs them")
def test_interpreted() -> None:
    run_interpreted(__file__)
