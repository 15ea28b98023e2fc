"""The split of the misses is the one that ends soonest, by trying them all."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_offload.planning import LaneRates, fetch_limits

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


def test_on_the_machine_of_the_design() -> None:
    assert fetch_limits(H100, 8).tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]


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
