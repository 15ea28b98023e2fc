"""`moe-offload bench cpu` from end to end, on sizes that take no time."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.common import problems
from vllm_moe_offload.cli import app
from vllm_moe_offload.engine import ISA_VARIABLE, CpuExpertEngine

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


def test_a_file_of_rows_is_written_anew_as_the_help_says(tmp_path: Path) -> None:
    target = tmp_path / "cpu.json"
    target.write_text("what was there")
    arguments = ["bench", "cpu", *SMALL.split(), "--no-torch", "--json", str(target)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert len({row["run"] for row in json.loads(target.read_text())}) == 1
    told = CliRunner().invoke(app, ["bench", "cpu", "--help"]).stdout.replace("│", " ")
    assert "over what the file holds" in " ".join(told.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--isas abacus", "isa=abacus: instruction set 'abacus' is not available"),
        ("--isas scalar,abacus", "isa=abacus: "),
        ("--formats fp3", "--formats 'fp3' is no number format: give some of fp32, "),
        ("--formats bf16,int4", "int4 scales 128 columns together"),
        ("--threads 4096", "4096 threads"),
        ("--threads 1,1099511627776", "1099511627776 threads"),
        ("--threads two", "--threads 'two' is not a list of numbers"),
        ("--shapes 4096x2048", "raise gib"),
        ("--shapes 64x32,128", "--shapes '128' is not a hidden and an intermediate size"),
        ("--shapes 64xy", "--shapes '64xy' is not a hidden and an intermediate size"),
        ("--rows x", "--rows 'x' is not a list of numbers: write one like"),
        ("--rows 1,0", "0 rows an expert were asked for: give at least 1"),
        ("--rows 1,16777217", "16777217 rows an expert were asked for: give at least 1 and at"),
        ("--rows 1,1", "--rows '1,1' has an empty place or the same twice"),
        ("--rows 1,01", "--rows '1,01' has an empty place or the same twice"),
        ("--isas scalar,", "--isas 'scalar,' has an empty place or the same twice"),
        ("--threads=", "--threads '' has an empty place"),
        ("--gib -1", "-1.0 GiB of experts were asked for"),
        ("--gib nan", "nan GiB of experts were asked for"),
        ("--gib 99999", "99999.0 GiB of experts were asked for"),
        ("--json /nonexistent/x", "--json /nonexistent/x cannot be written: name a file in"),
        ("--json /", "--json / cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        pytest.fail("something was measured")

    monkeypatch.setattr(CpuExpertEngine, "read_gb_per_s", measure)
    monkeypatch.setenv(ISA_VARIABLE, "scalar")
    result = CliRunner().invoke(app, ["bench", "cpu", *SMALL.split(), *arguments.split()])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert ISA_VARIABLE not in line


def test_vllm_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from vllm_moe_offload.cli import app\n"
        f"app(['bench', 'cpu', *{SMALL.split()!r}])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("command", "lacking"), [(["bench", "cpu"], "torch"), (["demo"], "vllm")])
def test_what_is_not_installed_is_named(command: list[str], lacking: str) -> None:
    code = (
        f"import sys; sys.modules[{lacking!r}] = None\n"
        f"from vllm_moe_offload.cli import app; app({command!r})\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"error: {lacking} is not installed" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == metadata.version("vllm-moe-offload")
