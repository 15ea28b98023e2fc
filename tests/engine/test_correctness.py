"""Every format, activation, instruction set and size against the float64 oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import oracle
from tests.engine.shards import (
    Batch,
    Shard,
    make_spec,
    random_batch,
    random_shard,
    tolerance,
)
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format

# Each set changes kernels somewhere between 4 and 17 rows.
ROWS = [1, 2, 3, 7, 8, 9, 10, 11, 12, 15, 16, 17, 64, 257]
MakeShard = Callable[[ExpertSpec, int], Shard]
by_value = pytest.mark.parametrize("format", list(Format), ids=lambda f: f.value)


def check(
    engine: CpuExpertEngine,
    spec: ExpertSpec,
    shard: Shard,
    batch: Batch,
    *,
    expert_map: torch.Tensor | None = None,
    max_tokens: int = 64,
) -> torch.Tensor:
    x, topk_ids, topk_weights = batch
    plan = engine.plan(spec, shard, max_tokens=max_tokens, top_k=topk_ids.shape[1])
    out = torch.full(x.shape, torch.nan)
    plan.run(x, topk_ids, topk_weights, out, expert_map=expert_map)
    expected = oracle.experts(spec, shard, x, topk_ids, topk_weights, expert_map)
    assert oracle.relative_error(out, expected) <= tolerance(spec)
    return out


@by_value
def test_each_format_at_each_row_count(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    spec = make_spec(320, 160, format)
    shard = make_shard(spec, 1)
    for rows in ROWS:
        check(engine, spec, shard, random_batch(spec, rows, 1, (0, 1), generator), max_tokens=257)


# The tiles take 512 tokens and 256 columns at a time; of up to 64 tokens 2048 columns.
@pytest.mark.parametrize(
    ("hidden", "intermediate", "tokens"), [(1088, 288, 545), (2176, 96, 20), (2240, 64, 64)]
)
@pytest.mark.parametrize(
    "format",
    [Format.BF16, Format.FP8_BLOCK, Format.INT4, Format.MXFP4, Format.NVFP4],
    ids=lambda f: f.value,
)
def test_more_tokens_and_columns_than_a_cache_holds(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    format: Format,
    hidden: int,
    intermediate: int,
    tokens: int,
) -> None:
    spec = make_spec(hidden, intermediate, format)
    batch = random_batch(spec, tokens, 1, (0, 1), generator)
    check(engine, spec, make_shard(spec, 1), batch, max_tokens=tokens)


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
@by_value
def test_each_activation_in_each_format(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    format: Format,
    activation: Activation,
) -> None:
    spec = make_spec(96, 64, format, activation=activation, bias=True)
    shard = make_shard(spec, 2)
    for rows in (1, 7, 40):
        check(engine, spec, shard, random_batch(spec, rows, 1, (0, 2), generator))


@by_value
def test_odd_sizes(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    for hidden, intermediate in [(2, 2), (8, 5), (34, 17), (100, 52), (300, 200)]:
        spec = make_spec(hidden, intermediate, format, bias=True)
        shard = make_shard(spec, 3)
        for rows in (1, 5, 40):
            check(engine, spec, shard, random_batch(spec, rows, 2, (0, 3), generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@by_value
def test_activations_of_each_dtype(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    format: Format,
    dtype: torch.dtype,
) -> None:
    if not format.quantised and dtype != format.dtype:
        pytest.skip("unquantised weights have the activations' dtype")
    spec = make_spec(128, 64, format, dtype=dtype, bias=True)
    shard = make_shard(spec, 2)
    for rows in (1, 30):
        check(engine, spec, shard, random_batch(spec, rows, 2, (0, 2), generator))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("format", [Format.INT4, Format.INT4_ZEROS], ids=lambda f: f.value)
def test_int4_groups(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    format: Format,
    group_size: int,
) -> None:
    spec = ExpertSpec(256, 128, Activation.SILU, format, group_size=group_size)
    for rows in (1, 4, 33):
        check(engine, spec, make_shard(spec, 3), random_batch(spec, rows, 2, (0, 3), generator))


@pytest.mark.parametrize(("bias", "on_input"), list(itertools.product([False, True], repeat=2)))
@by_value
def test_bias_and_router_weight_on_input(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    format: Format,
    bias: bool,
    on_input: bool,
) -> None:
    spec = make_spec(72, 40, format, bias=bias, apply_router_weight_on_input=on_input)
    shard = make_shard(spec, 4)
    for rows in (9, 40):
        check(engine, spec, shard, random_batch(spec, rows, 3, (0, 4), generator))


@pytest.mark.parametrize(
    "knobs",
    [
        {"swiglu_limit": 0.5},
        {"swiglu_limit": 0.7, "swiglu_alpha": 1.3, "swiglu_beta": 0.25},
    ],
    ids=["limit", "all"],
)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.SWIGLUOAI], ids=str)
def test_swiglu_limit_alpha_beta(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    activation: Activation,
    knobs: dict[str, float],
) -> None:
    spec = ExpertSpec(64, 32, activation, Format.FP32, **knobs)  # type: ignore[arg-type]
    check(engine, spec, make_shard(spec, 2), random_batch(spec, 9, 2, (0, 2), generator))


@by_value
def test_parts_of_the_intermediate_dimension_add_up(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    spec = make_spec(64, 320, format, bias=True)
    shard = make_shard(spec, 3)
    for rows in (2, 30):
        x, ids, weights = random_batch(spec, rows, 2, (0, 3), generator)
        plan = engine.plan(spec, shard, max_tokens=8, top_k=2)
        out = torch.zeros(x.shape)
        for part in [(0, 128), (128, 256), (256, 320)]:
            alone = torch.empty(x.shape)
            plan.run(x, ids, weights, alone, intermediate=part)
            expected = oracle.experts(spec, shard, x, ids, weights, part=part)
            assert oracle.relative_error(alone, expected) <= tolerance(spec)
            plan.run(x, ids, weights, out, intermediate=part, accumulate=True)
        expected = oracle.experts(spec, shard, x, ids, weights)
        assert oracle.relative_error(out, expected) <= tolerance(spec)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_bf16_output_is_the_rounded_float32(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, tokens: int
) -> None:
    spec = make_spec(70, 33, Format.BF16)
    x, ids, weights = random_batch(spec, tokens, 3, (-1, 3), generator)
    plan = engine.plan(spec, make_shard(spec, 3), max_tokens=16, top_k=3)
    exact, rounded = torch.empty(x.shape), torch.empty(x.shape, dtype=torch.bfloat16)
    plan.run(x, ids, weights, exact)
    plan.run(x, ids, weights, rounded)
    assert torch.equal(rounded, exact.bfloat16())


def test_expert_map_skips_and_moves(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator
) -> None:
    spec = make_spec(64, 32, Format.FP32)
    expert_map = torch.tensor([2, -1, 0, -1, 1, -1], dtype=torch.int32)
    batch = random_batch(spec, 33, 3, (-1, 6), generator)
    batch[1][4] = torch.tensor([1, 3, -1])
    out = check(engine, spec, make_shard(spec, 3), batch, expert_map=expert_map)
    assert not out[4].any()


def test_accumulate_adds_and_keeps(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator
) -> None:
    spec = make_spec(40, 24, Format.BF16)
    x, ids, weights = random_batch(spec, 6, 2, (0, 2), generator)
    ids[3] = -1
    plan = engine.plan(spec, make_shard(spec, 2), max_tokens=4, top_k=2)
    fresh, added = torch.empty(x.shape), torch.ones(x.shape)
    plan.run(x, ids, weights, fresh)
    plan.run(x, ids, weights, added, accumulate=True)
    torch.testing.assert_close(added, fresh + 1, rtol=1e-6, atol=1e-6)
    assert (added[3] == 1).all()
    ids.fill_(-1)
    plan.run(x, ids, weights, added, accumulate=True)
    torch.testing.assert_close(added, fresh + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_do_writes_zeros(
    engine: CpuExpertEngine, make_shard: MakeShard, tokens: int, dtype: torch.dtype
) -> None:
    spec = make_spec(40, 24, Format.FP32)
    plan = engine.plan(spec, make_shard(spec, 2), max_tokens=4, top_k=2)
    out = torch.full((tokens, 40), torch.nan, dtype=dtype)
    ids = torch.full((tokens, 2), -1, dtype=torch.int32)
    plan.run(torch.zeros(tokens, 40), ids, torch.zeros(tokens, 2), out)
    assert (out == 0).all()


@by_value
def test_weights_written_after_planning_count(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    spec = make_spec(40, 24, format, bias=True)
    shard, other = make_shard(spec, 2), make_shard(spec, 2)
    x, ids, weights = random_batch(spec, 5, 2, (0, 2), generator)
    plan = engine.plan(spec, shard, max_tokens=8, top_k=2)
    for name, tensor in shard.items():
        tensor.copy_(other[name])
    out = torch.empty(x.shape)
    plan.run(x, ids, weights, out)
    expected = oracle.experts(spec, other, x, ids, weights)
    assert oracle.relative_error(out, expected) <= tolerance(spec)


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
def test_activations_are_accurate_over_their_range(
    engine: CpuExpertEngine, activation: Activation
) -> None:
    # One weight of 1 at each place turns an expert into the activation itself; its bias gives up.
    spec = ExpertSpec(1, 1, activation, Format.FP32, bias=True)
    shard = {
        "w13_weight": torch.tensor([[[1.0], [0.0]]])[:, : activation.parts].contiguous(),
        "w13_bias": torch.tensor([[0.0, 1.0]])[:, : activation.parts].contiguous(),
        "w2_weight": torch.ones(1, 1, 1),
        "w2_bias": torch.zeros(1, 1),
    }
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.logspace(-15, 4, 100)])[:, None]
    plan = engine.plan(spec, shard, max_tokens=len(x), top_k=1)
    out = torch.empty_like(x)
    plan.run(x, torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1), out)
    exact = oracle.activate(spec, x.double(), torch.ones_like(x).double())
    # The lower tail falls like exp(-x^2 / 2): rounding x alone changes it by x^2 roundings.
    # The float64 oracle cancels there too, hence the floor.
    bound = 5e-7 * (1 + x.double().clamp(max=0) ** 2) * exact.abs() + 1e-14
    assert ((out - exact).abs() <= bound).all()


@by_value
def test_activations_of_very_different_sizes(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    spec = make_spec(320, 160, format)
    shard = make_shard(spec, 2)
    for rows in (1, 2, 5, 12):
        x, ids, weights = random_batch(spec, rows, 2, (0, 2), generator)
        sizes = 10.0 ** torch.randint(-6, 2, x.shape, generator=generator)
        x = (x * sizes).to(x.dtype)
        x[:, 64:96] = 0
        check(engine, spec, shard, (x, ids, weights))


FOUR_BITS = (Format.INT4, Format.MXFP4, Format.NVFP4)


WITH_SCALED_OPERANDS = (*FOUR_BITS, Format.FP8_BLOCK, Format.FP8_CHANNEL, Format.INT8_CHANNEL)


def weigh_nothing_in_every_eighth(format: Format, shard: Shard) -> None:
    """Columns 0, 8, 16, ... of w13: of four bits the low half of every fourth byte."""
    codes = shard["w13_weight"].view(torch.uint8)
    if format in FOUR_BITS:
        codes[:, :, ::4] = (codes[:, :, ::4] & 0xF0) | (8 if format is Format.INT4 else 0)
    else:
        codes[:, :, ::8] = 0


@pytest.mark.parametrize("format", WITH_SCALED_OPERANDS, ids=lambda f: f.value)
@pytest.mark.parametrize("size", [30.0, 300.0, 1e3, 1e4])
def test_activations_beside_large_ones_that_weigh_nothing(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    format: Format,
    size: float,
) -> None:
    spec = make_spec(320, 160, format)
    shard = make_shard(spec, 1)
    weigh_nothing_in_every_eighth(format, shard)
    for rows in (1, 5, 12):
        x, ids, weights = random_batch(spec, rows, 1, (0, 1), generator)
        x[:, ::8] = size
        check(engine, spec, shard, (x, ids, weights))


@pytest.mark.parametrize("format", WITH_SCALED_OPERANDS, ids=lambda f: f.value)
def test_large_ones_that_weigh_nothing_in_some_blocks_only(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    spec = make_spec(320, 160, format)
    shard = make_shard(spec, 1)
    weigh_nothing_in_every_eighth(format, shard)
    for rows in (1, 5, 12):
        # In all of them first: what they leave in the engine's memory must not count afterwards.
        for blocks in ((0, 1, 2), (0,), (1,), (2,), (0, 2)):
            x, ids, weights = random_batch(spec, rows, 1, (0, 1), generator)
            for block in blocks:
                x[:, 128 * block : 128 * (block + 1) : 8] = 1e4
            check(engine, spec, shard, (x, ids, weights))


@pytest.mark.parametrize("format", WITH_SCALED_OPERANDS, ids=lambda f: f.value)
@pytest.mark.parametrize("size", [1e-6, 1e-12])
def test_small_activations_are_as_accurate(
    engine: CpuExpertEngine,
    make_shard: MakeShard,
    generator: torch.Generator,
    format: Format,
    size: float,
) -> None:
    spec = make_spec(320, 160, format)
    shard = make_shard(spec, 1)
    for rows in (1, 5, 12):
        x, ids, weights = random_batch(spec, rows, 1, (0, 1), generator)
        check(engine, spec, shard, (x * size, ids, weights))


@pytest.mark.parametrize(
    "format", [*FOUR_BITS, Format.INT4_ZEROS, Format.INT8_CHANNEL], ids=lambda f: f.value
)
def test_few_tokens_are_computed_as_if_alone(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    if engine.isa not in ("avx512_vnni", "amx"):
        pytest.skip("how many rows pass together decides the order of sums")
    spec = make_spec(320, 160, format, bias=True)
    x, _, weights = random_batch(spec, 8, 2, (0, 3), generator)
    x[2, ::8] = 1e4  # of more digits than the others
    token = torch.arange(8, dtype=torch.int32)
    ids = torch.stack([token % 3, (token + 1) % 3], 1)  # five or six tokens an expert
    plan = engine.plan(spec, make_shard(spec, 3), max_tokens=8, top_k=2)
    together = torch.empty(x.shape)
    plan.run(x, ids, weights, together)
    for t in range(8):
        alone = torch.empty(1, spec.hidden)
        plan.run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], alone)
        assert torch.equal(alone[0], together[t])


def filled(shard: Shard, w13: int, w2: int) -> Shard:
    """Its weights of these bytes alone."""
    shard["w13_weight"].view(torch.uint8)[:] = w13
    shard["w2_weight"].view(torch.uint8)[:] = w2
    return shard


@pytest.mark.parametrize("format", WITH_SCALED_OPERANDS, ids=lambda f: f.value)
def test_infinity_in_gives_infinity_out(
    engine: CpuExpertEngine, make_shard: MakeShard, format: Format
) -> None:
    spec = make_spec(40, 24, format, activation=Activation.RELU2_NO_MUL)
    ones = {Format.INT4: 0x99, Format.FP8_BLOCK: 0x38, Format.FP8_CHANNEL: 0x38}
    one = ones.get(format, 0x22)
    shard = filled(make_shard(spec, 1), one, one)
    plan = engine.plan(spec, shard, max_tokens=20, top_k=1)
    for tokens in (1, 20):
        x = torch.ones(tokens, spec.hidden, dtype=spec.activation_dtype)
        x[0, 3] = torch.inf
        out = torch.zeros(x.shape)
        plan.run(x, torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1), out)
        assert (out[0] == torch.inf).all()
        assert out[1:].isfinite().all()


# Bytes of weights of 1 and of -1.
ONES = {
    Format.INT4: (0x99, 0x77),
    Format.MXFP4: (0x22, 0xAA),
    Format.NVFP4: (0x22, 0xAA),
    Format.INT8_CHANNEL: (0x01, 0xFF),
}


@pytest.mark.parametrize("format", ONES, ids=lambda f: f.value)
@pytest.mark.parametrize("weight_sign", [1, -1])
@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_counts_in_each_column_with_its_sign(
    engine: CpuExpertEngine, make_shard: MakeShard, format: Format, sign: int, weight_sign: int
) -> None:
    # The activation makes 0 of -inf.
    spec = make_spec(160, 32, format, activation=Activation.RELU2_NO_MUL)
    plus, minus = ONES[format]
    shard = filled(make_shard(spec, 1), plus if weight_sign > 0 else minus, plus)
    plan = engine.plan(spec, shard, max_tokens=4, top_k=1)
    x = torch.ones(spec.hidden, spec.hidden, dtype=spec.activation_dtype)
    x.fill_diagonal_(sign * torch.inf)
    out = torch.empty(x.shape)
    ids, weights = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    for t in range(0, len(x), 4):  # few rows an expert: the kernels that split activations
        plan.run(x[t : t + 4], ids, weights, out[t : t + 4])
    assert (out == (torch.inf if sign == weight_sign else 0)).all()


# Bytes of the least and the largest weights.
EXTREMES = {
    Format.INT4: (0x00, 0xFF),
    Format.MXFP4: (0xFF, 0x77),
    Format.NVFP4: (0xFF, 0x77),
    Format.INT8_CHANNEL: (0x80, 0x7F),
}


@pytest.mark.parametrize("format", EXTREMES, ids=lambda f: f.value)
@pytest.mark.parametrize("up", [0, 1], ids=["least", "largest"])
@pytest.mark.parametrize("down", [0, 1], ids=["least", "largest"])
def test_sums_of_the_largest_products(
    engine: CpuExpertEngine, make_shard: MakeShard, format: Format, up: int, down: int
) -> None:
    """All weights and all activations as large as they can be: what adds up must not overflow."""
    spec = make_spec(320, 160, format, activation=Activation.RELU2_NO_MUL)
    shard = filled(make_shard(spec, 1), EXTREMES[format][up], EXTREMES[format][down])
    for rows in (1, 4, 8, 20):
        x = torch.full((rows, spec.hidden), 1.0 if up else -1.0, dtype=spec.activation_dtype)
        check(
            engine, spec, shard, (x, torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1))
        )


def test_nan_in_gives_nan_out(engine: CpuExpertEngine, make_shard: MakeShard) -> None:
    formats = (Format.FP32, Format.BF16, Format.FP8_TENSOR, Format.INT4, Format.MXFP4, Format.NVFP4)
    for activation, format in itertools.product(Activation, formats):
        spec = make_spec(40, 24, format, activation=activation)
        plan = engine.plan(spec, make_shard(spec, 1), max_tokens=20, top_k=1)
        for tokens in (1, 20):
            x = torch.zeros(tokens, spec.hidden, dtype=spec.activation_dtype)
            x[0, 3] = torch.nan
            out = torch.zeros(x.shape)
            ids = torch.zeros(tokens, 1, dtype=torch.int32)
            plan.run(x, ids, torch.ones(tokens, 1), out)
            assert out[0].isnan().all()
            assert not out[1:].isnan().any()


@given(data=st.data())
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_routing(engine: CpuExpertEngine, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    experts = data.draw(st.integers(1, 9))
    spec = make_spec(
        data.draw(st.integers(1, 70)) * 2,
        data.draw(st.integers(1, 70)),
        data.draw(st.sampled_from(list(Format))),
        activation=data.draw(st.sampled_from(list(Activation))),
        bias=data.draw(st.booleans()),
        apply_router_weight_on_input=data.draw(st.booleans()),
    )
    tokens, top_k = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 6))
    ids = st.integers(-1, experts - 1)
    if data.draw(st.booleans()):  # concentrate on one expert
        ids = st.just(data.draw(ids))
    drawn = data.draw(st.lists(ids, min_size=tokens * top_k, max_size=tokens * top_k))
    batch = random_batch(spec, tokens, top_k, (0, 1), generator)
    batch[1].copy_(torch.tensor(drawn, dtype=torch.int32).view(tokens, top_k))
    expert_map = None
    if data.draw(st.booleans()):
        rows = st.integers(-1, experts - 1)
        entries = [*data.draw(st.lists(rows, min_size=experts, max_size=experts)), -1]
        expert_map = torch.tensor(entries, dtype=torch.int32)
    check(
        engine,
        spec,
        random_shard(spec, experts, generator),
        batch,
        expert_map=expert_map,
        max_tokens=data.draw(st.integers(1, 50)),
    )


def test_scales_of_very_different_sizes(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator
) -> None:
    spec = make_spec(640, 384, Format.FP8_BLOCK)
    shard = make_shard(spec, 2)
    for name in ("w13_scale", "w2_scale"):
        sizes = torch.randint(-12, 13, shard[name].shape, generator=generator)
        shard[name] *= torch.exp2(sizes.float())
    for rows in (1, 2, 5, 12):
        check(engine, spec, shard, random_batch(spec, rows, 2, (0, 2), generator))


@pytest.mark.parametrize(
    "format", [Format.FP8_BLOCK, Format.FP8_CHANNEL, Format.FP8_TENSOR, Format.INT8_CHANNEL]
)
def test_scales_may_be_negative(
    engine: CpuExpertEngine, make_shard: MakeShard, generator: torch.Generator, format: Format
) -> None:
    spec = make_spec(256, 256, format)
    shard = make_shard(spec, 2)
    for name in ("w13_scale", "w2_scale"):
        shard[name].view(-1)[::2] *= -1
    for rows in (1, 4, 9, 40):
        check(engine, spec, shard, random_batch(spec, rows, 1, (0, 2), generator))


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_clamps_to_nothing_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="clamps to nothing"):
        make_spec(64, 64, Format.BF16, swiglu_limit=limit)
