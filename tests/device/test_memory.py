"""How much of a GPU's memory is there to be divided, by plain numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from vllm_moe_offload.device.cuda import usable_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("may_take", "free_at_start", "free", "reserved", "usable"),
    [
        (60, 100, 90, 9, 50),  # its own: 9 by torch, 1 by libraries
        (60, 70, 60, 9, 50),  # beside what others had before
        (60, 100, 60, 9, 50),  # beside what others have taken since
        (60, 100, 20, 9, 20),  # which leave less than it may take
        (60, 100, 110, 0, 70),  # or have given back
        (9, 100, 90, 9, 0),
    ],
)
def test_what_others_take_meanwhile_is_theirs(
    may_take: int, free_at_start: int, free: int, reserved: int, usable: int
) -> None:
    numbers = (may_take, free_at_start, free, reserved)
    assert usable_bytes(*(number * GIB for number in numbers)) == usable * GIB
