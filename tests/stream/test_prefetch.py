"""Every layer reads its own tensors, however late either stream is, launched and captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interrupted import interruptions
from tests.stream.graphs import Graph, GraphCopies, GraphMachine, GraphMark
from tests.stream.machine import DELAYS
from vllm_moe_offload import UnsupportedError
from vllm_moe_offload.stream import BufferPool, LayerPrefetcher, PoolPlan, TensorKind, prefetch
from vllm_moe_offload.stream.memory import aligned

CPU = torch.device("cpu")
# Name -> rows of three columns; a tensor of 0 rows is not there.
Shape = dict[str, int]
SAME = [{"a": 2, "b": 1}] * 5
# How a step runs: all layers launched, in one graph, or in a graph for each piece.
MODES = ("launched", "graph", "pieces")


def kinds(shape: Shape) -> list[TensorKind]:
    # Columns first: a stride that is not the usual one.
    return [
        TensorKind(name, (rows, 3), (1, rows), torch.float32)
        for name, rows in shape.items()
        if rows
    ]


class Model:
    """Layers of random tensors; buffers are NaN until something is copied into them."""

    def __init__(
        self, machine: GraphMachine, shapes: Sequence[Shape], step: int, seed: int = 0
    ) -> None:
        self.machine = machine
        generator = torch.Generator().manual_seed(seed)
        layers = [kinds(shape) for shape in shapes]
        self.plan = PoolPlan.of(layers, step)
        self.pool = BufferPool(self.plan, CPU)
        for memory in self.pool.memory:
            memory.fill_(0xFF)
        self.host: list[list[torch.Tensor]] = []
        self.tensors: list[list[torch.Tensor]] = []
        self.expected: list[list[torch.Tensor]] = []
        for layer, used in zip(layers, self.plan.of_layer, strict=True):
            block = torch.empty(sum(aligned(k.nbytes) for k in layer), dtype=torch.uint8)
            start, host = 0, []
            for kind in layer:
                host.append(block[start : start + kind.nbytes])
                kind.view(host[-1]).copy_(torch.randn(kind.shape, generator=generator))
                start += aligned(kind.nbytes)
            self.host.append(host)
            self.expected.append([k.view(h) for k, h in zip(layer, host, strict=True)])
            self.tensors.append(
                [k.view(self.pool.memory[b]) for k, b in zip(layer, used, strict=True)]
            )
        self.copies = GraphCopies(machine)
        self.prefetcher = LayerPrefetcher(self.plan, self.pool.memory, self.host, self.copies)
        self.prefetcher.start()
        self.graphs: dict[tuple[int, ...], list[Graph]] = {}
        self.read: list[tuple[int, list[torch.Tensor]]] = []

    def run(self, layers: Sequence[int]) -> None:
        """Launch these layers, each reading its tensors one after another."""
        for number in layers:
            self.prefetcher.wait(number)
            values: list[torch.Tensor] = []
            for tensor in self.tensors[number]:
                self.machine.enqueue(lambda v=values, t=tensor: v.append(t.clone()))
            self.machine.enqueue(
                lambda n=number, v=values: (self.read.append((n, v.copy())), v.clear())
            )
            self.prefetcher.refill(number)

    def step(self, mode: str, cuts: Sequence[int] = ()) -> None:
        """All layers; graphs that do not exist yet are captured first."""
        everything = range(len(self.host))
        if mode == "launched":
            self.run(everything)
            return
        edges = (0, *cuts, len(self.host)) if mode == "pieces" else (0, len(self.host))
        if edges not in self.graphs:
            self.graphs[edges] = []
            for first, end in pairwise(edges):
                self.prefetcher.settle()
                with self.machine.capture() as graph:
                    self.run(range(first, end))
                    self.prefetcher.join()
                self.graphs[edges].append(graph)
        for graph in self.graphs[edges]:
            self.prefetcher.settle()
            self.machine.replay(graph)

    def check(self, steps: int) -> None:
        self.machine.finish()
        count = len(self.host)
        assert [number for number, _ in self.read] == list(range(count)) * steps
        for number, values in self.read:
            for value, expected in zip(values, self.expected[number], strict=True):
                assert torch.equal(value, expected), f"layer {number}"


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[GraphMachine], None]:
    def of(machine: GraphMachine) -> None:
        monkeypatch.setattr(prefetch, "is_capturing", lambda: machine.capturing is not None)

    return of


shapes_of = st.lists(
    st.fixed_dictionaries({"a": st.integers(1, 2), "b": st.integers(0, 1), "c": st.integers(0, 2)}),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=80, deadline=None)
@given(
    shapes=shapes_of,
    step=st.integers(1, 4),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 6)),
    seed=st.integers(0, 2**31),
)
def test_every_layer_reads_its_own(
    delay: str, shapes: list[Shape], step: int, modes: list[str], cuts: set[int], seed: int
) -> None:
    machine = GraphMachine(DELAYS[delay], seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "is_capturing", lambda: machine.capturing is not None)
        model = Model(machine, shapes, step, seed)
        for mode in modes:
            model.step(mode, sorted(cut for cut in cuts if cut < len(shapes)))
        model.check(len(modes))


@pytest.mark.parametrize("delay", DELAYS)
@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes_of,
    step=st.integers(1, 4),
    modes=st.lists(st.sampled_from(MODES), min_size=2, max_size=5),
    begun=st.integers(0, 6),
    seed=st.integers(0, 2**31),
)
def test_after_a_step_that_has_not_ended_every_layer_reads_its_own(
    delay: str, shapes: list[Shape], step: int, modes: list[str], begun: int, seed: int
) -> None:
    """Stopped between two layers, or two graphs; the next one is launched, or replayed."""
    machine = GraphMachine(DELAYS[delay], seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "is_capturing", lambda: machine.capturing is not None)
        model = Model(machine, shapes, step, seed)
        pieces = range(1, len(shapes))
        for mode in modes:
            model.step(mode, pieces)
            if mode == "pieces":
                for graph in model.graphs[(0, *pieces, len(shapes))][:begun]:
                    model.prefetcher.settle()
                    machine.replay(graph)
            else:
                model.run(range(min(begun, len(shapes))))
            model.prefetcher.restart()
        machine.finish()
        for number, values in model.read:
            assert all(map(torch.equal, values, model.expected[number])), number


@pytest.mark.parametrize("delay", DELAYS)
def test_after_copies_that_were_interrupted_every_layer_reads_its_own(
    delay: str,
) -> None:
    """Before they are made, and behind them."""
    for interruption in interruptions(least=8):
        machine = GraphMachine(DELAYS[delay], interruption.number)
        model = Model(machine, SAME, 2, interruption.number)
        model.step("launched")
        with interruption.of((model.copies, "copy")):
            model.step("launched")
        for _ in range(2):
            model.step("launched")
        machine.finish()
        for layer, values in model.read:
            assert all(map(torch.equal, values, model.expected[layer])), layer


@settings(max_examples=100, deadline=None)
@given(shapes=shapes_of, step=st.integers(1, 4))
def test_what_the_pool_takes_is_what_was_predicted(shapes: list[Shape], step: int) -> None:
    layers = [kinds(shape) for shape in shapes]
    plan = PoolPlan.of(layers, step)
    pool = BufferPool(plan, CPU)
    assert pool.nbytes == plan.nbytes
    starts = [memory.data_ptr() for memory in pool.memory]
    assert all((start - starts[0]) % 256 == 0 for start in starts)
    assert sorted(starts) == starts and len(set(starts)) == len(starts)
    of_kind = {kind: sum(kind in layer for layer in layers) for kind in plan.buffers}
    for kind, users in of_kind.items():
        assert plan.buffers.count(kind) == min(step, users)
    for layer, used in zip(layers, plan.of_layer, strict=True):
        assert [plan.buffers[buffer] for buffer in used] == layer
        assert len(set(used)) == len(used)
    everything = {kind for layer in layers for kind in layer}
    assert plan.is_static == all(step >= of_kind[kind] for kind in everything)


def test_bytes_are_known_by_hand() -> None:
    """Two buffers of 24 and 12 bytes each, at 256 bytes' distance; five layers pass through."""
    machine = GraphMachine(None)
    model = Model(machine, SAME, 2)
    assert model.plan.nbytes == 2 * (256 + 256)
    assert model.prefetcher.step_bytes == 5 * (24 + 12)
    assert TensorKind("a", (2, 3), (8, 1), torch.bfloat16).nbytes == 22
    assert TensorKind("a", (), (), torch.bfloat16).nbytes == 2
    assert TensorKind("a", (0, 3), (3, 1), torch.bfloat16).nbytes == 0


