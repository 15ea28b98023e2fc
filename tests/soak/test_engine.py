"""The soak program itself: a second of it is right, and it finds what is planted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.soak.engine import Case, make_case, soak
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Format


@pytest.fixture(scope="module")
def cases() -> Iterator[list[Case]]:
    with CpuExpertEngine() as engine:
        yield [make_case(format, [engine], seed=0) for format in Format]


def test_a_second_without_a_wrong_result(cases: list[Case]) -> None:
    counts, faults = soak(cases, seconds=1, threads=2, seed=0)
    assert faults == []
    assert sum(counts.values()) > 20


def test_a_planted_fault_is_found(cases: list[Case]) -> None:
    weight = cases[0].shard["w2_weight"]
    before = weight[3].clone()
    weight[3] = weight[2]
    try:
        _, faults = soak(cases[:1], seconds=10, threads=2, seed=0)
    finally:
        weight[3] = before
    assert faults and "is allowed" in faults[0]
