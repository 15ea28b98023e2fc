"""Where the kernels of a test file run: compiled for a CUDA device, or by Triton's interpreter.

The interpreter is switched on when Triton is imported, so it needs a process of its own: the last
test of such a file starts one over the same file.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The layers (see `tests.routing.steps.layers`) that kernels are tried on: compiled, few, since each
# takes a second or more to compile for.
SIZES = None if INTERPRETED else [(1, 1, 1), (6, 2, 2), (13, 5, 1), (24, 16, 7)]


def marked(test: object) -> object:
    """A test that runs in the interpreter's process, and compiled where there is a device."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory that `DEVICE` can read."""
    return tensor.clone() if INTERPRETED else tensor.cpu().pin_memory()


def _store_words_once() -> None:
    """Let the interpreter write a single word with one store, as a GPU does.

    Its own copy of four bytes writes them twice: a thread that takes a flag in between finds it set
    again, and a request would be answered twice.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    store = builder.create_store

    def create_store(self: Any, ptr: Any, value: Any, cache_policy: Any) -> None:
        if ptr.data.size != 1 or value.data.dtype != np.int32:
            store(self, ptr, value, cache_policy)
            return
        word = ctypes.c_int32.from_address(int(ptr.data.item()))
        word.value = int(value.data.item())

    builder.create_store = create_store


if INTERPRETED:
    _store_words_once()


def run_interpreted(file: str) -> None:
    """Run the tests of this file that are not for a GPU by the interpreter."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", file],
        capture_output=True,
        text=True,
        timeout=900,  # a request that nobody answers is waited for without end
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
