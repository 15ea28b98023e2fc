"""Steps that an error ends somewhere, as the user's Ctrl-C does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


class Interrupted(KeyboardInterrupt):
    """Not an `Exception`, and nobody else's."""


def interrupt(
    patch: pytest.MonkeyPatch, calls: Sequence[tuple[Any, str]], number: int
) -> Callable[[], bool]:
    """Let one of these calls (object, method) raise: the one of that number, from 0 on.

    Even numbers raise before what is called has been done, odd ones after: so a call counts twice.
    Returns whether it has been reached.
    """
    count = 0

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal count
            for done in (lambda: None, lambda: original(*given, **named)):
                result, at = done(), count
                count += 1
                if at == number:
                    raise Interrupted
            return result

        return call

    for owner, name in calls:
        patch.setattr(owner, name, instead(getattr(owner, name)))
    return lambda: count > number
