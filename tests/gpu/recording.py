"""What the layers of an engine last computed, in graphs too, to be computed again in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.engine.oracle import relative_error
from tests.gpu.oracle import Checked
from vllm_moe_offload.lanes import OffloadedLayer


class Recorded:
    """The last step of a layer: buffers that are written by launches, so that a graph holds them.

    Made by the first step of the layer, which comes before any capture.
    """

    def __init__(self, max_rows: int, x: torch.Tensor, ids: torch.Tensor) -> None:
        k = ids.shape[1]
        with torch.inference_mode(False):
            self.x = torch.zeros(max_rows, x.shape[1], dtype=x.dtype, device=x.device)
            self.weights = torch.zeros(max_rows, k, device=x.device)
            self.ids = torch.zeros(max_rows, k, dtype=torch.int32, device=x.device)
            self.out = torch.zeros_like(self.x)
            self.rows = torch.zeros((), dtype=torch.int32, device=x.device)

    def write(self, x: Any, weights: Any, ids: Any, padding: Any, out: Any, sentinel: int) -> None:
        rows = len(x)
        if padding is not None:
            ids = ids.masked_fill(padding[:, None], sentinel)
        for buffer, values in (
            (self.x, x),
            (self.weights, weights),
            (self.ids, ids),
            (self.out, out),
        ):
            buffer[:rows].copy_(values)
        self.rows.fill_(rows)

    def error(self, checked: Checked) -> tuple[float, int]:
        """Of the norm from float64, and of how many rows; waits."""
        x, weights, ids, out = (
            tensor[: int(self.rows)] for tensor in (self.x, self.weights, self.ids, self.out)
        )
        real = ids[:, 0] < checked.layer.num_experts
        if not real.any():
            return 0.0, 0
        expected = checked.routed(x[real], weights[real], ids[real])
        return relative_error(out[real], expected), int(real.sum())


class Recorder:
    """Of every layer that `recording` was entered for, its last step."""

    def __init__(self, max_rows: int) -> None:
        self.of: dict[int, Recorded] = {}
        self._max_rows = max_rows

    def write(self, layer: OffloadedLayer, x: Any, weights: Any, ids: Any, *rest: Any) -> None:
        recorded = self.of.get(id(layer))
        if recorded is None:
            recorded = self.of[id(layer)] = Recorded(self._max_rows, x, ids)
        recorded.write(x, weights, ids, *rest, layer.num_experts)


@contextmanager
def recording(max_rows: int) -> Iterator[Recorder]:
    """Steps of up to so many rows, of engines that are started inside."""
    recorder, forward = Recorder(max_rows), OffloadedLayer.forward

    def recorded(
        self: OffloadedLayer, x: Any, weights: Any, ids: Any, padding: Any = None, *rest: Any
    ) -> torch.Tensor:
        out = forward(self, x, weights, ids, padding, *rest)
        recorder.write(self, x, weights, ids, padding, out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadedLayer, "forward", recorded)
        yield recorder


@contextmanager
def after_steps(done: Callable[[int], None]) -> Iterator[None]:
    """Inside, `done` is called with the number of each step when the step has been launched."""
    execute, steps = WorkerWrapperBase.execute_model, 0

    def counted(self: WorkerWrapperBase, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        output = execute(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            steps += 1
            done(steps)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerWrapperBase, "execute_model", counted)
        yield
