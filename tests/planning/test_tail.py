"""The CPU's experts are those with which both lanes are done soonest, by trying every choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_offload.planning import CopiesAhead, TailRates, TailWorth, experts_for_cpu

SECONDS = st.integers(0, 50)
H100 = TailRates(copy=175e-6, cpu=112e-6, cpu_row=1.85e-6)


@given(
    rows=st.lists(st.integers(1, 40), max_size=8),
    ahead=st.integers(0, 5),
    copy=SECONDS,
    cpu=SECONDS,
    cpu_row=st.integers(0, 9),
)
def test_no_other_choice_ends_sooner(
    rows: list[int], ahead: int, copy: int, cpu: int, cpu_row: int
) -> None:
    def seconds(on_cpu: tuple[int, ...]) -> int:
        copies = (ahead + len(rows) - len(on_cpu)) * copy
        return max(copies, sum(cpu + cpu_row * rows[expert] for expert in on_cpu))

    chosen = experts_for_cpu(TailRates(copy, cpu, cpu_row), np.array(rows, np.int64), ahead)
    assert len(set(chosen.tolist())) == len(chosen)
    every = chain.from_iterable(combinations(range(len(rows)), n) for n in range(len(rows) + 1))
    best = min((seconds(choice), len(choice)) for choice in every)
    assert (seconds(tuple(chosen.tolist())), len(chosen)) == best


def test_the_cpus_part_is_left_out_where_it_does_not_pay_and_tried_again() -> None:
    worth = TailWorth()
    assert all(worth.has_part(rows) for rows in (1, 512, 8192))
    for rows, share in ((512, 0.6), (8192, 1.4), (8192, 1.2)):
        worth.took(rows, share)
    assert worth.has_part(512) and worth.has_part(4096), "nothing is known of its size"
    tries = [at for at in range(1, 127) if worth.has_part(8000)]
    assert tries == [2, 6, 14, 30, 62, 94, 126], "after twice as many each time, 32 at most"
    worth.took(8192, 0.6)
    assert worth.has_part(8192)
    worth.took(512, 100.0)
    assert worth.has_part(512), "once may be chance"
    worth.took(512, 100.0)
    assert not worth.has_part(512)
    for rows in (8192, 512):
        for _ in range(9):
            worth.took(rows, 1.05)
    tried = [[worth.has_part(rows) for rows in (512, 8192)] for _ in range(4)]
    assert np.sum(tried, 0).tolist() == [1, 1], "each size by itself, and anew"
    assert worth.has_part(0)


def test_one_disturbed_step_changes_nothing_where_the_part_saves_little() -> None:
    worth = TailWorth()
    for share in 6 * [0.95, 0.95, 0.95, 50.0]:
        worth.took(512, share)
        assert worth.has_part(512)
    worth.took(512, 50.0)
    assert not worth.has_part(512)


@given(
    took=st.lists(st.floats(0, 20), max_size=9),
    missing=st.integers(0, 40),
    copy=st.floats(0.25, 4),
)
def test_as_many_are_copied_ahead_as_keep_the_bus_busy(
    took: list[float], missing: int, copy: float
) -> None:
    """Through the longest time until the rest came, of which each layer since leaves 9 tenths."""
    ahead, longest = CopiesAhead(), None
    for seconds in took:
        ahead.took(512, seconds)
        longest = seconds if longest is None else max(seconds, 0.9 * longest + 0.1 * seconds)
    count = ahead.count(500, missing, copy)
    if longest is None:
        assert count == -(-missing // 3)
    else:
        assert count <= missing
        assert count == missing or count * copy >= longest * (1 - 1e-9)
        assert count >= min(missing, 1)
        assert count <= 1 or (count - 1) * copy <= longest * (1 + 1e-9)
    assert ahead.count(8192, missing, copy) == -(-missing // 3), "nothing is known of its size"


def test_other_sizes_and_another_cpu_scale_what_an_expert_takes() -> None:
    rates = TailRates(copy=4.0, cpu=2.0, cpu_row=0.5)
    assert rates.of(2.0) == TailRates(8.0, 4.0, 1.0)
    assert rates.with_cpu(0.5) == TailRates(4.0, 4.0, 1.0)
    assert TailRates(4.0, 2.0, 0.5, 1.3).of(2.0).with_cpu(0.5).slowed == 1.3
    assert rates.on_cpu(np.array([1, 4])).tolist() == [2.5, 4.0]


def test_fewer_experts_are_left_to_the_cpu_the_more_rows_there_are() -> None:
    """Of 103 missing experts with as many rows each, 35 of them copied ahead."""
    taken = [len(experts_for_cpu(H100, np.full(68, rows), 35)) for rows in (8, 32, 256, 2048)]
    assert taken == [60, 52, 23, 4]


@given(
    rows=st.lists(st.integers(1, 40), max_size=8),
    ahead=st.integers(0, 5),
    cpu_row=st.integers(0, 9),
    slowed=st.integers(10, 20),
)
def test_copies_are_slowed_while_the_cpu_reads(
    rows: list[int], ahead: int, cpu_row: int, slowed: int
) -> None:
    """By the share of its time in which it does; whoever has fewest rows is the CPU's first."""
    rates = TailRates(copy=10.0, cpu=7.0, cpu_row=float(cpu_row), slowed=slowed / 10)

    def seconds(count: int) -> float:
        computing = sum(7 + cpu_row * n for n in sorted(rows)[:count])
        share = 7 * count / computing if count else 0
        copying = (ahead + len(rows) - count) * 10 * (1 + (slowed / 10 - 1) * share)
        return max(computing, copying)

    chosen = experts_for_cpu(rates, np.array(rows, np.int64), ahead)
    assert sorted(rows[expert] for expert in chosen) == sorted(rows)[: len(chosen)]
    assert seconds(len(chosen)) == pytest.approx(min(map(seconds, range(len(rows) + 1))))


def test_copies_are_slowed_by_a_cpu_that_takes_microseconds_too() -> None:
    """Of 20 experts the CPU takes 12 if copies go on as before, and 14 if they take half longer."""
    rates = TailRates(copy=150e-6, cpu=100e-6, cpu_row=0.0)
    rows = np.ones(20, np.int64)
    assert len(experts_for_cpu(rates, rows, 0)) == 12
    assert len(experts_for_cpu(replace(rates, slowed=1.5), rows, 0)) == 14


def test_the_cpu_takes_those_with_the_fewest_rows() -> None:
    rows = np.array([500, 1, 400, 2, 300, 3])
    assert sorted(rows[experts_for_cpu(H100, rows, 3)]) == [1, 2, 3, 300]
    assert len(experts_for_cpu(TailRates(1.0, 9.0, 0.0), rows, 3)) == 0
