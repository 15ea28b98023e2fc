"""What the machine's rates are counted from."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest
import torch

from bench import rates
from bench.rates import METRICS
from vllm_moe_offload.engine import ExpertPlan

GIB = 1 << 30


def test_what_is_done_beside_other_work_is_counted() -> None:
    reader = rates.Reader(gib=1)
    reads: list[int] = []

    def read() -> int:
        reads.append(reader.read())
        return reads[-1]

    def work() -> int:
        time.sleep(0.3)
        return 7

    began = time.perf_counter()
    worked, read_a_second = rates.beside(read, work)
    assert 7 / (time.perf_counter() - began) <= worked <= 7 / 0.3
    assert len(reads) >= 1
    assert sum(reads) / (time.perf_counter() - began) <= read_a_second


def test_each_of_two_works_is_timed_by_itself() -> None:
    """A step that goes on when the other work is done takes nothing from that one's rate."""

    def step() -> float:
        time.sleep(0.4)
        return 8.0

    def work() -> float:
        time.sleep(0.1)
        return 3.0

    worked, stepped = rates.beside(step, work)
    assert 3 / 0.2 <= worked <= 3 / 0.1
    assert 8 / 0.6 <= stepped <= 8 / 0.4


def test_a_step_that_fails_beside_other_work_is_no_rate() -> None:
    with pytest.raises(ZeroDivisionError):
        rates.beside(lambda: 1 / 0, lambda: 1.0)


def test_other_work_that_fails_ends_what_is_beside_it() -> None:
    steps: list[int] = []

    def step() -> int:
        steps.append(1)
        return 1

    def work() -> int:
        raise RuntimeError("no copies")

    with pytest.raises(RuntimeError, match="no copies"):
        rates.beside(step, work)
    done = len(steps)
    time.sleep(0.2)
    assert len(steps) == done


def test_the_parts_of_the_memory_are_read_in_turns() -> None:
    reader = rates.Reader(gib=1)
    seen: list[int] = []

    class Engine:
        def read_gb_per_s(self, part: torch.Tensor) -> None:
            seen.append(part.data_ptr() - reader._memory.data_ptr())

    reader._engine = Engine()
    read = [reader.read() for _ in range(2 * rates._PARTS)]
    assert sum(read) == 2 * GIB
    assert seen == 2 * [GIB // rates._PARTS * part for part in range(rates._PARTS)]


def test_steps_are_done_for_as_long_as_is_asked() -> None:
    steps: list[int] = []

    def step() -> int:
        steps.append(3)
        return 3

    began = time.perf_counter()
    assert rates.during(step, rates.within(0.01)) == sum(steps)
    assert time.perf_counter() - began >= 0.01
    assert rates.during(step, rates.within(0.0)) == 3, "one at least"


def test_the_measuring_process_has_the_cpus_that_it_is_given() -> None:
    (one, *_) = os.sched_getaffinity(0)
    for cpus, expected in ((None, os.sched_getaffinity(0)), ({one}, {one})):
        with closing(rates.Machine(cpus=cpus)) as machine:
            assert os.sched_getaffinity(machine._process.pid) == expected


def test_windows_of_several_samples_are_pooled() -> None:
    no_gpu = dict.fromkeys(METRICS, "no CUDA device")
    samples = [no_gpu | {"read_gb_per_s": [float(i), float(i)]} for i in range(3)]
    pooled = rates.pooled(samples)
    assert pooled.pop("read_gb_per_s") == [0, 0, 1, 1, 2, 2]
    assert set(pooled.values()) == {"no CUDA device"}
    assert set(rates.pooled([]).values()) == {"not measured"}


def test_the_engine_computes_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert has as many rows, and what is counted is all their products."""
    monkeypatch.setattr(rates, "_EXPERTS", 3)
    monkeypatch.setattr(rates, "_ROWS", 2)
    monkeypatch.setattr(rates, "_SETS", 2)
    calls = []
    run = ExpertPlan.run

    def noted(plan: ExpertPlan, x: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor) -> None:
        calls.append((x, ids))
        run(plan, x, ids, *rest)
        assert rest[1].abs().max() > 0

    monkeypatch.setattr(ExpertPlan, "run", noted)
    step = rates.Reader(gib=1).compute()
    assert not calls
    for _ in range(3):
        assert step() == pytest.approx(6 * 2 * 3 * 2048 * 768 * 1e-12)  # 3 matrices, 2 a number
    assert {x.shape for x, _ in calls} == {(6, 2048)}
    counts = [ids.flatten().bincount(minlength=6).tolist() for _, ids in calls]
    assert counts == [[2, 2, 2, 0, 0, 0], [0, 0, 0, 2, 2, 2], [2, 2, 2, 0, 0, 0]], "other experts"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_machine_without_a_gpu_has_the_rates_of_its_cpu_alone() -> None:
    with closing(rates.Machine()) as machine:
        both = [machine.sample(seconds=0.01, repeats=n) for n in (1, 3)]
    for found, repeats in zip(both, (1, 3), strict=True):
        for name in ("read_gb_per_s", "cpu_tflop_per_s"):
            assert len(found[name]) == repeats
            assert min(found[name]) > 0
        rest = set(METRICS) - {"read_gb_per_s", "cpu_tflop_per_s"}
        assert {found[name] for name in rest} == {"no CUDA device"}


def test_a_machine_that_cannot_be_measured_says_why() -> None:
    with closing(rates.Machine(piece=-1)) as machine:
        assert "--serve: '-1': give numbers from 1 up" in machine.sample()["read_gb_per_s"]