def test_tensors_side_by_side_are_one_copy() -> None:
    model = Model(GraphMachine(None), SAME, 2)
    machine = model.machine
    machine.finish()
    model.copies.copied = 0
    model.step("launched")
    model.check(1)
    # From the start of the first to the end of the second.
    assert model.copies.copied == 5 * (256 + 12)


def test_a_tensor_with_a_buffer_to_itself_is_copied_once() -> None:
    shapes = [{"a": 2, "b": 1}, {"a": 2}, {"a": 2}]
    model = Model(GraphMachine(None), shapes, 1)
    assert model.prefetcher.step_bytes == 3 * 24
    assert not model.plan.is_static
    for _ in range(3):
        model.step("launched")
    model.check(3)
    alone = Model(GraphMachine(None), SAME, 5)
    assert alone.plan.is_static
    assert alone.prefetcher.step_bytes == 0


@pytest.mark.parametrize("delay", DELAYS)
def test_layers_out_of_turn_read_their_own(delay: str) -> None:
    machine = GraphMachine(DELAYS[delay], 1)
    model = Model(machine, SAME, 2)
    order = (0, 1, 3, 2, 2, 4, 0, 4, 1, 0, 1, 2, 3, 4)
    model.run(order)
    machine.finish()
    assert tuple(number for number, _ in model.read) == order
    for number, values in model.read:
        assert all(map(torch.equal, values, model.expected[number])), number
    assert not model.prefetcher.not_run


