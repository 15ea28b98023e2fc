"""A step whose CPU lane has failed gives no output, whenever that is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_moe_offload.errors import CpuLaneError
from vllm_moe_offload.integration.plugin import register

STEP = SimpleNamespace(
    total_num_scheduled_tokens=5, scheduled_cached_reqs=SimpleNamespace(req_ids=["a"])
)


class Runtime:
    """A lane that fails when it is told to."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.error: Exception | None = None

    def expect(self, rows: int, goes_on: bool) -> None:
        self.calls.append(f"expect {rows}" + (" of old" if goes_on else ""))

    def wake(self) -> None:
        self.calls.append("wake")

    def check(self) -> None:
        self.calls.append("check")
        if self.error:
            raise self.error

    def check_lane(self) -> None:
        self.calls.append("check the lane")
        if self.error:
            raise self.error

    def warmed_up(self) -> None:
        self.calls.append("warmed up")

    def close(self) -> None:
        self.calls.append("close")


class Later(AsyncModelRunnerOutput):
    """The GPU is done when it is waited for, and the lane has failed until then."""

    def __init__(self, runtime: Runtime, error: Exception | None) -> None:
        self.runtime, self.error = runtime, error

    def get_output(self) -> Any:
        self.runtime.calls.append("wait")
        self.runtime.error = self.error
        return "tokens"


class Worker:
    def __init__(self, calls: list[str], output: Any) -> None:
        self.calls, self.output = calls, output

    def execute_model(self, *_: Any) -> Any:
        self.calls.append("execute")
        return None

    def sample_tokens(self, grammar: Any) -> Any:
        self.calls.append("sample")
        return self.output

    def compile_or_warm_up_model(self) -> float:
        self.calls.append("warm up")
        return 1.5

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def calls() -> list[str]:
    register()
    return []


def wrapper(calls: list[str], output: Any, runtime: Runtime | None) -> WorkerWrapperBase:
    made = WorkerWrapperBase()
    made.mm_receiver_cache = None
    made.worker = Worker(calls, output)  # type: ignore[assignment]
    if runtime is not None:
        made._moe_offload_runtime = runtime  # type: ignore[attr-defined]
    return made


def test_the_lane_is_checked_after_the_wait_for_an_output_of_later(calls: list[str]) -> None:
    runtime = Runtime(calls)
    made = wrapper(calls, Later(runtime, None), runtime)
    assert made.execute_model(STEP) is None
    output = made.sample_tokens(None)
    assert isinstance(output, AsyncModelRunnerOutput)
    launched = ["expect 5 of old", "wake", "execute", "check", "wake", "sample", "check"]
    assert calls == launched
    assert output.get_output() == "tokens"
    # Not what another thread may be computing: the next step.
    assert calls == [*launched, "wait", "check the lane"]


def test_a_step_of_new_requests_alone_does_not_go_on_from_one_before(calls: list[str]) -> None:
    new = SimpleNamespace(
        total_num_scheduled_tokens=7, scheduled_cached_reqs=SimpleNamespace(req_ids=[])
    )
    wrapper(calls, None, Runtime(calls)).execute_model(new)
    assert calls[0] == "expect 7"


def test_a_failure_during_the_wait_is_raised_in_place_of_the_tokens(calls: list[str]) -> None:
    runtime = Runtime(calls)
    made = wrapper(calls, Later(runtime, CpuLaneError("layer 3: died")), runtime)
    output = made.sample_tokens(None)
    with pytest.raises(CpuLaneError, match="layer 3: died"):
        output.get_output()
    with pytest.raises(CpuLaneError, match="layer 3: died"):
        made.execute_model(STEP)


def test_an_output_that_is_there_is_checked_at_once(calls: list[str]) -> None:
    runtime = Runtime(calls)
    made = wrapper(calls, "tokens", runtime)
    assert made.sample_tokens(None) == "tokens"
    runtime.error = CpuLaneError("layer 3: died")
    with pytest.raises(CpuLaneError, match="layer 3: died"):
        made.sample_tokens(None)


def test_warm_up_is_not_counted_and_the_lane_ends_after_the_worker(calls: list[str]) -> None:
    made = wrapper(calls, None, Runtime(calls))
    assert made.compile_or_warm_up_model() == 1.5
    made.shutdown()
    assert calls == ["warm up", "warmed up", "shutdown", "close"]


def test_without_offload_nothing_is_in_the_way(calls: list[str]) -> None:
    output = object()
    made = wrapper(calls, output, None)
    assert made.execute_model(STEP) is None
    assert made.sample_tokens(None) is output
    assert made.compile_or_warm_up_model() == 1.5
    made.shutdown()
    assert calls == ["execute", "sample", "warm up", "shutdown"]


def test_registering_twice_wraps_once(calls: list[str]) -> None:
    before = WorkerWrapperBase.execute_model
    register()
    assert WorkerWrapperBase.execute_model is before
