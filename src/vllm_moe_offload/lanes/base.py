"""What a lane does."""

from __future__ import annotations

from typing import Protocol

import torch


class Lane(Protocol):
    """Computes the part of a layer's output that one shard of its experts contributes."""

    def compute(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        out: torch.Tensor,
        accumulate: bool,
    ) -> None:
        """Write (or add, when `accumulate`) the shard's weighted sum to `out`.

        x: [T, H]; topk_weights: float32 [T, K]; topk_ids: int32 [T, K] in 0..E, E being the
        sentinel of rows that route nowhere; expert_map: int32 [E + 1], expert -> row of the shard's
        tensors or -1 (None: expert e is row e, the sentinel nowhere; [E] where no id is the
        sentinel); out: float32 [T, H].

        By `output`, for a lane that derives from this class: its kernel rounds, the sum does not.
        """
        part = self.output(x, topk_weights, topk_ids, expert_map)
        if accumulate:
            out.add_(part)
        else:
            out.copy_(part)

    def output(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same sum as floats [T, H], of float32 or of x's dtype; good until the next call."""
        ...


class Computing(Protocol):
    """What a lane computes beside its caller."""

    def wait(self, timeout: float | None = None) -> float:
        """Return when it is done: the seconds it took.

        Raises what computing has raised, and TimeoutError where it goes on after `timeout` seconds.
        """
        ...

    def abandon(self) -> None:
        """It does not end: whoever lets go of it is not to wait for it."""
        ...


class LaneBeside(Lane, Protocol):
    """A lane that computes beside its caller too."""

    def begin(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor,
        out: torch.Tensor,
        done: torch.Tensor,
    ) -> Computing:
        """As `compute` without adding; the tensors are to be left alone until it is done.

        out: float32 or bf16 [T, H].
        done: int32 [1] in host memory, becomes 1 when the sum is there or computing has failed.
        """
        ...
