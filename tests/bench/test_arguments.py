"""What a benchmark cannot measure is refused by its arguments, before anything is."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import decode, load, prefill, runner, serve

BENCHES = {"decode": decode, "prefill": prefill, "load": load, "serve": serve}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*_: object) -> None:
        pytest.fail("the arguments were taken")

    monkeypatch.setattr(runner, "session", session)
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
        ("decode prefill", "--tokens x", "--tokens: 'x': give numbers from 1 up"),
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
