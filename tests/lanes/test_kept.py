"""Slots hold what the tables say after streamed steps, decided by the host and on the device.

On the device by Triton's interpreter, in a process of its own that the last test here starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.device.kernels import INTERPRETED, run_interpreted
from tests.engine import oracle
from tests.engine.shards import random_shard, tolerance
from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.device.copies import CopyStream
from vllm_moe_offload.device.step import DeviceStep
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import MAX_CAPTURED, CapturedLayer, EngineLane, OffloadedLayer
from vllm_moe_offload.lanes.kept import KeptOnDevice
from vllm_moe_offload.planning import TailRates
from vllm_moe_offload.stream import BufferMemory, CpuTail, LayerStreamer, buffer_bytes

CPU = torch.device("cpu")
EXPERTS, SLOTS, TOP_K = 12, 4, 2
ROWS = MAX_CAPTURED + 8
SPEC = ExpertSpec(24, 10, Activation.SILU, Format.FP32)


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine(threads=1) as engine:
        yield engine


class Model:
    """One layer of random experts, whose slots and buffers show what was not copied."""

    def __init__(
        self, engine: CpuExpertEngine, buffer_experts: int = EXPERTS, streams: bool = True
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.host = random_shard(SPEC, EXPERTS, self.generator)

        def lane(tensors: dict[str, torch.Tensor]) -> EngineLane:
            return EngineLane(engine, SPEC, tensors, TOP_K, ROWS)

        def capture(slots: dict[str, torch.Tensor], lane: EngineLane) -> CapturedLayer:
            side = SideStream(CPU)
            return CapturedLayer(self.host, slots, lane, side, policy="lfru", top_k=TOP_K)

        self.layer = OffloadedLayer(
            self.host,
            HostDevice(),
            SPEC.layout.empty,
            lane,
            lane(self.host),
            num_slots=SLOTS,
            policy="lfru",
            capture=capture if INTERPRETED else None,
        )
        self.streamer = LayerStreamer(CopyStream(CPU), MAX_CAPTURED)
        nbytes = buffer_bytes(SPEC.layout, buffer_experts)
        buffers = [BufferMemory(nbytes, CPU).tensors(SPEC.layout, buffer_experts) for _ in range(2)]
        for shard in (*buffers, self.layer._slots.cache.tensors):
            for tensor in shard.values():
                tensor.fill_(float("nan"))
        if streams:
            self.layer.stream_through(
                self.streamer, [(buffer, lane(buffer)) for buffer in buffers], "layer"
            )

    def step(self, experts: list[int], rows: int, requests: list[int] | None = None) -> None:
        """A step of rows of these experts: the oracle's output, and slots that are as they say."""
        chosen = torch.tensor(experts)
        ids = torch.stack(
            [
                chosen[torch.randperm(len(experts), generator=self.generator)[:TOP_K]]
                for _ in range(rows)
            ]
        )
        self.check(ids, None if requests is None else torch.tensor(requests, dtype=torch.int32))

    def check(self, ids: torch.Tensor, requests: torch.Tensor | None) -> None:
        x = torch.randn((len(ids), SPEC.hidden), generator=self.generator)
        weights = torch.rand(ids.shape, generator=self.generator)
        got = self.layer.forward(x, weights, ids, None, requests)
        expected = oracle.experts(SPEC, self.host, x, ids.int(), weights)
        assert oracle.relative_error(got, expected) <= tolerance(SPEC)
        slot_of = self.slot_of
        for name, tensor in self.layer._slots.cache.tensors.items():
            for expert in np.flatnonzero(slot_of >= 0):
                assert torch.equal(tensor[slot_of[expert]], self.host[name][expert])

    @property
    def slot_of(self) -> np.ndarray:
        return self.layer._in_slots().slot_of.numpy()

    def in_slots(self) -> set[int]:
        return set(np.flatnonzero(self.slot_of >= 0).tolist())


# Whole in a buffer, and in waves.
sizes = pytest.mark.parametrize("buffer_experts", [EXPERTS, EXPERTS - 1, 5, 1])


@sizes
def test_a_prompt_leaves_what_its_last_rows_use(
    engine: CpuExpertEngine, buffer_experts: int
) -> None:
    model = Model(engine, buffer_experts)
    first = torch.arange(TOP_K).repeat(ROWS - 40, 1)
    last = torch.tensor([[8, 9], [10, 11]]).repeat(20, 1)
    model.check(torch.cat([first, last]), torch.tensor([0, ROWS], dtype=torch.int32))
    assert model.in_slots() == {8, 9, 10, 11}
    model.step([8, 9, 10, 11], 3)
    done = model.layer.counters
    assert (done.kept, done.bytes_kept) == (4, 4 * SPEC.layout.nbytes)
    assert (done.misses, done.bytes_fetched) == (0, 0)
    model.layer.resize(SLOTS)
    assert model.layer.counters == done
    model.layer.reset_counters()
    assert model.layer.counters.kept == 0


