"""Exact-size anonymous memory, its pages put on NUMA nodes before anyone reads them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

_NODES = Path("/sys/devices/system/node")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# By the controller's name, which version 2 has none for: files of the limit and of what is used,
# and what memory.stat calls the page cache that goes first.
_MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Linux 5.14: fault pages in, writable, without changing what they hold.
_MADV_POPULATE_WRITE = 23
# What one thread touches at a time: large enough that the calls cost nothing, small enough that
# threads finish together and progress is seen.
PIECE = 32 << 20
# A loader copies by as many threads as there are processors, each waiting for the last one.
_CPUS_A_THREAD = 4


class Pages(mmap.mmap):
    """An anonymous mapping; `before_unmap` is called once, while it is still mapped."""

    before_unmap: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()


def map_pages(nbytes: int) -> Pages:
    """A private anonymous mapping of `nbytes`, huge pages advised, no page touched yet.

    A forked child does not have it: it could only copy gigabytes, and pages that a device reads
    must stay where they are. Raises OSError where there is not as much to be mapped.
    """
    if nbytes > sys.maxsize:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    # Private, because shared memory gets huge pages on few systems.
    block = Pages(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def resident_bytes(address: int, nbytes: int) -> int:
    """How much of a block, which begins with a page, has been touched; 0 where nobody can tell.

    What has been read only counts, though it takes no memory.
    """
    return _said_resident(address, nbytes) if _knows_what_is_resident() else 0


@functools.cache
def _knows_what_is_resident() -> bool:
    """Some sandboxes say it of every page."""
    untouched = map_pages(mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(untouched))
    return _said_resident(address, mmap.PAGESIZE) == 0


def _said_resident(address: int, nbytes: int) -> int:
    states = np.empty(-(-nbytes // mmap.PAGESIZE), np.uint8)
    where = ctypes.c_void_p(states.ctypes.data)
    if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), where):
        return 0
    return min(int((states & 1).sum()) * mmap.PAGESIZE, nbytes)


def available_memory() -> int:
    """Bytes this process could still take: what the system has, within the limits of its cgroups.

    Page cache that goes where memory is wanted, such as a checkpoint that has been read, is
    available.
    """
    left = [
        _left(group, *files)
        for controller, files in _MEMORY_FILES.items()
        for group in _own_groups(controller)
    ]
    return int(min(psutil.virtual_memory().available, *left))


def _own_groups(controller: str) -> list[Path]:
    """This process's cgroup of a controller and those above it, as far as they are seen here."""
    own = ""
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == controller:
                own = path.lstrip("/")
    groups = [_CGROUP / controller / own]
    while groups[-1] != _CGROUP / controller:
        groups.append(groups[-1].parent)
    return groups


def _left(group: Path, limit: str, used: str, reclaimable: str) -> float:
    """Bytes that a cgroup may still take, by the files of its version; inf where nothing limits."""
    try:
        most = int((group / limit).read_text())  # "max" where there is none
        taken = int((group / used).read_text())
    except (OSError, ValueError):
        return math.inf
    cache = 0
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(counts.get(reclaimable, 0))
    return max(most - max(taken - cache, 0), 0)


def pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    """The (address, bytes) pieces of a block, in order."""
    return [(address + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)]


def node_cpus() -> list[set[int]]:
    """The processors this process may use, NUMA node by node; one set without NUMA."""
    allowed = os.sched_getaffinity(0)
    nodes = []
    for folder in sorted(_NODES.glob("node[0-9]*")):
        here = allowed & set(_cpu_list((folder / "cpulist").read_text()))
        if here:
            nodes.append(here)
    return nodes or [allowed]


def touch(blocks: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Fault in the pages of each (address, bytes) block; yields bytes as they are done.

    Each block is split evenly over the NUMA nodes, and each part is touched by threads of its node,
    so that it is placed there; by a thread for four processors, so that who loads weights into what
    has been touched has the others. What the pages hold is not changed.
    """
    nodes = node_cpus()
    jobs: list[list[tuple[int, int]]] = [[] for _ in nodes]
    for address, nbytes in blocks:
        share = -(-nbytes // len(nodes))
        share += -share % mmap.PAGESIZE
        for node, at in enumerate(range(0, nbytes, share)):
            jobs[node] += pieces(address + at, min(share, nbytes - at))
    pools = [
        ThreadPoolExecutor(
            max(len(cpus) // _CPUS_A_THREAD, 1),
            initializer=os.sched_setaffinity,
            initargs=(0, cpus),
        )
        for cpus in nodes
    ]
    try:
        done = [
            pool.submit(_touch_piece, *piece)
            for pool, node_jobs in zip(pools, jobs, strict=True)
            for piece in node_jobs
        ]
        for future in done:
            yield future.result()
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _touch_piece(address: int, nbytes: int) -> int:
    start = address & -mmap.PAGESIZE
    length = address + nbytes - start
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
        # An older kernel: read and write back one byte of each page.
        for page in range(max(start, address), address + nbytes, mmap.PAGESIZE):
            byte = ctypes.c_char.from_address(page)
            byte.value = byte.value
    return nbytes


def _cpu_list(text: str) -> Iterator[int]:
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


_libc = ctypes.CDLL(None, use_errno=True)
