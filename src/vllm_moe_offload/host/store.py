"""Where offloaded weights live: exact-size blocks of host memory, of experts one a tensor."""

from __future__ import annotations

import contextlib
import functools
import math
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from vllm_moe_offload.amounts import amount
from vllm_moe_offload.errors import MemoryShortError, OffloadError
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.host.pages import Pages, available_memory, map_pages, resident_bytes, touch

_ADVICE = "free memory, or serve a smaller or more strongly quantised model"

Register = Callable[[int, int], None]
Unregister = Callable[[int], None]


def not_mapped(nbytes: int, cause: str) -> MemoryShortError:
    """The error where the system does not even promise so many bytes."""
    return MemoryShortError(
        f"{amount(nbytes)} of host memory cannot be mapped ({cause}), and "
        f"{amount(available_memory())} are available: {_ADVICE}"
    )


@dataclass(eq=False)
class _Block:
    """One tensor's memory, which the tensor alone keeps."""

    pages: weakref.ref[Pages]
    address: int
    nbytes: int
    ready: threading.Event = field(default_factory=threading.Event)
    is_registered: bool = False


def _forget(block: _Block, blocks: dict[int, _Block], unregister: Unregister) -> None:
    """What comes before its memory goes, in whichever thread drops it.

    Not of the store, whose error may hold frames with tensors: those would hold themselves.
    """
    del blocks[block.address]
    if block.is_registered:
        unregister(block.address)


