"""Fixtures of modules whose engines draw tokens from one checkpoint; see `tests.gpu.drawing`.

vLLM is imported by them alone: without it the modules are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm import LLM

    from tests.gpu.drawing import Drawn


@pytest.fixture(scope="module")
def drawn(checkpoint: Path) -> dict[str, Drawn]:
    """By name: stock's at first, and what each test adds."""
    from tests.e2e.engines import engine
    from tests.gpu.drawing import CAPTURED, SIZES, draw

    with engine(checkpoint, dtype="bfloat16", **CAPTURED, **SIZES) as llm:
        return {"stock": draw(llm)}


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Iterator[LLM]:
    """In float32, of the same checkpoint: the last tests of a module are judged by it."""
    from tests.e2e.engines import engine
    from tests.gpu.drawing import SIZES

    with engine(checkpoint, dtype="float32", enforce_eager=True, **SIZES) as llm:
        yield llm
