"""The host device keeps the promises of `device.base`."""

from __future__ import annotations

import pytest
import torch

from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.routing import Wave


def make() -> tuple[dict[str, torch.Tensor], ExpertLayout]:
    host = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(4, dtype=torch.int32).view(4, 1)}
    return host, ExpertLayout.of(host)


def test_fetch_copies_every_tensor_of_the_expert_and_nothing_else() -> None:
    host, layout = make()
    cache = HostDevice().slot_cache(host, layout.empty(2))
    for tensor in cache.tensors.values():
        tensor.fill_(-7)
    cache.fetch([(3, 1)])
    assert torch.equal(cache.tensors["a"][1], host["a"][3])
    assert torch.equal(cache.tensors["b"][1], host["b"][3])
    assert (cache.tensors["a"][0] == -7).all()


def test_publish_maps_the_experts_of_the_wave_alone_and_never_the_sentinel() -> None:
    host, layout = make()
    cache = HostDevice().slot_cache(host, layout.empty(3))
    cache.publish(Wave(experts=(2, 0), slots=(1, 2), fetched=0))
    assert cache.expert_map.tolist() == [2, -1, 1, -1, -1]
    cache.publish(Wave(experts=(3,), slots=(0,), fetched=1))
    assert cache.expert_map.tolist() == [-1, -1, -1, 0, -1]


def test_slots_leave_what_the_experts_in_host_memory_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HostDevice().free_memory(0) > 0
    monkeypatch.setattr("vllm_moe_offload.device.host.available_memory", lambda: 100)
    free = [HostDevice().free_memory(experts) for experts in (0, 50, 60, 90, 100, 120)]
    assert free == [50, 50, 20, 5, 0, 0]
