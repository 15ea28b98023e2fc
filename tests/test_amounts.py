"""Amounts of memory in words."""

from __future__ import annotations

import pytest

from vllm_moe_offload.amounts import amount


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
