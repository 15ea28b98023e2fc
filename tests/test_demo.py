"""What `moe-offload demo` shows where it does not run, and of a run without slots."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_moe_offload import demo
from vllm_moe_offload.cli import app

MODEL = Path(__file__).parents[1] / demo.MODEL


def test_an_error_of_ours_is_shown_by_its_message_alone() -> None:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("a GPU has a bus")
    result = CliRunner().invoke(app, ["demo", "--mode", "hybrid", "--model", str(MODEL)])
    assert result.exit_code == 2
    _, error = " ".join(result.output.split()).split("error: ")
    assert error.startswith("moe_offload: mode='hybrid': vLLM's CPU build has no bus"), error
    assert error.endswith(": use mode='cache', 'cpu' or 'stream' there"), error


@pytest.mark.parametrize(
    ("config", "why"),
    [("{", "is not JSON"), ("[1]", "describes no model"), ("{}", "names no number of experts")],
)
def test_a_folder_that_is_no_models_is_refused(config: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    result = CliRunner().invoke(app, ["demo", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())


def test_a_folder_without_a_model_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(demo.DemoError, match=r"there is no .*/config\.json: run this in"):
        demo.run(
            Console(),
            model=tmp_path,
            prompts=["a"],
            mode="cache",
            slots=None,
            max_tokens=1,
            policy=None,
        )


def test_more_tokens_than_a_text_may_have_are_refused() -> None:
    result = CliRunner().invoke(app, ["demo", "--model", str(MODEL), "--max-tokens", "1024"])
    assert result.exit_code == 2
    assert "up to 1024 tokens" in " ".join(result.output.split())


def test_the_run_without_offload_has_no_settings_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[dict[str, str]] = []

    def run(command: list[str], env: dict[str, str], **others: Any) -> SimpleNamespace:
        ran.append(env)
        Path(json.loads(command[-1])["result"]).write_text(
            json.dumps({"tokens": [[1]], "seconds": 1.0, "start_seconds": 1.0, "stats": None})
        )
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_POLICY", "lru")
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_ISA", "scalar")
    for settings in ({"slots_per_layer": 8}, None):
        demo._in_a_process(MODEL, ["a"], 1, settings, print_text=False)
    offloaded, stock = ran
    assert offloaded["VLLM_MOE_OFFLOAD_POLICY"] == "lru"
    assert "VLLM_MOE_OFFLOAD_POLICY" not in stock
    assert stock.keys() - offloaded.keys() == set()
    assert {env["VLLM_MOE_OFFLOAD_ISA"] for env in ran} == {"scalar"}


def table(**stats: Any) -> str:
    layer = {"slots": 0, "experts": 16, "buffer_experts": 0}
    given = {name: stats.pop(name) for name in layer if name in stats}
    counted = dict.fromkeys(("hits", "misses", "bytes_fetched", "bytes_streamed"), 0)
    bytes_ = dict.fromkeys(("device_bytes", "buffer_bytes", "host_bytes"), 0)
    done = {"layers": {"a": layer | given}, **counted, **bytes_, **stats}
    console = Console(file=io.StringIO(), width=100)
    runs = [demo.Result([[1, 2]], 1.0, 1.0, stats) for stats in (done, None)]
    console.print(demo._table(*runs))
    return console.file.getvalue()


def test_the_table_names_slots_or_buffers() -> None:
    cached = table(slots=4, hits=3, misses=1, device_bytes=4 << 20, host_bytes=16 << 20)
    for row in ("experts on the device, a layer", "4 of 16", "3 (75%)", "misses", "4.0 MiB"):
        assert row in cached
    assert "buffers" not in cached
    streamed = table(buffer_experts=16, buffer_bytes=32 << 20, host_bytes=1 << 30)
    for row in ("experts in each of two buffers", "16 of 16", "32.0 MiB", "1.00 GiB"):
        assert row in streamed
    computed = table(host_bytes=16 << 20)
    assert "buffers" not in computed
    for text in (streamed, computed):
        assert not [word for word in ("hits", "misses", "a layer") if word in text]


def test_a_setting_in_the_environment_is_refused_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "_in_a_process", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER", "6")
    result = CliRunner().invoke(app, ["demo", "--model", str(MODEL)])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "slots_per_layer is 8 by the demo (--mode, --slots, --policy) and 6 in VLLM_MOE" in said
