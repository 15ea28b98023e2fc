"""Result files as tables and pictures.

    python -m bench.report bench/results/h200/*.json --out docs/benchmarks.md

Ratios are of rows of one file only. A figure's share of the floor stands behind it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import report_cpu
from bench.common import Row, read

_HEAD = """# Benchmarks

Made by `python -m bench.report` from the files in [bench/results](../bench/results). Medians; in
brackets the floor's share, the floor being a lower bound from rates measured in the same run
([design](design.md), section 1). The rates are measured with the engines idle and vary, mostly by a
tenth or two: where a share is above 100 %, the lanes (what serves a missing expert: the bus, the
CPU) ran faster in the run than alone. After commit 5b9ce98 they are measured before and behind each
column, for its floor, and contestants that started together take turns column by column (before,
one after another: a minute apart, in which such a machine changes). Up to commit 2a4df13 they were
read over 2 GiB, part of which a large cache keeps: these floors are up to a fifth too low. The CPU
engine is timed by its own clock since 2026-11-30 evening (its tables of 2026-11-29 are of other
kernels, and with Python in each call: a tenth of 2048x768's with few rows); torch and kt-kernel are
timed from Python, which took 20 to 50 us a call of ours (`python_ms` in the files). And engines
that started beside others split their misses by what these left them then. The floors of prefills
from before 2026-11-30 have the CPU compute as much as it reads, and those up to commit 4098bbe both
lanes at the rate that each has by itself: they are too low for long prompts.
Figures of different runs are not to be compared: machines differ; of runs with the same contestants
the newest stands first, and older ones are there for what it lacks. A dash is a figure that was not
reached, and why stands below (`stopped after 12 s`: the time given to the whole run was over). A
heading ends with its file's name (`eager`: without CUDA graphs).

`auto`, `hybrid`, `cache`, `cpu` and `stream` are modes of this package, `vllm-gpu` is vLLM with
everything on the GPU, `vllm-uva` its `--cpu-offload-gb` and `vllm-prefetch` its
`--offload-group-size`, both on the experts. Routings (`uniform`, `local`, `switching`) are
imposed on made-up weights: what they are, what is given to each contestant, and what other rows
are called, says [bench/README.md](../bench/README.md). An empty place was not to be measured.
kt-kernel's INT4 has scales for 32 columns where ours has them for 128: compare operations there,
not bytes.

"""
TITLES = {
    "step_ms": "Decode, ms a step",
    "ttft_ms": "Prefill, ms to the first token",
    "chunk_ms": "A chunk of a prefill by itself, ms",
    "itl_p50_ms": "Between two tokens of a served request, ms, median",
    "itl_p99_ms": "Between two tokens of a served request, ms, 99th percentile",
    "itl_p99_chunks": "Between two tokens of a served request, chunk times, 99th percentile",
    "load_s": "Loading, s",
    "weights_s": "Loading weights, in that, s",
    "step_us": "What a step decides, us a layer",
    "doorbell_us": "Asking the CPU for nothing that takes time, us a layer",
    "doorbell_idle_us": "Not asking the CPU, us a layer",
    "fetch_gb_per_s": "Fetching experts by a kernel, GB/s",
    "layer_us": "An offloaded layer of a captured step, us",
}


def table(rows: Sequence[Row], metric: str) -> str:
    """Markdown: contestants down, what was measured across, ``value (floor / value)``.

    A last column for the GPU memory of the experts, where that was measured.
    """
    mine = [row for row in rows if row["metric"] == metric]
    columns = list(dict.fromkeys(_column(row) for row in mine))
    names = list(dict.fromkeys(row["contestant"] for row in mine))
    cells = {(row["contestant"], _column(row)): row for row in mine}
    beside = _beside(rows)
    titles = [*columns, *(["GPU GiB for experts"] if beside else [])]
    lines = ["| | " + " | ".join(titles) + " |", "|" + "---|" * (len(titles) + 1)]
    for name in names:
        figures = [_figure(cells, name, column) for column in columns]
        figures += [beside.get(name, "")] if beside else []
        lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n" + _notes(mine)


def sections(files: Iterable[Path]) -> str:
    """All tables of the files, each under what it is and where it was measured.

    The newest first, files of one day in the order given; the CPU engine's last.
    """
    parts = []
    named = sorted(files, key=lambda path: path.stem)  # of one day `decode` before `decode-2`
    found = sorted(((path, read(path)) for path in named), key=_date, reverse=True)
    for path, of_file in sorted(found, key=_is_of_cpu):
        runs = _runs(of_file)
        for number, rows in enumerate(runs, 1):
            head = rows[0]
            name = f"`{path.stem}`" + (f", run {number}" if len(runs) > 1 else "")
            if head["bench"] == "cpu":
                parts += [*_cpu_head(head, name), report_cpu.tables(rows)]
                continue
            about = ", ".join(
                f"{head[key]}" + (f" {key}" if key == "layers" else "")
                for key in ("model", "layers", "format", "card", "host_cpu")
                if head[key] is not None
            )
            versions = f"vLLM {head['vllm']}, torch {head['torch']}, commit {head['commit']}"
            for metric in _metrics(rows):
                parts += [
                    f"## {TITLES[metric]}: {name}",
                    f"{about}; {versions}, {head['date']}.",
                    table(rows, metric),
                    _floor_of_bytes(rows, metric),
                    _rates(rows),
                ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _date(file: tuple[Path, list[Row]]) -> str:
    return max((row["date"] for row in file[1]), default="")


def _is_of_cpu(file: tuple[Path, list[Row]]) -> bool:
    return any(row["bench"] == "cpu" for row in file[1])


def _cpu_head(head: Row, name: str) -> tuple[str, str]:
    where = f"{head['card']}, {head['host_cpu']}; torch {head['torch']}, commit {head['commit']}"
    return f"## The CPU expert engine: {name}", f"{where}, {head['date']}."


def picture(rows: Sequence[Row], metric: str, target: Path) -> None:
    """Bars of every contestant at every column, logarithmic, the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mine = [row for row in rows if row["metric"] == metric and row["value"] is not None]
    columns = list(dict.fromkeys(_column(row) for row in mine))
    names = [n for n in dict.fromkeys(row["contestant"] for row in mine) if n != "floor"]
    values = {(row["contestant"], _column(row)): row["value"] for row in mine}
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.6 * len(columns), 4), layout="constrained")
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        places = [c + (index - (len(names) - 1) / 2) * width for c in range(len(columns))]
        heights = [values.get((name, column), 0) for column in columns]
        bars = axes.bar(places, heights, width, label=name)
        axes.bar_label(bars, [f"{h:.3g}" if h else "" for h in heights], fontsize=7)
    for place, column in enumerate(columns):
        if ("floor", column) in values:
            label = "floor" if place == 0 else None
            axes.hlines(
                values["floor", column], place - 0.45, place + 0.45, "black", "--", label=label
            )
    axes.set_yscale("log")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylabel(TITLES[metric])
    axes.legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one run each, so that nothing is compared across runs."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    return list(runs.values())


