"""The answers are vLLM's own: every architecture, any number of slots, and not when it is broken.

float32: identical greedy tokens. bf16: no further from the float32 model than stock bf16 is, by the
mean and the 99th percentile of the absolute error of the log-probabilities of given sequences.
Each check is shown to fail when a fault is planted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")

from vllm import LLM  # noqa: E402

from tests.e2e.engines import (  # noqa: E402
    Prompts,
    engine,
    errors,
    greedy,
    is_no_further,
    log_probabilities,
    resize,
    sequences_for,
    stats,
)
from tests.e2e.faults import FAULTS  # noqa: E402
from vllm_moe_offload import moe_offload_args  # noqa: E402
from vllm_moe_offload.device.copies import Pairs, RowCopies, Runs  # noqa: E402
from vllm_moe_offload.device.host import HostSlotCache  # noqa: E402
from vllm_moe_offload.planning import TailRates  # noqa: E402
from vllm_moe_offload.stream import CpuTail  # noqa: E402

DEMO = Path(__file__).parents[2] / "models" / "demo-moe"


@dataclass(frozen=True)
class Model:
    """A checkpoint with what stock vLLM makes of it."""

    path: Path
    num_experts: int
    prompts: Prompts
    tokens: list[list[int]]
    sequences: list[list[int]]
    reference: np.ndarray
    stock_bf16: np.ndarray


@pytest.fixture(scope="module", params=[*checkpoints.ARCHITECTURES, "demo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name: str = request.param
    if name == "demo":
        path, num_experts, vocabulary = DEMO, 32, 2048
    else:
        path = checkpoints.write(name, tmp_path_factory.mktemp(name))
        num_experts = checkpoints.NUM_EXPERTS[name]
        vocabulary = checkpoints.VOCAB
    prompts = Prompts.draw(vocabulary)
    sequences = sequences_for(vocabulary)
    with engine(path) as stock:
        tokens = greedy(stock, prompts)
        reference = log_probabilities(stock, sequences)
    with engine(path, dtype="bfloat16") as stock:
        stock_bf16 = log_probabilities(stock, sequences)
    return Model(path, num_experts, prompts, tokens, sequences, reference, stock_bf16)


def capacities(num_experts: int) -> list[int]:
    return [1, num_experts // 4, num_experts - 1, num_experts]


def test_float32_gives_identical_tokens_with_any_number_of_slots(model: Model) -> None:
    """And not with a planted fault; in one engine, whose start takes most of the time."""
    with engine(model.path, **moe_offload_args(slots_per_layer=1)) as ours:
        for slots in capacities(model.num_experts):
            resize(ours, slots)
            assert greedy(ours, model.prompts) == model.tokens, f"{slots} slots"
            done = stats(ours)
            assert (done["misses"] > 0) == (slots < model.num_experts)
            assert all(layer["slots"] == slots for layer in done["layers"].values())
            assert done["bytes_fetched"] == sum(
                layer["misses"] * layer["expert_bytes"] for layer in done["layers"].values()
            )
        for name, plant in FAULTS.items():
            with pytest.MonkeyPatch.context() as patch:
                plant(patch, HostSlotCache)
                resize(ours, model.num_experts // 4)
                assert greedy(ours, model.prompts) != model.tokens, name


def test_float32_gives_identical_tokens_through_buffers(model: Model) -> None:
    """Steps of more than four rows streamed, and all."""
    for threshold in (4, 0):
        missed = 0
        settings = moe_offload_args(slots_per_layer=1, stream_threshold=threshold)
        with engine(model.path, **settings) as ours:
            for slots in capacities(model.num_experts)[1:]:
                resize(ours, slots)
                assert greedy(ours, model.prompts) == model.tokens, (threshold, slots)
                done = stats(ours)
                streams = slots < model.num_experts
                for layer in done["layers"].values():
                    assert layer["steps"] - layer["streamed"] >= 0
                    assert (layer["streamed"] > 0) == streams
                    assert (layer["kept"] > 0) == streams
                    assert streams or not layer["misses"]
                missed += done["misses"]
                assert done["stream_threshold"] == threshold
        # With many slots what is kept of the prompts may be all that the small steps use.
        assert (missed > 0) == (threshold > 0)


def shift(self: RowCopies, runs: Runs) -> Pairs:
    """In place of `RowCopies.pairs`: every expert becomes the next one."""
    num_experts = len(self._pairs[0][0])
    rows = [
        ((expert + 1) % num_experts, row)
        for experts, places in runs
        for expert, row in zip(
            range(experts.start, experts.stop), range(places.start, places.stop), strict=True
        )
    ]
    return row_pairs(self, [(slice(e, e + 1), slice(row, row + 1)) for e, row in rows])


def drop(self: RowCopies, runs: Runs) -> Pairs:
    """One that is not copied: what was in its row before stays."""
    return [(to[1:], source[1:]) for to, source in row_pairs(self, runs)]


row_pairs = RowCopies.pairs


def check_faults_in_the_buffers(ours: LLM, model: Model) -> None:
    """The last that is done with an engine: they stay in slots."""
    for fault in (shift, drop):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowCopies, "pairs", fault)
            assert greedy(ours, model.prompts) != model.tokens, fault.__doc__


def test_float32_gives_identical_tokens_with_some_experts_on_the_cpu(model: Model) -> None:
    """Of streamed steps, as on a GPU: about half of those that are not copied ahead."""
    with engine(model.path, **moe_offload_args(slots_per_layer=1, stream_threshold=0)) as ours:
        (runtime,) = ours.collective_rpc(lambda worker: worker._moe_offload_runtime)
        runtime._streaming._streamer.tail = CpuTail(TailRates(copy=1.0, cpu=0.5, cpu_row=0.01))
        assert greedy(ours, model.prompts) == model.tokens
        done = stats(ours)
        assert all(layer["cpu_experts"] > 0 for layer in done["layers"].values())
        assert done["bytes_streamed"] > 0
        check_faults_in_the_buffers(ours, model)


def test_float32_gives_identical_tokens_by_ping_pong(model: Model) -> None:
    with engine(model.path, **moe_offload_args(mode="stream")) as ours:
        ours.collective_rpc("moe_offload_reset_stats")
        assert greedy(ours, model.prompts) == model.tokens
        for layer in stats(ours)["layers"].values():
            assert layer["streamed"] == layer["steps"] > 0
            assert layer["bytes_streamed"] == layer["steps"] * layer["host_bytes"]
        check_faults_in_the_buffers(ours, model)


def test_bf16_by_ping_pong_is_no_further_from_float32_than_stock_is(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model.path, dtype="bfloat16", **moe_offload_args(mode="stream")) as ours:
        got = log_probabilities(ours, model.sequences)
        assert is_no_further(got, model.stock_bf16, model.reference)
        for fault in (shift, drop):
            monkeypatch.setattr(RowCopies, "pairs", fault)
            got = log_probabilities(ours, model.sequences)
            assert not is_no_further(got, model.stock_bf16, model.reference), fault.__doc__


def test_float32_gives_identical_tokens_computed_by_the_cpu(model: Model) -> None:
    with engine(model.path, **moe_offload_args(mode="cpu")) as ours:
        assert greedy(ours, model.prompts) == model.tokens
        done = stats(ours)
        assert done["cpu_experts"] > 0
        assert (done["hits"], done["misses"], done["device_bytes"]) == (0, 0, 0)


def test_bf16_is_no_further_from_float32_than_stock_is(model: Model) -> None:
    with engine(model.path, dtype="bfloat16", **moe_offload_args(slots_per_layer=1)) as ours:
        for slots in capacities(model.num_experts):
            resize(ours, slots)
            got = log_probabilities(ours, model.sequences)
            assert is_no_further(got, model.stock_bf16, model.reference), (
                slots,
                errors(got, model.reference),
                errors(model.stock_bf16, model.reference),
            )
        for name, plant in FAULTS.items():
            with pytest.MonkeyPatch.context() as patch:
                plant(patch, HostSlotCache)
                resize(ours, model.num_experts // 4)
                got = log_probabilities(ours, model.sequences)
            assert not is_no_further(got, model.stock_bf16, model.reference), (
                name,
                errors(got, model.reference),
                errors(model.stock_bf16, model.reference),
            )
