"""The `moe-offload` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vllm_moe_offload import demo as demonstration

app = typer.Typer(
    help="Serve mixture-of-experts models bigger than GPU memory with stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _root() -> None:
    """Keep `demo` a subcommand while it is the only one."""


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be given several times.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Experts each layer keeps; a quarter by default.")
    ] = None,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = demonstration.MODEL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate a prompt.")] = 80,
    policy: Annotated[str, typer.Option(help="lfru, lru, lfu or static.")] = "lfru",
) -> None:
    """Generate with a few experts in slots, then without offload, and compare the tokens."""
    console = Console()
    try:
        same = demonstration.run(
            console,
            model=model,
            prompts=prompt or demonstration.PROMPTS,
            slots=slots,
            max_tokens=max_tokens,
            policy=policy,
        )
    except demonstration.DemoError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from None
    raise typer.Exit(0 if same else 1)
