"""Every layer is computed from its own experts, however late either stream is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stream.machine import DELAYS, HostLane, LateLane, LateStreamer, LateTail, Machine
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.planning import TailRates
from vllm_moe_offload.stream import BufferMemory, InSlots, StreamedLayer, buffer_bytes
from vllm_moe_offload.stream.streamer import Keep, _runs

CPU = torch.device("cpu")
HIDDEN, TOP_K = 3, 2


class Model:
    """Layers of random experts, some of them in slots; buffers and other slots are NaN."""

    def __init__(self, machine: Machine, sizes: Sequence[tuple[int, int]], seed: int = 0) -> None:
        """sizes: experts and slots of each layer."""
        self.machine = machine
        self.streamer = LateStreamer(machine)
        self.rng = np.random.default_rng(seed)
        self.hosts = [{"v": self.draw(experts, HIDDEN)} for experts, _ in sizes]
        self.residents: list[InSlots] = []
        self.computed = self.looked = 0
        layouts = [(ExpertLayout.of(host), len(host["v"])) for host in self.hosts]
        memory = [BufferMemory(max(buffer_bytes(*one) for one in layouts), CPU) for _ in "01"]
        self.layers: list[StreamedLayer] = []
        for number, (experts, slots) in enumerate(sizes):
            buffer = memory[number % 2].tensors(*layouts[number])
            buffer["v"].fill_(float("nan"))
            self.residents.append(self.fill(number, experts, slots))
            lane = LateLane(machine, buffer)
            self.layers.append(
                self.streamer.add(
                    self.hosts[number],
                    buffer,
                    lane,
                    HostLane(self.hosts[number]),
                    lambda number=number: self.residents[number],
                )
            )

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, np.float32))

    def fill(self, number: int, experts: int, slots: int) -> InSlots:
        """Other experts in the slots of a layer; what they hold is twice what host memory does."""
        slot_of = np.full(experts, -1, np.int32)
        slot_of[self.rng.choice(experts, slots, replace=False)] = self.rng.permutation(slots)
        tensors = torch.full((slots, HIDDEN), float("nan"))
        for expert in np.flatnonzero(slot_of >= 0):
            tensors[slot_of[expert]] = 2 * self.hosts[number]["v"][expert]
        return InSlots({"v": tensors}, torch.from_numpy(slot_of))

    def keep(self, number: int, ids: torch.Tensor) -> Keep:
        """Look at what is in the buffer when the layer has been computed, late."""

        def keep(in_buffer: torch.Tensor | None) -> None:
            values, in_slots = self.hosts[number]["v"], self.residents[number].slot_of >= 0
            expected = values * (1 + in_slots[:, None].float())
            here = torch.zeros(len(values), dtype=torch.bool)
            here[ids.unique().long()] = True
            if in_buffer is not None:
                here &= in_buffer >= 0

            def look() -> None:
                assert torch.equal(self.layers[number].buffer["v"][here], expected[here])
                self.looked += int(here.sum())

            self.machine.enqueue(look)

        return keep

    def run(self, numbers: Sequence[int], rows: int = 4) -> None:
        """These layers, one after another, then look at what they gave."""
        results = []
        for number in numbers:
            experts = len(self.hosts[number]["v"])
            ids = torch.from_numpy(self.rng.integers(0, experts, (rows, TOP_K)).astype(np.int32))
            x, weights = self.draw(rows, HIDDEN), self.draw(rows, TOP_K)
            done = self.layers[number].output(x, weights, ids, ids, self.keep(number, ids))
            in_slot = self.residents[number].slot_of >= 0
            missing = (~in_slot).numpy()
            if self.streamer.tail is None:
                assert (done.copied, done.computed) == (missing.sum(), 0)
            else:
                used = missing[np.unique(ids.numpy())].sum()
                assert used <= done.copied + done.computed <= missing.sum()
            self.computed += done.computed
            values = self.hosts[number]["v"] * (1 + in_slot[:, None].float())
            expected = (weights[:, :, None] * values[ids.long()] * x[:, None]).sum(1)
            results.append((number, done.out, expected))
        self.machine.finish()
        assert self.looked
        for number, got, expected in results:
            torch.testing.assert_close(got, expected, msg=f"layer {number}")


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.integers(1, 7).flatmap(lambda e: st.tuples(st.just(e), st.integers(0, e))),
        min_size=1,
        max_size=6,
    ),
    steps=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_steps_of_all_layers(
    delay: str, sizes: list[tuple[int, int]], steps: int, seed: int
) -> None:
    model = Model(Machine(DELAYS[delay], seed), sizes, seed)
    for _ in range(steps):
        model.streamer.begin()
        model.run(range(len(sizes)))
        for number, (experts, slots) in enumerate(sizes):
            model.residents[number] = model.fill(number, experts, slots)


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=60, deadline=None)
@given(cpu=st.floats(0, 4), row=st.floats(0, 2), seed=st.integers(0, 2**31))
def test_some_experts_on_the_cpu(delay: str, cpu: float, row: float, seed: int) -> None:
    model = Model(Machine(DELAYS[delay], seed), [(9, 2), (8, 0), (9, 5), (1, 0), (6, 6)], seed)
    model.streamer.tail = LateTail(model.machine, TailRates(1.0, cpu, row))
    for _ in range(3):
        model.streamer.begin()
        model.run(range(5))
    assert model.computed or cpu + row > 0.3


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=9), seed=st.integers(0, 2**31))
def test_layers_in_any_order(delay: str, order: list[int], seed: int) -> None:
    Model(Machine(DELAYS[delay], seed), [(5, 2), (6, 0), (4, 4), (5, 3)], seed).run(order)


def test_the_copies_of_the_next_layer_are_under_way_before_a_layer_is_computed() -> None:
    model = Model(Machine("copying"), [(5, 2), (6, 1), (7, 3), (4, 0)])
    model.streamer.begin()
    assert model.streamer.copies.copied == 3
    sent: list[int] = []
    for layer in model.layers:
        output = layer.lane.output
        layer.lane.output = lambda *given, output=output: (
            sent.append(model.streamer.copies.copied),
            output(*given),
        )[1]
    model.run(range(4))
    assert sent == [3 + 5, 3 + 5 + 4, 3 + 5 + 4 + 4, 3 + 5 + 4 + 4], "each once, none in a slot"


def test_a_step_that_was_begun_and_did_not_come_is_not_gone_on_with() -> None:
    model = Model(Machine(None), [(5, 2), (5, 2), (5, 2)])
    model.streamer.begin()
    for number in range(3):
        model.residents[number] = model.fill(number, 5, 2)
    model.streamer.end()
    model.run(range(3))


def test_an_error_in_a_layer_ends_the_step() -> None:
    model = Model(Machine(None), [(5, 2), (5, 2)])
    lane = model.layers[0].lane
    output, lane.output = lane.output, None
    with pytest.raises(TypeError):
        model.run([0])
    lane.output = output
    for number in range(2):
        model.residents[number] = model.fill(number, 5, 2)
    model.run([0, 1])


def test_what_is_streamed() -> None:
    streamer = LateStreamer(Machine(None))
    streamer.threshold = 64
    assert [streamer.takes(rows) for rows in (1, 64, 65, 4096)] == [False, False, True, True]
    streamer.threshold = None
    assert not streamer.takes(4096)


@given(st.sets(st.integers(0, 20)))
def test_runs_are_the_same_numbers(numbers: set[int]) -> None:
    runs = _runs(np.array(sorted(numbers), np.int64))
    assert [n for start, end in runs for n in range(start, end)] == sorted(numbers)
    assert all(end < start for (_, end), (start, _) in pairwise(runs))


def test_tensors_of_a_buffer_lie_apart_and_aligned() -> None:
    layout = ExpertLayout.of(
        {
            "a": torch.zeros(3, 5, dtype=torch.bfloat16),
            "b": torch.zeros(3),
            "c": torch.zeros(3, 2, 2, dtype=torch.uint8),
        }
    )
    memory = BufferMemory(buffer_bytes(layout, 3), CPU)
    tensors = memory.tensors(layout, 3)
    assert ExpertLayout.of(tensors) == layout
    base = tensors["a"].data_ptr()
    assert [(t.data_ptr() - base) % 256 for t in tensors.values()] == [0, 0, 0]
    for value, tensor in enumerate(tensors.values()):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors.values()] == [[0], [1], [2]]
    assert all(memory.holds(tensor[1]) for tensor in tensors.values())
    assert not memory.holds(torch.zeros(3))
    with pytest.raises(ValueError, match=r"100 experts take .* make buffers for the largest layer"):
        memory.tensors(layout, 100)
