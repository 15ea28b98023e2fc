"""What a layer has done."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Counts since the layer was built or its counters were reset.

    `hits` and `misses` count experts a step uses that were in a slot before it, or were not, but
    for streamed steps, which use all, and layers without slots; `cpu_experts` those the CPU lane
    computed, and `promoted` those of them that were copied into slots meanwhile; `bytes_fetched`
    all bytes copied from host memory into slots; `waves` the waves of all steps; `tokens` rows of
    real tokens; `streamed` the steps whose experts passed through buffers, and `bytes_streamed`
    what was copied there from host memory; `kept` the experts that were copied from there into
    slots, and `bytes_kept` their bytes, which `bytes_fetched` does not count.
    """

    steps: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    cpu_experts: int = 0
    promoted: int = 0
    waves: int = 0
    bytes_fetched: int = 0
    streamed: int = 0
    bytes_streamed: int = 0
    kept: int = 0
    bytes_kept: int = 0

    def __iadd__(self, other: Counters) -> Counters:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self
