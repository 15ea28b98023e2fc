"""Every layer is computed from its own experts, however late either stream is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interrupted import interruptions
from tests.stream.machine import DELAYS, HostLane, LateLane, LateStreamer, LateTail, Machine
from vllm_moe_offload.errors import CpuLaneError
from vllm_moe_offload.experts import ExpertLayout, TensorSpec
from vllm_moe_offload.planning import TailRates
from vllm_moe_offload.stream import (
    BufferMemory,
    CpuTail,
    InSlots,
    Keep,
    StreamedLayer,
    buffer_bytes,
)
from vllm_moe_offload.stream import tail as tail_module
from vllm_moe_offload.stream.tail import OnHost, TailTimes

CPU = torch.device("cpu")
HIDDEN, TOP_K = 3, 2


class Model:
    """Layers of random experts, some of them in slots; buffers and other slots are NaN."""

    def __init__(
        self,
        machine: Machine,
        sizes: Sequence[tuple[int, int]],
        seed: int = 0,
        buffer_experts: int = 100,
    ) -> None:
        """sizes: experts and slots of each layer; buffer_experts: what a buffer holds at most."""
        self.machine = machine
        self.streamer = LateStreamer(machine)
        self.rng = np.random.default_rng(seed)
        self.hosts = [{"v": self.draw(experts, HIDDEN)} for experts, _ in sizes]
        self.residents: list[InSlots] = []
        self.computed = self.kept = 0
        layouts = [
            (ExpertLayout.of(host), min(len(host["v"]), buffer_experts)) for host in self.hosts
        ]
        memory = [BufferMemory(max(buffer_bytes(*one) for one in layouts), CPU) for _ in "01"]
        self.layers: list[StreamedLayer] = []
        for number, (experts, slots) in enumerate(sizes):
            buffers = [each.tensors(*layouts[number]) for each in memory]
            for buffer in buffers:
                buffer["v"].fill_(float("nan"))
            self.residents.append(self.fill(number, experts, slots))
            self.layers.append(
                self.streamer.add(
                    self.hosts[number],
                    [(buffer, LateLane(machine, buffer)) for buffer in buffers],
                    HostLane(self.hosts[number]),
                    lambda number=number: self.residents[number],
                    f"layer {number}",
                )
            )

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, np.float32))

    def fill(self, number: int, experts: int, slots: int) -> InSlots:
        """Other experts in the slots of a layer; what they hold is twice what host memory does."""
        slot_of = np.full(experts, -1, np.int32)
        slot_of[self.rng.choice(experts, slots, replace=False)] = self.rng.permutation(slots)
        tensors = {"v": torch.full((slots, HIDDEN), float("nan"))}
        for expert in np.flatnonzero(slot_of >= 0):
            tensors["v"][slot_of[expert]] = 2 * self.hosts[number]["v"][expert]
        return InSlots(tensors, torch.from_numpy(slot_of), LateLane(self.machine, tensors))

    def run(self, numbers: Sequence[int], rows: int = 4) -> None:
        """These layers, one after another, then look at what they gave."""
        results = []
        for number in numbers:
            experts, layer = len(self.hosts[number]["v"]), self.layers[number]
            routed = torch.from_numpy(self.rng.integers(0, experts, (rows, TOP_K)).astype(np.int32))
            padding = torch.from_numpy(self.rng.random(rows) < 0.2)
            ids = routed.masked_fill(padding[:, None], experts)
            x, weights = self.draw(rows, HIDDEN), self.draw(rows, TOP_K)
            taking = Taking(self, number, ids)
            done = layer.output(x, weights, routed, ids, Keep(taking.decide, taking.take))
            taking.end(done.waves)
            in_slot = self.residents[number].slot_of >= 0
            missing = (~in_slot).numpy()
            if self.streamer.tail is None:
                assert (done.copied, done.computed) == (missing.sum(), 0)
            else:
                used = missing[np.unique(ids[~padding].numpy())].sum()
                assert used <= done.copied + done.computed <= missing.sum()
            parts = -(-done.copied // layer.size) + bool(in_slot.any())
            assert done.waves == (1 if layer.is_whole else parts)
            self.computed += done.computed
            values = self.hosts[number]["v"] * (1 + in_slot[:, None].float())
            expected = (weights[:, :, None] * values[routed.long()] * x[:, None]).sum(1)
            results.append((number, padding, done.out, expected))
        self.machine.finish()
        for number, padding, got, expected in results:
            torch.testing.assert_close(got[~padding], expected[~padding], msg=f"layer {number}")
            if not self.layers[number].is_whole:
                assert not got[padding].any()


class Taking:
    """Takes every expert that passes, and empties all slots as soon as they may be, late."""

    def __init__(self, model: Model, number: int, ids: torch.Tensor) -> None:
        self._model = model
        self._layer, self._host = model.layers[number], model.hosts[number]["v"]
        self._slots = model.residents[number]
        self._full = {name: t.clone() for name, t in self._slots.tensors.items()}
        self._used = torch.zeros(len(self._host), dtype=torch.bool)
        self._used[ids[ids < len(self._host)].unique().long()] = True
        self._at_hand: torch.Tensor | None = None
        self._decided = self._waves = 0
        self._taken: list[int] = []

    def decide(self, at_hand: torch.Tensor | None) -> None:
        assert not self._taken
        self._decided += 1

        def item() -> None:
            self._at_hand = torch.ones_like(self._used)
            if at_hand is not None:
                self._at_hand = at_hand >= 0
            for tensor in self._slots.tensors.values():
                tensor.fill_(float("nan"))

        self._model.machine.enqueue(item)

    def take(self, buffer: int, rows: torch.Tensor | None) -> None:
        assert self._decided == 1
        self._waves += 1
        tensor = self._layer.buffers[buffer].tensors["v"]

        def item() -> None:
            assert self._at_hand is not None
            here = torch.arange(len(self._host)) if rows is None else rows[:-1].long()
            if rows is None:  # and of those in slots twice what they are
                here = here.masked_fill(self._slots.slot_of >= 0, -1)
                here = here.masked_fill(~(self._at_hand & self._used), -1)
            experts = torch.nonzero(here >= 0).ravel()
            assert torch.equal(tensor[here[experts]], self._host[experts])
            self._taken += experts.tolist()

        self._model.machine.enqueue(item)

    def end(self, waves: int) -> None:
        """The layer is computed, later: slots are as they were from then on."""
        assert self._decided == 1

        def item() -> None:
            assert self._at_hand is not None
            missing = self._used & self._at_hand & (self._slots.slot_of < 0)
            assert set(torch.nonzero(missing).ravel().tolist()) <= set(self._taken)
            assert len(set(self._taken)) == len(self._taken)
            self._model.kept += len(self._taken)
            for name, tensor in self._slots.tensors.items():
                tensor.copy_(self._full[name])

        self._model.machine.enqueue(item)


LAYERS = st.lists(
    st.integers(1, 9).flatmap(lambda e: st.tuples(st.just(e), st.integers(0, e))),
    min_size=1,
    max_size=6,
)
BUFFERS = st.integers(1, 9)
SEEDS = st.integers(0, 2**31)


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=80, deadline=None)
@given(sizes=LAYERS, steps=st.integers(1, 3), buffer_experts=BUFFERS, seed=SEEDS)
def test_steps_of_all_layers(
    delay: str, sizes: list[tuple[int, int]], steps: int, buffer_experts: int, seed: int
) -> None:
    model = Model(Machine(DELAYS[delay], seed), sizes, seed, buffer_experts)
    for _ in range(steps):
        model.streamer.begin(1)
        model.run(range(len(sizes)))
        for number, (experts, slots) in enumerate(sizes):
            model.residents[number] = model.fill(number, experts, slots)


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=60, deadline=None)
@given(
    cpu=st.floats(0, 4),
    row=st.floats(0, 2),
    ahead=st.lists(st.integers(1, 9), min_size=1),
    buffer_experts=BUFFERS,
    seed=SEEDS,
)
def test_some_experts_on_the_cpu(
    delay: str, cpu: float, row: float, ahead: list[int], buffer_experts: int, seed: int
) -> None:
    """However many are copied ahead, another number for each layer."""
    sizes = [(9, 2), (8, 0), (9, 5), (1, 0), (6, 6)]
    model = Model(Machine(DELAYS[delay], seed), sizes, seed, buffer_experts)
    tail = model.streamer.tail = LateTail(model.machine, TailRates(1.0, cpu, row))
    counts = cycle(ahead)
    tail.ahead = lambda missing, _: min(next(counts), missing)
    for _ in range(3):
        model.streamer.begin(1)
        model.run(range(5))
    assert model.computed or cpu + row > 0.3 or max(ahead) > 3
    assert model.kept


def test_what_has_come_before_the_routing_is_known_leaves_more_to_the_bus() -> None:
    """The CPU takes as long for an expert as the bus does; 9 of 27 missing ones are ahead."""
    tail = LateTail(Machine(None), TailRates(copy=1.0, cpu=1.0, cpu_row=0.0))
    ids = torch.arange(27)[:, None]
    step, pending = OnHost(ids, ids, ids, is_staged=False), np.arange(9, 27)
    for seconds, on_cpu in ((0.0, 13), (3.0, 12), (9.0, 9), (99.0, 9)):
        copied, computed = tail.choose(step, pending, 27, 8, 9, seconds)
        assert sorted([*copied, *computed]) == pending.tolist()
        assert len(computed) == on_cpu


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_the_cpus_sum_crosses_the_bus_in_the_outputs_size(
    dtype: torch.dtype, summed: torch.dtype
) -> None:
    """In bf16 where the output is; the engine makes no other 16 bits. It is added as it is."""

    class Thirds:
        def begin(self, *given: Any) -> Any:
            self.out, done = given[4:]
            self.out.fill_(1 / 3)
            done.fill_(1)
            return self

        def wait(self, timeout: float) -> float:
            return 0.0

    tail, cpu = CpuTail(TailRates(1.0, 0.1, 0.0)), Thirds()
    ids = torch.arange(2, dtype=torch.int32)[:, None]
    step = tail.read(torch.zeros(2, 4, dtype=dtype), torch.ones(2, 1), ids)
    tail.start("layer", cpu, step, np.arange(3, dtype=np.int32))
    total = tail.add(torch.full((2, 4), 0.5, dtype=dtype), is_last=True)
    assert cpu.out.dtype == summed and total.dtype == torch.float32
    assert torch.equal(total, torch.full((2, 4), 0.5) + cpu.out.float())


def test_a_step_that_nobody_went_on_with_is_waited_for_and_forgotten() -> None:
    """Something else ended it: its CPU's error, if any, is not the next step's."""

    class Fails:
        waited = 0

        def begin(self, *given: Any) -> Any:
            given[5].fill_(1)
            return self

        def wait(self, timeout: float | None = None) -> float:
            self.waited += 1
            raise RuntimeError("of the step before")

    tail, cpu = CpuTail(TailRates(1.0, 0.1, 0.0)), Fails()
    given = torch.zeros(2, 4), torch.ones(2, 1), torch.arange(2, dtype=torch.int32)[:, None]
    tail.start("layer", cpu, tail.read(*given), np.arange(3, dtype=np.int32))
    tail.read(*given)
    assert cpu.waited == 1
    tail.finish()
    tail.start("layer", cpu, tail.read(*given), np.arange(3, dtype=np.int32))
    with pytest.raises(CpuLaneError, match="of the step before"):
        tail.finish()


def test_a_computation_whose_wait_was_interrupted_is_waited_for_by_the_next_step() -> None:
    """It writes to memory that the next one's sum will be in, and says that one is there."""

    class Slow:
        is_done = False

        def begin(self, *given: Any) -> Any:
            self.is_done = False
            return self

        def wait(self, timeout: float | None = None) -> float:
            self.is_done = True
            return 0.0

    tail, cpu = CpuTail(TailRates(1.0, 0.1, 0.0)), Slow()
    given = torch.zeros(2, 4), torch.ones(2, 1), torch.arange(2, dtype=torch.int32)[:, None]
    for interruption in interruptions(least=2):
        tail.start("layer", cpu, tail.read(*given), np.arange(3, dtype=np.int32))
        tail._is_joined = True
        with interruption.of((cpu, "wait")):
            tail.finish()
        cpu.is_done = cpu.is_done and not interruption.has_come
        tail.read(*given)
        assert cpu.is_done
        tail.finish()


