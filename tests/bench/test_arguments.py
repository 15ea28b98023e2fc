"""What a benchmark cannot measure is refused by its arguments, before anything is."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch

from bench import arguments as types
from bench import decode, kt, load, prefill, rates, runner, serve, step
from bench.common import Run, append
from vllm_moe_offload.engine import CpuExpertEngine

BENCHES = {
    "decode": decode,
    "prefill": prefill,
    "load": load,
    "serve": serve,
    "kt": kt,
    "rates": rates,
    "step": step,
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        pytest.fail("the arguments were taken")

    monkeypatch.setattr(runner, "session", run)
    monkeypatch.setattr(rates, "Machine", run)
    monkeypatch.setattr(CpuExpertEngine, "read_gb_per_s", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        ("decode prefill load", "--format int4", "invalid choice: 'int4' (choose from"),
        ("decode prefill load", "--contestants cache,tgi", "tgi: not among auto, "),
        ("decode prefill load", "--contestants ,", "not among auto, "),
        ("decode prefill load", "--gpus 0", "--gpus: 0: give at least 1"),
        ("decode prefill load", "--gpus -1", "--gpus: -1: give at least 1"),
        ("decode prefill load", "--gpus two", "--gpus: two: give at least 1"),
        ("decode prefill load", "--gpus 3", "--gpus: 3: this machine shows torch 2 CUDA devices"),
        ("load", "--gpus 2", "--gpus: loads are timed one after another"),
        ("load", "--together 2", "--together: loads are timed one after another"),
        ("load", "--repeats 4", "--repeats 4: a figure is a median of 5 or more"),
        ("load", "--turns folder", "--turns: loading is what is timed"),
        ("decode prefill serve", "--runs 0", "--runs: '0': give numbers from 1 up"),
        ("decode prefill", "--together 0", "--together: '0': give numbers from 1 up"),
        ("prefill serve", "--routing switching", "switching: not among uniform, local, model"),
        ("decode", "--routing foo", "--routing: foo: not among uniform, local, switching, model"),
        ("decode prefill", "--routing ,", "--routing: ',': not among uniform, local, "),
        ("decode prefill serve", "--chunk 0", "--chunk: '0': give numbers from 1 up"),
        ("decode prefill serve", "--chunk 8,9", "--chunk: '8,9': give one number from 1 up"),
        ("serve", "--chunk 8", "--chunk 8: give more than --decodes, 8"),
        ("serve", "--routing local,uniform", "--routing: a server has one: give one"),
        ("serve", "--gpus 2", "--gpus: servers are measured one after another"),
        ("serve", "--together 2", "--together: servers are measured one after another"),
        ("decode", "--batches 1,0", "--batches: '1,0': give numbers from 1 up"),
        ("decode", "--batches ,", "--batches: ',': give numbers from 1 up"),
        ("decode", "--batches 2,8,2", "--batches: 2: given more than once"),
        ("decode", "--batches 2,02", "--batches: 2: given more than once"),
        ("kt", "--rows 2,8,2", "--rows: 2: given more than once"),
        ("decode prefill", "--routing local,local", "--routing: local: given more than once"),
        ("decode prefill", "--tokens x", "--tokens: 'x': give numbers from 1 up"),
        ("prefill", "--kv-gib -1", "--kv-gib: '-1': give a finite number above 0"),
        ("decode", "--deadline nan", "--deadline: 'nan': give a finite number above 0"),
        ("load", "--timeout 0", "--timeout: '0': give a finite number above 0"),
        ("serve", "--seconds inf", "--seconds: 'inf': give a finite number above 0"),
        ("prefill", "--kv-gib four", "--kv-gib: 'four': give a finite number above 0"),
        ("rates", "--piece 0", "--piece: '0': give numbers from 1 up"),
        ("rates", "--piece -5", "--piece: '-5': give numbers from 1 up"),
        ("kt", "--shapes 2048", "--shapes: '2048': give hidden and intermediate sizes, like 2048x"),
        ("kt", "--shapes 64x32,0x8", "--shapes: '64x32,0x8': give hidden and intermediate sizes"),
        ("kt", "--shapes 64x33", "int4 scales 128 columns together"),
        ("kt", "--formats nope", "--formats: nope: not among bf16, fp8_block, int4, mxfp4"),
        ("kt", "--rows a", "--rows: 'a': give numbers from 1 up"),
        ("kt", "--rows ,", "--rows: ',': give numbers from 1 up"),
        ("kt", "--isas mmx", "isa=mmx: instruction set 'mmx' is not available"),
        ("kt", "--threads 0", "--threads: '0': give numbers from 1 up"),
        ("kt", "--threads 4096", "4096 threads"),
        ("kt", "--gib -1", "--gib: '-1': give a finite number above 0"),
        ("kt", "--gib 99999", "99999.0 GiB of experts were asked for"),
        ("decode prefill load serve", "--layers 0", "--layers: '0': give numbers from 1 up"),
        ("decode prefill load serve", "--layers -3", "--layers: '-3': give numbers from 1 up"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    names: str,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in names.split():
        monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            BENCHES[name].main()
        assert ended.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_what_can_be_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = "--format fp8-block --contestants cache,vllm-gpu --gpus 2 --routing local,model"
    monkeypatch.setattr(sys, "argv", [name, *taken.split(), "--tokens", "8,16"])
    with pytest.raises(pytest.fail.Exception, match="the arguments were taken"):
        BENCHES[name].main()


ROW = Run.here("decode", "a commit").row(contestant="x", metric="step_ms", unit="ms", value=1)


@pytest.mark.parametrize("name", BENCHES)
def test_a_file_that_cannot_be_added_to_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dict.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", [name, "--json", str(tmp_path / "dict.json")])
    with pytest.raises(SystemExit) as ended:
        BENCHES[name].main()
    assert ended.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"--json: {tmp_path}/dict.json is not a file of rows: no list, but dict" in message
    assert "name a new file, in a folder that is yours to write to, or one that" in message


def test_where_rows_can_be_added(tmp_path: Path) -> None:
    there = tmp_path / "rows.json"
    append(there, [ROW])
    for path in (there, tmp_path / "new.json", tmp_path / "new" / "folder" / "rows.json"):
        assert types.rows_file(str(path)) == path
        append(path, [ROW])
    (tmp_path / "text").write_text("a word")
    for wrong, why in (
        (tmp_path, "is there and no file"),
        ("/dev/null", "is there and no file"),
        (tmp_path / "text", "no JSON: Expecting value"),
        (there / "rows.json", "Not a directory"),
        ("/proc/no/such/rows.json", "/proc/no/such/rows.json: "),
    ):
        with pytest.raises(ArgumentTypeError, match=f"{why}.*: name a new file"):
            types.rows_file(str(wrong))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("new", "new.json", "rows.json", "text")
    ]
