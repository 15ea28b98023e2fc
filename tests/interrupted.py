"""Steps that an error ends somewhere, as the user's Ctrl-C does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Interrupted(KeyboardInterrupt):
    """Not an `Exception`, and nobody else's."""


class Interruption:
    """At the call of this number, from 0 on; `has_come`: whether one has come out of `of`.

    Even numbers are before what is called has been done, odd ones after: so a call counts twice.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_come = False

    @contextmanager
    def of(self, *calls: tuple[Any, str]) -> Iterator[None]:
        """Inside, one of these calls (object, method) raises, which ends what is inside."""
        numbers = itertools.count()

        def instead(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                for done in (lambda: None, lambda: original(*given, **named)):
                    result = done()
                    if next(numbers) == self.number:
                        raise Interrupted
                return result

            return call

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in calls:
                patch.setattr(owner, name, instead(getattr(owner, name)))
            try:
                yield
            except Interrupted:
                self.has_come = True


def interruptions(least: int) -> Iterator[Interruption]:
    """One at each number, until one is beyond the last call; there are `least` at least."""
    for number in itertools.count():
        one = Interruption(number)
        yield one
        if not one.has_come:
            assert number >= least
            return
