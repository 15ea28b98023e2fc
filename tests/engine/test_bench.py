"""The benchmark's rows and table, on sizes that take no time."""

from __future__ import annotations

import pytest

from vllm_moe_offload.engine import bench
from vllm_moe_offload.experts import Format


def test_rows_and_table() -> None:
    seen: list[bench.Row] = []
    rows = bench.bench_cpu(
        shapes=[(64, 32)],
        formats=[Format.BF16, Format.MXFP4, Format.NVFP4, Format.FP8_BLOCK],
        rows=[1, 3],
        threads=[1],
        gib=0.01,
        on_row=seen.append,
    )
    assert rows == seen
    assert len({row["run"] for row in rows}) == 1
    assert all(row["bench"] == "cpu" and row["min"] <= row["value"] <= row["max"] for row in rows)
    assert rows[0]["contestant"] == "floor"
    assert rows[0]["metric"] == "read_gb_per_s"
    ours = [row for row in rows if row["contestant"] == "cpu"]
    assert {(row["format"], row["rows"]) for row in ours} == {
        (format, count) for format in ("bf16", "mxfp4", "nvfp4", "fp8_block") for count in (1, 3)
    }
    assert any(row["contestant"] == "torch" for row in rows)
    phases = {row["metric"]: row["value"] for row in ours if row["rows"] == 3}
    assert phases["up_ms"] > 0
    assert phases["down_ms"] > 0
    table = bench.format_table(rows)
    assert "GB/s of memory read" in table
    assert "64x32" in table


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="raise gib"):
        bench.bench_cpu(shapes=[(4096, 2048)], formats=[Format.BF16], threads=[1], gib=0.01)
    with pytest.raises(ValueError, match=r"16777216 rows .* GiB of memory are available: give few"):
        bench.bench_cpu(
            shapes=[(4096, 2048)], formats=[Format.BF16], rows=[1, 1 << 24], threads=[1], gib=1
        )
