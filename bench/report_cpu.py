"""Rows of `moe-offload bench cpu` and `bench.kt` as tables and a picture of how threads scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from bench.common import Row

T = TypeVar("T")

# What limits: the bytes of the weights up to this many rows an expert, above it the arithmetic.
MEMORY_ROWS = 16

METRICS = {
    "weight_gb_per_s": ("read_gb_per_s", "GB/s of weights (share of the memory's read bandwidth)"),
    "tflop_per_s": ("tflop_per_s", "TFLOP/s (share of the AMX peak)"),
}


def tables(rows: Sequence[Row]) -> str:
    """Markdown: a table for each expert and metric, with the most threads measured."""
    most = max(row["threads"] for row in rows)
    ceilings = _ceilings(rows)
    parts = [_machine(ceilings, most)]
    for model in _distinct(row["model"] for row in rows if row["model"]):
        for metric, (ceiling, title) in METRICS.items():
            mine = [
                row
                for row in rows
                if (row["model"], row["metric"], row["threads"]) == (model, metric, most)
                and (row["rows"] <= MEMORY_ROWS) == (metric == "weight_gb_per_s")
            ]
            if mine:
                parts.append(f"Experts of {model}, {title}, {most} threads:")
                parts.append(_table(mine, ceilings.get((most, ceiling))))
    return "\n\n".join(parts)


def scaling(rows: Sequence[Row], target: Path) -> bool:
    """Draws GB/s of the fewest rows over the threads; False where only one count was measured."""
    ours = [
        row
        for row in rows
        if (row["contestant"], row["metric"]) == ("cpu", "weight_gb_per_s")
        and row["value"] is not None
    ]
    if len({row["threads"] for row in ours}) < 2:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fewest = min(row["rows"] for row in ours)
    models = _distinct(row["model"] for row in ours)
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(5 * len(models), 4), layout="constrained", squeeze=False
    )
    ceiling = {t: v for (t, metric), v in _ceilings(rows).items() if metric == "read_gb_per_s"}
    for plot, model in zip(axes[0], models, strict=True):
        plot.plot(*zip(*sorted(ceiling.items()), strict=True), "k--", label="memory read")
        lines = [row for row in ours if (row["model"], row["rows"]) == (model, fewest)]
        for who in _distinct((row["format"], row["isa"]) for row in lines):
            points = sorted((r["threads"], r["value"]) for r in lines if _who(r) == who)
            plot.plot(*zip(*points, strict=True), "o-", label=" ".join(who))
        plot.set_title(f"{model}, {fewest} rows an expert")
        plot.set_xlabel("threads")
        plot.set_ylabel("GB/s of weights")
        plot.set_ylim(bottom=0)
        plot.legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return True


def _table(rows: Sequence[Row], ceiling: float | None) -> str:
    counts = sorted({row["rows"] for row in rows})
    lines = [
        "| format | | " + " | ".join(f"{count} rows" for count in counts) + " |",
        "|" + "---|" * (len(counts) + 2),
    ]
    cells = {(row["format"], _name(row), row["rows"]): row["value"] for row in rows}
    for format, name in _distinct((row["format"], _name(row)) for row in rows):
        figures = [_figure(cells.get((format, name, count)), ceiling) for count in counts]
        lines.append(f"| {format} | {name} | " + " | ".join(figures) + " |")
    notes = _distinct(
        f"\n- {_name(row)}, {row['format']}: {row['note']}" for row in rows if row["value"] is None
    )
    return "\n".join(lines) + "".join(["\n", *notes] if notes else [])


def _figure(value: float | None, ceiling: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return text if not ceiling else f"{text} ({100 * value / ceiling:.0f} %)"


def _machine(ceilings: dict[tuple[int, str], float], threads: int) -> str:
    read, peak = (ceilings.get((threads, m)) for m in ("read_gb_per_s", "tflop_per_s"))
    text = f"The machine in this run, {threads} threads: {read or 0:.1f} GB/s read"
    return text + (f", {peak:.1f} TFLOP/s of AMX bf16 tiles." if peak else ".")


def _ceilings(rows: Sequence[Row]) -> dict[tuple[int, str], float]:
    """By threads and metric; the best of the measurements, which instruction sets repeat."""
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        if row["contestant"] == "floor" and row["value"] is not None:
            key = (row["threads"], row["metric"])
            found[key] = max(row["value"], found.get(key, 0.0))
    return found


def _who(row: Row) -> tuple[str, str]:
    return row["format"], row["isa"]


def _name(row: Row) -> str:
    return f"{row['contestant']} {row['isa']}" if row["isa"] else row["contestant"]


def _distinct(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
