"""Rates that are wrong become those of the machine, and rates that are right stay.

The machine is simulated step by step from its true rates, exactly; what it does is the oracle of
what a split by other rates costs.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_offload.planning import (
    LaneRates,
    LaneTrials,
    LaneUse,
    correct_rates,
    fetch_limits,
)

EXPERTS = 32
H200 = LaneRates(fetch=51.0, cpu=90.0, fetch_beside_cpu=46.0, cpu_beside_fetch=84.0)


def serve(true: LaneRates, limits: np.ndarray, misses: np.ndarray) -> tuple[float, LaneUse]:
    """Seconds that steps of so many misses take, and what their lanes have done."""
    fetched = limits[misses].astype(float)
    left = misses - fetched
    beside = np.minimum(fetched / true.fetch_beside_cpu, left / true.cpu_beside_fetch)
    bus = beside + (fetched - beside * true.fetch_beside_cpu) / true.fetch
    cpu = beside + (left - beside * true.cpu_beside_fetch) / true.cpu
    use = LaneUse(fetched.sum(), bus.sum(), left.sum(), cpu.sum())
    return float(np.maximum(bus, cpu).sum()), use


def drawn(rng: np.random.Generator, mean: float) -> np.ndarray:
    """How many misses each of many steps has."""
    return np.minimum(rng.poisson(mean, 400), EXPERTS)


@settings(max_examples=150, deadline=None)
@given(
    bus=st.floats(0.3, 3.0),
    cpu=st.floats(0.1, 10.0),
    mean=st.sampled_from([2.0, 6.0, 20.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_split_by_wrong_rates_becomes_the_machines(
    bus: float, cpu: float, mean: float, seed: int
) -> None:
    rng, true, rates = np.random.default_rng(seed), H200.scaled(bus, cpu), H200
    for _ in range(12):
        _, use = serve(true, fetch_limits(rates, EXPERTS), drawn(rng, mean))
        rates = correct_rates(rates, H200, use)
    misses = drawn(rng, mean)
    best, _ = serve(true, fetch_limits(true, EXPERTS), misses)
    wrong, _ = serve(true, fetch_limits(H200, EXPERTS), misses)
    got, _ = serve(true, fetch_limits(rates, EXPERTS), misses)
    # Each lane may be believed to be 1.15 times as fast, or as slow, as it is: of 50,000 draws none
    # cost more than 1.17 of the best, nor more than 1.02 of what wrong rates do.
    assert got <= max(1.2 * best, best + 0.25 * (wrong - best))
    assert got <= 1.04 * wrong


@given(mean=st.floats(1.0, 25.0), seed=st.integers(0, 2**32 - 1))
def test_right_rates_stay_whatever_the_steps(mean: float, seed: int) -> None:
    """Though of the sums it is not known how long the lanes ran beside each other."""
    rng = np.random.default_rng(seed)
    _, use = serve(H200, fetch_limits(H200, EXPERTS), drawn(rng, mean))
    assert correct_rates(H200, H200, use) == H200


@settings(max_examples=60, deadline=None)
@given(mean=st.sampled_from([2.0, 6.0, 20.0]), seed=st.integers(0, 2**32 - 1))
def test_noise_costs_next_to_nothing(mean: float, seed: int) -> None:
    """Each window's lanes a fifth faster or slower than they are on average."""
    rng, rates, taken, best = np.random.default_rng(seed), H200, 0.0, 0.0
    for _ in range(40):
        true = H200.scaled(*np.exp(rng.uniform(-0.2, 0.2, 2)))
        misses = drawn(rng, mean)
        seconds, use = serve(true, fetch_limits(rates, EXPERTS), misses)
        taken += seconds
        best += serve(true, fetch_limits(H200, EXPERTS), misses)[0]
        rates = correct_rates(rates, H200, use)
    assert taken <= 1.03 * best


