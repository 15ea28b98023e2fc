"""Random numbers in place of a checkpoint, drawn where it is fast."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

# vLLM's own range of dummy weights.
_LIMIT = 1e-3
# That of numbers of eight bits, which have scales for the range: within +-1e-3 hardly any but zero.
_SCALED_LIMIT = 1.0


def fill_dummy(tensors: Mapping[str, torch.Tensor], device: str, seed: int) -> None:
    """Fill each floating-point tensor (name -> ``[E, ...]``, on the CPU) with random numbers.

    Uniform in +-1e-3, numbers of eight bits in +-1, scales positive. Drawn on `device` and copied,
    an expert at a time; on the CPU by one thread a processor.
    """

    def fill(job: tuple[int, str, int]) -> None:
        number, name, expert = job
        target = tensors[name][expert]
        generator = torch.Generator(device).manual_seed(seed + number)
        # Half precision, because eight-bit types have no random numbers of their own.
        drawn = torch.empty(target.shape, dtype=torch.float16, device=device)
        is_scale = name.endswith(("scale", "scale_inv"))
        limit = _SCALED_LIMIT if target.itemsize == 1 and not is_scale else _LIMIT
        drawn.uniform_(-limit, limit, generator=generator)
        target.copy_(drawn.abs() if is_scale else drawn)

    jobs = [
        (number * tensor.shape[0] + expert, name, expert)
        for number, (name, tensor) in enumerate(tensors.items())
        if tensor.is_floating_point()
        for expert in range(tensor.shape[0])
    ]
    if device == "cpu":
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(fill, jobs))
    else:
        for job in jobs:
            fill(job)
