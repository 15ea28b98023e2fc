"""Engines in processes of their own, as vLLM gives them by default, and how they end."""

from __future__ import annotations

import faulthandler
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm import LLM
from vllm import envs as vllm_envs
from vllm.v1.engine.exceptions import EngineDeadError

from tests.e2e.engines import decoded, engine

# The client hears of a failure at once; vLLM then takes some 5 s to end the process.
SECONDS_TO_HEAR = 5
SECONDS_TO_END = 30
# vLLM pads three rows to the four of a graph.
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]


@contextmanager
def engine_process(model: Path, **arguments: Any) -> Iterator[tuple[LLM, psutil.Process]]:
    """An engine and its process, which functions can be sent to by `collective_rpc`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        vllm_envs.disable_envs_cache()
        with engine(model, **arguments) as llm:
            (process,) = llm.llm_engine.engine_core.resources.engine_manager.processes
            yield llm, psutil.Process(process.pid)
    vllm_envs.disable_envs_cache()


def check_failure_ends(
    llm: LLM, process: psutil.Process, fail: Callable[[Any], None]
) -> tuple[float, float]:
    """Steps are well until `fail` has run in the process; then one is an error, and that ends.

    Gives the seconds until the client has heard and until the process was gone. One that does not
    end prints where its threads are.
    """
    decoded(llm, PROMPTS, 4)
    llm.collective_rpc(_tell_where, args=(SECONDS_TO_END - 5,))
    llm.collective_rpc(fail)
    began = time.perf_counter()
    with pytest.raises(EngineDeadError):
        decoded(llm, PROMPTS, 4)
    heard = time.perf_counter() - began
    assert heard < SECONDS_TO_HEAR
    while not _is_gone(process):
        assert time.perf_counter() - began < SECONDS_TO_END, _threads(process)
        time.sleep(0.01)
    return heard, time.perf_counter() - began


def printed_error(printed: str) -> str:
    """What a process said of the failure of its lane."""
    return "".join(re.findall(r".*CpuLaneError: .*", printed))


def _tell_where(_: Any, seconds: float) -> None:
    """In the process: what Python does there after so long."""
    faulthandler.dump_traceback_later(seconds)


def _is_gone(process: psutil.Process) -> bool:
    # Not by multiprocessing's `join` and `is_alive`: vLLM waits for the same process in a thread,
    # and of two that wait one is told that there is no such child, which `is_alive` takes for life.
    # A process with a GPU is in that state for long: its pipes are closed before its device is.
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _threads(process: psutil.Process) -> str:
    """What the kernel says of its threads."""
    folder = Path(f"/proc/{process.pid}/task")
    return "still there: " + "; ".join(
        " ".join((task / name).read_text().strip() for name in ("comm", "wchan"))
        for task in folder.iterdir()
    )
