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
# Drawn at a time on a device: 32 MiB there, and few enough copies that one which several processes
# share, each in its turn, is not waited for thousands of times.
_DEVICE_NUMBERS = 1 << 24


def fill_dummy(tensors: Mapping[str, torch.Tensor], device: str, seed: int) -> None:
    """Fill each floating-point tensor (name -> ``[E, ...]``, on the CPU) with random numbers.

    Uniform in +-1e-3, numbers of eight bits in +-1, scales positive. Drawn on `device` and copied,
    a few experts at a time; on the CPU one, by a thread a processor.
    """

    def fill(job: tuple[int, str, int, int]) -> None:
        number, name, begin, end = job
        target = tensors[name][begin:end]
        generator = torch.Generator(device).manual_seed(seed + number)
        # Half precision, because eight-bit types have no random numbers of their own.
        drawn = torch.empty(target.shape, dtype=torch.float16, device=device)
        is_scale = name.endswith(("scale", "scale_inv"))
        limit = _SCALED_LIMIT if target.itemsize == 1 and not is_scale else _LIMIT
        drawn.uniform_(-limit, limit, generator=generator)
        target.copy_(drawn.abs() if is_scale else drawn)

    jobs = []
    for number, (name, tensor) in enumerate(tensors.items()):
        if not tensor.is_floating_point():
            continue
        of_one = tensor.numel() // max(tensor.shape[0], 1)
        at_once = 1 if device == "cpu" else max(_DEVICE_NUMBERS // max(of_one, 1), 1)
        for begin in range(0, tensor.shape[0], at_once):
            jobs.append((number * tensor.shape[0] + begin, name, begin, begin + at_once))
    if device == "cpu":
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(fill, jobs))
    else:
        for job in jobs:
            fill(job)
