"""What the machine's rates are counted from."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import rates
from vllm_moe_offload.engine import ExpertPlan

GIB = 1 << 30


def test_what_is_read_beside_other_work_is_counted_with_it() -> None:
    reader = rates.Reader(gib=1)

    def work() -> int:
        time.sleep(0.3)
        return 7

    moved = reader.beside(work)
    read, passes = moved - 7, (moved - 7) // GIB
    assert passes >= 1
    assert read == passes * GIB == reader.read


def test_other_work_that_fails_ends_the_reading() -> None:
    reader = rates.Reader(gib=1)

    def work() -> int:
        raise RuntimeError("no copies")

    with pytest.raises(RuntimeError, match="no copies"):
        reader.beside(work)
    read = reader.read
    time.sleep(0.2)
    assert reader.read == read


def test_a_window_counts_its_own_reading() -> None:
    reader = rates.Reader(gib=1)
    reader.window(0.01)
    assert reader.window(0.01) == reader.read - GIB


def test_the_measuring_process_has_the_cpus_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[tuple[int, set[int]]] = []

    def run(*command: object, preexec_fn: Callable[[], None] | None, **rest: object) -> Any:
        if preexec_fn is not None:
            preexec_fn()
        return SimpleNamespace(returncode=0, stdout="{}", stderr="")

    monkeypatch.setattr(rates.subprocess, "run", run)
    monkeypatch.setattr(rates.os, "sched_setaffinity", lambda *given: moved.append(given))
    rates.measure()
    rates.measure(cpus={1, 3})
    assert moved == [(0, {1, 3})]


def test_the_engine_computes_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert has as many rows, and what is counted is all their products."""
    monkeypatch.setattr(rates, "_EXPERTS", 3)
    monkeypatch.setattr(rates, "_ROWS", 2)
    calls = []
    run = ExpertPlan.run

    def noted(plan: ExpertPlan, x: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor) -> None:
        calls.append((x, ids))
        run(plan, x, ids, *rest)
        assert rest[1].abs().max() > 0

    monkeypatch.setattr(ExpertPlan, "run", noted)
    step = rates.Reader(gib=1).compute()
    assert not calls
    assert step() == pytest.approx(6 * 2 * 3 * 2048 * 768 * 1e-12)  # 3 matrices, 2 for each number
    ((x, ids),) = calls
    assert x.shape == (6, 2048)
    assert ids.flatten().bincount().tolist() == [2, 2, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_machine_without_a_gpu_has_the_rates_of_its_cpu_alone() -> None:
    found = rates.measure(seconds=0.01, repeats=5)
    assert len(found["read_gb_per_s"]) == 5
    assert min(found["read_gb_per_s"]) > 0
    assert len(found["cpu_tflop_per_s"]) == 5
    assert min(found["cpu_tflop_per_s"]) > 0
    rest = set(rates.METRICS) - {"read_gb_per_s", "cpu_tflop_per_s"}
    assert {found[name] for name in rest} == {"no CUDA device"}
