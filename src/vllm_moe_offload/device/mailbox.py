"""How a captured step asks the CPU lane for a partial sum, and takes it.

Memory that both sides read and write, and two flags in it, each on a cache line of its own. In
this order, and the layout of it is nowhere else:

    GPU  answer = 0, tokens, x, ids, weights, cpu_map;  a fence;  request = 1
    CPU  sees request == 1;  request = 0;  computes;  partial;  a fence;  answer = 1, FAILED if not
    GPU  waits until answer >= 1;  reads partial

Where the CPU has no expert in a step the GPU sets answer = 1 itself and asks for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DONE, FAILED = 1, 2

# Places in `Mailbox.control`, in int32: 16 of them are a cache line.
REQUEST, TOKENS, ANSWER = 0, 1, 16

# Numbers that a program copies or adds at once.
_BLOCK = 2048
# Writing to the host: more programs than this do not make it faster.
_MOST_PROGRAMS = 32


@dataclass(frozen=True)
class Mailbox:
    """The memory: tensors of the host, pinned where there is a GPU to read them.

    Written by the GPU, the first `tokens` rows of each:

    - `x` ``[T, H]`` of the model's dtype; `ids` int32 ``[T, K]``; `weights` float32 ``[T, K]``;
    - `cpu_map` int32 ``[E + 1]``: expert -> expert for those the CPU computes, -1 for all others;
      entry E, the sentinel, is -1 from the start and not written.

    Written by the CPU: `partial` float32 ``[T, H]``, the first `tokens` rows, every one of them.

    `control` int32 ``[32]``, at a multiple of 64 bytes: the request at `REQUEST`, the number of
    tokens at `TOKENS`, the answer at `ANSWER`.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    cpu_map: torch.Tensor
    partial: torch.Tensor
    control: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        num_experts: int,
        top_k: int,
        pinned: bool,
    ) -> Mailbox:
        """One for steps of up to `max_tokens` rows. Nothing is asked for and nothing answered."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=pinned)

        with torch.inference_mode(False):
            return cls(
                x=zeros(max_tokens, hidden_size, dtype=dtype),
                ids=zeros(max_tokens, top_k, dtype=torch.int32),
                weights=zeros(max_tokens, top_k, dtype=torch.float32),
                cpu_map=zeros(num_experts + 1, dtype=torch.int32).fill_(-1),
                partial=zeros(max_tokens, hidden_size, dtype=torch.float32),
                control=zeros(32, dtype=torch.int32),
            )


class Doorbell:
    """The GPU's side of a mailbox: three launches a step on the current stream, all capturable.

    A step is `submit`, whatever goes on beside the CPU, `wait`, `join`. The next step's `submit`
    must come after the `join` of this one: on the same stream, or behind an event.

    Args:
        mailbox: Kept; a graph that captured a launch needs it, and this object, to live.
        device: Where the launches run.
    """

    def __init__(self, mailbox: Mailbox, device: torch.device) -> None:
        self.mailbox = mailbox
        self._max_tokens, self._hidden_size = mailbox.x.shape
        self._top_k = mailbox.ids.shape[1]
        self._num_experts = len(mailbox.cpu_map) - 1
        self._width = 1 << (self._num_experts - 1).bit_length()
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

        x: [T, H] of the mailbox's dtype; topk_ids: integers [T, K]; topk_weights: floats [T, K];
        cpu_map: int32 [E + 1], `DeviceStep.cpu_map`. All contiguous, on the device. Raises
        ValueError for other shapes, more rows than the mailbox holds, or another dtype of x.
        """
        tokens = self._tokens(x)
        mailbox = self.mailbox
        for name, given, shape in (
            ("ids", topk_ids, (tokens, self._top_k)),
            ("weights", topk_weights, (tokens, self._top_k)),
            ("cpu_map", cpu_map, (self._num_experts + 1,)),
        ):
            if given.shape != shape or not given.is_contiguous():
                raise ValueError(
                    f"{name} {tuple(given.shape)} for {tokens} rows: it must be {shape}, contiguous"
                )
        if x.dtype != mailbox.x.dtype:
            raise ValueError(f"rows of {x.dtype} for a mailbox of {mailbox.x.dtype}")
        self._submit[(min(_blocks(tokens * max(self._hidden_size, self._top_k)), _MOST_PROGRAMS),)](
            x,
            topk_ids,
            topk_weights,
            cpu_map,
            mailbox.x,
            mailbox.ids,
            mailbox.weights,
            mailbox.cpu_map,
            mailbox.control,
            self._arrived,
            tokens,
            H=self._hidden_size,
            K=self._top_k,
            E=self._num_experts,
            REQUEST=REQUEST,
            TOKENS=TOKENS,
            ANSWER=ANSWER,
            BLOCK=_BLOCK,
            N=self._width,
        )

    def wait(self) -> None:
        """Let the current CUDA stream go on when the answer is there; no thread of the GPU spins.

        Raises RuntimeError if the driver refuses.
        """
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        answer = self.mailbox.control[ANSWER:].data_ptr()
        (code,) = driver.cuStreamWaitValue32(
            stream, answer, DONE, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        )
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA cannot make a stream wait for the CPU lane: {code.name}")

    def join(self, resident: torch.Tensor, cpu_map: torch.Tensor, out: torch.Tensor) -> None:
        """Write to `out` the resident lane's output plus the CPU lane's partial sum, if any.

        resident: floats [T, H]; cpu_map: what `submit` was given, unchanged since; out: floats
        [T, H], which may be `resident`. Summed in float32. Raises ValueError for other shapes.
        """
        self._tokens(resident)
        if out.shape != resident.shape or not out.is_contiguous():
            raise ValueError(
                f"out {tuple(out.shape)} must be as {tuple(resident.shape)}, contiguous"
            )
        self._join[(_blocks(out.numel()),)](
            resident,
            self.mailbox.partial,
            cpu_map,
            out,
            len(out),
            H=self._hidden_size,
            E=self._num_experts,
            BLOCK=_BLOCK,
            N=self._width,
        )

    def _tokens(self, rows: torch.Tensor) -> int:
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
    from vllm_moe_offload.device.mailbox_kernel import join_kernel, submit_kernel

    return submit_kernel, join_kernel
