"""The check before the first request passes for sound slots and notices unsound ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm")

from tests.e2e.faults import FAULTS, Plant
from tests.engine.shards import random_shard
from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.device.host import HostSlotCache
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.integration import selfcheck
from vllm_moe_offload.integration.selfcheck import SelfCheckError, check_layer
from vllm_moe_offload.lanes import Counters, EngineLane, OffloadedLayer


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine() as engine:
        yield engine


def check(
    engine: CpuExpertEngine,
    num_slots: int,
    top_k: int,
    format_: Format,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda host: None,
    of_slots: Callable[[EngineLane], EngineLane] = lambda lane: lane,
) -> OffloadedLayer:
    spec = ExpertSpec(64, 32, Activation.SILU, format_)
    host = random_shard(spec, 8, torch.Generator().manual_seed(0))
    change(host)

    def lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
        return EngineLane(engine, spec, tensors, top_k, 8)

    def slot_lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
        return of_slots(lane(tensors))

    layer = OffloadedLayer(
        host,
        HostDevice(),
        spec.layout.empty,
        slot_lane,
        lane(host),
        num_slots=num_slots,
        policy="lru",
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


def nothing_finite(host: dict[str, torch.Tensor]) -> None:
    host["w2_weight"].fill_(torch.nan)


def one_expert_of_nan(host: dict[str, torch.Tensor]) -> None:
    host["w2_weight"][5, 3, 7] = torch.nan


class Overflowing:
    """A lane that computes in fp16: what is too large for it is infinite."""

    def __init__(self, lane: EngineLane, most: float) -> None:
        self._lane, self._most = lane, most

    def __getattr__(self, name: str) -> object:
        return getattr(self._lane, name)

    def compute(self, *args: object) -> None:
        self._lane.compute(*args)
        out = args[4]
        out[out.abs() > self._most] = torch.inf


def test_a_checkpoint_that_holds_nan_is_not_the_slots_fault(
    engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(selfcheck.logger, "warning", lambda text, *args: said.append(text % args))
    check(engine, 3, 2, Format.BF16, one_expert_of_nan)
    assert not said
    check(engine, 3, 2, Format.BF16, nothing_finite)
    (line,) = said
    assert "experts of layer compute" in line and "is the checkpoint whole?" in line


def test_a_fault_beside_nan_is_noticed(
    engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(iter(FAULTS.values()))(monkeypatch, HostSlotCache)
    with pytest.raises(SelfCheckError):
        check(engine, 3, 2, Format.BF16, one_expert_of_nan)


@pytest.mark.parametrize(
    ("format_", "most", "passes"),
    [(Format.FP16, 0.05, True), (Format.FP16, 0.0, False), (Format.BF16, 0.05, False)],
)
def test_rows_that_overflow_fp16_are_made_smaller(
    format_: Format, most: float, passes: bool, engine: CpuExpertEngine
) -> None:
    def overflows(lane: EngineLane) -> EngineLane:
        return Overflowing(lane, most)  # type: ignore[return-value]

    if passes:
        check(engine, 3, 2, format_, of_slots=overflows)
    else:
        with pytest.raises(SelfCheckError, match="by inf of the norm"):
            check(engine, 3, 2, format_, of_slots=overflows)
