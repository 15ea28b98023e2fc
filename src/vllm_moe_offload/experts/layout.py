"""The tensors one expert is made of, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one expert: its name, its shape without the expert dimension, its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of this tensor for one expert."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertLayout:
    """The tensors that make up one expert, in a fixed order.

    A layer keeps each of them for all its experts as one tensor whose first dimension counts
    experts (in host memory) or slots (on the device).
    """

    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert: what one fetch moves."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(spec.name for spec in self.tensors)

    @classmethod
    def of(cls, stacked: Mapping[str, torch.Tensor]) -> ExpertLayout:
        """The layout of tensors stacked over experts, each of shape ``[E, ...]``.

        Raises ValueError when they do not agree on the number of experts.
        """
        counts = {name: tensor.shape[0] for name, tensor in stacked.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"tensors of one layer disagree on the number of experts: {counts}")
        return cls(
            tuple(
                TensorSpec(name, tuple(tensor.shape[1:]), tensor.dtype)
                for name, tensor in stacked.items()
            )
        )

    def empty(self, count: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Uninitialised tensors of shape ``[count, ...]``, one for each name."""
        return {
            spec.name: torch.empty((count, *spec.shape), dtype=spec.dtype, device=device)
            for spec in self.tensors
        }
