"""What is submitted reaches the CPU lane whole, and its answer reaches the sum."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import DEVICE, INTERPRETED, marked, run_interpreted
from tests.device.lane import FakeLane, Seen, partial_sum, wait_for_answer
from vllm_moe_offload.device.mailbox import ANSWER, DONE, FAILED, REQUEST, Doorbell, Mailbox

NAN = float("nan")


@dataclass(frozen=True)
class Sizes:
    max_tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16

    def mailbox(self) -> Mailbox:
        return Mailbox.allocate(
            self.max_tokens,
            self.hidden,
            self.dtype,
            num_experts=self.experts,
            top_k=self.top_k,
            pinned=not INTERPRETED,
        )


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

    def submit(self, bell: Doorbell) -> None:
        bell.submit(self.x, self.ids, self.weights, self.cpu_map)

    def run(self, bell: Doorbell) -> None:
        self.submit(bell)
        wait(bell)
        bell.join(self.resident, self.cpu_map, self.out)

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


def wait(bell: Doorbell) -> None:
    """As the GPU's stream waits."""
    if INTERPRETED:
        wait_for_answer(bell.mailbox)
    else:
        bell.wait()


def poison(mailbox: Mailbox) -> None:
    for tensor in (mailbox.x, mailbox.weights, mailbox.partial):
        tensor.fill_(NAN)
    mailbox.ids.fill_(2**30)
    mailbox.cpu_map[:-1] = 2**30


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
    mailbox = sizes.mailbox()
    bell = Doorbell(mailbox, DEVICE)
    with FakeLane(mailbox) as lane:
        for _ in range(3):
            step = Step(sizes, data.draw(st.integers(1, 64)))
            step.draw(data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from([0, 0.3, 1])))
            poison(mailbox)
            step.run(bell)
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
    mailbox = sizes.mailbox()
    bell, step = Doorbell(mailbox, DEVICE), Step(sizes, sizes.max_tokens)
    with FakeLane(mailbox) as lane:
        for seed in range(3 if INTERPRETED else 100):
            step.draw(seed, 0.2)
            poison(mailbox)
            step.run(bell)
            step.check(lane)


@marked
def test_a_step_without_the_cpu_asks_for_nothing_and_writes_nothing() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    mailbox = sizes.mailbox()
    bell, step = Doorbell(mailbox, DEVICE), Step(sizes, 4)
    step.draw(0, 0)
    poison(mailbox)
    mailbox.control.zero_()
    step.run(bell)
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert mailbox.control[REQUEST] == 0
    assert mailbox.control[ANSWER] == DONE
    assert mailbox.x.isnan().all()
    assert torch.equal(step.out.cpu(), rounded(step.resident.cpu(), step.out.dtype))


@marked
def test_wide_ids_narrow_weights_and_a_sum_in_place() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    mailbox = sizes.mailbox()
    bell, step = Doorbell(mailbox, DEVICE), Step(sizes, 3)
    step.draw(1, 1)
    step.ids, step.weights = step.ids.long(), step.weights.bfloat16()
    step.out.copy_(step.resident)
    step.resident = step.out.clone()
    with FakeLane(mailbox) as lane:
        step.submit(bell)
        wait(bell)
        bell.join(step.out, step.cpu_map, step.out)
        step.check(lane)


@marked
def test_the_last_answer_is_no_answer_to_this_request() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    mailbox = sizes.mailbox()
    bell, step = Doorbell(mailbox, DEVICE), Step(sizes, 4)
    step.draw(1, 1)
    mailbox.control[ANSWER] = DONE
    step.submit(bell)
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert mailbox.control[ANSWER] == 0
    assert mailbox.control[REQUEST] == 1


@marked
def test_no_rows_are_a_step_without_the_cpu() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    mailbox = sizes.mailbox()
    step = Step(sizes, 0)
    step.run(Doorbell(mailbox, DEVICE))


@marked
def test_what_does_not_fit_the_mailbox_is_refused() -> None:
    sizes = Sizes(max_tokens=4, hidden=32, experts=8, top_k=2)
    bell, step = Doorbell(sizes.mailbox(), DEVICE), Step(sizes, 4)
    x, ids, weights, cpu_map = step.x, step.ids, step.weights, step.cpu_map
    with pytest.raises(ValueError, match="up to 4 of 32 numbers"):
        Step(sizes, 5).submit(bell)
    with pytest.raises(ValueError, match=r"a mailbox of torch\.bfloat16"):
        bell.submit(x.float(), ids, weights, cpu_map)
    with pytest.raises(ValueError, match="ids"):
        bell.submit(x, ids[:2], weights, cpu_map)
    with pytest.raises(ValueError, match="weights"):
        bell.submit(x, ids, weights.mT.contiguous().mT, cpu_map)
    with pytest.raises(ValueError, match="cpu_map"):
        bell.submit(x, ids, weights, cpu_map[:-1])
    with pytest.raises(ValueError, match="out"):
        bell.join(x, cpu_map, x[:2])


@marked
def test_the_flags_lie_on_cache_lines_of_their_own() -> None:
    mailbox = Sizes(max_tokens=1, hidden=8, experts=8, top_k=2).mailbox()
    assert mailbox.control.data_ptr() % 64 == 0
    assert REQUEST * 4 // 64 != ANSWER * 4 // 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("answer", [DONE, FAILED])
def test_a_captured_round_trip(tokens: int, answer: int) -> None:
    sizes = Sizes(max_tokens=64, hidden=2048, experts=128, top_k=8)
    mailbox = sizes.mailbox()
    bell, step = Doorbell(mailbox, DEVICE), Step(sizes, tokens)
    step.run(bell)  # compiles, which capturing does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(bell)
    # A slow lane: a stream that does not wait would read the poison.
    with FakeLane(mailbox, answer, delay=0.002) as lane:
        for seed in range(60):
            step.draw(seed, (0, 0.1, 1)[seed % 3])
            poison(mailbox)
            graph.replay()
            step.check(lane)


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
