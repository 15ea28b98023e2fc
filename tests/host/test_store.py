"""Host memory of the experts."""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import itertools
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO
from unittest import mock

import psutil
import pytest
import torch
from tqdm import tqdm

from vllm_moe_offload import MemoryShortError, OffloadError
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.host import HostStore, dummy, fill_dummy, pages
from vllm_moe_offload.host import store as store_module
from vllm_moe_offload.host.pages import (
    PIECE,
    available_memory,
    map_pages,
    node_cpus,
    resident_bytes,
    touch,
)


class Registry:
    """Stands for a device: what it was told to register, and still is."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def store(self) -> HostStore:
        return HostStore(self.register, self.unregister)


def spec(hidden: int = 40, intermediate: int = 12, *, bias: bool = False) -> ExpertSpec:
    return ExpertSpec(hidden, intermediate, Activation.SILU, Format.BF16, bias)


def soon(call: Callable[[], object]) -> None:
    """Call, in another thread, and raise what it raises; fail where it does not return."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "hangs"
    for error in raised:
        raise error


def end_of_thread() -> None:
    """Wait until no store's thread is at work."""
    for thread in threading.enumerate():
        if thread.name == "moe-offload-host-memory":
            thread.join(10)
            assert not thread.is_alive()


def test_blocks_have_the_layouts_shapes_and_are_zero() -> None:
    store = Registry().store()
    layout = spec(bias=True).layout
    tensors = store.allocate(layout, 7)
    assert tuple(tensors) == layout.names
    for part in layout.tensors:
        assert tensors[part.name].shape == (7, *part.shape)
        assert tensors[part.name].dtype == part.dtype
        assert not tensors[part.name].any()
        tensors[part.name].fill_(1)
    assert store.nbytes == 7 * layout.nbytes


def test_memory_is_exact_registered_whole_and_given_back() -> None:
    process = psutil.Process()
    registry = Registry()
    layout = spec(1024, 1024 + 100).layout  # 6.75 MB an expert: nothing like a power of two
    gc.collect()
    before = process.memory_info().rss
    store = registry.store()
    tensors = store.allocate(layout, 40)
    assert process.memory_info().rss - before < 8 << 20, "addresses only until prepare"
    assert not registry.registered
    store.prepare()
    store.wait(tensors.values())
    taken = process.memory_info().rss - before
    assert taken <= 40 * layout.nbytes * 1.03 + (8 << 20)
    assert taken >= 40 * layout.nbytes * 0.97 - (8 << 20)
    assert sum(registry.registered.values()) == 40 * layout.nbytes
    store.prepare()  # nothing is registered twice
    store.wait(tensors.values())
    view = tensors["w2_weight"][3]
    del tensors
    gc.collect()
    assert sum(registry.registered.values()) == view.nbytes * 40, "a view keeps its block"
    del view
    gc.collect()
    assert not registry.registered
    assert process.memory_info().rss - before < 40 * layout.nbytes * 0.2


def test_blocks_that_are_waited_for_come_first() -> None:
    first_may_end, order = threading.Event(), []

    def register(address: int, nbytes: int) -> None:
        order.append(address)
        if len(order) == 1:
            first_may_end.wait(10)

    store = HostStore(register, lambda address: None)
    layers = [store.allocate(spec().layout, 4) for _ in range(4)]
    store.prepare()
    until = time.monotonic() + 10
    while not order:
        assert time.monotonic() < until, "no block is made ready"
        time.sleep(0.001)
    waiter = threading.Thread(target=store.wait, args=(layers[3].values(),))
    waiter.start()
    time.sleep(0.05)
    first_may_end.set()
    waiter.join(10)
    assert not waiter.is_alive()
    assert order[0] == layers[0]["w13_weight"].data_ptr()
    assert order[1] == layers[3]["w13_weight"].data_ptr(), "asked for while others were queued"
    store.wait(tensor for layer in layers for tensor in layer.values())
    assert len(set(order)) == len(order) == 4 * len(layers[0])


def test_what_registering_raises_is_raised_to_who_waits() -> None:
    def register(address: int, nbytes: int) -> None:
        raise MemoryShortError("no more")

    store = HostStore(register, lambda address: None)
    tensors = store.allocate(spec().layout, 4)
    store.prepare()
    with pytest.raises(MemoryShortError, match="no more"):
        store.wait(tensors.values())
    later = store.allocate(spec().layout, 4)
    store.prepare()
    with pytest.raises(MemoryShortError, match="no more"):
        store.wait(later.values())


