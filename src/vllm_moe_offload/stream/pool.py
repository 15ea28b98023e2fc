"""A static pool of buffers for tensors of layers that are copied ahead of their turn.

Each kind of tensor (its name within a layer, shape, stride and dtype) has up to `prefetch_step`
buffers, and the layers that have such a tensor take them in turns, whatever else they have: layers
of other shapes have buffers of their own. A buffer's layers form a ring. When one of them has run,
the next of the same ring is copied into the buffer, the first one again behind the last: a copy
never goes into a buffer that another layer is computed from, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_moe_offload.stream.memory import aligned


@dataclass(frozen=True)
class TensorKind:
    """What tensors that share buffers have in common."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorKind:
        """That of a tensor called `name` within its layer."""
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last, gaps of the stride included."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """A tensor of this kind over `memory`, uint8 of at least `nbytes`."""
        flat = memory[: self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


Layer = Sequence[TensorKind]


@dataclass(frozen=True)
class PoolPlan:
    """Which buffers there are, and which layer has each of them when.

    Layers are numbers, in the order in which they run. `buffers`: what each is for. `of_layer`: of
    every layer, the buffer of each of its tensors. `heirs`: of every layer, which layer has each of
    those buffers after it; itself where no other has.
    """

    buffers: tuple[TensorKind, ...]
    of_layer: tuple[tuple[int, ...], ...]
    heirs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layers: Sequence[Layer], prefetch_step: int) -> PoolPlan:
        """The plan of layers whose tensors are of these kinds, each kind once a layer."""
        users: dict[TensorKind, list[int]] = {}
        for number, layer in enumerate(layers):
            for kind in layer:
                users.setdefault(kind, []).append(number)
        buffers: list[TensorKind] = []
        held: dict[tuple[TensorKind, int], int] = {}
        of_layer, heirs = [], []
        for number, layer in enumerate(layers):
            used, after = [], []
            for kind in layer:
                count = min(prefetch_step, len(users[kind]))
                turn = users[kind].index(number)
                ring = users[kind][turn % count :: count]
                # Those of a layer side by side, so that one copy can fill them.
                if ring[0] == number:
                    held[kind, number] = len(buffers)
                    buffers.append(kind)
                used.append(held[kind, ring[0]])
                after.append(ring[(turn // count + 1) % len(ring)])
            of_layer.append(tuple(used))
            heirs.append(tuple(after))
        return cls(tuple(buffers), tuple(of_layer), tuple(heirs))

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that the pool takes."""
        return sum(aligned(kind.nbytes) for kind in self.buffers)

    @property
    def is_static(self) -> bool:
        """Whether every tensor has a buffer to itself, so that none is ever copied again."""
        return all(heir == n for n, heirs in enumerate(self.heirs) for heir in heirs)


class BufferPool:
    """The memory of a plan's buffers, one allocation; each starts where one of its own would."""

    def __init__(self, plan: PoolPlan, device: torch.device) -> None:
        # An ordinary tensor: it is written to in and out of inference mode.
        with torch.inference_mode(False):
            memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
        self.nbytes = memory.nbytes
        self.memory: list[torch.Tensor] = []
        start = 0
        for kind in plan.buffers:
            self.memory.append(memory[start : start + kind.nbytes])
            start += aligned(kind.nbytes)
