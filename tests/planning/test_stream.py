"""From how many rows on streaming pays, by trying them all; and what buffers leave to the slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_offload.amounts import gib_for
from vllm_moe_offload.errors import MemoryShortError
from vllm_moe_offload.planning import (
    LayerShape,
    larger_stream_experts,
    plan_slots,
    plan_with_buffers,
    stream_experts,
    stream_threshold,
)

LAYERS = [LayerShape("a", 8, 100), LayerShape("b", 8, 50)]
MS = st.floats(0.1, 100)


@given(num_experts=st.integers(1, 300), share=st.floats(0.01, 1), waves=MS, stream=MS)
def test_no_more_rows_are_left_to_waves_and_no_fewer(
    num_experts: int, share: float, waves: float, stream: float
) -> None:
    top_k = max(1, int(share * num_experts))
    threshold = stream_threshold(num_experts, top_k, waves_seconds=waves, stream_seconds=stream)

    def by_waves(rows: int) -> float:
        return (1 - (1 - top_k / num_experts) ** rows) * waves

    if threshold is None:
        assert stream >= waves
    else:
        assert by_waves(threshold) <= stream * (1 + 1e-9)
        assert by_waves(threshold + 1) > stream * (1 - 1e-9)


def test_thresholds_of_known_models() -> None:
    """27.4 ms by waves and 18.3 streamed: Qwen3-30B-A3B on an H100; 512 experts, 10 a token."""
    measured = {"waves_seconds": 27.4e-3, "stream_seconds": 18.3e-3}
    assert stream_threshold(128, 8, **measured) == 17
    assert stream_threshold(512, 10, **measured) == 55
    assert stream_threshold(4, 4, **measured) == 0
    assert stream_threshold(128, 8, waves_seconds=1.0, stream_seconds=1.0) is None


def test_buffers_of_known_models() -> None:
    """Qwen3-30B-A3B in bf16, FP8 and INT4, a model of few experts, DeepSeek-V3 in FP8."""
    small = 9437184
    assert stream_experts(128) == 16 and stream_experts(5) == 1
    assert larger_stream_experts(128, small) == 28
    assert larger_stream_experts(128, small // 2) == 56
    assert larger_stream_experts(128, small // 4) == 113
    assert larger_stream_experts(32, small // 4) == 32
    assert larger_stream_experts(256, 44040192) == stream_experts(256) == 32


@pytest.mark.parametrize(
    ("slots", "budget", "buffers"),
    [
        (5, 1100, 75),  # 750 in slots: a tenth
        (4, 1100, 40),  # 600 in slots: more than that
        (5, 824, 40),  # they do not fit
        (5, 789, 0),
        (None, 750, 75),
        (None, 749, 40),
        (None, 190, 0),  # an eighth leaves less than a slot a layer
    ],
)
def test_larger_buffers_are_taken_where_they_are_small_beside_the_slots(
    slots: int | None, budget: int, buffers: int
) -> None:
    found, taken = plan_with_buffers(
        LAYERS,
        slots_per_layer=slots,
        budget_bytes=budget,
        buffer_bytes=40 if budget > 200 else 100,
        is_wanted=False,
        larger_bytes=75,
    )
    assert taken == buffers
    if slots is None:
        room = budget - buffers
        assert found == plan_slots(LAYERS, slots_per_layer=None, budget_bytes=room)


@pytest.mark.parametrize(("buffers", "taken"), [(150, 150), (151, 0)])
def test_buffers_that_nobody_asked_for_leave_half_to_the_slots(buffers: int, taken: int) -> None:
    def plan(is_wanted: bool) -> int:
        return plan_with_buffers(
            LAYERS,
            slots_per_layer=None,
            budget_bytes=301,
            buffer_bytes=buffers,
            is_wanted=is_wanted,
        )[1]

    assert plan(is_wanted=False) == taken
    assert plan(is_wanted=True) == buffers


@given(
    budget=st.integers(150, 3000),
    buffers=st.integers(0, 2000),
    slots=st.none() | st.integers(1, 8),
    is_wanted=st.booleans(),
)
def test_slots_and_buffers_fit_into_what_there_is(
    budget: int, buffers: int, slots: int | None, is_wanted: bool
) -> None:
    def plan() -> tuple[tuple[int, ...], int]:
        found, taken = plan_with_buffers(
            LAYERS,
            slots_per_layer=slots,
            budget_bytes=budget,
            buffer_bytes=buffers,
            is_wanted=is_wanted,
        )
        return found.slots, taken

    alone = plan_slots(
        LAYERS, slots_per_layer=slots, budget_bytes=budget if slots is None else None
    )
    least = 150 if slots is None else 150 * slots
    if is_wanted and buffers + least > budget and buffers and not alone.fits:
        with pytest.raises(MemoryShortError, match=r"two buffers for streamed layers need") as said:
            plan()
        enough = f"with one slot a layer gpu_memory_gib={gib_for(buffers + least)} would do"
        assert (
            enough if slots is None else "give more memory, fewer slots, smaller buffers"
        ) in str(said.value)
        budget = buffers + least
        plan()  # that is enough
        return
    found, taken = plan()
    assert taken in (0, buffers)
    if not taken:
        assert found == alone.slots
        return
    assert not alone.fits
    assert taken + sum(n * s.expert_bytes for n, s in zip(found, LAYERS, strict=True)) <= budget
    if slots is not None:
        assert found == alone.slots
    else:
        rest = plan_slots(LAYERS, slots_per_layer=None, budget_bytes=budget - taken)
        assert found == rest.slots
        assert is_wanted or 2 * taken <= budget
