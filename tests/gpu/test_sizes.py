"""Slots sized from the memory there is: what is left is enough to serve, and not more is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
import torch

from tests.e2e.engines import Prompts, engine, greedy, stats
from tests.gpu import checkpoints
from vllm_moe_offload import MemoryShortError, moe_offload_args

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = checkpoints.write("bf16", tmp_path_factory.mktemp("sizes"), seed=5)
    return folder


def share(gib: float) -> float:
    """gpu_memory_utilization for so much of this GPU."""
    return gib * 2**30 / torch.cuda.mem_get_info()[1]


def test_automatic_slots_leave_room_for_the_kv_cache_and_the_step(checkpoint: Path) -> None:
    prompts = Prompts.draw(checkpoints.VOCABULARY)
    free, _ = torch.cuda.mem_get_info()
    with engine(
        checkpoint,
        dtype="bfloat16",
        gpu_memory_utilization=share(4.0),
        kv_cache_memory_bytes=None,
        **moe_offload_args(),
    ) as llm:
        generated = greedy(llm, prompts)
        done = stats(llm)
        slots = {layer["slots"] for layer in done["layers"].values()}
        taken = free - torch.cuda.mem_get_info()[0]
    print(f"\n{slots} slots, {taken / 2**30:.2f} of 4 GiB taken")
    assert all(16 < count < checkpoints.EXPERTS for count in slots)
    assert taken <= 4.25 * 2**30
    assert all(len(tokens) == 12 for tokens in generated)


def test_too_many_slots_are_refused_with_all_numbers(checkpoint: Path) -> None:
    with (
        pytest.raises(MemoryShortError, match=r"120 slots in each of 4 layers need .* are left"),
        engine(
            checkpoint,
            dtype="bfloat16",
            gpu_memory_utilization=share(3.0),
            **moe_offload_args(mode="cache", slots_per_layer=120),
        ),
    ):
        pass