def _metrics(rows: Sequence[Row]) -> list[str]:
    return [metric for metric in TITLES if any(row["metric"] == metric for row in rows)]


def _column(row: Row) -> str:
    words = [row["routing"]] if row["routing"] not in (None, "model") else []
    words += [f"{name} {row[name]}" for name in ("batch", "tokens") if row[name] is not None]
    return ", ".join(words) or "all"


def _figure(cells: dict[tuple[str, str], Row], name: str, column: str) -> str:
    row, floor = cells.get((name, column)), cells.get(("floor", column))
    if row is None:
        return ""
    if row["value"] is None:
        return "-"
    text = f"{row['value']:.3g}" if row["value"] < 100 else f"{row['value']:.0f}"
    if floor is None or floor["value"] is None or name in ("floor", "vllm-gpu"):
        return text  # the floor is that of experts that are not all on the GPU
    if row["value"] == 0:
        return text  # nothing has a share of it
    return f"{text} ({100 * floor['value'] / row['value']:.0f} %)"


def _beside(rows: Sequence[Row]) -> dict[str, str]:
    return {
        row["contestant"]: f"{row['value']:.2f}"
        for row in rows
        if row["metric"] == "expert_gpu_gib" and row["value"] is not None
    }


def _notes(rows: Sequence[Row]) -> str:
    notes: dict[str, Any] = {}
    for row in rows:
        if row["value"] is None:
            notes.setdefault(f"{row['contestant']}: {row['note']}", None)
    return "".join(f"\n- {note}" for note in notes)


def _floor_of_bytes(rows: Sequence[Row], metric: str) -> str:
    """That a step's floor lacks the GPU's part, where nothing has shown it."""
    of = {row["contestant"] for row in rows if row["metric"] == metric and row["value"] is not None}
    if metric != "step_ms" or "floor" not in of or "vllm-gpu" in of:
        return ""
    return "Its floor is of the missed bytes alone: `vllm-gpu` was not measured in this run."


def _rates(rows: Sequence[Row]) -> str:
    figures: dict[str, list[str]] = {}
    for row in rows:
        if row["contestant"] == "machine" and row["value"] is not None and _column(row) == "all":
            name = re.sub("_[a-z]+_per_s$", "", row["metric"]).replace("_", " ")
            figures.setdefault(row["unit"], []).append(f"{name} {row['value']:.1f}")
    each = (f"{unit}: {', '.join(those)}" for unit, those in figures.items())
    return f"The machine in this run, {'; '.join(each)}." if figures else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="markdown file; default: printed")
    parser.add_argument("--pictures", type=Path, help="folder for a PNG of each table")
    options = parser.parse_args()
    for path in options.files:
        try:
            if not read(path):
                raise ValueError(f"{path} holds no rows")
        except (OSError, ValueError) as error:
            parser.error(f"{error}: give files that a benchmark's --json has written")
    text = _HEAD + sections(options.files)
    if options.out:
        options.out.write_text(text)
    else:
        print(text)
    if options.pictures:
        for path in options.files:
            for rows in _runs(read(path)):
                name = f"{rows[0]['card']}-{path.stem}-{rows[0]['run']}"
                if rows[0]["bench"] == "cpu":
                    report_cpu.scaling(rows, options.pictures / f"{name}.png")
                for metric in _metrics(rows):
                    picture(rows, metric, options.pictures / f"{name}-{metric}.png")


if __name__ == "__main__":
    main()
