"""Ways for a doorbell's service to fail that no request asks for."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.engine.shards import random_shard
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format

# As csrc/engine/doorbell.cpp names it.
SERVICE_THREAD = "moe-doorbell"


@contextmanager
def kept_busy(engine: CpuExpertEngine, seconds: float) -> Iterator[None]:
    """Another caller has the engine for about so long, beginning before this is entered."""
    generator = torch.Generator().manual_seed(0)
    spec = ExpertSpec(1024, 1024, Activation.SILU, Format.FP32)
    plan = engine.plan(spec, random_shard(spec, 2, generator), max_tokens=64, top_k=16)

    def work(tokens: int) -> tuple[torch.Tensor, ...]:
        ids = torch.zeros(tokens, 16, dtype=torch.int32)
        return torch.ones(tokens, 1024), ids, torch.ones(tokens, 16), torch.ones(tokens, 1024)

    short = work(64)
    plan.run(*short)  # the first one takes longer
    begin = time.monotonic()
    plan.run(*short)
    long = work(int(64 * seconds / (time.monotonic() - begin)))
    other = threading.Thread(target=plan.run, args=long)
    other.start()
    try:
        time.sleep(0.05)
        yield
    finally:
        other.join()  # the engine must not close under it


def end_service_thread() -> None:
    """End the one service thread of this process, once it dozes, in the middle of its sleep.

    By a signal whose handler is pthread_exit: the thread's destructors run and nothing else.
    """
    # Asleep for 10 ms at a time by then; when one has just begun there is time for the signal.
    time.sleep(1.2)
    (tid,) = (
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == SERVICE_THREAD
    )
    before = _sleeps(tid)
    while _sleeps(tid) == before:
        pass
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    pthread_exit = ctypes.cast(libc.pthread_exit, ctypes.c_void_p)
    old = libc.signal(signal.SIGUSR1, pthread_exit)
    libc.tgkill(os.getpid(), tid, signal.SIGUSR1)
    while Path(f"/proc/self/task/{tid}").exists():
        time.sleep(0)
    libc.signal(signal.SIGUSR1, old)


def _sleeps(tid: int) -> str:
    status = Path(f"/proc/self/task/{tid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
    return line