def test_layers_out_of_turn_are_not_captured(capturing: Callable[[GraphMachine], None]) -> None:
    machine = GraphMachine(None)
    capturing(machine)
    model = Model(machine, SAME, 2)
    with (
        machine.capture(),
        pytest.raises(UnsupportedError, match=r"do not run one after another.*--enforce-eager"),
    ):
        model.run((0, 3))


def not_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GraphMark, "wait", lambda self: None)


def not_settling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerPrefetcher, "settle", lambda self: None)


def not_joining(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerPrefetcher, "join", lambda self: self._unjoined.clear())


def one_set_of_marks(patch: pytest.MonkeyPatch) -> None:
    original = prefetch._Marks
    shared: dict[int, prefetch._Marks] = {}
    patch.setattr(prefetch, "_Marks", lambda c, n: shared.setdefault(id(c), original(c, n)))


def slots_by_number(patch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26: buffer n % 2, and behind layer n the layer (n + 2) % 5 into its buffer."""
    of = PoolPlan.of

    def plan(layers: Sequence[Sequence[TensorKind]], step: int) -> PoolPlan:
        right = of(layers, step)
        count = len(layers)
        heirs = tuple(((n + step) % count,) * len(layer) for n, layer in enumerate(layers))
        return PoolPlan(right.buffers, right.of_layer, heirs)

    def refill(self: LayerPrefetcher, number: int) -> list[prefetch._Fill]:
        (heir,) = set(self._plan.heirs[number])
        return [self._fill(heir, self._plan.of_layer[heir])]

    patch.setattr(PoolPlan, "of", plan)
    patch.setattr(LayerPrefetcher, "_plan_refill", refill)
    patch.setattr(LayerPrefetcher, "wait", lambda self, n: self._launched.copied[n].wait())


def another_layers_tensors(patch: pytest.MonkeyPatch) -> None:
    fill = LayerPrefetcher._fill

    def faulty(self: LayerPrefetcher, number: int, buffers: Sequence[int]) -> prefetch._Fill:
        right = fill(self, number, buffers)
        return right if number != 3 else prefetch._Fill(3, buffers, fill(self, 1, buffers).pairs)

    patch.setattr(LayerPrefetcher, "_fill", faulty)


FAULTS = (
    not_waiting,
    not_settling,
    not_joining,
    one_set_of_marks,
    slots_by_number,
    another_layers_tensors,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        for delay in DELAYS.values():
            for modes in (("launched",) * 3, ("launched", "graph", "graph", "launched", "pieces")):
                machine = GraphMachine(delay, 2)
                monkeypatch.setattr(
                    prefetch, "is_capturing", lambda m=machine: m.capturing is not None
                )
                model = Model(machine, SAME, 2)
                for mode in modes:
                    model.step(mode, (1, 3))
                model.check(len(modes))

    run()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run()
