"""The benchmark's rows and table, on sizes that take no time."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from vllm_moe_offload.engine import bench
from vllm_moe_offload.experts import Activation, ExpertSpec, Format


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


class StubEngine:
    """Its calls take half a millisecond, by a clock of its own, and Python's part 1.5 ms."""

    isa, threads = "stub", 1
    phase_seconds = (1e-5, 3e-4, 1e-4, 5e-4)

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def read_gb_per_s(self, memory: torch.Tensor) -> float:
        return 1.0

    def tile_peak_tflop_per_s(self) -> None:
        return None

    def plan(self, spec: ExpertSpec, tensors: Mapping[str, torch.Tensor], **sizes: int) -> object:
        return SimpleNamespace(run=self._run)

    def _run(self, *batch: torch.Tensor) -> None:
        self.now += 2e-3


def test_calls_are_timed_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine()
    monkeypatch.setattr(bench, "time", engine)
    spec = ExpertSpec(64, 32, Activation.SILU, Format.BF16)
    memory = torch.zeros(8 * spec.layout.nbytes, dtype=torch.uint8)
    rows: list[bench.Row] = []
    bench._bench_engine(engine, memory, [spec], [3], lambda **row: rows.append(row))  # type: ignore[arg-type]
    figures = {row["metric"]: row["value"] for row in rows if row["contestant"] == "cpu"}
    assert figures == pytest.approx(
        {
            "weight_gb_per_s": 8 * spec.layout.nbytes / 1e9 / 5e-4,
            "tflop_per_s": 8 * 3 * 6 * 64 * 32 / 1e12 / 5e-4,
            "prepare_ms": 0.01,
            "up_ms": 0.3,
            "down_ms": 0.1,
            "python_ms": 1.5,
        }
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 5)])
def test_experts_of_a_few_bytes(shape: tuple[int, int]) -> None:
    rows = bench.bench_cpu(
        shapes=[shape], formats=[Format.BF16], rows=(1,), threads=[1], gib=0.01, beside_torch=False
    )
    figures = {row["metric"]: row["value"] for row in rows if row["contestant"] == "cpu"}
    assert figures["weight_gb_per_s"] > 0
    assert figures["up_ms"] > 0