def test_of_a_disturbed_layer_no_more_is_copied_ahead_than_for_as_long_as_all_take() -> None:
    """Else a layer that waited for seconds, compiling say, keeps the CPU out for many steps."""
    tail = CpuTail(TailRates(copy=1e-3, cpu=1e-3, cpu_row=0.0), corrects=True)
    ids = torch.arange(6, dtype=torch.int32)[:, None]
    tail.begin(6)
    step = tail.read(torch.zeros(6, 4), torch.ones(6, 1), ids)
    tail.choose(step, np.arange(2, 6), 6, 8, ahead=2, seconds=5.0)
    tail.went_on(5.0)
    assert tail.ahead(100, 8) == 6


@pytest.mark.parametrize(("expert_bytes", "count"), [(8, 3), (16, 4)])
def test_larger_experts_are_split_by_what_they_take(expert_bytes: int, count: int) -> None:
    """Copied and computed at the same rate. Four were begun as long ago as four small ones take.

    So of the small ones six are to be split in two; of the large ones two are still on their way.
    """
    tail = CpuTail(TailRates(copy=1.0, cpu=1.0, cpu_row=0.0), expert_bytes=8)
    ids = torch.arange(6, dtype=torch.int32)[:, None]
    step = tail.read(torch.zeros(6, 4), torch.ones(6, 1), ids)
    _, on_cpu = tail.choose(step, np.arange(6), 6, expert_bytes, ahead=4, seconds=4.0)
    assert len(on_cpu) == count