class _Stderr:
    """sys.stderr for a bar that must not fail what it shows: what cannot be written is left out.

    There may be none, a closed one, or a pipe that nobody reads any more.
    """

    def write(self, text: str) -> None:
        with contextlib.suppress(Exception):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class HostStore:
    """Allocates the host memory of all layers, and makes it ready once all are known.

    `allocate` reserves addresses only: no page is touched, so a store that turns out too large has
    cost nothing. `prepare` then checks the sum against what there is, and a thread begins to place
    the pages and to register them with the device, block after block, so that weights can be
    loaded into the first blocks meanwhile; `wait` is called before blocks are written. A block
    lives as long as a tensor over it does.

    Args:
        register: Called with (address, bytes) of each block, so that the device can read it; by
            another thread than the caller's.
        unregister: Called with the address of each block before its memory goes.
    """

    def __init__(self, register: Register, unregister: Unregister) -> None:
        self.nbytes = 0
        self._register = register
        self._unregister = unregister
        self._waiting: list[_Block] = []
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.Lock()
        self._queue: list[_Block] = []
        self._is_working = False
        self._error: BaseException | None = None

    def allocate(self, layout: ExpertLayout, num_experts: int) -> dict[str, torch.Tensor]:
        """Tensors of shape ``[E, ...]``, one for each tensor of the layout, contents zero.

        Raises MemoryShortError where the system does not even promise as much.
        """
        blocks = {
            spec.name: self._block((num_experts, *spec.shape), spec.dtype)
            for spec in layout.tensors
        }
        self.nbytes += layout.nbytes * num_experts
        return blocks

    def allocate_bytes(self, nbytes: int) -> torch.Tensor:
        """uint8 of so many bytes, contents zero: one block."""
        block = self._block((nbytes,), torch.uint8)
        self.nbytes += nbytes
        return block

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is one of this store's blocks."""
        # A copy, because another thread may drop a block meanwhile.
        return tensor.device.type == "cpu" and any(
            block.address <= tensor.data_ptr() < block.address + block.nbytes
            for block in list(self._blocks.values())
        )

    def needs(self) -> str:
        """In words: what has been allocated and not made ready, and what host memory there is."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else amount(soft)
        return (
            f"offloaded weights need {amount(self.pending_bytes)} of host memory and "
            f"{amount(available_memory())} are available (locked-memory limit: {limit})"
        )

    def require(self, also_needed: str = "") -> None:
        """Raise MemoryShortError where there is less than what has been allocated needs.

        It names both. `also_needed`: what to say there of other memory.
        """
        if self.pending_bytes > available_memory():
            raise MemoryShortError(
                f"{self.needs()}: {_ADVICE}" + (f" ({also_needed})" if also_needed else "")
            )

    def prepare(self, also_needed: str = "") -> None:
        """Begin to make ready what has been allocated since the last call.

        Raises as `require`, before touching a page.
        """
        if not self._waiting:
            return
        self.require(also_needed)
        waiting, self._waiting = self._waiting, []
        with self._lock:
            self._queue += waiting
            is_idle, self._is_working = not self._is_working, True
        if not is_idle:
            return
        name = "moe-offload-host-memory"
        try:
            threading.Thread(target=self._make_ready, name=name, daemon=True).start()
        except RuntimeError:  # the system has no thread to give: what was allocated waits on
            with self._lock:
                self._is_working = False
                self._waiting, self._queue = self._queue, []
            raise

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return when the blocks of these tensors of `allocate` are ready; they come first then.

        Raises what making any block ready raised.
        """
        for tensor in tensors:
            block = self._blocks[tensor.data_ptr()]
            if not block.ready.is_set():
                with self._lock:
                    if block in self._queue:
                        self._queue.remove(block)
                        self._queue.insert(0, block)
                block.ready.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give up what is not ready: the thread ends soon, and to wait for a block is an error."""
        if self._is_working:
            self._fail(OffloadError("host memory is not made ready any more: loading was given up"))

    def _fail(self, error: BaseException) -> None:
        """Let `wait` raise this, now and from now on; the first such error stays."""
        with self._lock:
            self._error = self._error or error
            self._is_working = False
            left, self._queue = self._queue, []
        for block in left:
            block.ready.set()

    def _make_ready(self) -> None:
        """The thread: ends when the queue is empty, or at the first error."""
        try:
            # Beside vLLM's own bar, which is drawn by the same library meanwhile.
            with tqdm(
                desc="host memory",
                unit="B",
                unit_scale=True,
                position=1,
                leave=False,
                delay=1,
                file=_Stderr(),
                dynamic_ncols=True,
            ) as progress:
                self._work(progress)
        except BaseException as error:
            self._fail(error)

    def _work(self, progress: tqdm) -> None:
        while True:
            if self._error is not None:
                raise self._error
            with self._lock:
                if not self._queue:
                    self._is_working = False
                    return
                progress.total = progress.n + sum(each.nbytes for each in self._queue)
                block = self._queue[0]
            self._touch_and_register(block, progress.update)
            with self._lock:
                if block in self._queue:
                    self._queue.remove(block)
            block.ready.set()

    def _touch_and_register(self, block: _Block, progress: Callable[[int], object]) -> None:
        pages = block.pages()
        if pages is None:
            return  # its tensor is gone
        try:
            for done in touch([(block.address, block.nbytes)]):
                progress(done)
                if self._error is not None:
                    return
            # Whole: a copy must not cross from one registered range into another.
            self._register(block.address, block.nbytes)
            block.is_registered = True
        finally:
            del pages  # which the traceback of an error would keep

    @property
    def pending_bytes(self) -> int:
        """Bytes allocated since the last `prepare` for which there is no memory yet.

        There is for what a loader has written without `wait`.
        """
        return sum(
            block.nbytes - resident_bytes(block.address, block.nbytes)
            for block in self._waiting
            if block.pages() is not None
        )

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        try:
            pages = map_pages(nbytes)
        except OSError as error:  # far more than there is: Linux maps what is a little too much
            raise not_mapped(nbytes, str(error.strerror)) from None
        # The tensor keeps a reference to the mapping, which is unmapped with its last view.
        tensor = torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
        block = _Block(weakref.ref(pages), tensor.data_ptr(), tensor.nbytes)
        pages.before_unmap = functools.partial(_forget, block, self._blocks, self._unregister)
        self._blocks[block.address] = block
        self._waiting.append(block)
        return tensor
