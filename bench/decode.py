"""Decode: the time of an engine step in which every request of a batch gets one token.

    python -m bench.decode --layers 24 --batches 1,8,32 --routing uniform,local --json FILE

The same method for every contestant: a batch is prefilled in one step, caches are filled by up to
64 steps, then seven times the mean of up to 64 steps is taken (of ``--routing switching`` of as
many under each simulated routing, one after the other). ``--tokens 512,4096`` measures prefills
too, as `bench.prefill` does, in the same engines: starting them takes most of the time.
"""

from __future__ import annotations

import argparse

from bench import arguments, latency, runner
from bench.common import SIMULATED, SWITCHING
from bench.runner import Cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.arguments(parser)
    parser.add_argument("--batches", type=arguments.numbers, default=[1, 8, 32])
    parser.add_argument("--routing", type=runner.step_routings, default=["uniform", "local"])
    parser.add_argument("--tokens", type=arguments.numbers, default=[], help="prefills, if any")
    parser.add_argument(
        "--chunk", type=arguments.number, default=8192, help="tokens of a step, at most"
    )
    options = parser.parse_args()
    cells = [Cell(r, batch=b) for r in options.routing for b in options.batches]
    routing = options.routing[0] if options.routing[0] != SWITCHING else SIMULATED[0]
    cells += [Cell(routing, tokens=t) for t in options.tokens]
    latency.run("decode", options, cells)


if __name__ == "__main__":
    main()