@pytest.mark.parametrize("corrects", [False, True])
def test_a_cpu_that_is_slower_than_measured_is_given_less(corrects: bool) -> None:
    """Ten times: half of the experts are its own until that has shown."""

    class Slow:
        def begin(self, *given: Any) -> Any:
            expert_map, out, done = given[3:]
            out.zero_()
            done.fill_(1)
            self.count = int((expert_map >= 0).sum())
            return self

        def wait(self, timeout: float) -> float:
            # Three seconds and ten times what it was expected to take, which is never less than
            # what it was measured to.
            assert timeout >= 3.0 + 10 * 2e-4 * self.count - 1e-9
            assert corrects or timeout == pytest.approx(3.0 + 10 * 2e-4 * self.count)
            return 0.002 * self.count

    tail = CpuTail(TailRates(copy=2e-4, cpu=2e-4, cpu_row=0.0), corrects)
    ids = torch.arange(20, dtype=torch.int32)[:, None]
    shares = []
    for _ in range(12):
        step = tail.read(torch.zeros(20, 4), torch.ones(20, 1), ids)
        _, on_cpu = tail.choose(step, np.arange(20), 20, 8, 0, 0.0)
        shares.append(len(on_cpu))
        expert_map = np.full(21, -1, np.int32)
        expert_map[on_cpu] = on_cpu
        tail.start("layer", Slow(), step, expert_map)
        tail.add(torch.zeros(20, 4), is_last=True)
    assert tail.times.computed == pytest.approx(0.002 * sum(shares))
    assert shares[0] == 10
    # Two of its own take as long as the copies of the other 18.
    assert shares[-1] == (2 if corrects else 10)


