"""The memory of a buffer, in which experts of layers of any formats take their turns."""

from __future__ import annotations

import torch

from vllm_moe_offload.experts import ExpertLayout

# Of the start of a tensor, in bytes: what an allocation of its own would have.
_ALIGNMENT = 256


class BufferMemory:
    """Bytes of a device that are seen as the tensors of one layer, then of the next."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # An ordinary tensor: it is written to in and out of inference mode.
        with torch.inference_mode(False):
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """How many there are."""
        return self._bytes.nbytes

    def capacity(self, layout: ExpertLayout, num_experts: int) -> int:
        """How many experts of this layout it holds, of the `num_experts` that a layer has.

        Raises ValueError where it holds none.
        """
        count = min(num_experts, self.nbytes // layout.nbytes)
        # Each tensor starts aligned, which may cost a few experts that are tiny.
        while count and buffer_bytes(layout, count) > self.nbytes:
            count -= 1
        if not count:
            raise ValueError(
                f"an expert takes {buffer_bytes(layout, 1)} bytes of a buffer of {self.nbytes}: "
                "make buffers for the largest layer"
            )
        return count

    def tensors(self, layout: ExpertLayout, num_experts: int) -> dict[str, torch.Tensor]:
        """Name -> ``[E, ...]``, from the start of the memory on.

        Raises ValueError where `buffer_bytes` of the same is more than there is.
        """
        needed = buffer_bytes(layout, num_experts)
        if needed > self.nbytes:
            raise ValueError(
                f"{num_experts} experts take {needed} bytes of a buffer of {self.nbytes}: make "
                "buffers for the largest layer"
            )
        found, start = {}, 0
        for spec in layout.tensors:
            end = start + num_experts * spec.nbytes
            flat = self._bytes[start:end].view(spec.dtype)
            found[spec.name] = flat.view(num_experts, *spec.shape)
            start = aligned(end)
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this memory."""
        start = self._bytes.data_ptr()
        return (
            tensor.device == self._bytes.device
            and start <= tensor.data_ptr() < start + self._bytes.nbytes
        )


def buffer_bytes(layout: ExpertLayout, num_experts: int) -> int:
    """Bytes of a buffer for so many experts."""
    return sum(aligned(num_experts * spec.nbytes) for spec in layout.tensors)


def aligned(nbytes: int) -> int:
    """So many bytes and what is left of them to the start of the next tensor."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
