"""The comparison with kt-kernel: what it measures, and that what fails is a row."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import kt
from bench.common import ROOT, Row, problems
from tests.engine.oracle import nibbles
from vllm_moe_offload.experts import Format


def run(folder: Path, formats: str) -> list[Row]:
    target = folder / "kt.json"
    small = "--shapes 256x128 --rows 1,3 --threads 1 --gib 0.01 --card here"
    command = [sys.executable, "-m", "bench.kt", *small.split()]
    subprocess.run(
        [*command, "--formats", formats, "--json", str(target)], cwd=ROOT, check=True, timeout=300
    )
    rows: list[Row] = json.loads(target.read_text())
    assert [problems(row) for row in rows if problems(row)] == []
    assert len({row["run"] for row in rows}) == 1
    return [row for row in rows if row["contestant"] == "kt-kernel"]


@pytest.mark.skipif(importlib.util.find_spec("kt_kernel") is not None, reason="kt-kernel is there")
def test_a_contestant_that_is_not_there_is_a_row(tmp_path: Path) -> None:
    rows = run(tmp_path, "bf16")
    assert len(rows) == 4
    assert all(row["value"] is None and "no kt-kernel on the path" in row["note"] for row in rows)


@pytest.mark.skipif(importlib.util.find_spec("kt_kernel") is None, reason="needs kt-kernel")
def test_every_format_is_measured(tmp_path: Path) -> None:
    rows = run(tmp_path, ",".join(format.value for format in kt.CLASSES))
    assert [row["note"] for row in rows if row["value"] is None] == []


@pytest.mark.parametrize("format", kt.CLASSES, ids=lambda f: f.value)
def test_codes_stand_for_their_values(format: Format) -> None:
    codes, scale, values = kt._matrix(kt._spec(256, 128, format), 128, 256)
    if format in (Format.INT4, Format.MXFP4):
        assert scale is not None
        numbers = nibbles(codes)
        table = kt._E2M1 if format is Format.MXFP4 else torch.arange(16) - 8
        decoded = table[numbers].float() * scale.float().repeat_interleave(32, 1)
    else:
        blocks = 1 if scale is None else scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        decoded = codes.float() * blocks
    assert torch.equal(decoded, values)


def test_a_wrong_result_is_no_figure() -> None:
    spec = kt._spec(256, 128, Format.BF16)
    shapes = {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}
    matrices = {name: kt._matrix(spec, *shape) for name, shape in shapes.items()}
    with pytest.raises(RuntimeError, match="a wrong result for 2 rows"):
        kt._check(matrices, torch.ones(2, 256), torch.ones(2, 8), torch.ones(2, 256))