@pytest.mark.parametrize(
    ("copy", "corrects", "ahead", "pays"),
    [(1e-9, True, 9, False), (1e9, True, 1, True), (1e-9, False, 3, True)],
)
def test_a_step_that_copies_would_have_done_sooner_is_copied_next_time(
    copy: float, corrects: bool, ahead: int, pays: bool
) -> None:
    """A third of the 9 that are missing is copied ahead at first, then what has shown to do."""
    model = Model(Machine(None), [(9, 0), (9, 0), (9, 0)])
    rates = TailRates(copy, 0.0, 0.0)
    tail = model.streamer.tail = LateTail(model.machine, rates, corrects=corrects)

    def begin(rows: int) -> int:
        before = model.streamer.copies.copied
        model.streamer.begin(rows)
        return model.streamer.copies.copied - before

    for expected in (3, ahead):  # one slow step may be chance
        assert begin(512) == expected
        model.run(range(3))
    read = tail.read
    for rows, expected, has_part in ((512, ahead, pays), (4096, 3, True)):
        assert begin(rows) == expected
        computed = model.computed
        tail.read = read if has_part else None  # nothing is waited for
        model.run(range(3))
        assert (model.computed > computed) == (has_part and expected < 9)
    model.run(range(3))
    assert tail._rows == 4, "a step that was not begun is as long as it is"


