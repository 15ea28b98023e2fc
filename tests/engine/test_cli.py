"""`moe-offload bench cpu` from end to end, on sizes that take no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.common import problems
from vllm_moe_offload.cli import app

SMALL = "--shapes 64x32 --formats bf16,mxfp4 --rows 1,3 --threads 1 --gib 0.01 --card here"


def test_rows_and_table(tmp_path: Path) -> None:
    target = tmp_path / "cpu.json"
    arguments = ["bench", "cpu", *SMALL.split(), "--json", str(target)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "GB/s of memory read" in result.stdout
    rows = json.loads(target.read_text())
    assert [problems(row) for row in rows if problems(row)] == []
    assert {row["card"] for row in rows} == {"here"}
    assert {(r["format"], r["rows"]) for r in rows if r["contestant"] == "cpu"} == {
        (format, count) for format in ("bf16", "mxfp4") for count in (1, 3)
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--isas abacus", "'abacus' is not available"),
        ("--formats fp3", "'fp3'"),
        ("--threads 4096", "4096 threads"),
        ("--shapes 4096x2048", "raise gib"),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "cpu", *SMALL.split(), *arguments.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_vllm_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from vllm_moe_offload.cli import app\n"
        f"app(['bench', 'cpu', *{SMALL.split()!r}])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