@pytest.mark.parametrize("fetched", [1, 12, 23])
def test_right_rates_stay_under_other_splits_too(fetched: int) -> None:
    """Where one lane has more to do it runs by itself behind the other."""
    _, use = serve(H200, np.minimum(np.arange(EXPERTS + 1), fetched), np.full(400, 24))
    assert correct_rates(H200, H200, use) == H200


def test_a_lane_that_was_hardly_used_keeps_its_rates() -> None:
    use = LaneUse(fetched=1e-3, fetch_seconds=0.019, computed=90.0, cpu_seconds=2.0)
    rates = correct_rates(H200, H200, use)
    assert (rates.fetch, rates.fetch_beside_cpu) == (H200.fetch, H200.fetch_beside_cpu)
    assert rates.cpu == pytest.approx(H200.cpu / 2**0.5, rel=0.01)
    assert rates.cpu_beside_fetch / rates.cpu == pytest.approx(84 / 90)
    assert correct_rates(H200, H200, LaneUse()) == H200


def test_what_is_far_off_is_corrected_in_few_readings() -> None:
    """As FP8 on an H200 host, which was measured while four other engines started."""
    measured = LaneRates(fetch=51.1, cpu=20.1, fetch_beside_cpu=50.9, cpu_beside_fetch=10.7)
    true = LaneRates(fetch=52.0, cpu=90.0, fetch_beside_cpu=50.0, cpu_beside_fetch=75.0)
    rng, rates = np.random.default_rng(0), measured
    for _ in range(5):
        _, use = serve(true, fetch_limits(rates, EXPERTS), drawn(rng, 6.0))
        rates = correct_rates(rates, measured, use)
    misses = drawn(rng, 6.0)
    best, _ = serve(true, fetch_limits(true, EXPERTS), misses)
    got, _ = serve(true, fetch_limits(rates, EXPERTS), misses)
    wrong, _ = serve(true, fetch_limits(measured, EXPERTS), misses)
    assert got <= 1.05 * best
    assert wrong >= 1.5 * best
    assert rates.cpu > 4 * measured.cpu


@pytest.mark.parametrize("lane", ["cpu_seconds", "fetch_seconds"])
@pytest.mark.parametrize("mean", [1.0, 2.0, 6.0, 20.0])
def test_one_reading_that_is_far_off_is_forgotten(lane: str, mean: float) -> None:
    """As of a moment in which the process was stopped."""
    rng, rates, taken, best = np.random.default_rng(1), H200, 0.0, 0.0
    for reading in range(60):
        misses = drawn(rng, mean)
        seconds, use = serve(H200, fetch_limits(rates, EXPERTS), misses)
        if reading == 5:
            use = replace(use, **{lane: 100 * getattr(use, lane)})
        before, rates = rates, correct_rates(rates, H200, use)
        assert before.cpu / 2.01 <= rates.cpu <= before.cpu * 2.01
        assert before.fetch / 2.01 <= rates.fetch <= before.fetch * 2.01
        if reading > 20:
            taken += seconds
            best += serve(H200, fetch_limits(H200, EXPERTS), misses)[0]
    assert taken <= 1.05 * best


@pytest.mark.parametrize("mean", [1.0, 2.0])
def test_a_lane_that_got_nothing_is_tried_again(mean: float) -> None:
    """What it was slow for is over, and by its rates nothing would ever be left to it."""
    rng, rates, trials = np.random.default_rng(1), H200.scaled(1.0, 1 / 16), LaneTrials()
    assert fetch_limits(rates, 6).tolist() == list(range(7))
    for _ in range(40):
        _, use = serve(H200, fetch_limits(rates, EXPERTS), drawn(rng, mean))
        rates = trials.correct(rates, H200, use)
    assert rates.cpu >= H200.cpu / 1.2
    # Where neither did anything nothing is known.
    idle = H200.scaled(1.0, 1 / 16)
    assert astuple(LaneTrials().correct(idle, H200, LaneUse())) == pytest.approx(astuple(idle))


