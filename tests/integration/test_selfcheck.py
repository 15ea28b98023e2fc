"""The check before the first request passes for sound slots and notices unsound ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")

from tests.e2e.faults import FAULTS, Plant
from tests.engine.shards import random_shard
from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.device.host import HostSlotCache
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.integration.selfcheck import SelfCheckError, check_layer
from vllm_moe_offload.lanes import Counters, EngineLane, OffloadedLayer


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine() as engine:
        yield engine


def check(engine: CpuExpertEngine, num_slots: int, top_k: int, format_: Format) -> OffloadedLayer:
    spec = ExpertSpec(64, 32, Activation.SILU, format_)
    host = random_shard(spec, 8, torch.Generator().manual_seed(0))

    def lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
        return EngineLane(engine, spec, tensors, top_k, 8)

    layer = OffloadedLayer(
        host, HostDevice(), spec.layout.empty, lane, lane(host), num_slots=num_slots, policy="lru"
    )
    check_layer("layer", layer, spec, lane(host), top_k)
    return layer


@pytest.mark.parametrize("format_", [Format.FP32, Format.FP16, Format.BF16])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_sound_slots_pass_and_nothing_is_left_of_the_check(
    engine: CpuExpertEngine, num_slots: int, top_k: int, format_: Format
) -> None:
    layer = check(engine, num_slots, top_k, format_)
    assert layer.counters == Counters()


def test_the_models_default_dtype_does_not_matter(engine: CpuExpertEngine) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(engine, 3, 2, Format.BF16)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)
def test_every_planted_fault_is_noticed(
    engine: CpuExpertEngine, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, HostSlotCache)
    with pytest.raises(SelfCheckError, match=r"layer: bf16 experts computed from 3 slots differ"):
        check(engine, 3, 2, Format.BF16)
