"""Ping-pong under CUDA's rules of capture, and around replays, whose work no mark tells of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stream.capture import RuledCopies, RuledMark, Rules
from tests.stream.machine import DELAYS, Machine
from tests.stream.test_streamer import CPU, HIDDEN, TOP_K, Model
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.stream import BufferMemory, InSlots, LayerStreamer, buffer_bytes

EXPERTS = 3


class Lane:
    """Computes at once: a layer whose expert e is ``x * v[e]``."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._v = tensors["v"]

    def output(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: None
    ) -> torch.Tensor:
        assert expert_map is None
        return (weights[:, :, None] * self._v[ids.long()] * x[:, None]).sum(1)


class PingPong:
    """Layers without slots, run eagerly and captured in any order."""

    def __init__(self, num_layers: int) -> None:
        self.rules = Rules()
        self.is_piecewise = False
        self.streamer = LayerStreamer(
            RuledCopies(self.rules),
            threshold=0,
            is_alone=lambda: self.is_piecewise and self.rules.capture is not None,
        )
        rng = np.random.default_rng(0)
        draw = rng.standard_normal((num_layers, EXPERTS, HIDDEN)).astype(np.float32)
        self.hosts = [{"v": torch.from_numpy(layer)} for layer in draw]
        layout = ExpertLayout.of(self.hosts[0])
        memory = [BufferMemory(buffer_bytes(layout, EXPERTS), CPU) for _ in "01"]
        nowhere = InSlots({}, torch.full((EXPERTS,), -1, dtype=torch.int32), None)
        self.layers = []
        for host in self.hosts:
            buffers = [each.tensors(layout, EXPERTS) for each in memory]
            bound = [(buffer, Lane(buffer)) for buffer in buffers]
            self.layers.append(self.streamer.add(host, bound, Lane(host), lambda: nowhere, "layer"))

    def layer(self, number: int) -> None:
        x, weights = torch.ones(4, HIDDEN), torch.rand(4, TOP_K)
        ids = torch.arange(4 * TOP_K).view(4, TOP_K) % EXPERTS
        done = self.layers[number].output(x, weights, ids.int(), ids.int(), None)
        expected = Lane(self.hosts[number]).output(x, weights, ids, None)
        assert torch.equal(done.out, expected)
        assert done.copied == EXPERTS

    def eager(self) -> None:
        for number in range(len(self.layers)):
            self.layer(number)

    def announced(self) -> None:
        self.streamer.begin(1)
        self.eager()

    def announced_and_not_run(self) -> None:
        self.streamer.begin(1)
        self.streamer.end()

    def full(self) -> None:
        with self.rules.capturing():
            self.eager()

    def pieces(self) -> None:
        self.is_piecewise = True
        for number in range(len(self.layers)):
            with self.rules.capturing():
                self.layer(number)
        self.is_piecewise = False


STEPS: dict[str, Callable[[PingPong], None]] = {
    name: getattr(PingPong, name)
    for name in ("eager", "announced", "announced_and_not_run", "full", "pieces")
}


@settings(max_examples=100, deadline=None)
@given(
    num_layers=st.integers(1, 5),
    steps=st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=8),
)
def test_steps_in_and_out_of_capture(num_layers: int, steps: list[str]) -> None:
    model = PingPong(num_layers)
    for step in steps:
        STEPS[step](model)


def test_a_piece_may_have_several_layers() -> None:
    model = PingPong(4)
    model.is_piecewise = True
    for piece in ([0], [1, 2], [3]):
        with model.rules.capturing():
            for number in piece:
                model.layer(number)


def test_the_rules_notice_copies_for_a_layer_of_the_next_piece() -> None:
    model = PingPong(3)
    with pytest.raises(AssertionError, match="nobody waits"), model.rules.capturing():
        model.layer(0)


def test_the_rules_notice_a_mark_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PingPong(3)
    model.eager()
    record = RuledMark.record
    monkeypatch.setattr(RuledMark, "record", lambda self: model.rules.capture or record(self))
    with pytest.raises(AssertionError), model.rules.capturing():
        model.layer(0)


class Replayed(Model):
    """Layers without slots; what a replay does comes between their steps."""

    def __init__(self, machine: Machine, num_layers: int, seed: int) -> None:
        super().__init__(machine, [(4, 0)] * num_layers, seed)

    def replay(self) -> None:
        """On the computing stream alone: the graph fills both buffers and reads them."""

        def item() -> None:
            for buffer in self.layers[0].buffers:
                buffer.tensors["v"].fill_(float("nan"))

        self.machine.enqueue(item)


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=40, deadline=None)
@given(num_layers=st.integers(1, 4), steps=st.lists(st.booleans(), max_size=4), seed=st.integers(0))
def test_nothing_is_copied_into_a_buffer_before_a_replay_is_done(
    delay: str, num_layers: int, steps: list[bool], seed: int
) -> None:
    model = Replayed(Machine(DELAYS[delay], seed), num_layers, seed % 2**31)
    for is_announced in (True, *steps):
        model.replay()
        if is_announced:
            model.streamer.begin(1)
        model.run(range(num_layers))


@pytest.mark.parametrize("delay", DELAYS)
def test_a_replay_comes_after_the_copies_of_a_step_that_was_not_run(delay: str) -> None:
    model = Replayed(Machine(DELAYS[delay]), 2, 0)
    model.streamer.begin(1)
    model.streamer.end()
    model.replay()
    model.machine.finish()
    model.machine.finish_copying()
    for buffer in model.layers[0].buffers:
        assert buffer.tensors["v"].isnan().all(), "and not overwritten by them"


def test_the_check_of_replays_notices_a_mark_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Replayed(Machine(DELAYS["computing is late"]), 2, 0)
    model.run(range(2))
    begin = model.streamer.begin

    def late(rows: int, first: int = 0) -> None:
        with monkeypatch.context() as patch:
            for marks in model.streamer._marks:
                patch.setattr(marks.free, "record", lambda: None)
            begin(rows, first)

    monkeypatch.setattr(model.streamer, "begin", late)
    model.replay()
    with pytest.raises(AssertionError):
        model.run(range(2))
