"""What a streamed step leaves in the slots of a layer, decided on the device: nothing read back.

What is decided is `routing.plan_kept`, number for number, on the state of a `DeviceStep`.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.routing import LAST_TOKENS

# Ids read at once; more are read in turns.
_BLOCK = 1024


class DeviceKeep:
    """Decisions of one layer, whose state is that of `step`.

    Written by every launch, int32: `kept` ``[E, 2]`` and `kept_count` ``[1]``, the (expert, slot)
    pairs to copy before the next step, the first `kept_count` of them; what follows those is stale.
    `counter` int64 ``[1]``: how many have been listed, set to 0 by whoever reads it.
    """

    def __init__(self, step: DeviceStep) -> None:
        self._step = step

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=step.slot_of.device)

        # Ordinary tensors, so that the host may write to them in and out of inference mode.
        with torch.inference_mode(False):
            self.kept = table(step.num_experts, 2)
            self.kept_count = table(1)
            self.counter = table(1, dtype=torch.int64)
            self._uses = table(LAST_TOKENS, step.width)
            self._turns = table(1)
        self._kernel = _kernel()

    def launch(
        self, topk_ids: torch.Tensor, requests: torch.Tensor, at_hand: torch.Tensor | None
    ) -> None:
        """Decide on the current stream; the step's tables of before are stale then.

        topk_ids: integers [T, K], a number outside 0..E-1 is no expert; requests: int32 [R + 1],
        where the rows of each request begin and the last one's end; at_hand: int32 [E], -1 for
        experts that cannot be copied, or None where all can. All contiguous, on the tables' device.
        """
        step = self._step
        self._kernel[(1,)](
            topk_ids,
            requests,
            self._uses if at_hand is None else at_hand,
            self._uses,
            self._turns,
            step.step,
            step.slot_of,
            step.last_used,
            step.value,
            self.kept,
            self.kept_count,
            self.counter,
            len(requests) - 1,
            step.num_slots,
            E=step.num_experts,
            K=step.top_k,
            POLICY=step.policy,
            ALL_AT_HAND=at_hand is None,
            LAST=LAST_TOKENS,
            BLOCK=_BLOCK,
            N=step.width,
            num_warps=step.num_warps,
        )


def _kernel() -> Any:
    """The kernel; imported late, since only a CUDA device has Triton for certain."""
    from vllm_moe_offload.device.keep_kernel import keep_kernel

    return keep_kernel
