"""CUDA graphs of more rows than a step on the device can have are left out, and it is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config.compilation import CUDAGraphMode

from vllm_moe_offload.integration import graphs


def config(sizes: list[int] | None, mode: CUDAGraphMode | None) -> Any:
    most = max(sizes or [], default=0)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=most, cudagraph_mode=mode
        )
    )


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(graphs.logger, level, lambda text, *values: lines.append(text % values))
    return lines


@pytest.mark.parametrize("mode", [m for m in CUDAGraphMode if m != CUDAGraphMode.NONE])
def test_larger_sizes_are_left_out_and_named(mode: CUDAGraphMode, said: list[str]) -> None:
    made = config([1, 2, 64, 72, 80], mode)
    for _ in range(2):
        graphs.limit_capture_sizes(made, 64)
        compilation = made.compilation_config
        assert compilation.cudagraph_capture_sizes == [1, 2, 64]
        assert compilation.max_cudagraph_capture_size == 64
        assert compilation.cudagraph_mode == mode
    assert len(said) == 1 and "no CUDA graphs of 72, 80 rows" in said[0]


def test_many_sizes_are_named_by_their_range(said: list[str]) -> None:
    graphs.limit_capture_sizes(config(list(range(8, 513, 8)), CUDAGraphMode.FULL), 64)
    assert "graphs of 72 to 512 rows" in said[0]


def test_without_a_size_left_none_is_captured(said: list[str]) -> None:
    made = config([128, 256], CUDAGraphMode.FULL_AND_PIECEWISE)
    graphs.limit_capture_sizes(made, 64)
    compilation = made.compilation_config
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE
    assert (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size) == ([], 0)
    assert "no CUDA graphs are captured: all sizes asked for (128, 256)" in said[0]


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        ([1, 64], CUDAGraphMode.FULL),
        ([128], CUDAGraphMode.NONE),
        (None, None),
        ([], CUDAGraphMode.NONE),
    ],
)
def test_nothing_to_leave_out_changes_nothing(
    sizes: list[int] | None, mode: CUDAGraphMode | None, said: list[str]
) -> None:
    made = config(sizes, mode)
    graphs.limit_capture_sizes(made, 64)
    assert made.compilation_config.cudagraph_capture_sizes == sizes
    assert made.compilation_config.cudagraph_mode == mode
    assert said == []
