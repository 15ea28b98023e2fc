"""How experts pass through buffers, against a plain rule; and copies of neighbours together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_offload.stream.waves import Wave, plan_waves


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """E, B and the experts that pass."""
    num_experts = draw(st.integers(1, 20))
    passing = draw(st.sets(st.integers(0, num_experts - 1)))
    return num_experts, draw(st.integers(1, num_experts)), sorted(passing)


@given(layers())
def test_waves_are_the_oracles(layer: tuple[int, int, list[int]]) -> None:
    num_experts, size, passing = layer
    if size == num_experts:
        expected = [{e: e for e in passing}]
    else:
        expected = []
        for number, expert in enumerate(passing):
            if number % size == 0:
                expected.append({})
            expected[-1][expert] = number % size
    waves = plan_waves(np.array(passing, np.int64), size, num_experts)
    assert [dict(zip(w.experts.tolist(), w.rows.tolist(), strict=True)) for w in waves] == expected
    for wave, rows in zip(waves, expected, strict=True):
        entries = wave.expert_map(num_experts)
        assert entries.dtype == np.int32
        assert entries.tolist() == [rows.get(e, -1) for e in range(num_experts + 1)]


@given(layers(), st.integers(0, 20))
def test_runs_are_the_same_experts_in_the_same_rows(
    layer: tuple[int, int, list[int]], done: int
) -> None:
    num_experts, size, passing = layer
    for wave in plan_waves(np.array(passing, np.int64), size, num_experts):
        rest = wave.behind(done)
        every = list(zip(wave.experts.tolist(), wave.rows.tolist(), strict=True))
        assert list(zip(rest.experts.tolist(), rest.rows.tolist(), strict=True)) == every[done:]
        moved = []
        for experts, rows in rest.runs():
            moved += zip(
                range(experts.start, experts.stop), range(rows.start, rows.stop), strict=True
            )
        assert moved == every[done:]
        starts = [experts.start for experts, _ in rest.runs()]
        assert not any(start - 1 in rest.experts for start in starts), "neighbours together"


def test_neighbours_whose_rows_are_apart_are_apart() -> None:
    runs = Wave(np.array([2, 3, 4]), np.array([0, 1, 5])).runs()
    assert runs == [(slice(2, 4), slice(0, 2)), (slice(4, 5), slice(5, 6))]
