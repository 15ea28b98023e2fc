"""What is submitted reaches the CPU lane whole, and its answer reaches the sum."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import DEVICE, INTERPRETED, marked, run_interpreted
from tests.device.lane import FakeLane, Rig, Seen, partial_sum
from vllm_moe_offload.device.request import Operands
from vllm_moe_offload.engine import ASKED, DONE, FAILED, Mailbox

NAN = float("nan")


@dataclass(frozen=True)
class Sizes:
    max_tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16

    def rig(self) -> Rig:
        operands = Operands.allocate(
            self.max_tokens,
            self.hidden,
            self.dtype,
            num_experts=self.experts,
            top_k=self.top_k,
            device=DEVICE,
        )
        return Rig(operands, DEVICE)


class Step:
    """The tensors of a step on the device; `draw` writes others into the same memory."""

    def __init__(self, sizes: Sizes, tokens: int) -> None:
        self.sizes = sizes
        self.x = torch.zeros(tokens, sizes.hidden, dtype=sizes.dtype, device=DEVICE)
        self.ids = torch.zeros(tokens, sizes.top_k, dtype=torch.int32, device=DEVICE)
        self.weights = torch.zeros(tokens, sizes.top_k, device=DEVICE)
        self.cpu_map = torch.full((sizes.experts + 1,), -1, dtype=torch.int32, device=DEVICE)
        self.resident = torch.zeros_like(self.x, dtype=torch.float32)
        self.out = torch.zeros_like(self.x)

    def draw(self, seed: int, cpu_share: float) -> None:
        """`cpu_share`: of the experts, which are the CPU's."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.x, self.weights, self.resident):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        # The sentinel is among the ids: a row of padding.
        ids = torch.randint(0, self.sizes.experts + 1, self.ids.shape, generator=generator)
        self.ids.copy_(ids)
        experts = torch.arange(self.sizes.experts, dtype=torch.int32)
        of_cpu = torch.rand(experts.shape, generator=generator) < cpu_share
        self.cpu_map[:-1] = torch.where(of_cpu, experts, -1).to(DEVICE)
        self.out.fill_(NAN)

    @property
    def given(self) -> Seen:
        return Seen(
            self.x.cpu(), self.ids.int().cpu(), self.weights.float().cpu(), self.cpu_map.cpu()
        )

    def submit(self, rig: Rig) -> None:
        rig.request.submit(self.x, self.ids, self.weights, self.cpu_map)

    def run(self, rig: Rig) -> None:
        self.submit(rig)
        rig.wait()
        rig.request.join(self.resident, self.cpu_map, self.out)

    def check(self, lane: FakeLane) -> None:
        """The lane was asked for what was given, if for anything, and `out` is the sum."""
        given, expected = self.given, self.resident.cpu().float()
        out = self.out.cpu()
        if (given.cpu_map >= 0).any():
            (seen,) = lane.seen
            for name, tensor in vars(given).items():
                assert torch.equal(getattr(seen, name), tensor), name
            expected = expected + partial_sum(given)
        else:
            assert lane.seen == []
        lane.seen.clear()
        assert torch.equal(out, rounded(expected, out.dtype))


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the device rounds float32: to the nearest, but the interpreter cuts bfloat16 off."""
    if INTERPRETED and dtype == torch.bfloat16:
        value = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return value.to(dtype)


def poison(operands: Operands) -> None:
    for tensor in (operands.x, operands.weights, operands.partial):
        tensor.fill_(NAN)
    operands.ids.fill_(2**30)
    operands.cpu_map[:-1] = 2**30


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@marked
@settings(max_examples=30 if INTERPRETED else 200, deadline=None)
@given(data=st.data())
def test_drawn_steps_make_the_round_trip(data: st.DataObject) -> None:
    sizes = Sizes(
        max_tokens=64,
        hidden=data.draw(st.integers(1, 300)),
        experts=data.draw(st.integers(1, 40)),
        top_k=data.draw(st.integers(1, 8)),
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    rig = sizes.rig()
    with FakeLane(rig) as lane:
        for _ in range(3):
            step = Step(sizes, data.draw(st.integers(1, 64)))
            step.draw(data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from([0, 0.3, 1])))
            poison(rig.operands)
            step.run(rig)
            step.check(lane)


@marked
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(max_tokens=64, hidden=4096, experts=128, top_k=8),
        Sizes(max_tokens=600, hidden=1, experts=16, top_k=8),
    ],
    ids=["wide", "narrower than top-k"],
)
def test_many_programs_write_before_one_rings(sizes: Sizes) -> None:
    rig, step = sizes.rig(), Step(sizes, sizes.max_tokens)
    with FakeLane(rig) as lane:
        for seed in range(3 if INTERPRETED else 100):
            step.draw(seed, 0.2)
            poison(rig.operands)
            step.run(rig)
            step.check(lane)


@marked
def test_a_step_without_the_cpu_asks_for_nothing_and_writes_nothing() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    rig, step = sizes.rig(), Step(sizes, 4)
    step.draw(0, 0)
    poison(rig.operands)
    step.run(rig)
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert rig.asked[0] == 0
    assert rig.answer[0] == DONE
    assert rig.operands.x.isnan().all()
    assert torch.equal(step.out.cpu(), rounded(step.resident.cpu(), step.out.dtype))


@marked
def test_wide_ids_narrow_weights_and_a_sum_in_place() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    rig, step = sizes.rig(), Step(sizes, 3)
    step.draw(1, 1)
    step.ids, step.weights = step.ids.long(), step.weights.bfloat16()
    step.out.copy_(step.resident)
    step.resident = step.out.clone()
    with FakeLane(rig) as lane:
        step.submit(rig)
        rig.wait()
        rig.request.join(step.out, step.cpu_map, step.out)
        step.check(lane)


@marked
def test_the_last_answer_is_no_answer_to_this_request() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    rig, step = sizes.rig(), Step(sizes, 4)
    step.draw(1, 1)
    rig.answer[0] = DONE
    step.submit(rig)
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert rig.answer[0] == 0
    assert rig.asked[0] == ASKED
    flags = rig.board.view(torch.int32)
    assert int((flags != 0).sum()) == 2, "a flag of another mailbox was written"


@marked
def test_no_rows_are_a_step_without_the_cpu() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    rig, step = sizes.rig(), Step(sizes, 0)
    step.run(rig)
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert rig.answer[0] == DONE


@marked
def test_what_does_not_fit_the_operands_is_refused() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    rig, step = sizes.rig(), Step(sizes, 4)
    x, ids, weights, cpu_map = step.x, step.ids, step.weights, step.cpu_map
    with pytest.raises(ValueError, match="up to 4 of 32 numbers"):
        Step(sizes, 5).submit(rig)
    with pytest.raises(ValueError, match=r"made for torch\.bfloat16"):
        rig.request.submit(x.float(), ids, weights, cpu_map)
    with pytest.raises(ValueError, match="ids"):
        rig.request.submit(x, ids[:2], weights, cpu_map)
    with pytest.raises(ValueError, match="weights"):
        rig.request.submit(x, ids, weights.mT.contiguous().mT, cpu_map)
    with pytest.raises(ValueError, match="cpu_map"):
        rig.request.submit(x, ids, weights, cpu_map[:-1])
    with pytest.raises(ValueError, match="out"):
        rig.request.join(x, cpu_map, x[:2])


def test_the_flags_lie_on_cache_lines_of_their_own() -> None:
    """What the GPU writes and what the CPU writes."""
    boxes = [Mailbox.at(index, 20) for index in range(20)]
    answers = {box.answer // 64 for box in boxes}
    assert len(answers) == 20
    assert answers.isdisjoint({at // 64 for box in boxes for at in (box.request, box.tokens)})


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("answer", [DONE, FAILED])
def test_a_captured_round_trip(tokens: int, answer: int) -> None:
    sizes = Sizes(max_tokens=64, hidden=2048, experts=128, top_k=8)
    rig, step = sizes.rig(), Step(sizes, tokens)
    step.run(rig)  # compiles, which capturing does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(rig)
    # A slow lane: a stream that does not wait would read the poison.
    with FakeLane(rig, answer, delay=0.002) as lane:
        for seed in range(60):
            step.draw(seed, (0, 0.1, 1)[seed % 3])
            poison(rig.operands)
            graph.replay()
            step.check(lane)


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
