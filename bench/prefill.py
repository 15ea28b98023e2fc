"""Prefill: the time to the first token of one prompt, prefilled in steps of up to 8192 tokens.

    python -m bench.prefill --layers 24 --tokens 512,4096,32768 --chunk 8192 --json FILE

Prefix caching is off and every prompt is another; one to warm up, then five.
"""

from __future__ import annotations

import argparse

from bench import arguments, latency, runner
from bench.runner import Cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.arguments(parser)
    parser.add_argument(
        "--tokens",
        type=arguments.numbers,
        default=[512, 2048, 4096, 8192, 32768],
        help="of a prompt",
    )
    parser.add_argument(
        "--chunk", type=arguments.number, default=8192, help="tokens of a step, at most"
    )
    parser.add_argument("--routing", type=runner.routings, default=["uniform"])
    options = parser.parse_args()
    latency.run(
        "prefill", options, [Cell(r, tokens=t) for r in options.routing for t in options.tokens]
    )


if __name__ == "__main__":
    main()
