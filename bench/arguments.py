"""Types of options: what is wrong is refused before anything runs."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from bench.common import read

T = TypeVar("T")


def words(text: str) -> list[str]:
    """``a,b`` as a list, in which nothing is twice."""
    return _once(_split(text))


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _once(given: list[T]) -> list[T]:
    if twice := [each for each in dict.fromkeys(given) if given.count(each) > 1]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(str, twice))}: given more than once")
    return given


def known(text: str, names: Sequence[str]) -> list[str]:
    """At least one word, each among the `names`."""
    given = words(text)
    unknown = [word for word in given if word not in names]
    if unknown or not given:
        wrong = ", ".join(unknown) or repr(text)
        raise argparse.ArgumentTypeError(f"{wrong}: not among {', '.join(names)}")
    return given


def numbers(text: str) -> list[int]:
    """``1,8,32`` as a list of numbers from 1 up."""
    given = _split(text)
    if not given or not all(word.isdecimal() and int(word) > 0 for word in given):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 1 up, like 1,8,32")
    return _once([int(word) for word in given])


def number(text: str) -> int:
    """One number from 1 up."""
    found = numbers(text)
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give one number from 1 up")
    return found[0]


def positive(text: str) -> float:
    """A number above 0, whole or not."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a finite number above 0")
    return found


def rows_file(text: str) -> Path:
    """A file that `common.append` can add to: one of rows, or a new one, in a new folder even."""
    path = Path(text)
    try:
        if path.is_file():
            read(path)
        elif path.exists():
            raise ValueError(f"{path} is there and no file")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        why = error if isinstance(error, ValueError) else f"{path}: {error.strerror}"
        raise argparse.ArgumentTypeError(
            f"{why}: name a new file, in a folder that is yours to write to, or one that a "
            "benchmark has written"
        ) from None
    return path
