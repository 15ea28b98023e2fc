"""An engine in a process of its own whose CPU lane has failed ends, off a GPU too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")
import torch
from vllm.platforms import current_platform

from tests.e2e import checkpoints
from tests.e2e.processes import check_failure_ends, engine_process, printed_error
from tests.engine.faults import end_service_thread
from vllm_moe_offload import moe_offload_args

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="tests/gpu has it on a GPU")


def end_thread_of_a_lane(worker: Any) -> None:
    """In the worker's process: give it the lane that it would have on a GPU, and end its thread."""
    from vllm_moe_offload.integration.share import CpuShare

    runtime = worker._moe_offload_runtime
    runtime._share = CpuShare(runtime.config, runtime.engine, torch.device("cpu"))
    for name, lane in runtime._cpu_lanes.items():
        runtime._share.request(name, lane)
    end_service_thread()
    close = runtime.close

    def closes() -> None:
        close()
        print("closed", flush=True)

    runtime.close = closes


def test_its_process_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoints.write("qwen3_moe", tmp_path)
    with engine_process(checkpoint, **moe_offload_args(mode="cpu")) as (llm, process):
        check_failure_ends(llm, process, end_thread_of_a_lane)
    printed = "".join(capfd.readouterr())
    assert "the service thread ended" in printed_error(printed)
    # By itself: vLLM kills a worker that takes too long.
    assert "closed" in printed.splitlines()