class Broken(io.StringIO):
    """Stands for a pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def closed() -> TextIO:
    with open(os.devnull, "w") as file:
        return file


@pytest.mark.parametrize("stderr", [None, closed(), Broken()], ids=["none", "closed", "broken"])
def test_a_bar_that_cannot_be_shown_stops_nothing(
    stderr: TextIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)

    def at_once(**arguments: Any) -> tqdm:
        return tqdm(**{**arguments, "delay": 0, "mininterval": 0})

    monkeypatch.setattr(store_module, "tqdm", at_once)
    registry = Registry()
    store = registry.store()
    tensors = store.allocate(spec().layout, 4)
    store.prepare()
    soon(lambda: store.wait(tensors.values()))
    assert len(registry.registered) == len(tensors)
    end_of_thread()
    soon(lambda: tqdm(disable=True))  # no thread has ended with the lock of all bars


def test_whatever_ends_the_thread_is_raised_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "tqdm", mock.Mock(side_effect=OSError("no bar")))
    store = Registry().store()
    tensors = store.allocate(spec().layout, 4)
    store.prepare()
    with pytest.raises(OSError, match="no bar"):
        soon(lambda: store.wait(tensors.values()))


def test_a_thread_that_cannot_be_started_may_be_later(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    store = registry.store()
    tensors = store.allocate(spec().layout, 4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            store.prepare()
    assert store.pending_bytes == store.nbytes
    store.prepare()
    soon(lambda: store.wait(tensors.values()))
    assert len(registry.registered) == len(tensors)


class Held(Registry):
    """Holds the first block that is registered until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.came, self.go = threading.Event(), threading.Event()
        self.seen: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        super().register(address, nbytes)
        self.seen.append(address)
        self.came.set()
        assert self.go.wait(10)


def held_at_its_first_block() -> tuple[Held, HostStore, list[dict[str, torch.Tensor]]]:
    """A store of four layers that is being made ready."""
    registry = Held()
    store = registry.store()
    layers = [store.allocate(spec().layout, 4) for _ in range(4)]
    store.prepare()
    assert registry.came.wait(10)
    return registry, store, layers


def test_blocks_whose_tensors_are_gone_are_left_out() -> None:
    registry, store, layers = held_at_its_first_block()
    kept = layers[3]
    layers.clear()
    gc.collect()
    registry.go.set()
    soon(lambda: store.wait(kept.values()))
    end_of_thread()
    assert len(registry.seen) == 1 + len(kept)
    assert set(registry.registered) == {tensor.data_ptr() for tensor in kept.values()}


def test_what_is_given_up_is_not_made_ready() -> None:
    registry, store, layers = held_at_its_first_block()
    store.close()
    for layer in layers:
        with pytest.raises(OffloadError, match="given up"):
            soon(functools.partial(store.wait, layer.values()))
    registry.go.set()
    end_of_thread()
    assert len(registry.seen) == 1
    del layers, layer, store
    gc.collect()
    assert not registry.registered


def test_closing_changes_nothing_where_all_is_ready() -> None:
    store = Registry().store()
    tensors = store.allocate(spec().layout, 4)
    store.prepare()
    store.wait(tensors.values())
    end_of_thread()
    store.close()
    store.wait(tensors.values())


def test_memory_that_comes_where_a_block_was_is_not_owned() -> None:
    store = Registry().store()
    tensors = store.allocate(spec().layout, 4)
    store.prepare()
    store.wait(tensors.values())
    assert store.owns(tensors["w2_weight"])
    assert store.owns(tensors["w2_weight"][3])
    other = mock.Mock(device=torch.device("cpu"))
    other.data_ptr.return_value = tensors["w2_weight"].data_ptr()
    assert store.owns(other)
    end_of_thread()
    del tensors
    gc.collect()
    assert not store.owns(other)


