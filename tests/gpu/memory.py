"""What loading and serving a model take of the GPU's and the host's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.plugins import load_general_plugins
from vllm.v1.worker.worker_base import WorkerWrapperBase

from bench.child import Sampler, dense_bytes

_GIB = 2**30


@dataclass
class Loading:
    """Bytes above what there was before, and seconds. `dense`: parameters outside the experts."""

    gpu_peak: int = 0
    gpu_after: int = 0
    host_after: int = 0
    dense: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"loaded in {self.seconds:.1f} s, GPU peak {self.gpu_peak / _GIB:.3f} GiB and after it "
            f"{self.gpu_after / _GIB:.3f} GiB ({self.dense / _GIB:.3f} GiB dense), host "
            f"{self.host_after / _GIB:.2f} GiB"
        )


def anonymous_bytes() -> int:
    """Of this process: without files' pages, which other processes share and the system drops."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@contextmanager
def watch_loading() -> Iterator[Loading]:
    """Measures the `load_model` of the worker that is made inside; filled in when it has loaded."""
    loading = Loading()
    load_general_plugins()  # the plugin adds to the same class, first
    load = WorkerWrapperBase.load_model

    def load_model(worker: Any, *args: Any, **kwargs: Any) -> None:
        before = anonymous_bytes()
        with Sampler() as seen:
            began = time.perf_counter()
            load(worker, *args, **kwargs)
            loading.seconds = time.perf_counter() - began
        loading.gpu_peak = seen.gpu_most - seen.gpu_before
        loading.gpu_after = seen.gpu_now() - seen.gpu_before
        loading.host_after = anonymous_bytes() - before
        loading.dense = dense_bytes(worker.worker.get_model())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerWrapperBase, "load_model", load_model)
        yield loading


@dataclass
class Serving:
    """The most GPU bytes above those held before: activations, all else being allocated then."""

    gpu_peak: int = 0


@contextmanager
def watch_serving() -> Iterator[Serving]:
    """Measures what is computed inside; filled in at its end."""
    serving = Serving()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield serving
    torch.cuda.synchronize()
    serving.gpu_peak = torch.cuda.max_memory_allocated() - before
