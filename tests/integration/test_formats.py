"""Slots under a format's own processing: converted a slot-full at a time, the kernel over slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe import get_config

from vllm_moe_offload import UnsupportedError
from vllm_moe_offload.experts import ExpertLayout, Format
from vllm_moe_offload.host import HostStore
from vllm_moe_offload.integration import formats
from vllm_moe_offload.integration.formats import (
    FormatLane,
    SlotBinder,
    engine_view,
)
from vllm_moe_offload.stream import BufferMemory, buffer_bytes

E = 7


class Layer(torch.nn.Module):
    """As much of a RoutedExperts as a format's processing looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace(
            moe_kernel="old",
            moe_quant_config="old",
            moe=SimpleNamespace(num_experts=E, num_local_experts=E),
        )
        self.local_num_experts = E


def loaded() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w13_weight": torch.randn((E, 4, 6), generator=generator),
        "w13_weight_scale": torch.rand((E, 2), generator=generator) + 0.5,
        "w13_input_scale": torch.rand(E, generator=generator),
    }


def keeps(layer: torch.nn.Module) -> None:
    """A format whose kernel reads what the checkpoint has."""
    layer.quant_method.moe_kernel = ("kernel over", layer.w13_weight)


def converts(layer: torch.nn.Module) -> None:
    """A format that rescales (w13 to one scale an expert), renames and reduces over experts."""
    assert layer.quant_method.moe_kernel is None
    moe = layer.quant_method.moe
    assert len(layer.w13_weight) == layer.local_num_experts == moe.num_local_experts
    assert moe.num_experts == E + (moe.num_local_experts < E), "the entries of the map"
    scale = layer.w13_weight_scale.max(dim=1).values
    ratio = (layer.w13_weight_scale / scale[:, None]).repeat_interleave(2, dim=1)
    for name, value in {
        "w13_packed": layer.w13_weight * ratio[:, :, None],
        "w13_weight_scale": scale,
        "w13_input_scale": layer.w13_input_scale.max(),
    }.items():
        if name in layer._parameters:
            delattr(layer, name)
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    del layer.w13_weight
    layer.quant_method.moe_kernel = ("kernel over", layer.w13_packed, layer.w13_weight_scale)


def make_store() -> HostStore:
    return HostStore(lambda address, nbytes: None, lambda address: None)


@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_a_format_that_keeps_the_layout_shares_the_loaded_experts(num_slots: int) -> None:
    layer, experts = Layer(), loaded()
    del experts["w13_input_scale"]
    experts["w2_weight_scale"] = torch.rand(E)
    binder = SlotBinder(layer, keeps, experts, torch.device("cpu"))
    host = binder.convert(make_store(), num_slots)
    assert {name: t.data_ptr() for name, t in host.items()} == {
        name: t.data_ptr() for name, t in experts.items()
    }


@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_a_format_that_converts_gives_what_it_gives_for_all_experts(num_slots: int) -> None:
    whole = Layer()
    for name, tensor in loaded().items():
        whole.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    whole.quant_method.moe_kernel = None
    converts(whole)

    layer = Layer()
    binder = SlotBinder(layer, converts, loaded(), torch.device("cpu"))
    host = binder.convert(make_store(), num_slots)
    assert set(host) == {"w13_packed", "w13_weight_scale"}
    assert torch.equal(host["w13_packed"], whole.w13_packed.data)
    assert torch.equal(host["w13_weight_scale"], whole.w13_weight_scale.data)

    slots = binder.bind(0, num_slots)
    assert layer.quant_method.moe.num_experts == layer.quant_method.moe.num_local_experts == E
    assert set(slots) == set(host)
    assert all(len(tensor) == num_slots for tensor in slots.values())
    _, weight, scale = layer.quant_method.moe_kernel
    assert weight.data_ptr() == slots["w13_packed"].data_ptr(), "the kernel reads the slots"
    assert scale.data_ptr() == slots["w13_weight_scale"].data_ptr()
    assert torch.equal(layer.w13_input_scale, whole.w13_input_scale), "the largest of all experts"


