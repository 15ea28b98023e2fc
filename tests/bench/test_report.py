"""Tables and pictures out of rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import report, report_cpu
from bench.common import Row, Run, append, read

RUN = Run("decode", "abc", "1234567", "2026-01-01", "h100", "a CPU", "0.26.0", "2.11.0")


def rows() -> list[Row]:
    def row(contestant: str, value: float | None, **keys: object) -> Row:
        common = dict(model="qwen3-30b-a3b", layers=24, format="bf16", routing="local", unit="ms")
        given = common | dict(contestant=contestant, metric="step_ms", value=value) | keys
        return RUN.row(**given)

    return [
        row("machine", 54.2, metric="h2d_gb_per_s", unit="GB/s", routing=None),
        row("machine", 48.3, metric="h2d_gb_per_s", unit="GB/s", batch=1),  # around that cell
        row("cache", 20.0, batch=1),
        row("cache", 5.1, metric="expert_gpu_gib", unit="GiB", routing=None),
        row("vllm-uva", None, batch=1, note="out of memory"),
        row("floor", 10.0, batch=1),
        row("cache", 412.3, batch=8),
    ]


def test_a_table_has_every_contestant_its_share_of_the_floor_and_why_one_failed() -> None:
    lines = report.table(rows(), "step_ms").splitlines()
    assert lines[0] == "| | local, batch 1 | local, batch 8 | GPU GiB for experts |"
    assert lines[2] == "| cache | 20 (50 %) | 412 | 5.10 |"
    assert lines[3] == "| vllm-uva | - |  |  |"
    assert lines[4] == "| floor | 10 |  |  |"
    assert lines[-1] == "- vllm-uva: out of memory"


def test_a_figure_of_nothing_has_no_share_of_the_floor() -> None:
    figures = [row | {"value": 0} if row["contestant"] == "cache" else row for row in rows()]
    assert "| cache | 0 | 0 | 0.00 |" in report.table(figures, "step_ms")
    machine = [row | {"value": 0} for row in cpu_rows() if row["value"] is not None]
    assert "| bf16 | cpu amx | 0.00 |" in report_cpu.tables(machine)


NO_ROWS = {
    "a dict": ("{}", "no list, but dict"),
    "numbers": ("[1]", "row 1: 1 is not keys with values"),
    "an empty list": ("[]", "holds no rows"),
    "half": ("[{", "no JSON: Expecting property name"),
    "bytes": (b"\xff", "no JSON: 'utf-8' codec can't decode"),
    "no max": (json.dumps([rows()[0] | {"min": 1.0}]), "row 1: min is 1.0 and max None"),
}


@pytest.mark.parametrize("what", [*NO_ROWS, "nothing", "a folder"])
def test_what_holds_no_rows_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    content, why = NO_ROWS.get(what, (None, ""))
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    elif what == "a folder":
        path.mkdir()
    monkeypatch.setattr(sys, "argv", ["report", str(path), "--out", str(tmp_path / "out.md")])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert str(path) in message and why in message
    assert "give files that a benchmark's --json has written" in message
    assert not (tmp_path / "out.md").exists()


def test_a_page_names_machine_versions_and_file(tmp_path: Path) -> None:
    path = tmp_path / "2026-01-01-decode.json"
    append(path, rows())
    page = report.sections([path])
    assert "## Decode, ms a step: `2026-01-01-decode`\n" in page
    assert "qwen3-30b-a3b, 24 layers, bf16, h100, a CPU; vLLM 0.26.0, torch 2.11.0" in page
    assert "GB/s: h2d 54.2." in page


def test_a_floor_without_the_gpus_part_is_said_to_be(tmp_path: Path) -> None:
    said = "Its floor is of the missed bytes alone"
    append(tmp_path / "alone.json", rows())
    assert said in report.sections([tmp_path / "alone.json"])
    gpu = rows()[2] | {"contestant": "vllm-gpu"}
    append(tmp_path / "beside.json", [*rows(), gpu])
    assert said not in report.sections([tmp_path / "beside.json"])
    no_floor = [row for row in rows() if row["contestant"] != "floor"]
    append(tmp_path / "none.json", no_floor)
    assert said not in report.sections([tmp_path / "none.json"])


def test_the_newest_stands_first_and_the_cpu_engine_last(tmp_path: Path) -> None:
    for name, bench, day in (("a", "decode", 1), ("c", "prefill", 2), ("d", "load", 2)):
        run = Run(bench, name, "1234567", f"2026-01-0{day}", "h100", "a CPU", "0.26.0", "2.11.0")
        row = run.row(contestant="cache", metric="load_s", unit="s", value=1.0)
        append(tmp_path / f"{name}.json", [row])
    append(tmp_path / "b.json", [row | {"date": "2026-01-03"} for row in cpu_rows()])
    append(tmp_path / "c-2.json", read(tmp_path / "c.json"))
    page = report.sections(sorted(tmp_path.glob("*.json")))
    files = [line.rpartition(": ")[2] for line in page.splitlines() if line.startswith("## ")]
    assert files == ["`c`", "`c-2`", "`d`", "`a`", "`b`"]


def test_no_two_headings_are_the_same(tmp_path: Path) -> None:
    one, two = tmp_path / "decode.json", tmp_path / "decode-eager.json"
    append(one, rows())
    append(one, [row | {"run": "def"} for row in rows()])
    append(two, rows())
    cpu = tmp_path / "cpu.json"
    append(cpu, cpu_rows())
    lines = report.sections([one, two, cpu]).splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert len(headings) == 4
    assert len(set(headings)) == len(headings)


def test_runs_are_never_compared(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    append(path, rows())
    append(path, [row | {"run": "def", "value": 5.0} for row in rows()[4:5]])
    assert report.sections([path]).count("## Decode") == 2


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.picture(rows(), "step_ms", tmp_path / "img" / "one.png")
    assert (tmp_path / "img" / "one.png").read_bytes().startswith(b"\x89PNG")


def cpu_rows() -> list[Row]:
    run = Run("cpu", "abc", "1234567", "2026-01-01", "h100", "a CPU", None, "2.11.0")

    def row(contestant: str, value: float | None, threads: int = 16, **keys: object) -> Row:
        given = dict(contestant=contestant, metric="weight_gb_per_s", value=value, unit="GB/s")
        return run.row(**given | keys) | {"threads": threads}

    ours = dict(model="2048x768", format="bf16", isa="amx")
    return [
        row("floor", 15.0, 1, metric="read_gb_per_s", isa="amx"),
        row("floor", 100.0, metric="read_gb_per_s", isa="amx"),
        row("floor", 20.0, metric="tflop_per_s", unit="TFLOP/s", isa="amx"),
        row("cpu", 12.0, 1, rows=1, **ours),
        row("cpu", 90.0, rows=1, **ours),
        row("cpu", 8.0, rows=256, **ours),
        row("cpu", 9.0, rows=256, metric="tflop_per_s", **ours),
        row("kt-kernel", None, rows=1, note="SIGILL", model="2048x768", format="bf16"),
    ]


def test_cpu_rows_stand_beside_what_limits_them(tmp_path: Path) -> None:
    path = tmp_path / "2026-01-01-cpu.json"
    append(path, cpu_rows())
    lines = report.sections([path]).splitlines()
    assert "## The CPU expert engine: `2026-01-01-cpu`" in lines
    assert "| bf16 | cpu amx | 90.0 (90 %) |" in lines
    assert "| bf16 | cpu amx | 9.00 (45 %) |" in lines
    assert "| bf16 | kt-kernel | - |" in lines
    assert "- kt-kernel, bf16: SIGILL" in lines


def test_scaling_is_drawn_where_threads_differ(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report_cpu.scaling(cpu_rows(), tmp_path / "img" / "cpu.png")
    assert (tmp_path / "img" / "cpu.png").read_bytes().startswith(b"\x89PNG")
    assert not report_cpu.scaling([row for row in cpu_rows() if row["threads"] == 16], tmp_path)
