"""The split of the misses is the one that ends soonest, by trying them all.

And what is promoted beside it is as much as the bus has time for.
"""

from __future__ import annotations

import timeit
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_offload.planning import LaneRates, fetch_limits, promotion_limits

RATE = st.integers(1, 200)
H100 = LaneRates(fetch=50e9, cpu=95e9, fetch_beside_cpu=46e9, cpu_beside_fetch=88e9)


def seconds(rates: LaneRates, misses: int, fetched: int) -> Fraction:
    """When both lanes are done, in experts' time: who is done first leaves the other alone."""
    left = misses - fetched
    bus, cpu = Fraction(rates.fetch_beside_cpu), Fraction(rates.cpu_beside_fetch)
    if fetched / bus < left / cpu:
        return fetched / bus + (left - cpu * fetched / bus) / Fraction(rates.cpu)
    return left / cpu + (fetched - bus * left / cpu) / Fraction(rates.fetch)


@given(
    fetch=RATE, cpu=RATE, beside=RATE, under=RATE, num_experts=st.integers(1, 24),
    most=st.none() | st.integers(0, 24),
)  # fmt: skip
def test_no_other_number_ends_sooner(
    fetch: int, cpu: int, beside: int, under: int, num_experts: int, most: int | None
) -> None:
    rates = LaneRates(fetch, cpu, beside, under)
    limits = fetch_limits(rates, num_experts, most)
    assert limits.shape == (num_experts + 1,)
    for misses, chosen in enumerate(limits.tolist()):
        allowed = range(min(misses, num_experts if most is None else most) + 1)
        assert chosen in allowed
        taken = [seconds(rates, misses, fetched) for fetched in allowed]
        soonest = min(taken)
        assert chosen == max(f for f in allowed if taken[f] == soonest)


def by_trying_all(rates: LaneRates, num_experts: int, most: int | None) -> np.ndarray:
    """`fetch_limits`, of a table of every number of misses by every number fetched."""
    misses = np.arange(num_experts + 1)[:, None]
    fetched = np.arange(num_experts + 1)[None, :]
    left = misses - fetched
    beside = np.minimum(fetched / rates.fetch_beside_cpu, left / rates.cpu_beside_fetch)
    alone = (fetched - beside * rates.fetch_beside_cpu) / rates.fetch
    alone += (left - beside * rates.cpu_beside_fetch) / rates.cpu
    seconds = beside + alone
    seconds[left < 0] = np.inf
    if most is not None:
        seconds[:, most + 1 :] = np.inf
    is_soonest = seconds <= seconds.min(axis=1, keepdims=True) * (1 + 1e-9)
    return num_experts - np.argmax(is_soonest[:, ::-1], axis=1)


BYTES = st.floats(1e8, 1e12) | st.sampled_from([1e9, 2e9, 3e9, 5e10, 1e11])


@given(
    fetch=BYTES, cpu=BYTES, beside=BYTES, under=BYTES, num_experts=st.integers(1, 520),
    most=st.none() | st.integers(0, 520),
)  # fmt: skip
def test_as_many_as_by_trying_all(
    fetch: float, cpu: float, beside: float, under: float, num_experts: int, most: int | None
) -> None:
    rates = LaneRates(fetch, cpu, beside, under)
    chosen = fetch_limits(rates, num_experts, most)
    np.testing.assert_array_equal(chosen, by_trying_all(rates, num_experts, most))


def test_another_split_takes_little_of_a_step() -> None:
    times = timeit.repeat(lambda: promotion_limits(H100, fetch_limits(H100, 512)), number=1)
    assert min(times) < 1e-3


@given(
    fetch=RATE, cpu=RATE, beside=RATE, under=RATE, num_experts=st.integers(1, 24),
    most=st.none() | st.integers(0, 24),
)  # fmt: skip
def test_as_many_are_promoted_as_come_before_the_cpu_is_done(
    fetch: int, cpu: int, beside: int, under: int, num_experts: int, most: int | None
) -> None:
    rates = LaneRates(fetch, cpu, beside, under)
    limits = fetch_limits(rates, num_experts, most)
    promoted = promotion_limits(rates, limits, most)
    assert promoted.shape == (num_experts + 1,)
    for misses, (fetched, chosen) in enumerate(
        zip(limits.tolist(), promoted.tolist(), strict=True)
    ):
        left = misses - fetched
        cpu_done = Fraction(left, under)
        may = [p for p in range(left + 1) if most is None or fetched + p <= most]
        most_in_time = max(p for p in may if not p or Fraction(fetched + p, beside) <= cpu_done)
        if fetched == 0 and max(may) and Fraction(1, beside) <= 3 * cpu_done:
            most_in_time = max(most_in_time, 1)
        assert chosen == most_in_time


def test_on_the_machine_of_the_design() -> None:
    limits = fetch_limits(H100, 8)
    assert limits.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert promotion_limits(H100, limits).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_a_slow_bus_promotes_once_the_cpu_has_much_to_do() -> None:
    slow = LaneRates(10, 90, 10, 40)
    none = np.zeros(13, np.int64)
    assert promotion_limits(slow, none).tolist() == [0, 0, *[1] * 6, *[2] * 4, 3]
    assert promotion_limits(slow, none, most=0).tolist() == [0] * 13


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (LaneRates(50, 10, 30, 10), [0, 1, 2, 3, 4]),  # the CPU only slows the bus down
        (LaneRates(10, 90, 10, 40), [0, 0, 0, 0, 0]),  # the bus only slows the CPU down
        (LaneRates(10, 10, 10, 10), [0, 1, 1, 2, 2]),
    ],
)
def test_one_lane_alone_where_that_is_faster(rates: LaneRates, expected: list[int]) -> None:
    assert fetch_limits(rates, 4).tolist() == expected


def test_a_limit_on_the_experts_fetched_a_step() -> None:
    unlimited = fetch_limits(H100, 128)
    assert unlimited.max() > 40
    np.testing.assert_array_equal(fetch_limits(H100, 128, most=2), np.minimum(unlimited, 2))
    assert not fetch_limits(H100, 128, most=0).any()