@pytest.mark.parametrize("slower", [5, 10, 20, 50])
@pytest.mark.parametrize("mean", [1.0, 2.0, 6.0])
def test_trying_a_lane_that_has_become_slow_costs_next_to_nothing(
    slower: float, mean: float
) -> None:
    """Once its trials have shown that it stays so."""
    times = served(H200.scaled(1.0, 1 / slower), H200, mean, 2000)
    assert np.mean(times[200:]) < 1.03


def test_no_lane_leaves_what_was_measured_by_more_than_16() -> None:
    rates = H200
    for _ in range(20):
        rates = correct_rates(rates, H200, LaneUse(1.0, 5.0, 5000.0, 0.1))
    assert (rates.fetch, rates.cpu) == (H200.fetch / 16, H200.cpu * 16)


def served(true: LaneRates, measured: LaneRates, mean: float, readings: int) -> list[float]:
    """How many times as long as at best the steps of each reading take, of up to 8 misses."""
    rng, rates, trials, times = np.random.default_rng(0), measured, LaneTrials(), []
    for _ in range(readings):
        misses = np.minimum(drawn(rng, mean), 8)
        took, use = serve(true, fetch_limits(rates, 8), misses)
        times.append(took / serve(true, fetch_limits(true, 8), misses)[0])
        rates = trials.correct(rates, measured, use)
    return times


@pytest.mark.parametrize("lane", ["bus", "cpu"])
@pytest.mark.parametrize("slower", [4, 8, 10, 16])
@pytest.mark.parametrize("mean", [1.0, 2.0, 6.0])
def test_a_lane_that_was_measured_too_slow_to_get_anything_shows_what_it_does(
    lane: str, slower: float, mean: float
) -> None:
    measured = H200.scaled(**{"bus": 1.0, "cpu": 1.0} | {lane: 1 / slower})
    times = served(H200, measured, mean, 100)
    assert max(times[60:]) < 1.1
    assert slower < 10 or fetch_limits(measured, 2)[1:].tolist() in ([1, 2], [0, 0])


@pytest.mark.parametrize("slower", [4, 16, 40])
@pytest.mark.parametrize("mean", [1.0, 2.0, 6.0])
def test_trying_a_lane_that_is_slow_costs_next_to_nothing(slower: float, mean: float) -> None:
    slow = H200.scaled(1.0, 1 / slower)
    times = served(slow, slow, mean, 2000)
    assert np.mean(times[:60]) < 1.02
    assert np.mean(times) < 1.005


def test_a_lane_is_tried_less_often_the_more_often_it_did_not_pay() -> None:
    """It has something to do from twice its rate on, and shows then that it is as measured."""
    measured, trials = H200.scaled(1.0, 1 / 40), LaneTrials()
    rates, tried = measured, []
    for reading in range(3000):
        is_used = rates.cpu >= 2 * measured.cpu
        if is_used:
            tried.append(reading)
        computed = rates.cpu * 0.5 if is_used else 0.0
        use = LaneUse(50.0, 1.0, computed, computed / measured.cpu)
        before, rates = rates, trials.correct(rates, measured, use)
        assert is_used or rates.cpu <= before.cpu * 1.11
    waits = np.diff([at for at in tried if at - 1 not in tried])
    assert tried[0] < 30
    assert len(waits) >= 6
    assert all(later >= 1.4 * sooner or later > 500 for sooner, later in pairwise(waits))
    assert max(waits) < 540
    assert not any(trials.correct(measured, measured, LaneUse()) != measured for _ in range(99))


def test_no_trial_believes_more_than_16_times_what_was_measured() -> None:
    trials, rates, levels = LaneTrials(), H200, []
    for _ in range(100):
        rates = trials.correct(rates, H200, LaneUse(fetched=51.0, fetch_seconds=1.0))
        levels.append(rates.cpu / H200.cpu)
    highest = levels.index(max(levels))
    assert levels[highest] == pytest.approx(16.0)
    assert levels[highest + 1] == levels[0] == 1.0, "it got nothing by that either"