def test_touching_keeps_what_is_there_and_counts_every_byte() -> None:
    values = torch.arange(3 << 20, dtype=torch.int64)
    address, nbytes = values.data_ptr(), values.nbytes
    assert sum(touch([(address, nbytes)])) == nbytes
    assert torch.equal(values, torch.arange(3 << 20, dtype=torch.int64))


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_each_node_touches_its_own_part_of_a_block(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    sets = [{cpus[node % len(cpus)]} for node in range(nodes)]
    monkeypatch.setattr(pages, "node_cpus", lambda: sets)
    touched: list[tuple[int, int, set[int]]] = []
    inner = pages._touch_piece

    def touch_piece(address: int, nbytes: int) -> int:
        touched.append((address, nbytes, os.sched_getaffinity(0)))
        return inner(address, nbytes)

    monkeypatch.setattr(pages, "_touch_piece", touch_piece)
    memory = map_pages(4 * PIECE)
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    nbytes = 3 * PIECE + 12345
    assert sum(touch([(begin, nbytes)])) == nbytes
    share = -(-nbytes // nodes)
    share += -share % mmap.PAGESIZE
    at = begin
    for address, count, where in sorted(touched):
        assert address == at, "all of it, once"
        at += count
        assert where == sets[(address - begin) // share]
        assert address % mmap.PAGESIZE == 0, "no page is of two nodes"
    assert at == begin + nbytes


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (3, 1), (4, 1), (8, 2), (35, 8)])
def test_a_thread_for_four_processors_touches(
    cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Counted(ThreadPoolExecutor):
        def __init__(self, most: int, **_: object) -> None:  # not bound to CPUs that are not here
            made.append(most)
            super().__init__(most)

    monkeypatch.setattr(pages, "node_cpus", lambda: [set(range(cpus))])
    monkeypatch.setattr(pages, "ThreadPoolExecutor", Counted)
    memory = map_pages(PIECE)
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert sum(touch([(begin, PIECE)])) == PIECE
    assert made == [threads]


def test_pages_are_private_huge_and_not_copied_by_a_fork() -> None:
    tensors = Registry().store().allocate(spec(1024, 1024).layout, 8)
    address = tensors["w13_weight"].data_ptr()
    areas = re.findall(
        r"^(\w+)-(\w+) (\S+).*?^VmFlags: (.*?)$",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (found,) = [a for a in areas if int(a[0], 16) <= address < int(a[1], 16)]
    assert found[2] == "rw-p"
    assert "dc" in found[3].split(), "not in a forked child"
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").is_file():
        assert "hg" in found[3].split()


def test_pieces_cover_a_block() -> None:
    parts = pages.pieces(4096, 2 * PIECE + 5)
    assert [nbytes for _, nbytes in parts] == [PIECE, PIECE, 5]
    assert parts[2][0] == 4096 + 2 * PIECE
    assert set().union(*node_cpus()) <= os.sched_getaffinity(0)


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    store = registry.store()
    # Each layer would fit, all of them do not.
    layers = [store.allocate(spec(1024, 1024).layout, 64) for _ in range(3)]
    available = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(pages, "_CGROUP", Path("nowhere"))
    with pytest.raises(MemoryShortError, match=r"need 1\.12 GiB .*1\.00 GiB are available.*locked"):
        store.prepare()
    assert not registry.registered
    del layers[1:]
    store.prepare()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
# The CPU with an index is none but by name: several experts at once, as on a GPU.
@pytest.mark.parametrize(("device", "at_once"), [("cpu", 1), ("cpu:0", 2), ("cpu:0", 1 << 20)])
def test_dummy_numbers_fill_every_expert_and_repeat(
    dtype: torch.dtype, device: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy, "_DEVICE_NUMBERS", at_once * 8 * 16)
    draws: list[object] = []
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *a: draws.append(a) or generator(*a))

    def filled() -> dict[str, torch.Tensor]:
        tensors = {
            "w2_weight": torch.full((5, 8, 16), 7.0).to(dtype),
            "w2_weight_scale": torch.full((5, 8), 7.0),
            "w2_zeros": torch.full((5, 4), 7, dtype=torch.uint8),
        }
        fill_dummy(tensors, device, seed=3)
        return tensors

    one = filled()
    # The scales of five experts are few enough numbers for one draw.
    assert len(draws) == (2 * 5 if device == "cpu" else -(-5 // at_once) + 1)
    two = filled()
    weights = one["w2_weight"].float()
    limit = 1.0 if dtype == torch.float8_e4m3fn else 1e-3
    assert limit / 2 < weights.abs().max() <= limit
    assert all(expert.unique().numel() > 32 for expert in weights)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights))
    assert (one["w2_weight_scale"] >= 0).all()
    assert 0 < one["w2_weight_scale"].max() <= 1e-3
    assert (one["w2_zeros"] == 7).all()
    for name in one:
        assert torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_dummy_numbers_of_two_tensors_and_of_two_seeds_differ(device: str) -> None:
    def filled(seed: int) -> list[torch.Tensor]:
        tensors = {name: torch.zeros(4, 16, 8) for name in ("w13_weight", "w2_weight")}
        fill_dummy(tensors, device, seed)
        return [expert for tensor in tensors.values() for expert in tensor]

    every = [*filled(1), *filled(100)]
    assert len({tuple(expert.flatten().tolist()) for expert in every}) == len(every)


def test_what_cannot_be_mapped_is_not_counted() -> None:
    store = Registry().store()
    store.allocate_bytes(4096)
    with pytest.raises(MemoryShortError, match="cannot be mapped"):
        store.allocate_bytes(1 << 60)
    with pytest.raises(MemoryShortError, match="cannot be mapped"):
        store.allocate(spec(1024, 1024).layout, 1 << 40)
    assert store.nbytes == 4096


def test_writes_through_one_view_show_in_another() -> None:
    tensors = Registry().store().allocate(spec().layout, 2)
    view = tensors["w2_weight"].view(-1)
    view[3] = 5.0
    assert tensors["w2_weight"][0, 0, 3] == torch.tensor(5.0)


def test_the_limit_of_the_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_memory() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 3000


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cache"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_page_cache_is_available_in_a_cgroup_of_either_version(
    folder: str, limit: str, used: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_CGROUP", tmp_path)
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / limit).write_text("5000\n")
    (group / used).write_text("4000\n")
    assert available_memory() == 1000
    (group / "memory.stat").write_text(f"anon 500\n{cache} 1500\nactive_file 2000\n")
    assert available_memory() == 2500
    (group / used).write_text("1000\n")  # read at another moment
    assert available_memory() == 5000
    (group / used).write_text("9000\n")
    assert available_memory() == 0


def test_version_1_has_a_number_for_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_CGROUP", tmp_path)
    system = psutil.virtual_memory()._replace(available=7000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("4000\n")
    assert available_memory() == 7000


@pytest.mark.parametrize(("version", "line"), [(1, "4:memory:"), (2, "0::")])
def test_the_limits_of_the_own_cgroup_and_those_above_count(
    version: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_CGROUP", tmp_path)
    monkeypatch.setattr(pages, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"1:cpu:/other\n{line}/slice/unit\n")
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    unit = tmp_path / ("memory" if version == 1 else "") / "slice" / "unit"
    unit.mkdir(parents=True)
    for group, most in ((unit, 2**62), (unit.parent, 5000)):
        (group / limit).write_text(f"{most}\n")
        (group / used).write_text("2000\n")
    assert available_memory() == 3000
    (unit / limit).write_text("2500\n")
    assert available_memory() == 500
    (tmp_path / "own").write_text(f"{line}/../../elsewhere\n")  # not seen here
    assert available_memory() > 5000


def test_a_kernel_without_huge_pages_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(pages.Pages):
        def madvise(self, *arguments: int) -> None:
            if arguments[0] == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")

    monkeypatch.setattr(pages, "Pages", Refusing)
    block = map_pages(3 * mmap.PAGESIZE)
    assert len(block) == 3 * mmap.PAGESIZE


def test_what_has_been_touched_is_resident() -> None:
    nbytes = 6 << 20
    block = map_pages(nbytes + 5)
    block.madvise(mmap.MADV_NOHUGEPAGE)  # whose pages would be more than what is written
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    address = tensor.data_ptr()
    assert resident_bytes(address, nbytes + 5) == 0
    tensor[: 2 << 20].fill_(1)
    assert resident_bytes(address, nbytes + 5) == 2 << 20
    tensor.fill_(1)
    assert resident_bytes(address, nbytes + 5) == nbytes + 5
    assert resident_bytes(1, 5) == 0, "no page begins there: nobody can tell"


def test_a_system_that_calls_every_page_resident_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_of_them(address: Any, nbytes: Any, states: Any) -> int:
        ctypes.memset(states, 1, -(-nbytes.value // mmap.PAGESIZE))
        return 0

    monkeypatch.setattr(pages, "_libc", SimpleNamespace(mincore=all_of_them))
    pages._knows_what_is_resident.cache_clear()
    block = map_pages(1 << 20)
    assert resident_bytes(torch.frombuffer(block, dtype=torch.uint8).data_ptr(), 1 << 20) == 0
    pages._knows_what_is_resident.cache_clear()


def test_weights_that_are_there_need_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some loaders write into the blocks before these are made ready."""
    store = Registry().store()
    tensors = store.allocate(spec(512, 512).layout, 16)  # 24 MiB
    monkeypatch.setattr(store_module, "available_memory", lambda: 8 << 20)
    with pytest.raises(MemoryShortError, match=r"need 24\.0 MiB .* and 8\.0 MiB are available"):
        store.require()
    for tensor in tensors.values():
        tensor.fill_(1)
    assert store.pending_bytes == 0
    store.prepare()
    store.wait(tensors.values())
    assert all((tensor == 1).all() for tensor in tensors.values())


def test_the_first_error_is_the_one_that_stays() -> None:
    store = Registry().store()
    store._fail(OffloadError("first"))
    store._fail(OffloadError("second"))
    with pytest.raises(OffloadError, match="first"):
        store.wait([])
