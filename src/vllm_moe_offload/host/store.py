"""Where the experts live: one exact-size block of host memory for each tensor of each layer."""

from __future__ import annotations

import functools
import math
import resource
from collections.abc import Callable

import torch
from rich.progress import Progress

from vllm_moe_offload.errors import MemoryShortError
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.host.pages import Pages, available_memory, map_pages, touch

_GIB = 2**30
Register = Callable[[int, int], None]
Unregister = Callable[[int], None]


class HostStore:
    """Allocates the host memory of all layers, and makes it ready once all are known.

    `allocate` reserves addresses only: no page is touched, so a store that turns out too large has
    cost nothing. `prepare` then checks the sum against what there is, places the pages, and
    registers them with the device. A block lives as long as a tensor over it does.

    Args:
        register: Called with (address, bytes) of each block, so that the device can read it.
        unregister: Called with the address of each block before its memory goes.
    """

    def __init__(self, register: Register, unregister: Unregister) -> None:
        self.nbytes = 0
        self._register = register
        self._unregister = unregister
        self._waiting: list[tuple[Pages, int, int]] = []
        self._blocks: list[tuple[int, int]] = []

    def allocate(self, layout: ExpertLayout, num_experts: int) -> dict[str, torch.Tensor]:
        """Tensors of shape ``[E, ...]``, one for each tensor of the layout, contents zero."""
        self.nbytes += layout.nbytes * num_experts
        return {
            spec.name: self._block((num_experts, *spec.shape), spec.dtype)
            for spec in layout.tensors
        }

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is one of this store's blocks."""
        return any(
            start <= tensor.data_ptr() < start + nbytes
            for start, nbytes in self._blocks
            if tensor.device.type == "cpu"
        )

    def needs(self) -> str:
        """In words: what has been allocated and not made ready, and what host memory there is."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _GIB:.2f} GiB"
        return (
            f"the experts need {self._needed / _GIB:.2f} GiB of host memory and "
            f"{available_memory() / _GIB:.2f} GiB are available (locked-memory limit: {limit})"
        )

    def prepare(self, also_needed: str = "") -> None:
        """Make ready what has been allocated since the last call; call before the first write.

        Raises MemoryShortError, naming what is needed and what there is, before touching a page.
        `also_needed`: what to say there of other memory.
        """
        if not self._waiting:
            return  # called for every tensor that is loaded
        needed = self._needed
        if needed > available_memory():
            raise MemoryShortError(
                f"{self.needs()}: free memory, or serve a smaller or more strongly quantised model"
                + (f" ({also_needed})" if also_needed else "")
            )
        waiting, self._waiting = self._waiting, []
        with Progress(transient=True) as progress:
            task = progress.add_task("host memory for experts", total=2 * needed)
            for done in touch([(address, nbytes) for _, address, nbytes in waiting]):
                progress.advance(task, done)
            for block, address, nbytes in waiting:
                # Whole: a copy must not cross from one registered range into another.
                self._register(address, nbytes)
                block.before_unmap = functools.partial(self._unregister, address)
                progress.advance(task, nbytes)

    @property
    def _needed(self) -> int:
        return sum(nbytes for _, _, nbytes in self._waiting)

    def _block(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        block = map_pages(count * dtype.itemsize)
        # The tensor keeps a reference to the mapping, which is unmapped with its last view.
        tensor = torch.frombuffer(block, dtype=dtype, count=count).view(shape)
        if count:
            self._waiting.append((block, tensor.data_ptr(), tensor.nbytes))
            self._blocks.append((tensor.data_ptr(), tensor.nbytes))
        return tensor
