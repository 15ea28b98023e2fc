"""How a captured step asks the CPU lane for a partial sum, and takes it.

The GPU's side of one mailbox of a doorbell. csrc/engine/doorbell.h says what lies where in the
memory that both sides see, in which order it is written, and what happens when the CPU fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_moe_offload.device.streams import shared_zeros, wait_for_word
from vllm_moe_offload.engine import ASKED, DONE, Mailbox

# Numbers that a program copies or adds at once.
_BLOCK = 2048
# Writing to the host: more programs than this do not make it faster.
_MOST_PROGRAMS = 32


@dataclass(frozen=True)
class Operands:
    """What requests are about: tensors of the host that the GPU reaches too.

    Written by the GPU, the first rows of each:

    - `x` ``[T, H]`` of the model's dtype; `ids` int32 ``[T, K]``; `weights` float32 ``[T, K]``;
    - `cpu_map` int32 ``[E + 1]``: expert -> row of the CPU's shard for those the CPU computes, -1
      for all others; entry E, the sentinel, is -1 from the start and not written.

    Written by the CPU: `partial` float32 ``[T, H]``, every one of the first rows.

    Requests that are never outstanding together may share them: those of one stream, each joined
    before the next is submitted.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    cpu_map: torch.Tensor
    partial: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device,
    ) -> Operands:
        """For steps of up to `max_tokens` rows on `device`."""
        tokens, h = max_tokens, hidden_size
        return cls(
            x=shared_zeros(tokens, h, dtype=dtype, device=device),
            ids=shared_zeros(tokens, top_k, dtype=torch.int32, device=device),
            weights=shared_zeros(tokens, top_k, dtype=torch.float32, device=device),
            cpu_map=shared_zeros(num_experts + 1, dtype=torch.int32, device=device).fill_(-1),
            partial=shared_zeros(tokens, h, dtype=torch.float32, device=device),
        )


class CpuRequest:
    """One layer's requests to the CPU lane: three launches a step on the current stream.

    A step is `submit`, whatever goes on beside the CPU, `wait`, `join`; all may be captured. The
    next `submit` over the same operands must come after the `join` of this one: on the same
    stream, or behind an event.

    Args:
        board: uint8, the doorbell's.
        mailbox: Where this layer's is on it.
        operands: Those the mailbox was added with.
        device: Where the launches run.

    The tensors are kept; a graph that captured a launch needs this object to live.
    """

    def __init__(
        self, board: torch.Tensor, mailbox: Mailbox, operands: Operands, device: torch.device
    ) -> None:
        self.operands = operands
        self._max_tokens, self._hidden_size = operands.x.shape
        self._top_k = operands.ids.shape[1]
        self._num_experts = len(operands.cpu_map) - 1
        self._width = 1 << (self._num_experts - 1).bit_length()
        self._request, self._tokens, self._answer = (
            board[at : at + 4].view(torch.int32)
            for at in (mailbox.request, mailbox.tokens, mailbox.answer)
        )
        with torch.inference_mode(False):
            self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._submit, self._join = _kernels()

    def submit(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        cpu_map: torch.Tensor,
    ) -> None:
        """Hand the rows of a step to the CPU lane, if it has an expert in it.

        x: [T, H] of the operands' dtype; topk_ids: integers [T, K] in 0..E; topk_weights: floats
        [T, K]; cpu_map: int32 [E + 1], `DeviceStep.cpu_map`. All contiguous, on the device. Raises
        ValueError for other shapes, more rows than the operands hold, or another dtype of x.
        """
        tokens = self._check_rows(x)
        operands = self.operands
        for name, given, shape in (
            ("ids", topk_ids, (tokens, self._top_k)),
            ("weights", topk_weights, (tokens, self._top_k)),
            ("cpu_map", cpu_map, (self._num_experts + 1,)),
        ):
            if given.shape != shape or not given.is_contiguous():
                raise ValueError(
                    f"{name} {tuple(given.shape)} for {tokens} rows: it must be {shape}, contiguous"
                )
        if x.dtype != operands.x.dtype:
            raise ValueError(f"rows of {x.dtype}: this request was made for {operands.x.dtype}")
        self._submit[(min(_blocks(tokens * max(self._hidden_size, self._top_k)), _MOST_PROGRAMS),)](
            x,
            topk_ids,
            topk_weights,
            cpu_map,
            operands.x,
            operands.ids,
            operands.weights,
            operands.cpu_map,
            self._request,
            self._tokens,
            self._answer,
            self._arrived,
            tokens,
            H=self._hidden_size,
            K=self._top_k,
            E=self._num_experts,
            ASKED=ASKED,
            DONE=DONE,
            BLOCK=_BLOCK,
            N=self._width,
        )

    def wait(self) -> None:
        """Let the current CUDA stream go on when the answer is there; no thread of the GPU spins.

        Where there are no streams the caller waits. Raises RuntimeError if the driver refuses.
        """
        wait_for_word(self._answer, DONE, self._arrived.device)

    def join(self, resident: torch.Tensor, cpu_map: torch.Tensor, out: torch.Tensor) -> None:
        """Write to `out` the resident lane's output plus the CPU lane's partial sum, if any.

        resident: floats [T, H]; cpu_map: what `submit` was given, unchanged since; out: floats
        [T, H], which may be `resident`. Summed in float32. Raises ValueError for other shapes.
        """
        self._check_rows(resident)
        if out.shape != resident.shape or not out.is_contiguous():
            raise ValueError(
                f"out {tuple(out.shape)} must be as {tuple(resident.shape)}, contiguous"
            )
        self._join[(_blocks(out.numel()),)](
            resident,
            self.operands.partial,
            cpu_map,
            out,
            len(out),
            H=self._hidden_size,
            E=self._num_experts,
            BLOCK=_BLOCK,
            N=self._width,
        )

    def _check_rows(self, rows: torch.Tensor) -> int:
        """How many there are; ValueError where they do not suit the operands."""
        if (
            rows.dim() != 2
            or rows.shape[1] != self._hidden_size
            or len(rows) > self._max_tokens
            or not rows.is_contiguous()
        ):
            raise ValueError(
                f"rows {tuple(rows.shape)}: they must be contiguous, up to {self._max_tokens} of "
                f"{self._hidden_size} numbers"
            )
        return len(rows)


def _blocks(numbers: int) -> int:
    """How many blocks hold so many numbers, and 1 for none: a step without rows is answered too."""
    return max(-(-numbers // _BLOCK), 1)


def _kernels() -> tuple[Any, Any]:
    """The kernels; imported late, since only a CUDA device has Triton for certain."""
    from vllm_moe_offload.device.request_kernel import join_kernel, submit_kernel

    return submit_kernel, join_kernel
