"""Counters come as they are, and nobody who counts is waited for."""

from __future__ import annotations

import time

import pytest
import torch

from vllm_moe_offload.device.readout import Readout


def test_every_tensor_is_a_list_of_its_numbers() -> None:
    readout = Readout(torch.device("cpu"))
    assert readout.read([]) == []
    tensors = [torch.tensor([1, 2**40]), torch.tensor([3]), torch.arange(8)]
    assert readout.read(tensors) == [tensor.tolist() for tensor in tensors]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_stream_is_not_waited_for() -> None:
    readout = Readout(torch.device("cuda"))
    counted = torch.tensor([7], device="cuda")
    torch.cuda.synchronize()
    readout.read([counted])  # allocates
    torch.cuda._sleep(2_000_000_000)  # about a second
    counted += 1
    began = time.perf_counter()
    assert readout.read([counted]) == [[7]]
    taken = time.perf_counter() - began
    assert not torch.cuda.current_stream().query(), "it is still busy"
    print(f"\n{1e6 * taken:.0f} us for one reading")
    torch.cuda.synchronize()
    assert readout.read([counted]) == [[8]]
