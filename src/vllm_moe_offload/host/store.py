"""Where the experts live: one exact-size block of host memory for each tensor of each layer."""

from __future__ import annotations

import math
import mmap

import psutil
import torch

from vllm_moe_offload.errors import MemoryShortError
from vllm_moe_offload.experts import ExpertLayout

_GIB = 2**30


class HostStore:
    """Allocates the host memory of all layers and counts it.

    Blocks are anonymous mappings: exactly as large as asked for (rounded to pages, never to a
    power of two), zero pages until first written, huge pages advised. A block lives as long as a
    tensor over it does.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def allocate(self, layout: ExpertLayout, num_experts: int) -> dict[str, torch.Tensor]:
        """Tensors of shape ``[E, ...]``, one for each tensor of the layout, contents zero.

        Raises MemoryShortError, naming what is needed and what there is, before any allocation.
        """
        needed = layout.nbytes * num_experts
        available = psutil.virtual_memory().available
        if needed > available:
            raise MemoryShortError(
                f"the experts of one layer need {needed / _GIB:.2f} GiB of host memory "
                f"({num_experts} experts of {layout.nbytes / _GIB:.4f} GiB) after "
                f"{self.nbytes / _GIB:.2f} GiB for other layers, and {available / _GIB:.2f} GiB "
                "are available: free memory, or use a smaller or more strongly quantised model"
            )
        self.nbytes += needed
        return {
            spec.name: _map_block((num_experts, *spec.shape), spec.dtype) for spec in layout.tensors
        }


def _map_block(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    block = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps a reference to the mapping, which is unmapped with its last view.
    return torch.frombuffer(block, dtype=dtype, count=count).view(shape)
