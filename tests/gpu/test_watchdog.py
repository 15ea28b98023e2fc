"""A CPU lane that fails under vLLM's graphs ends the step: layer and cause, no token, soon.

In this process, where the error can be read, and in the process that vLLM gives an engine by
default, which ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")
from vllm import LLM

from tests.e2e import checkpoints
from tests.e2e.engines import decoded, engine
from tests.e2e.processes import PROMPTS, check_failure_ends, engine_process, printed_error
from tests.engine.faults import end_service_thread, kept_busy
from tests.gpu.oracle import checked_layers
from vllm_moe_offload import CpuLaneError, moe_offload_args

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.1,
    "enforce_eager": False,
    # Without torch.compile, which takes most of a start.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 4],
    },
    **moe_offload_args(mode="cpu"),
}
SECONDS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("watchdog"))


@contextmanager
def stall(llm: LLM) -> Iterator[None]:
    """Another has the engine's threads for longer than the lane waits."""
    (runtime,) = llm.collective_rpc(lambda worker: worker._moe_offload_runtime)
    with kept_busy(runtime.engine, SECONDS + 1):
        yield


@contextmanager
def exception(llm: LLM) -> Iterator[None]:
    """A request that cannot be computed: padding is routed to an expert that does not exist."""
    for checked in checked_layers(llm):
        layer = checked.layer
        layer._asking._cpu.operands.cpu_map[-1] = layer.num_experts
    yield


@contextmanager
def thread_exit(llm: LLM) -> Iterator[None]:
    end_service_thread()
    yield


CAUSES = {
    stall: r"computing it did not end within 3\.0 s",
    exception: r"expert_map\[\d+\] is",
    thread_exit: "the service thread ended",
}


@pytest.mark.parametrize("fault", CAUSES)
def test_a_step_of_a_lane_that_fails_ends(fault: Any, checkpoint: Path) -> None:
    with engine(checkpoint, **SETTINGS) as llm:
        decoded(llm, PROMPTS, 4)
        assert all(checked.layer._is_in_graph for checked in checked_layers(llm))
        with fault(llm):
            began = time.perf_counter()
            with pytest.raises(CpuLaneError) as caught:
                decoded(llm, PROMPTS, 4)
            seconds = time.perf_counter() - began
        print(f"\n{fault.__name__}: {seconds:.2f} s, {caught.value}")
        assert seconds < SECONDS
        assert re.search(r"model\.layers\.\d+", str(caught.value))
        assert re.search(CAUSES[fault], str(caught.value))


def test_an_engine_in_a_process_of_its_own_is_shut_down(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with engine_process(checkpoint, **SETTINGS) as (llm, process):
        heard, gone = check_failure_ends(llm, process, end_thread)
    error = printed_error("".join(capfd.readouterr()))
    print(f"\nthe client heard after {heard:.2f} s, the process was gone after {gone:.2f} s")
    assert re.search(r"model\.layers\.\d+", error)
    assert CAUSES[thread_exit] in error


def end_thread(worker: Any) -> None:
    """In the engine's process."""
    end_service_thread()
