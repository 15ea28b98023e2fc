"""A machine that also captures what is enqueued, and replays it, by the rules of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.stream.machine import COMPUTING, COPYING, LateCopies, LateMark, Machine


class Graph:
    """What was enqueued on both streams while it was captured."""

    def __init__(self) -> None:
        self.items: dict[str, list[Callable[[], Any]]] = {COMPUTING: [], COPYING: []}
        self.marks: set[GraphMark] = set()


class GraphMachine(Machine):
    def __init__(self, first: str | None, seed: int = 0) -> None:
        super().__init__(first, seed)
        self.capturing: Graph | None = None

    def enqueue(self, item: Callable[[], Any]) -> None:
        if self.capturing is None:
            super().enqueue(item)
        else:
            self.capturing.items[self.current].append(item)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        graph = self.capturing = Graph()
        try:
            yield graph
        finally:
            self.capturing = None

    def replay(self, graph: Graph) -> None:
        """On the computing stream, which goes on when all of the graph is done."""

        def item() -> None:
            for mark in graph.marks:
                mark._passed = 0
            inner = Machine(self._first, self._random.randrange(2**31))
            inner._queues = {name: list(items) for name, items in graph.items.items()}
            inner.finish()
            assert not inner._queues[COPYING], "the graph ends with copies that nothing joined"

        self.enqueue(item)


class GraphMark(LateMark):
    """A mark that is of use only where it was recorded: in one graph, or in none."""

    _machine: GraphMachine

    def __init__(self, machine: GraphMachine) -> None:
        super().__init__(machine)
        self._graph: Graph | None = None

    def record(self) -> None:
        self._graph = self._machine.capturing
        if self._graph is not None:
            self._graph.marks.add(self)
        super().record()

    def wait(self) -> None:
        if self._recorded:
            assert self._graph is self._machine.capturing, "waited for elsewhere"
        super().wait()


class GraphCopies(LateCopies):
    def __init__(self, machine: GraphMachine) -> None:
        super().__init__(machine)
        self._graph_machine = machine

    def mark(self) -> GraphMark:
        return GraphMark(self._graph_machine)
