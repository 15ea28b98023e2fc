"""Draw the loss curve and the expert load of the demo model from its training log.

Needs matplotlib::

    python models/plot_demo.py models/demo-moe
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def plot_loss(log: dict[str, Any], path: Path) -> None:
    """Draw training and held-out loss over the tokens seen, all runs one after the other."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    offset = 0.0
    for index, run in enumerate(log["runs"]):
        history = run["history"]
        tokens = [offset + entry["tokens"] / 1e6 for entry in history]
        held = [(t, e["heldout_loss"]) for t, e in zip(tokens, history, strict=True)
                if "heldout_loss" in e]  # fmt: skip
        label = {"label": "training"} if index == 0 else {}
        axes.plot(tokens, [e["loss"] for e in history], color="tab:blue", lw=0.8, **label)
        label = {"label": "held-out (part)"} if index == 0 else {}
        axes.plot(*zip(*held, strict=True), "o-", color="tab:orange", ms=3, lw=1, **label)
        offset += run["tokens_seen"] / 1e6
        if index + 1 < len(log["runs"]):
            axes.axvline(offset, color="grey", lw=0.8, ls=":")
    axes.plot(
        offset, log["heldout_loss"], "*", color="tab:red", ms=9, label="held-out (all, final)"
    )
    axes.set(xlabel="million tokens seen", ylabel="cross-entropy (nats per token)", ylim=(2.3, 4.5))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def plot_load(log: dict[str, Any], path: Path) -> None:
    """Draw how much of each layer's work every expert does on held-out text, 1 being even."""
    load = log["expert_load"]
    experts = len(load[0])
    figure, axes = plt.subplots(len(load), 1, figsize=(6.4, 1.2 * len(load) + 0.6), sharex=True)
    for layer, (axis, shares) in enumerate(zip(axes, load, strict=True)):
        axis.bar(range(experts), [share * experts for share in shares], color="tab:blue")
        axis.axhline(1, color="grey", lw=0.8, ls=":")
        axis.set_ylabel(f"layer {layer}")
        axis.set_ylim(0, 2.2)
    axes[-1].set_xlabel("expert (load relative to an even share)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Write ``loss.png`` and ``expert_load.png`` into the model folder given."""
    folder = Path(sys.argv[1])
    log = json.loads((folder / "training_log.json").read_text())
    plot_loss(log, folder / "loss.png")
    plot_load(log, folder / "expert_load.png")


if __name__ == "__main__":
    main()
