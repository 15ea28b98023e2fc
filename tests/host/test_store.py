"""Host memory of the experts."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from vllm_moe_offload import MemoryShortError
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.host import HostStore


def spec(hidden: int = 40, intermediate: int = 12, *, bias: bool = False) -> ExpertSpec:
    return ExpertSpec(hidden, intermediate, Activation.SILU, Format.BF16, bias)


def test_blocks_have_the_layouts_shapes_and_are_zero() -> None:
    store = HostStore()
    layout = spec(bias=True).layout
    tensors = store.allocate(layout, 7)
    assert tuple(tensors) == layout.names
    for part in layout.tensors:
        assert tensors[part.name].shape == (7, *part.shape)
        assert tensors[part.name].dtype == part.dtype
        assert not tensors[part.name].any()
        tensors[part.name].fill_(1)
    assert store.nbytes == 7 * layout.nbytes


def test_memory_is_exact_and_given_back() -> None:
    process = psutil.Process()
    layout = spec(1024, 1024 + 100).layout  # 6.75 MB an expert: nothing like a power of two
    gc.collect()
    before = process.memory_info().rss
    tensors = HostStore().allocate(layout, 40)
    for tensor in tensors.values():
        tensor.fill_(1)
    taken = process.memory_info().rss - before
    assert taken <= 40 * layout.nbytes * 1.03 + (8 << 20)
    assert taken >= 40 * layout.nbytes * 0.97 - (8 << 20)
    del tensor, tensors
    gc.collect()
    assert process.memory_info().rss - before < 40 * layout.nbytes * 0.2


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = spec(1024, 1024).layout
    available = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    with pytest.raises(MemoryShortError, match=r"need 1\.50 GiB .*256 experts.*1\.00 GiB are av"):
        HostStore().allocate(layout, 256)


def test_writes_through_one_view_show_in_another() -> None:
    tensors = HostStore().allocate(spec().layout, 2)
    view = tensors["w2_weight"].view(-1)
    view[3] = 5.0
    assert tensors["w2_weight"][0, 0, 3] == torch.tensor(5.0)
