"""The `moe-offload` command."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vllm_moe_offload import demo as demonstration

if TYPE_CHECKING:
    from vllm_moe_offload.experts import Format

app = typer.Typer(no_args_is_help=True, add_completion=False)
bench_app = typer.Typer(help="Measure what this machine does.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(metadata.version("vllm-moe-offload"))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show which.")
    ] = False,
) -> None:
    """Serve mixture-of-experts models bigger than GPU memory with stock vLLM."""


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be given several times.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Experts each layer keeps; a quarter by default.")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="cache; or without slots: stream, every expert copied, or cpu. On a GPU also "
            "auto and hybrid, in which the CPU computes some of the missing experts."
        ),
    ] = "cache",
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = demonstration.MODEL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate a prompt.")] = 80,
    policy: Annotated[
        str | None, typer.Option(help="lfru, lru, lfu or static; lfru by default.")
    ] = None,
) -> None:
    """Generate with experts offloaded, then without offload, and compare the tokens."""
    console = Console()
    try:
        same = demonstration.run(
            console,
            model=model,
            prompts=prompt or demonstration.PROMPTS,
            mode=mode,
            slots=slots,
            max_tokens=max_tokens,
            policy=policy,
        )
    except demonstration.DemoError as error:
        _print_error(error)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if same else 1)


def _print_error(error: Exception) -> None:
    # One line, however wide the terminal is.
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")


@bench_app.command("cpu")
def bench_cpu(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows here, over what the file holds.")
    ] = None,
    shapes: Annotated[
        str, typer.Option(help="Experts as hidden x intermediate, comma-separated.")
    ] = "2048x768,7168x2048",
    formats: Annotated[
        str, typer.Option(help="Number formats of the weights, comma-separated.")
    ] = "bf16,fp8_block,int4,mxfp4",
    rows: Annotated[
        str, typer.Option(help="Rows (tokens) an expert, comma-separated.")
    ] = "1,2,4,16,64,256,1024",
    isas: Annotated[
        str | None,
        typer.Option(help="Instruction sets; by default VLLM_MOE_OFFLOAD_ISA or the fastest."),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(help="Thread counts; all physical cores by default.")
    ] = None,
    gib: Annotated[float, typer.Option(help="GiB of experts to rotate over.")] = 4.0,
    card: Annotated[
        str | None, typer.Option(help="What the rows call this machine; cpu-<CPUs>c by default.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="What the rows call the code; git's by default.")
    ] = None,
    torch: Annotated[bool, typer.Option(help="Also time torch's bf16 linear.")] = True,
) -> None:
    """Time the CPU expert engine beside what this machine could do at most."""
    try:
        from vllm_moe_offload.engine import bench
    except ModuleNotFoundError as error:
        _print_error(
            ValueError(f"{error.name} is not installed, which weights are made with: install it")
        )
        raise typer.Exit(2) from None

    console = Console(stderr=True)
    measured: list[bench.Row] = []

    def keep(row: bench.Row) -> None:
        # Written at once: what a run cut short has measured is not lost.
        measured.append(row)
        status.update(" ".join(str(row[key]) for key in ("contestant", "model", "format", "rows")))
        if json_file is not None:
            lines = ",\n".join(json.dumps(row) for row in measured)
            json_file.write_text(f"[\n{lines}\n]\n")

    try:
        with console.status("") as status:
            if json_file is not None:
                _check_writable("--json", json_file)
            bench.bench_cpu(
                shapes=[_shape(shape) for shape in _words("--shapes", shapes)],
                formats=[_format(name) for name in _words("--formats", formats)],
                rows=_numbers("--rows", rows),
                isas=_words("--isas", isas) if isas is not None else None,
                threads=_numbers("--threads", threads) if threads is not None else None,
                gib=gib,
                beside_torch=torch,
                labels={"card": card or _card(), "commit": commit or _commit()},
                on_row=keep,
            )
    except ValueError as error:
        _print_error(error)
        raise typer.Exit(2) from None
    typer.echo(bench.format_table(measured))


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    _check_list(option, text, words)
    return words


def _check_list(option: str, text: str, given: Sequence[object]) -> None:
    if "" in given or len(set(given)) < len(given):
        raise ValueError(
            f"{option} {text!r} has an empty place or the same twice: write a list like a,b"
        )


def _numbers(option: str, text: str) -> list[int]:
    words = _words(option, text)
    try:
        numbers = [int(number) for number in words]
    except ValueError:
        raise ValueError(
            f"{option} {text!r} is not a list of numbers: write one like 1,4,16"
        ) from None
    _check_list(option, text, numbers)
    return numbers


def _shape(text: str) -> tuple[int, int]:
    try:
        hidden, intermediate = map(int, text.split("x"))
    except ValueError:
        raise ValueError(
            f"--shapes {text!r} is not a hidden and an intermediate size: write one like 2048x768"
        ) from None
    return hidden, intermediate


def _format(text: str) -> Format:
    from vllm_moe_offload.experts import Format

    known = [format.value for format in Format]
    if text not in known:
        raise ValueError(f"--formats {text!r} is no number format: give some of {', '.join(known)}")
    return Format(text)


def _check_writable(option: str, path: Path) -> None:
    folder = path.parent
    if (
        path.is_dir()
        or not folder.is_dir()
        or not os.access(path if path.exists() else folder, os.W_OK)
    ):
        raise ValueError(
            f"{option} {path} cannot be written: name a file in a folder that exists and is yours "
            "to write to"
        )


def _card() -> str:
    return f"cpu-{len(os.sched_getaffinity(0))}c"


def _commit() -> str:
    """The commit of the clone this file lies in, `?` where it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "?"
