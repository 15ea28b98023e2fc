"""Rows that are copied by their addresses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_offload.device.copies import CopyStream, RowCopies, Rows, Runs

CPU = torch.device("cpu")
DEVICES = [CPU] + [
    pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)
    for _ in range(torch.cuda.is_available())
]
DTYPES = {"weight": torch.bfloat16, "scale": torch.float32, "bytes": torch.uint8}


def tensors(rows: int, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Random ones of several dtypes and ranks, page-locked on the CPU of a machine with a GPU."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (rows, 3, 5), "scale": (rows, 7), "bytes": (rows,)}
    made = {
        name: torch.randint(0, 200, shape, generator=generator).to(DTYPES[name])
        for name, shape in shapes.items()
    }
    if device.type == "cuda":
        return {name: tensor.to(device) for name, tensor in made.items()}
    return {
        name: tensor.pin_memory() if torch.cuda.is_available() else tensor
        for name, tensor in made.items()
    }


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, Runs]:
    """Rows there are, rows there is room for, and runs that do not overlap where they go."""
    source, room = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    made, row = [], 0
    while row < room:
        length = draw(st.integers(1, min(source, room - row)))
        start = draw(st.integers(0, source - length))
        if draw(st.booleans()):
            made.append((slice(start, start + length), slice(row, row + length)))
        row += length
    return source, room, made


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)  # the first one on a device waits for CUDA to start
@given(case=runs())
def test_runs_are_copied_and_nothing_else_is(
    device: torch.device, case: tuple[int, int, Runs]
) -> None:
    source, room, chosen = case
    host, to = tensors(source, CPU, 1), tensors(room, device, 2)
    expected = {name: tensor.clone() for name, tensor in to.items()}
    for name, tensor in expected.items():
        for taken, rows in chosen:
            tensor[rows] = host[name][taken].to(device)
    stream = CopyStream(device)
    done = stream.mark()
    stream.copy((), after=stream.mark(), done=done, rows=Rows(RowCopies(host, to), chosen))
    done.wait()
    for name, tensor in expected.items():
        assert torch.equal(to[name], tensor), name


def test_rows_that_are_not_alike_are_refused() -> None:
    host = torch.zeros(4, 6)
    for to, why in (
        (torch.zeros(2, 5), "cannot be copied"),
        (torch.zeros(2, 6, dtype=torch.int32), "cannot be copied"),
        (torch.zeros(6, 2).T, "contiguous"),
    ):
        with pytest.raises(ValueError, match=f"w: .*{why}"):
            RowCopies({"w": host}, {"w": to})