def test_a_conversion_that_changes_some_experts_is_one() -> None:
    experts = loaded()
    expected = {name: tensor.clone() for name, tensor in experts.items()}
    expected["w13_weight"][:, 0] = experts["w13_weight"][:, 0].relu()
    first = experts["w13_weight"][0, 0] = experts["w13_weight"][0, 0].abs()
    expected["w13_weight"][0, 0] = first

    def process(layer: Layer) -> None:
        layer.w13_weight.data[:, 0].relu_()

    host = SlotBinder(Layer(), process, experts, torch.device("cpu")).convert(make_store(), 3)
    assert torch.equal(host["w13_weight"], expected["w13_weight"])


def test_slots_past_the_last_expert_hold_it_again() -> None:
    """A kernel may take the largest of something over all its slots."""
    experts = loaded()
    binder = SlotBinder(Layer(), keeps, experts, torch.device("cpu"))
    slots = binder.bind(E - 2, 5)
    for name, tensor in slots.items():
        assert torch.equal(tensor, experts[name][[E - 2, *[E - 1] * 4]])


@pytest.mark.parametrize("size", [E, 2])
def test_a_buffer_and_slots_are_bound_to_one_layer_with_a_lane_for_each(size: int) -> None:
    seen = []

    def apply(layer: Layer, x: torch.Tensor, *rest: object) -> torch.Tensor:
        kernel = layer.quant_method.moe_kernel
        assert kernel.weight.data_ptr() == layer.w13_weight.data_ptr()
        seen.append((kernel.weight.data_ptr(), len(layer.w13_weight), layer.local_num_experts))
        return x

    def process(layer: Layer) -> None:
        layer.quant_method.moe_kernel = SimpleNamespace(
            weight=layer.w13_weight.data, fused_experts=object()
        )

    layer, experts = Layer(), loaded()
    layer.quant_method.apply = apply
    layer.moe_config = SimpleNamespace(num_experts=E)
    layer.layer_name = "layers.0"
    binder = SlotBinder(layer, process, experts, torch.device("cpu"))
    slots = binder.bind(0, 3)
    over_slots = FormatLane(layer)
    memory = BufferMemory(buffer_bytes(ExpertLayout.of(experts), size), torch.device("cpu"))
    buffer = binder.bind_buffer(memory)
    over_buffer = FormatLane(layer)
    x = torch.ones(2, 6)
    for lane in (over_buffer, over_slots, over_slots, over_buffer):
        lane.output(x, x, x, None)
    both = [(buffer["w13_weight"].data_ptr(), size, size), (slots["w13_weight"].data_ptr(), 3, 3)]
    assert seen == [both[0], both[1], both[1], both[0]]
    assert memory.holds(buffer["w13_weight"])
    assert layer.quant_method.moe.num_local_experts == E


def test_a_format_that_leaves_the_buffer_is_refused() -> None:
    layer, experts = Layer(), loaded()
    layer.layer_name = "layers.0"
    memory = BufferMemory(buffer_bytes(ExpertLayout.of(experts), E), torch.device("cpu"))
    binder = SlotBinder(layer, converts, experts, torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"layers\.0: .*w13_packed.*stream_threshold='off'"):
        binder.bind_buffer(memory)


