"""Loading: seconds of a worker's `load_model` and, in it, of filling the weights; and memory.

    python -m bench.load --layers 4 --load-format auto --json FILE     a random checkpoint's files
    python -m bench.load --layers 24 --json FILE                       weights made up

A contestant's worker loads the model as often as is asked and forgets it in between, all in one
process, eagerly; the first time has what is done once in it. Behind the weights ours measures
rates and checks itself, in a time that does not grow with the model. Of made-up weights there is
the whole time alone, since ours fills the experts behind vLLM's loader. Memory is the most that it
grew by while loading: torch's on the GPU, the host's as the kernel counts what is available. Files
are written just before, so that they are read from the page cache.
"""

from __future__ import annotations

import argparse

from bench import arguments, models, report, runner
from bench.common import MIN_REPEATS, Row, summary
from bench.runner import Cell

METRICS = {
    "load_s": "s",
    "weights_s": "s",
    "peak_gpu_gib": "GiB",
    "peak_host_gib": "GiB",
    "expert_gpu_gib": "GiB",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.arguments(parser)
    parser.add_argument("--repeats", type=arguments.number, default=MIN_REPEATS)
    options = parser.parse_args()
    if options.repeats < MIN_REPEATS:
        parser.error(f"--repeats {options.repeats}: a figure is a median of {MIN_REPEATS} or more")
    for name in ("gpus", "together"):
        if getattr(options, name) > 1:
            parser.error(f"--{name}: loads are timed one after another, on one GPU: leave it out")
    if options.turns is not None:
        parser.error("--turns: loading is what is timed, and nothing waits for it: leave it out")
    with runner.session("load", options) as session:
        if options.load_format != "dummy" and options.model in models.MODELS:
            if options.format != "bf16":
                parser.error("checkpoints are written in bf16 only: --load-format dummy")
            models.write_checkpoint(options.model, session.shape.layers, session.model)
        # Eager: what torch.compile has seen once is kept, and would take fresh memory every time.
        engine = {
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "enforce_eager": True,
        }
        metrics = dict(METRICS)
        if options.load_format == "dummy":
            del metrics["weights_s"]
        session.prepare(len(options.contestants))
        for name in options.contestants:
            session.add(_merge(session.figures(name, [Cell("model")], engine), metrics))
    for metric in report.TITLES:
        if metric in metrics:
            print(f"{report.TITLES[metric]}\n\n{report.table(session.rows, metric)}")


def _merge(rows: list[Row], metrics: dict[str, str]) -> list[Row]:
    """One row a metric over the repeats; too few of them are a row without a value."""
    made = []
    notes = [row["note"] for row in rows if row.get("note")]
    for metric, unit in metrics.items():
        values = [r["value"] for r in rows if r["metric"] == metric and r["value"] is not None]
        template = rows[0] | {"metric": metric, "unit": unit, "routing": None}
        template.pop("note", None)
        try:
            made.append(template | summary(values))
        except ValueError as error:
            nothing = dict.fromkeys(("value", "min", "max", "repeats"))
            made.append(template | nothing | {"note": (notes or [str(error)])[0]})
    return made


if __name__ == "__main__":
    main()