@sizes
def test_running_requests_keep_theirs(engine: CpuExpertEngine, buffer_experts: int) -> None:
    model = Model(engine, buffer_experts)
    for _ in range(40):
        model.step([0, 1], 2)
    prompt = torch.tensor([[4, 5], [6, 7], [8, 9], [10, 11]]).repeat(ROWS // 4, 1)[: ROWS - 1]
    ids = torch.cat([torch.tensor([[0, 1]]), prompt])
    for _ in range(3):
        model.check(ids, torch.tensor([0, 1, ROWS], dtype=torch.int32))
        assert model.in_slots() >= {0, 1}
    assert len(model.in_slots()) == SLOTS


@sizes
def test_experts_of_the_cpu_are_not_kept(engine: CpuExpertEngine, buffer_experts: int) -> None:
    model = Model(engine, buffer_experts)
    model.streamer.tail = CpuTail(TailRates(1.0, 0.0, 0.0))
    for _ in range(4):
        model.step(list(range(EXPERTS)), ROWS, [0, ROWS])
        model.step([1, 5, 7], 2)
    assert model.layer.counters.cpu_experts > 0
    assert model.layer.counters.kept > 0


@sizes
def test_a_step_that_fails_leaves_no_slot_that_its_table_is_wrong_about(
    engine: CpuExpertEngine, buffer_experts: int
) -> None:
    """By the last copy out of a buffer; some have been made where there are several waves."""
    model = Model(engine, buffer_experts)
    model.step([0, 1, 2, 3], 3)
    kept = model.layer._slots.kept
    take, kept.take = kept.take, None
    with pytest.raises(TypeError):
        model.step(list(range(EXPERTS)), ROWS, [0, ROWS])
    kept.take = take
    model.step([0, 1, 8, 9], 3)
    model.step(list(range(EXPERTS)), ROWS, [0, ROWS])
    model.step([0, 1, 8, 9], 3)


@sizes
def test_without_requests_slots_stay_as_they_are(
    engine: CpuExpertEngine, buffer_experts: int
) -> None:
    model = Model(engine, buffer_experts)
    model.step([0, 1], 2)
    before = model.in_slots()
    model.step(list(range(EXPERTS)), ROWS)
    assert model.in_slots() == before
    assert model.layer.counters.kept == 0


def test_a_prompt_in_waves_leaves_what_its_last_rows_use(engine: CpuExpertEngine) -> None:
    model = Model(engine, streams=False)
    first = torch.arange(EXPERTS).view(-1, TOP_K).repeat(10, 1)
    last = torch.tensor([[2, 3], [4, 5]]).repeat(20, 1)
    ids = torch.cat([first, last])
    model.check(ids, torch.tensor([0, len(ids)], dtype=torch.int32))
    assert model.in_slots() == {2, 3, 4, 5}


@pytest.mark.gpu
def test_nothing_is_compiled_for_the_first_prompt() -> None:
    from vllm_moe_offload.device.fetch_kernel import fetch_kernel
    from vllm_moe_offload.device.keep_kernel import keep_kernel

    def compiled() -> int:
        kernels = (keep_kernel, fetch_kernel)
        return sum(len(found[0]) for each in kernels for found in each.device_caches.values())

    device = torch.device("cuda")
    # Sizes that no other test has compiled for.
    step = DeviceStep(131, 9, "lfru", top_k=5, cache_topk=5, num_waves=1, device=device)
    layout = ExpertSpec(52, 28, Activation.SILU, Format.FP32).layout
    before = compiled()
    kept = KeptOnDevice(step, [layout.empty(7, device) for _ in "01"], layout.empty(9, device))
    made = compiled()
    assert made > before
    ids = torch.randint(0, 131, (40, 5), dtype=torch.int32, device=device)
    requests = torch.tensor([0, 3, 40], dtype=torch.int32, device=device)
    for at_hand in (None, torch.ones(131, dtype=torch.int32, device=device)):
        kept.decide(ids, requests, at_hand)
    nowhere = torch.full((132,), -1, dtype=torch.int32, device=device)
    for rows in (None, nowhere):
        kept._decide.kept_count.zero_()
        kept.take(0, rows)
        kept.take(1, rows)
    assert compiled() == made


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