def test_the_lane_sums_waves_in_float32_and_maps_with_a_sentinel() -> None:
    calls = []

    def apply(layer: Layer, x: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append((layer._expert_map, layer.global_num_experts))
        return (x * (1 + 2**-9)).to(torch.bfloat16)

    layer = Layer()
    layer.moe_config = SimpleNamespace(num_experts=E)
    layer.quant_method = SimpleNamespace(
        apply=apply,
        moe_kernel=SimpleNamespace(fused_experts=object()),
        moe_quant_config=None,
    )
    lane = FormatLane(layer)
    x = torch.randn(3, 5).to(torch.bfloat16)
    out = torch.full((3, 5), float("nan"))
    map_ = torch.zeros(E + 1, dtype=torch.int32)
    lane.compute(x, x, x, map_, out, False)
    lane.compute(x, x, x, map_, out, True)
    assert torch.equal(out, 2 * apply(layer, x).float())
    lane.compute(x, x, x, None, out, False)
    assert [number for _, number in calls] == [E + 1, E + 1, E + 1, E]
    assert calls[-1][0] is None
    lane.compute(x, x, x, map_[:E], out, False)
    assert calls[-1][1] == E, "without the sentinel"


def test_the_triton_kernel_is_tuned_for_the_layers_experts_not_for_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kernel:
        quant_config = SimpleNamespace(config_name=lambda dtype: None)
        block_shape = None

    chosen: list[object] = []

    def apply(layer: Layer, x: torch.Tensor, *rest: object) -> torch.Tensor:
        chosen.append(get_config())
        return x

    def tuned(w1: tuple[int, ...], w2: tuple[int, ...], *rest: object, **more: object) -> dict:
        return {"w1": w1, "w2": w2, "rest": rest}

    monkeypatch.setattr(formats, "TritonExperts", Kernel)
    monkeypatch.setattr(formats, "try_get_optimal_moe_config", tuned)
    layer = Layer()
    layer.w13_weight, layer.w2_weight = torch.zeros(2, 8, 5), torch.zeros(2, 5, 4)
    layer.moe_config = SimpleNamespace(num_experts=E)
    layer.quant_method = SimpleNamespace(
        apply=apply,
        moe_kernel=SimpleNamespace(fused_experts=Kernel()),
        moe_quant_config=None,
    )
    x, ids = torch.randn(3, 5), torch.zeros(3, 2, dtype=torch.int32)
    FormatLane(layer).compute(x, x, ids, None, torch.empty(3, 5), False)
    assert chosen == [{"w1": (E, 8, 5), "w2": (E, 5, 4), "rest": (2, None, 3)}]
    assert get_config() is None


def make_routed(kind: str, **method: object) -> SimpleNamespace:
    return SimpleNamespace(
        layer_name="layers.0",
        quant_method=type(kind, (), method)(),
        params_dtype=torch.bfloat16,
        apply_router_weight_on_input=False,
        moe_config=SimpleNamespace(
            hidden_dim=256,
            intermediate_size_per_partition=128,
            activation=SimpleNamespace(value="silu"),
            has_bias=False,
        ),
    )


def compressed(strategy: str) -> dict[str, object]:
    return {"weight_quant": SimpleNamespace(strategy=strategy)}


@pytest.mark.parametrize(
    ("kind", "method", "format_", "scale"),
    [
        ("UnquantizedFusedMoEMethod", {}, Format.BF16, None),
        ("Fp8MoEMethod", {"block_quant": True}, Format.FP8_BLOCK, "weight_scale_inv"),
        ("Fp8MoEMethod", {"block_quant": False}, Format.FP8_TENSOR, "weight_scale"),
        (
            "CompressedTensorsW8A8Fp8MoEMethod",
            compressed("channel"),
            Format.FP8_CHANNEL,
            "weight_scale",
        ),
    ],
)
def test_the_engine_reads_each_format_under_vllms_names(
    kind: str, method: dict, format_: Format, scale: str | None
) -> None:
    routed = make_routed(kind, **method)
    view = engine_view(routed)
    assert view.spec.format is format_
    assert not view.spec.bias
    assert not view.spec.apply_router_weight_on_input
    routed.moe_config.has_bias = routed.apply_router_weight_on_input = True
    other = engine_view(routed)
    assert other.spec.bias
    assert other.spec.apply_router_weight_on_input
    assert other.names["w13_bias"] == "w13_bias"
    assert view.spec.activation_dtype is torch.bfloat16
    expected = {"w13_weight": "w13_weight", "w2_weight": "w2_weight"}
    if scale:
        expected |= {"w13_scale": f"w13_{scale}", "w2_scale": f"w2_{scale}"}
    assert view.names == expected


@pytest.mark.parametrize(
    ("kind", "method"),
    [("Int3Method", {}), ("CompressedTensorsW8A8Fp8MoEMethod", compressed("group"))],
)
def test_another_format_is_refused_by_name(kind: str, method: dict) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        engine_view(make_routed(kind, **method))
