from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.engine.shards import Shard, random_shard
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import ExpertSpec

ISAS = CpuExpertEngine(threads=1).isas_available


@pytest.fixture(scope="package", autouse=True)
def oracle_in_one_thread() -> Iterator[None]:
    """torch's threads busy-wait for each other: on a shared machine small products take seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=ISAS)
def engine(request: pytest.FixtureRequest) -> Iterator[CpuExpertEngine]:
    """An engine for every instruction set of this host, in turn."""
    with CpuExpertEngine(isa=request.param) as engine:
        yield engine


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def make_shard(generator: torch.Generator) -> Callable[[ExpertSpec, int], Shard]:
    return lambda spec, experts: random_shard(spec, experts, generator)