@pytest.mark.parametrize("corrects", [False, True])
def test_as_much_is_copied_ahead_as_its_routing_takes(
    corrects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second an expert, the large one two: 2.5 s on the device and 2 s of the host's are 5."""
    clock = 0.0
    monkeypatch.setattr(tail_module.time, "perf_counter", lambda: clock)
    tail = CpuTail(TailRates(1.0, 0.0, 0.0), corrects=corrects, expert_bytes=8)
    tail.begin(512)
    assert tail.ahead(30, 8) == tail.ahead(30, 16) == 10
    ids = torch.arange(20, dtype=torch.int32)[:, None]
    step = tail.read(torch.zeros(20, 4), torch.ones(20, 1), ids)
    tail.choose(step, np.arange(10, 30), 30, 8, ahead=10, seconds=2.5)
    clock = 2.0
    tail.went_on(2.5)
    assert tail.ahead(30, 8) == (5 if corrects else 10)
    assert tail.ahead(30, 16) == (3 if corrects else 10)
    assert tail.ahead(4, 8) == (4 if corrects else 2)
    tail.begin(4096)
    assert tail.ahead(30, 8) == 10, "of another size"


def test_what_a_step_took_is_from_one_routing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a share of copying all that the layers between lacked, of whatever sizes."""
    clock, told = 0.0, []
    monkeypatch.setattr(tail_module.time, "perf_counter", lambda: clock)
    tail = CpuTail(TailRates(2.0, 0.0, 0.0), corrects=True, expert_bytes=8)
    tail._worth.took = lambda *given: told.append(given)
    ids = torch.arange(20, dtype=torch.int32)[:, None]

    def layer(at: float, pending: int, ahead: int, expert_bytes: int = 8) -> None:
        nonlocal clock
        clock = at
        step = tail.read(torch.zeros(20, 4), torch.ones(20, 1), ids)
        tail.choose(step, np.arange(pending), 20, expert_bytes, ahead, 0.0)

    for rows in (512, 64):
        assert tail.begin(rows)
        layer(10.0, 3, 6)
        layer(20.0, 4, 0, 16)
        layer(24.0, 5, 5)
    tail.begin(1)
    tail.begin(1)
    share = (10 + 4) / (2 * 9 + 2 * 2 * 4)
    assert told == [(512, share), (64, share)], "the last layer's end is not seen"
    by_copies = 2 * (2 * 9 + 2 * 2 * 4)
    assert tail.times == TailTimes(layers=6, ahead=22, passed=28, by_copies=by_copies)


def test_a_cpu_that_was_disturbed_once_is_believed_again() -> None:
    tail = CpuTail(TailRates(1e-3, 1e-3, 0.0), corrects=True)
    tail._level = 0.25
    tail._rates = tail._measured.with_cpu(0.25)
    ids = torch.arange(3, dtype=torch.int32)[:, None]
    step = tail.read(torch.zeros(3, 4), torch.ones(3, 1), ids)
    given = [len(tail.choose(step, np.arange(3), 3, 8, 0, 0.0)[1]) for _ in range(60)]
    assert given[0] == 0 and given[-1] == 1


@pytest.mark.parametrize("delay", DELAYS)
def test_it_is_told_how_long_copies_ahead_have_been_under_way(delay: str) -> None:
    sizes = [(9, 2), (9, 0), (6, 6), (9, 5)]
    model = Model(Machine(DELAYS[delay]), sizes, buffer_experts=4)
    model.streamer.tail = LateTail(model.machine, TailRates(1.0, 0.3, 0.0))
    told: list[tuple[int, float]] = []
    went_on: list[float] = []
    choose = model.streamer.tail.choose

    def listen(*given: Any) -> Any:
        told.append(given[4:])
        return choose(*given)

    model.streamer.tail.choose = listen
    model.streamer.tail.went_on = went_on.append
    for _ in range(3):
        before = model.machine.done
        model.streamer.begin(1)
        model.run(range(4))
        # Items of the machine are its seconds.
        assert all(0 <= seconds <= model.machine.done - before for _, seconds in told)
    assert all(seconds == 0 for ahead, seconds in told if ahead == 0)
    assert went_on == [seconds for ahead, seconds in told if ahead > 0]
    assert any(seconds > 0 for _, seconds in told)


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=60, deadline=None)
@given(
    order=st.lists(st.integers(0, 3), min_size=1, max_size=9), buffer_experts=BUFFERS, seed=SEEDS
)
def test_layers_in_any_order(delay: str, order: list[int], buffer_experts: int, seed: int) -> None:
    sizes = [(5, 2), (6, 0), (4, 4), (5, 3)]
    Model(Machine(DELAYS[delay], seed), sizes, seed, buffer_experts).run(order)


def copied_when_computed(model: Model) -> list[int]:
    """Is filled with how many experts had been asked for when each wave of a buffer was."""
    sent: list[int] = []
    for layer in model.layers:
        for buffer in layer.buffers:
            compute = buffer.lane.compute
            buffer.lane.compute = lambda *given, compute=compute: (
                sent.append(model.streamer.copies.copied),
                compute(*given),
            )
    return sent


def test_the_copies_of_the_next_layer_are_under_way_before_a_layer_is_computed() -> None:
    model = Model(Machine("copying"), [(5, 2), (6, 1), (7, 3), (4, 0)])
    model.streamer.begin(1)
    assert model.streamer.copies.copied == 3
    sent = copied_when_computed(model)
    model.run(range(4))
    assert sent == [3 + 5, 3 + 5 + 4, 3 + 5 + 4 + 4, 3 + 5 + 4 + 4], "each once, none in a slot"


def test_the_copies_of_the_next_wave_are_under_way_before_a_wave_is_computed() -> None:
    model = Model(Machine("copying"), [(6, 1), (9, 5), (4, 0)], buffer_experts=3)
    model.streamer.begin(1)
    assert model.streamer.copies.copied == 3 + 2, "both buffers"
    sent = copied_when_computed(model)
    model.run(range(3))
    waves = [3, 2, 3, 1, 3, 1]
    assert sent == [*np.cumsum(waves)[1:].tolist(), sum(waves)], "each once, none in a slot"


def test_a_step_that_was_begun_and_did_not_come_is_not_gone_on_with() -> None:
    model = Model(Machine(None), [(5, 2), (5, 2), (5, 2)])
    model.streamer.begin(1)
    for number in range(3):
        model.residents[number] = model.fill(number, 5, 2)
    model.streamer.end()
    model.run(range(3))


def test_an_error_in_a_layer_ends_the_step() -> None:
    model = Model(Machine(None), [(5, 2), (5, 2)])
    (lane, _) = (buffer.lane for buffer in model.layers[0].buffers)
    output, lane.output = lane.output, None
    with pytest.raises(TypeError):
        model.run([0])
    lane.output = output
    for number in range(2):
        model.residents[number] = model.fill(number, 5, 2)
    model.run([0, 1])


@pytest.mark.parametrize("buffer_experts", [2, 5])
@pytest.mark.parametrize("fails_at", range(5))
def test_an_error_in_a_copy_ends_the_step(fails_at: int, buffer_experts: int) -> None:
    """What was being copied is not taken for what a later step needs."""
    model = Model(Machine(None), [(5, 2), (5, 2)], buffer_experts=buffer_experts)
    copies, copy, made = model.streamer.copies, model.streamer.copies.copy, 0

    def fail(*given: Any, **named: Any) -> None:
        nonlocal made
        made += 1
        if made > fails_at:
            raise RuntimeError("no copy")
        copy(*given, **named)

    copies.copy = fail
    with suppress(RuntimeError):
        model.streamer.begin(1)
        model.run([0, 1])
    copies.copy = copy
    for number in range(2):
        model.residents[number] = model.fill(number, 5, 2)
    model.run([0, 1])


def test_copies_of_a_step_that_an_error_ended_are_waited_for() -> None:
    model = Model(Machine("computing"), [(9, 2), (9, 2)], buffer_experts=3)
    (lane, _) = (buffer.lane for buffer in model.layers[0].buffers)
    compute, lane.compute = lane.compute, None
    with pytest.raises(TypeError):
        model.run([0])
    lane.compute = compute
    model.streamer.end()
    model.machine.finish()
    assert not model.machine.copies_left


def test_what_is_streamed() -> None:
    streamer = LateStreamer(Machine(None))
    streamer.threshold = 64
    assert [streamer.takes(rows) for rows in (1, 64, 65, 4096)] == [False, False, True, True]
    streamer.threshold = None
    assert not streamer.takes(4096)


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


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 30),
    st.integers(0, 9000),
)
def test_a_buffer_holds_as_many_experts_as_fit(
    shapes: list[tuple[int, int]], num_experts: int, nbytes: int
) -> None:
    layout = ExpertLayout(
        tuple(TensorSpec(str(i), shape, torch.int16) for i, shape in enumerate(shapes))
    )
    fitting = [n for n in range(1, num_experts + 1) if buffer_bytes(layout, n) <= nbytes]
    memory = BufferMemory(nbytes, CPU)
    if not fitting:
        with pytest.raises(ValueError, match=r"an expert takes .* buffers for the largest layer"):
            memory.capacity(layout, num_experts)
        return
    count = memory.capacity(layout, num_experts)
    assert count == max(fitting)
    assert {len(t) for t in memory.tensors(layout, count).values()} == {count}
