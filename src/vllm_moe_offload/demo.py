"""The demonstration: the same prompts with and without offload, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_moe_offload.amounts import amount
from vllm_moe_offload.config import (
    ADDITIONAL_CONFIG_KEY,
    SLOTLESS_MODES,
    OffloadConfig,
    variable_names,
)
from vllm_moe_offload.errors import ConfigError

MODEL = Path("models/demo-moe")
PROMPTS = [
    "To change the settings of your printer,",
    "In most cases, the default",
    "Before you upgrade the system,",
]
# Tokens of a prompt and its text.
MAX_MODEL_LEN = 1024
_KIB = 2**10


class DemoError(Exception):
    """The demonstration cannot run; the message says why and what to do."""


@dataclass(frozen=True)
class Result:
    """One run. `stats`: the counters of the offloaded layers, None for stock vLLM."""

    tokens: list[list[int]]
    seconds: float
    start_seconds: float
    stats: dict[str, Any] | None

    @property
    def count(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.tokens))


def run(
    console: Console,
    *,
    model: Path,
    prompts: list[str],
    mode: str,
    slots: int | None,
    max_tokens: int,
    policy: str | None,
) -> bool:
    """Show both runs and a table; True when they generated the same tokens."""
    settings_file = model / "config.json"
    if not settings_file.is_file():
        raise DemoError(
            f"no model in {model}: there is no {settings_file}: run this in a checkout of the "
            "repository, or name a model's folder with --model"
        )
    num_experts = _num_experts(settings_file)
    if slots is None and mode not in SLOTLESS_MODES:
        if num_experts is None:
            raise DemoError(f"{settings_file} names no number of experts: give --slots")
        slots = max(1, num_experts // 4)
    if num_experts is not None and slots is not None and slots > num_experts:
        raise DemoError(f"--slots {slots}: {model} has {num_experts} experts a layer, give fewer")
    if max_tokens >= MAX_MODEL_LEN:
        raise DemoError(
            f"--max-tokens {max_tokens}: a prompt and its text are up to {MAX_MODEL_LEN} tokens "
            "here, give fewer"
        )
    if not all(prompts):
        raise DemoError("--prompt is empty: give some text to continue")
    asked = {"mode": mode, "slots_per_layer": slots, "policy": policy}
    settings = {name: value for name, value in asked.items() if value is not None}
    try:
        OffloadConfig.resolve(
            {ADDITIONAL_CONFIG_KEY: settings}, os.environ, "by the demo (--mode, --slots, --policy)"
        )
    except ConfigError as error:
        raise DemoError(str(error)) from None
    if importlib.util.find_spec("vllm") is None:
        raise DemoError(
            "vllm is not installed, which this package plugs into: install it (in a checkout of "
            "the repository `make setup` does)"
        )

    plural = "" if slots == 1 else "s"
    where = f"{slots} slot{plural} a layer" if slots else f"mode {mode}"
    console.rule(f"{escape(model.name)} with {where}, all experts in host memory")
    console.print("starting vLLM ...", style="dim")
    ours = _in_a_process(model, prompts, max_tokens, settings, print_text=True)
    console.rule("the same prompts without offload")
    console.print("starting vLLM ...", style="dim")
    stock = _in_a_process(model, prompts, max_tokens, None, print_text=False)
    console.print(_table(ours, stock))
    same = ours.tokens == stock.tokens
    if same:
        console.print(
            f"[bold green]same tokens[/]: all {ours.count} generated tokens are those of vLLM "
            "without offload"
        )
    else:
        pairs = zip(ours.tokens, stock.tokens, strict=True)
        differing = ", ".join(str(number) for number, (a, b) in enumerate(pairs, 1) if a != b)
        console.print(f"[bold red]different tokens[/] after prompts {differing}")
    return same


def _num_experts(settings_file: Path) -> int | None:
    try:
        settings = json.loads(settings_file.read_text())
    except ValueError as error:
        raise DemoError(f"{settings_file} is not JSON ({error}): name a model's folder") from None
    if not isinstance(settings, dict):
        raise DemoError(f"{settings_file} describes no model: name a model's folder with --model")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(settings.get(name), int):
            return int(settings[name])
    return None


def _in_a_process(
    model: Path,
    prompts: list[str],
    max_tokens: int,
    settings: dict[str, Any] | None,
    *,
    print_text: bool,
) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        order = {
            "model": str(model),
            "prompts": prompts,
            "max_tokens": max_tokens,
            "max_model_len": MAX_MODEL_LEN,
            "settings": settings,
            "print_text": print_text,
            "result": str(result),
        }
        with log.open("wb") as errors:
            process = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "vllm_moe_offload.integration.demo_run",
                    json.dumps(order),
                ],
                env=_environment(is_offloaded=settings is not None),
                stderr=errors,
                check=False,
            )
        if process.returncode or not result.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise DemoError(f"the run ended with code {process.returncode}:\n{tail}")
        outcome = json.loads(result.read_text())
        if "error" in outcome:
            raise DemoError(outcome["error"])
        return Result(**outcome)


def _environment(*, is_offloaded: bool) -> dict[str, str]:
    """Quiet, and without the settings in this process's own where nothing is to be offloaded."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    left_out = set() if is_offloaded else set(variable_names())
    given = {name: text for name, text in os.environ.items() if name not in left_out}
    return {**quiet, **given}


def _table(ours: Result, stock: Result) -> Table:
    assert ours.stats is not None
    stats = ours.stats
    layers = list(stats["layers"].values())
    looked_up = stats["hits"] + stats["misses"]
    table = Table(title=f"{len(layers)} layers, float32, batch 1")
    table.add_column("")
    table.add_column("with offload", justify="right")
    table.add_column("without", justify="right")
    experts = layers[0]["experts"]
    if layers[0]["slots"]:
        table.add_row(
            "experts on the device, a layer",
            f"{layers[0]['slots']} of {experts}",
            f"{experts} of {experts}",
        )
        table.add_row("hits", f"{stats['hits']} ({stats['hits'] / max(looked_up, 1):.0%})", "-")
        table.add_row("misses", f"{stats['misses']}", "-")
    elif stats["buffer_bytes"]:
        table.add_row(
            "experts in each of two buffers", f"{layers[0]['buffer_experts']} of {experts}", "-"
        )
    copied = stats["bytes_fetched"] + stats["bytes_streamed"]
    table.add_row("copied a token", f"{copied / max(ours.count, 1) / _KIB:.0f} KiB", "-")
    table.add_row(
        "experts in device memory",
        amount(stats["device_bytes"] + stats["buffer_bytes"]),
        amount(stats["host_bytes"]),
    )
    table.add_row("experts in host memory", amount(stats["host_bytes"]), "-")
    table.add_row(
        "tokens a second",
        f"{ours.count / ours.seconds:.0f}",
        f"{stock.count / stock.seconds:.0f}",
    )
    return table
