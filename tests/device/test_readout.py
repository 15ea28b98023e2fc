"""Counters come as they are, and nobody who counts is waited for."""

from __future__ import annotations

import sys
import threading
import time
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch

from vllm_moe_offload.device.readout import Readout
from vllm_moe_offload.device.streams import beside_captures


def test_every_tensor_is_a_list_of_its_numbers() -> None:
    readout = Readout(torch.device("cpu"))
    assert readout.read([]) == []
    tensors = [torch.tensor([1, 2**40]), torch.tensor([3]), torch.arange(8)]
    assert readout.read(tensors) == [tensor.tolist() for tensor in tensors]


@pytest.mark.gpu
def test_a_busy_stream_is_not_waited_for() -> None:
    readout = Readout(torch.device("cuda"))
    counted = torch.tensor([7], device="cuda")
    torch.cuda.synchronize()
    readout.read([counted])  # allocates
    counted += 0  # a kernel that is loaded waits for what runs
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    counted += 1
    began = time.perf_counter()
    assert readout.read([counted]) == [[7]]
    taken = time.perf_counter() - began
    assert not torch.cuda.current_stream().query(), "it is still busy"
    print(f"\n{1e6 * taken:.0f} us for one reading")
    torch.cuda.synchronize()
    assert readout.read([counted]) == [[8]]


class Mode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_INITIALIZED = 3


def test_only_inside_a_threads_calls_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now, code = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL, Result.CUDA_SUCCESS

    def exchange(mode: Mode) -> tuple[Result, Mode]:
        nonlocal now
        before, now = now, mode
        return code, before

    driver = SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=exchange, CUstreamCaptureMode=Mode, CUresult=Result
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    with pytest.raises(KeyError), beside_captures():
        assert now is Mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        raise KeyError
    assert now is Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
    code = Result.CUDA_ERROR_NOT_INITIALIZED
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_INITIALIZED"), beside_captures():
        pass


@pytest.mark.gpu
def test_a_capture_of_another_thread_goes_on() -> None:
    counted, result = (torch.tensor([number], device="cuda") for number in (7, 0))
    readout = Readout(torch.device("cuda"))
    assert readout.read([counted]) == [[7]]  # loads the kernels
    result.copy_(counted * 2)
    torch.cuda.synchronize()
    # So that the reading has to allocate, on the device and on the host.
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    read: list[list[list[int]]] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other = threading.Thread(target=lambda: read.append(readout.read([counted, result])))
        other.start()
        other.join()
        result.copy_(counted * 2 + 1)
    assert read == [[[7], [14]]]
    graph.replay()
    assert result.item() == 15
