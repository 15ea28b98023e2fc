"""Two streams whose work runs when a scheduler says so, in any order that their marks allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_moe_offload.device.copies import Rows
from vllm_moe_offload.planning import TailRates
from vllm_moe_offload.stream import CpuTail, LayerStreamer
from vllm_moe_offload.stream.tail import OnHost

COMPUTING, COPYING = "computing", "copying"
# Which stream goes first whenever both may go on; None: either.
DELAYS: dict[str, str | None] = {
    "copies are late": COMPUTING,
    "computing is late": COPYING,
    "either": None,
}


class Machine:
    """What has been enqueued and not run. An item returns False while it has to wait."""

    def __init__(self, first: str | None, seed: int = 0) -> None:
        self._first = first
        self._random = random.Random(seed)
        self._queues: dict[str, list[Callable[[], Any]]] = {COMPUTING: [], COPYING: []}
        self.current = COMPUTING
        self.done = 0

    def enqueue(self, item: Callable[[], Any]) -> None:
        """On the current stream."""
        self._queues[self.current].append(item)

    def finish(self) -> None:
        """The host waits for the computing stream."""
        while self._queues[COMPUTING]:
            order = sorted(self._queues, key=lambda name: self._random.random())
            if self._first is not None:
                order = sorted(self._queues, key=lambda name: name != self._first)
            for name in order:
                if self._queues[name] and self._queues[name][0]() is not False:
                    self._queues[name].pop(0)
                    self.done += 1
                    break
            else:
                raise AssertionError("the streams wait for each other")

    @property
    def copies_left(self) -> int:
        """How many items of copying have not run."""
        return len(self._queues[COPYING])

    def finish_copying(self) -> None:
        """What is left of the copies, when nothing is being computed."""
        while self._queues[COPYING]:
            assert self._queues[COPYING].pop(0)() is not False


class LateMark:
    """A mark of such a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._recorded = self._passed = 0

    def record(self) -> None:
        self._recorded += 1
        number = self._recorded

        def item() -> None:
            self._passed = number

        self._machine.enqueue(item)

    def wait(self) -> None:
        number = self._recorded
        self._machine.enqueue(lambda: self._passed >= number)


class LateWatch:
    """A stopwatch of such a machine, of which an item is a second."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._began: int | None = None
        self._ended = 0

    def start(self) -> None:
        self._began = None
        self._machine.enqueue(self._start)

    def _start(self) -> None:
        self._began = self._machine.done

    def stop(self) -> None:
        self._machine.enqueue(self._stop)

    def _stop(self) -> None:
        self._ended = self._machine.done

    def has_begun(self) -> bool:
        return self._began is not None

    def seconds(self) -> float:
        assert self._began is not None
        return float(self._ended - self._began)


class LateCopies:
    """In place of a CopyStream."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.copied = 0

    def mark(self) -> LateMark:
        return LateMark(self._machine)

    def stopwatch(self) -> LateWatch:
        return LateWatch(self._machine)

    def copy(
        self,
        pairs: Any,
        *,
        after: LateMark,
        done: LateMark,
        watch: LateWatch | None = None,
        rows: Rows | None = None,
    ) -> None:
        self._machine.current = COPYING
        after.wait()
        if watch is not None:
            watch.start()
        of_rows = rows.copies.pairs(rows.runs) if rows is not None else ()
        for to, source in (*of_rows, *pairs):
            self._machine.enqueue(lambda to=to, source=source: to.copy_(source))
            self.copied += len(to) if to.dtype != torch.int32 else 0  # those are maps
        done.record()
        self._machine.current = COMPUTING

    def join(self) -> None:
        done = self.mark()
        self._machine.current = COPYING
        done.record()
        self._machine.current = COMPUTING
        done.wait()


class LateStreamer(LayerStreamer):
    """A streamer whose work on the computing stream is late too."""

    def __init__(self, machine: Machine) -> None:
        self.copies = LateCopies(machine)
        super().__init__(self.copies, threshold=0)
        self._machine = machine

    def _copy_here(self, pairs: Any) -> None:
        for to, source in pairs:
            self._machine.enqueue(lambda to=to, source=source: to.copy_(source))

    def _read_tables(self) -> None:
        if any((layer.in_slots().slot_of >= 0).any() for layer in self._layers):
            self._machine.finish()
        super()._read_tables()


class LateLane:
    """Adds up the experts of a shard one by one: a layer whose expert e is ``x * v[e]``."""

    def __init__(self, machine: Machine, shard: Mapping[str, torch.Tensor]) -> None:
        self._machine = machine
        self._shard = shard

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        self.compute(x, topk_weights, topk_ids, expert_map, out, False)
        return out

    def compute(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        out: torch.Tensor,
        accumulate: bool,
    ) -> None:
        def add(k: int) -> None:
            ids = topk_ids[:, k].long()
            here = torch.ones_like(ids, dtype=torch.bool)
            if expert_map is not None:
                here, ids = expert_map[ids] >= 0, expert_map[ids].clamp_min(0).long()
            rows = self._shard["v"][ids]
            out.add_(torch.where(here[:, None], topk_weights[:, k : k + 1] * rows * x, 0.0))

        if not accumulate:
            out.fill_(float("nan"))
            self._machine.enqueue(out.zero_)
        for k in range(topk_ids.shape[1]):
            self._machine.enqueue(lambda k=k: add(k))


class HostLane:
    """The same over all experts in host memory, at once."""

    def __init__(self, host: Mapping[str, torch.Tensor]) -> None:
        self._host = host

    def begin(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor,
        out: torch.Tensor,
        done: torch.Tensor,
    ) -> HostLane:
        rows = expert_map[topk_ids.long()].long()
        here = (rows >= 0).float() * topk_weights
        out.copy_((here[:, :, None] * self._host["v"][rows.clamp_min(0)] * x[:, None]).sum(1))
        done.fill_(1)
        return self

    def wait(self, timeout: float | None = None) -> float:
        return 0.0


class LateTail(CpuTail):
    """A tail that waits for the machine, and whose sum is made late."""

    def __init__(self, machine: Machine, rates: TailRates, **settings: Any) -> None:
        super().__init__(rates, **settings)
        self._machine = machine

    def read(self, *given: torch.Tensor) -> OnHost:
        self._machine.finish()
        return super().read(*given)

    def add(self, out: torch.Tensor, is_last: bool) -> torch.Tensor:
        partial = super().add(torch.zeros_like(out), is_last)
        total = torch.empty_like(out)
        self._machine.enqueue(lambda: total.copy_(out + partial))
        return total
