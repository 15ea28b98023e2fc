"""How large the buffers of streamed layers are asked to be, on a GPU and in vLLM's CPU build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")
import torch

from vllm_moe_offload.config import OffloadConfig
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.integration import sizing
from vllm_moe_offload.integration.sizing import Sizing, Taken
from vllm_moe_offload.planning import LayerShape

# Of Qwen3-30B-A3B in bf16; the first of two layers has experts of half its size.
EXPERT = 3 * 2048 * 768 * 2


def buffers(settings: dict[str, Any], taken: Taken) -> tuple[float, float]:
    """The two sizes, in experts of the larger layer."""
    modules = []
    for rows in (EXPERT // 4, EXPERT // 2):
        host = {"w": torch.empty(128, rows, dtype=torch.bfloat16, device="meta")}
        moe_config = SimpleNamespace(num_experts=128)
        modules.append(SimpleNamespace(layer_name="a", moe_config=moe_config, host=host))
    shapes = [LayerShape("a", 128, ExpertLayout.of(module.host).nbytes) for module in modules]
    sized = Sizing(OffloadConfig.parse(settings), *cast(Any, [None] * 4))
    wanted, larger = sized._wanted_buffers(cast(Any, modules), shapes, taken)
    return wanted / (2 * EXPERT), larger / (2 * EXPERT)


@pytest.mark.parametrize(
    ("settings", "gpu", "cpu"),
    [
        ({}, (16, 28), (0, 0)),
        ({"stream_threshold": 64}, (16, 28), (16, 0)),
        ({"stream_threshold": "off"}, (0, 0), (0, 0)),
        ({"stream_threshold": 64, "stream_experts": 20}, (20, 0), (20, 0)),
    ],
)
def test_buffers_are_asked_for(
    settings: dict[str, Any],
    gpu: tuple[int, int],
    cpu: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_cpu, expected in ((False, gpu), (True, cpu)):
        monkeypatch.setattr(
            sizing, "current_platform", SimpleNamespace(is_cpu=lambda is_cpu=is_cpu: is_cpu)
        )
        assert buffers(settings, Taken(0, 0, 0)) == expected
        assert buffers(settings, Taken(2, 1, 1)) == (0, 0), "a draft model takes turns in them"
