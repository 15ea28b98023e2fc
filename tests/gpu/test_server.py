"""`vllm serve` on a GPU: what a step does is readable while it serves."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import aiohttp

from bench.server import metrics, server, stream
from tests.gpu import checkpoints
from vllm_moe_offload import moe_offload_args

pytestmark = pytest.mark.gpu
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.25,
    "kv_cache_memory_bytes": 1 << 30,
    "compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4]},
    **moe_offload_args(mode="auto", slots_per_layer=26),
}
EXPERT_BYTES = 3 * checkpoints.HIDDEN * checkpoints.INTERMEDIATE * 2
PROMPT, NEW, REQUESTS = 16, 60, 3


async def generate(url: str) -> list[int]:
    """How many tokens each of some requests got."""
    async with aiohttp.ClientSession() as session:
        prompts = [[3 + i] * PROMPT for i in range(REQUESTS)]
        return await asyncio.gather(*(stream(session, url, p, NEW, []) for p in prompts))


def counted(url: str) -> dict[str, float]:
    """Our counters, by their names and lanes."""
    found = re.findall(
        r'^vllm_moe_offload_(\w+)_total\{engine="0"(.*?)\} (\S+)$', metrics(url), re.M
    )
    return {name + lane: float(value) for name, lane, value in found}


def test_hits_lanes_and_the_floor_are_readable_while_serving(tmp_path: Path) -> None:
    model = checkpoints.write("bf16", tmp_path, layers=2)[0]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_LOG_STATS_INTERVAL": "0.5", "VLLM_LOGGING_LEVEL": "INFO"}
    log = tmp_path / "log"
    with server(ENGINE | {"model": model}, environment, log, 240) as url:
        assert asyncio.run(generate(url)) == [NEW] * REQUESTS
        until = time.monotonic() + 20
        tokens = REQUESTS * (PROMPT + NEW - 1)
        while (shown := counted(url)).get("tokens", 0) < tokens and time.monotonic() < until:
            time.sleep(0.5)
    print(shown)
    assert shown["tokens"] >= tokens
    assert shown["hits"] > 0 and shown["misses"] > 0
    lanes = shown['bytes,lane="fetched"'], shown['bytes,lane="cpu"']
    # An expert that the CPU computes may be fetched as well, for later steps.
    assert min(lanes) > 0 and sum(lanes) >= shown["misses"] * EXPERT_BYTES
    assert shown["decode_seconds"] > 0 and shown["decode_floor_seconds"] > 0
    said = log.read_text()
    assert "of the used experts in slots, " in said and re.search(
        r"decode at \d+% of its floor", said
    )
