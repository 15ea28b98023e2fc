"""Amounts of memory in words."""

from __future__ import annotations

import pytest

from vllm_moe_offload.amounts import amount, gib_for


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 KiB"),
        (10737, "10.5 KiB"),
        (3 * 16 * 24576, "1.1 MiB"),
        (102 << 20, "102.0 MiB"),
        (103 << 20, "0.10 GiB"),
        (1 << 30, "1.00 GiB"),
        (57 * 2**30 + 2**28, "57.25 GiB"),
    ],
)
def test_small_amounts_are_in_smaller_units(nbytes: int, text: str) -> None:
    assert amount(nbytes) == text


def test_two_amounts_may_be_told_in_one_unit() -> None:
    assert (amount(10737), amount(192 << 10, like=10737)) == ("10.5 KiB", "192.0 KiB")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(3 * 24576, "0.0000687"), (192 << 10, "0.000184"), (3 << 29, "1.5"), (9 << 40, "9220")],
)
def test_a_number_of_gib_holds_the_bytes(nbytes: int, text: str) -> None:
    assert gib_for(nbytes) == text
    assert int(float(text) * 2**30) >= nbytes
