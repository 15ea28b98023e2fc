"""The check before the first request passes for sound slots and notices unsound ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
from vllm_moe_offload.lanes import Counters, EngineLane, Lane, OffloadedLayer


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine() as engine:
        yield engine


def made(format_: Format, experts: int = 8) -> tuple[ExpertSpec, dict[str, torch.Tensor]]:
    wide = format_ is Format.FP8_BLOCK
    spec = ExpertSpec(128 if wide else 64, 128 if wide else 32, Activation.SILU, format_)
    return spec, random_shard(spec, experts, torch.Generator().manual_seed(0))


def check_between(
    engine: CpuExpertEngine,
    spec: ExpertSpec,
    slots: dict[str, torch.Tensor],
    cpu: dict[str, torch.Tensor],
    top_k: int,
    num_slots: int = 3,
    of_slots: Callable[[EngineLane], EngineLane] = lambda lane: lane,
    kernel: Callable[[dict[str, torch.Tensor]], Lane] | None = None,
    **how: Any,
) -> OffloadedLayer:
    """The check of slots that are filled from the one set of experts, and the CPU over another."""

    def lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
        return EngineLane(engine, spec, tensors, top_k, 8)

    layer = OffloadedLayer(
        slots,
        HostDevice(),
        spec.layout.empty,
        kernel or (lambda tensors: of_slots(lane(tensors))),
        lane(slots),
        num_slots=num_slots,
        policy="lru",
    )
    check_layer("layer", layer, spec, lane(cpu), top_k, **how)
    return layer


def check(
    engine: CpuExpertEngine,
    num_slots: int,
    top_k: int,
    format_: Format,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda host: None,
    of_slots: Callable[[EngineLane], EngineLane] = lambda lane: lane,
) -> OffloadedLayer:
    spec, host = made(format_)
    change(host)
    return check_between(engine, spec, host, host, top_k, num_slots, of_slots)


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


# Four of 32 experts a row: each is in one row.
@pytest.mark.parametrize(("change", "left"), [(one_expert_of_nan, 1), (nothing_finite, 32)])
def test_a_checkpoint_that_holds_nan_is_not_the_slots_fault(
    engine: CpuExpertEngine,
    change: Callable[[dict[str, torch.Tensor]], object],
    left: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(selfcheck.logger, "warning", lambda text, *args: said.append(text % args))
    spec, host = made(Format.BF16, 32)
    change(host)
    layer = check_between(engine, spec, host, host, 4)
    (line,) = said
    assert f"rows of {left} of 32 experts of layer are" in line
    assert "is the checkpoint whole?" in line
    assert layer.counters == Counters()


def dead(host: dict[str, torch.Tensor], expert: int) -> None:
    host["w2_weight"][expert] = torch.zeros_like(host["w2_weight"][expert])


def exchanged(host: dict[str, torch.Tensor], expert: int) -> None:
    other = (expert + 1) % len(host["w2_weight"])
    for tensor in host.values():
        tensor[[expert, other]] = tensor[[other, expert]]


def larger(host: dict[str, torch.Tensor], expert: int) -> None:
    name = "w2_scale" if "w2_scale" in host else "w2_weight"
    host[name][expert] = (host[name][expert].float() * 1.5).to(host[name].dtype)


@pytest.mark.parametrize("sizes", ["at once", "as a device's", "streamed"])
@pytest.mark.parametrize("change", [dead, exchanged, larger])
@pytest.mark.parametrize("format_", [Format.FP32, Format.BF16, Format.FP8_BLOCK])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (160, 6)])
def test_one_wrong_expert_of_many_is_noticed(
    engine: CpuExpertEngine,
    experts: int,
    top_k: int,
    format_: Format,
    change: Callable[[dict[str, torch.Tensor], int], None],
    sizes: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sizes == "as a device's":
        monkeypatch.setattr(OffloadedLayer, "decides_on_device", True)
    how = {"rows": 128} if sizes == "streamed" else {}
    spec, host = made(format_, experts)
    check_between(engine, spec, host, host, top_k, experts // 4, **how)
    for expert in (0, experts // 2 + 1, experts - 1):
        wrong = {name: tensor.clone() for name, tensor in host.items()}
        change(wrong, expert)
        with pytest.raises(SelfCheckError, match=r"differ from the same experts on the CPU by"):
            check_between(engine, spec, wrong, host, top_k, experts // 4, **how)


def test_a_layer_whose_kind_has_been_checked_computes_two_rows(engine: CpuExpertEngine) -> None:
    spec, host = made(Format.BF16, 32)
    rows: list[int] = []
    layer = check_between(
        engine,
        spec,
        host,
        host,
        4,
        of_slots=faulty(lambda out: rows.append(len(out))),
        is_brief=True,
    )
    assert set(rows) == {2}
    assert layer.counters == Counters()
    wrong = {name: tensor.roll(1, 0) for name, tensor in host.items()}
    with pytest.raises(SelfCheckError, match=r"differ from the same experts on the CPU by"):
        check_between(engine, spec, wrong, host, 4, is_brief=True)


class Faulty:
    """A lane whose results are changed."""

    def __init__(self, lane: EngineLane, change: Callable[[torch.Tensor], object]) -> None:
        self._lane, self._change = lane, change

    def __getattr__(self, name: str) -> object:
        return getattr(self._lane, name)

    def compute(self, *args: object) -> None:
        self._lane.compute(*args)
        self._change(args[4])


def faulty(change: Callable[[torch.Tensor], object]) -> Callable[[EngineLane], EngineLane]:
    return lambda lane: Faulty(lane, change)  # type: ignore[return-value]


class Fp16Kernel(Lane):
    """Rounds to fp16 what a kernel does: the results of both products, and the inner rows."""

    def __init__(self, experts: dict[str, torch.Tensor]) -> None:
        self._experts = experts

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        def rounded(value: torch.Tensor) -> torch.Tensor:
            return value.half().float()

        places = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
        total = torch.zeros(x.shape)
        for row, column in (places >= 0).nonzero().tolist():
            w13, w2 = (
                self._experts[name][places[row, column]].float()
                for name in ("w13_weight", "w2_weight")
            )
            gate, up = rounded(w13 @ x[row].float()).chunk(2)
            inner = rounded(torch.nn.functional.silu(gate) * up)
            total[row] += rounded(w2 @ inner * topk_weights[row, column])
        return rounded(total)


def outliers(others: float, one: float) -> tuple[ExpertSpec, dict[str, torch.Tensor]]:
    spec = ExpertSpec(256, 128, Activation.SILU, Format.FP16)
    host = random_shard(spec, 16, torch.Generator().manual_seed(0))
    for tensor in host.values():
        tensor *= others
        tensor[3] *= one / others
    return spec, host


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize(
    ("others", "one"), [(1.0, 1e-2), (1.0, 300.0), (0.3, 300.0), (0.1, 30.0), (1e-4, 1e-4)]
)
def test_fp16s_range_is_no_fault(
    engine: CpuExpertEngine, others: float, one: float, top_k: int
) -> None:
    """One expert far weaker or stronger than the others, or all of hardly any weight."""
    spec, host = outliers(others, one)
    check_between(engine, spec, host, host, top_k, kernel=Fp16Kernel)


def test_a_strong_expert_of_fp16_hides_no_fault_of_others(engine: CpuExpertEngine) -> None:
    spec, host = outliers(1.0, 300.0)
    wrong = {name: tensor.clone() for name, tensor in host.items()}
    dead(wrong, 7)
    with pytest.raises(SelfCheckError, match=r"differ from the same experts on the CPU by"):
        check_between(engine, spec, wrong, host, 1, kernel=Fp16Kernel)


def test_experts_of_nan_are_named_in_a_layer_whose_kind_has_been_checked(
    engine: CpuExpertEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(selfcheck.logger, "warning", lambda text, *args: said.append(text % args))
    spec, host = made(Format.BF16, 8)
    nothing_finite(host)
    check_between(engine, spec, host, host, 2, is_brief=True)
    (line,) = said
    assert "of 8 experts of layer are infinite or NaN" in line


@pytest.mark.parametrize("where", ["slots", "cpu"])
@pytest.mark.parametrize("expert", [e for e in range(32) if e != 5])
def test_a_fault_beside_nan_is_noticed(engine: CpuExpertEngine, where: str, expert: int) -> None:
    """Of an expert that may share its only row with the one whose numbers are none."""
    spec, host = made(Format.BF16, 32)
    one_expert_of_nan(host)
    wrong = {name: tensor.clone() for name, tensor in host.items()}
    wrong["w2_weight"][expert] *= -1
    slots, cpu = (wrong, host) if where == "slots" else (host, wrong)
    with pytest.raises(SelfCheckError, match=r"differ from the same experts on the CPU by"):
        check_between(engine, spec, slots, cpu, 4)


@pytest.mark.parametrize("where", ["slots", "cpu"])
def test_nan_on_one_side_alone_is_a_fault(engine: CpuExpertEngine, where: str) -> None:
    spec, host = made(Format.BF16)
    wrong = {name: tensor.clone() for name, tensor in host.items()}
    one_expert_of_nan(wrong)
    slots, cpu = (wrong, host) if where == "slots" else (host, wrong)
    with pytest.raises(SelfCheckError, match="by inf of the norm"):
        check_between(engine, spec, slots, cpu, 2)


@pytest.mark.parametrize(
    ("format_", "most", "passes"),
    [
        (Format.FP16, 1.0, True),
        (Format.FP16, 0.02, True),
        (Format.FP16, 0.0, False),
        (Format.BF16, 1.0, False),
    ],
)
def test_rows_that_overflow_fp16_are_made_smaller(
    format_: Format, most: float, passes: bool, engine: CpuExpertEngine
) -> None:
    def enlarge(host: dict[str, torch.Tensor]) -> None:
        host["w2_weight"] *= 64

    of_slots = faulty(lambda out: out.masked_fill_(out.abs() > most, torch.inf))
    if passes:
        check(engine, 3, 2, format_, enlarge, of_slots)
    else:
        with pytest.raises(SelfCheckError, match="by inf of the norm"):
            check(engine, 3, 2, format_, enlarge, of_slots)


def test_norms_that_overflow_float32_hide_no_fault(engine: CpuExpertEngine) -> None:
    """Their quotient would be NaN."""
    spec, host = made(Format.BF16)
    host["w2_weight"] *= 1e25
    check_between(engine, spec, host, host, 2)
    wrong = {name: tensor.clone() for name, tensor in host.items()}
    wrong["w2_weight"][3] *= -1
    with pytest.raises(SelfCheckError, match=r"by \d\.\de[+-]\d\d of the norm"):
        check_between(engine, spec, wrong, host, 2)
