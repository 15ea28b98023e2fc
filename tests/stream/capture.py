"""CUDA's rules of capture, kept by marks and copies that do nothing else.

In a capture a stream may only wait for what was recorded in the same one, outside of all only for
what was recorded outside; the copying stream takes part from its first such wait on; and what it
does has been waited for when the capture ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_moe_offload.device.copies import Rows


class Rules:
    """`capture`: the number of the one under way, or None."""

    def __init__(self) -> None:
        self.capture: int | None = None
        self.captures = 0
        self.is_copying = False
        # Of the capture under way: whether the copying stream takes part, copies made, waited for.
        self.is_forked = False
        self.copied = self.joined = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A capture of the computing stream."""
        self.captures += 1
        self.capture, self.is_forked = self.captures, False
        self.copied = self.joined = 0
        yield
        assert self.joined == self.copied, "copies that nobody waits for"
        self.capture = None


class RuledMark:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._recorded: int | str | None = "never"
        self._copies = 0

    def record(self) -> None:
        rules = self._rules
        assert rules.is_forked or not (rules.is_copying and rules.capture), "not in the capture"
        self._recorded = rules.capture
        self._copies = rules.copied if rules.is_copying else 0

    def wait(self) -> None:
        rules = self._rules
        if self._recorded == "never":
            return
        assert self._recorded == rules.capture, (self._recorded, rules.capture)
        if rules.is_copying:
            rules.is_forked = True
        else:
            rules.joined = max(rules.joined, self._copies)


class RuledCopies:
    """In place of a CopyStream."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def mark(self) -> RuledMark:
        return RuledMark(self._rules)

    def stopwatch(self) -> None:
        """Nobody asks: without a CPU's part nothing is timed."""

    def copy(
        self,
        pairs: Any,
        *,
        after: RuledMark,
        done: RuledMark,
        watch: None = None,
        rows: Rows | None = None,
    ) -> None:
        assert watch is None
        rules = self._rules
        rules.is_copying = True
        after.wait()
        assert rules.capture is None or rules.is_forked, "not in the capture"
        of_rows = rows.copies.pairs(rows.runs) if rows is not None else ()
        for to, source in (*of_rows, *pairs):
            to.copy_(source)
            rules.copied += 1
        done.record()
        rules.is_copying = False

    def join(self) -> None:
        assert self._rules.capture is None, "not to be captured"
