"""One layer over slots on a GPU: against the layer with all experts, and against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")
import torch

from tests.e2e.engines import engine, resize
from tests.engine.oracle import relative_error
from tests.gpu import checkpoints
from tests.gpu.oracle import Checked, checked_layers
from tests.gpu.test_sameness import SIZES
from vllm_moe_offload import moe_offload_args

pytestmark = pytest.mark.gpu
E, TOP_K = checkpoints.EXPERTS, 8
# Of the norm. The FP8 kernels quantise their input rows and their activations to e4m3 as well.
FLOOR = {"bf16": 5e-3, "fp8_block": 6e-2}
# Between two orders of the same sums: a wave's part is rounded to bf16 before it is added.
ROUNDING = 5e-3


@pytest.fixture(scope="module", params=sorted(FLOOR))
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple]:
    quantised, _ = checkpoints.write(request.param, tmp_path_factory.mktemp("layer"), seed=3)
    with engine(
        quantised,
        dtype="bfloat16",
        enforce_eager=True,
        **moe_offload_args(mode="cache", slots_per_layer=8, stream_threshold="off"),
        **SIZES,
    ) as llm:
        yield request.param, llm


def draw(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fresh rows, weights and distinct experts of each row."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn((rows, checkpoints.HIDDEN), generator=generator, device="cuda")
    logits = torch.randn((rows, E), generator=generator, device="cuda")
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return x.to(torch.bfloat16), weights / weights.sum(-1, keepdim=True), ids.int()


def poison(checked: Checked) -> None:
    """Every byte of every slot becomes part of a NaN."""
    for tensor in checked.layer._slots.cache.tensors.values():
        tensor.view(torch.uint8).fill_(0xFF)


@torch.inference_mode()
def test_slots_and_waves_compute_what_all_experts_do(running: tuple) -> None:
    kind, llm = running
    inputs = [draw(rows, seed) for seed, rows in enumerate((1, 3, 17, 64, 65, 200))]
    resize(llm, E)
    everything = [[c.layer.forward(*i) for i in inputs] for c in checked_layers(llm)]
    print(
        f"\n{kind}: {type(next(checked_layers(llm)).module.quant_method.moe_kernel.fused_experts)}"
    )
    for slots in (1, 8, 32, 127):
        resize(llm, slots)
        worst = [0.0, 0.0]
        for checked, resident in zip(checked_layers(llm), everything, strict=True):
            poison(checked)
            for (x, weights, ids), stock in zip(inputs, resident, strict=True):
                padding = torch.zeros(len(x), dtype=torch.bool, device="cuda")
                padding[2::3] = True
                got = checked.layer.forward(x, weights, ids, padding)[~padding]
                exact = checked.routed(x[~padding], weights[~padding], ids[~padding])
                worst[0] = max(worst[0], relative_error(got, exact))
                worst[1] = max(worst[1], relative_error(got, stock[~padding].double()))
        print(f"{kind}: {slots} slots: {worst[0]:.2e} from float64, {worst[1]:.2e} from stock's")
        assert worst[0] <= FLOOR[kind]
        assert worst[1] <= ROUNDING


@torch.inference_mode()
def test_experts_in_any_order_behind_a_map_are_bit_identical(running: tuple) -> None:
    kind, llm = running
    resize(llm, E)
    x, weights, ids = draw(33, 7)
    stock = [c.layer.forward(x, weights, ids) for c in checked_layers(llm)]
    for checked, expected in zip(checked_layers(llm), stock, strict=True):
        cache, lane = checked.layer._slots.cache, checked.layer._slots.resident
        for seed in range(3):
            order = torch.randperm(E, generator=torch.Generator().manual_seed(seed))
            poison(checked)
            for slot, number in enumerate(order.tolist()):
                for name, tensor in cache.tensors.items():
                    tensor[slot].copy_(checked.layer._host[name][number])
            cache.expert_map[order.cuda()] = torch.arange(E, dtype=torch.int32, device="cuda")
            cache.expert_map[E] = -1
            out = torch.full(x.shape, float("nan"), device="cuda")
            with_padding = ids.clone()
            with_padding[5] = E
            lane.compute(x, weights, with_padding, cache.expert_map, out, False)
            assert not out[5].any(), "rows of padding add nothing"
            rest = torch.arange(len(x), device="cuda") != 5
            difference = (out[rest].to(x.dtype) != expected[rest]).sum().item()
            print(f"{kind} {checked.name} order {seed}: {difference} numbers differ")
            assert not difference


@torch.inference_mode()
def test_a_stale_slot_is_noticed(running: tuple) -> None:
    """The checks above can fail: a wrong expert, and one that is left out."""
    kind, llm = running
    resize(llm, E)
    x, weights, ids = draw(17, 11)
    checked = next(checked_layers(llm))
    exact = checked.routed(x, weights, ids)
    assert relative_error(checked.layer.forward(x, weights, ids), exact) <= FLOOR[kind]
    cache = checked.layer._slots.cache
    number = int(ids[0, 0])
    for tensor in cache.tensors.values():
        tensor[number].copy_(tensor[(number + 1) % E])
    assert relative_error(checked.layer.forward(x, weights, ids), exact) > 2 * FLOOR[kind]