def test_what_a_trial_has_shown_is_kept() -> None:
    """Also while there is nothing to do for the lane again, as by steps of a single miss."""
    trials, rates, measured = LaneTrials(), H200.scaled(1.0, 1 / 4), H200.scaled(1.0, 1 / 4)
    alone = LaneUse(fetched=51.0, fetch_seconds=1.0)
    shown = replace(alone, computed=H200.cpu_beside_fetch, cpu_seconds=1.0)
    for _ in range(20):
        rates = trials.correct(rates, measured, alone)
    for _ in range(10):
        rates = trials.correct(rates, measured, shown)
    learned = rates.cpu / measured.cpu
    assert learned == pytest.approx(4.0, rel=0.2)
    for _ in range(400):
        rates = trials.correct(rates, measured, alone)
        assert rates.cpu >= learned * measured.cpu * (1 - 1e-9)


ALONE = LaneUse(fetched=51.0, fetch_seconds=1.0)
SHOWN = replace(ALONE, computed=H200.cpu_beside_fetch, cpu_seconds=1.0)


class Lane:
    """The CPU, whose level follows from what it and the bus do; one reading a call."""

    def __init__(self, level: float) -> None:
        self.rates, self.trials = H200.scaled(1.0, level), LaneTrials()

    def after(self, use: LaneUse, readings: int = 1) -> float:
        for _ in range(readings):
            self.rates = self.trials.correct(self.rates, H200, use)
        return self.rates.cpu / H200.cpu

    def untried(self, use: LaneUse = ALONE) -> int:
        """For how many such readings the level stays, until it is raised."""
        for reading in range(2000):
            before = self.after(LaneUse())
            if self.after(use) > before:
                return reading
        raise AssertionError("never tried")


def test_a_lane_believed_slower_than_measured_is_tried_at_once_others_later() -> None:
    assert Lane(0.5).untried() == 0
    assert Lane(1.0).untried() == Lane(3.0).untried() == 15


def test_readings_in_which_nothing_is_served_or_the_lane_is_used_begin_no_trial() -> None:
    idle = Lane(1.0)
    idle.after(LaneUse(), 100)
    assert idle.untried() == 15
    used = Lane(1.0)
    for _ in range(9):
        assert used.after(ALONE, 15) == 1.0
        assert used.after(SHOWN) == 1.0
    assert Lane(1.0).after(replace(SHOWN, fetched=0.0, fetch_seconds=0.0), 100) == 1.0


@pytest.mark.parametrize(("used", "is_kept"), [(1, False), (3, False), (4, True), (9, True)])
def test_a_trial_pays_from_four_readings_with_something_to_do_on(used: int, is_kept: bool) -> None:
    """As slow as it was believed when it began, it is that again; what has paid is kept."""
    lane = Lane(0.25)
    lane.after(ALONE, 8)
    shown = lane.after(SHOWN, used)
    assert 0.5 < shown <= 1.2
    assert lane.after(LaneUse()) == pytest.approx(shown)
    after = lane.after(ALONE)
    if is_kept:
        assert after >= shown
    else:
        assert after == pytest.approx(0.25)
        assert lane.untried() == 31


def test_what_a_lane_does_by_itself_is_something_to_do_too() -> None:
    lane = Lane(0.25)
    lane.after(ALONE, 8)
    assert lane.after(replace(SHOWN, fetched=0.0, fetch_seconds=0.0, cpu_seconds=0.2), 4) > 1.0
    assert lane.untried() == 15, "the trial is over"


def test_a_trial_that_pays_lets_the_next_one_come_soon() -> None:
    lane = Lane(0.25)
    for _ in range(4):
        lane.after(ALONE, lane.untried() + 8)
        lane.after(replace(SHOWN, cpu_seconds=4.0))
    assert lane.untried() > 200, "four have failed"
    lane.after(ALONE, 9)
    level = lane.after(SHOWN, 9)
    assert level == pytest.approx(1.0, rel=0.2)
    assert lane.untried() == (0 if level < 1.0 else 15)
