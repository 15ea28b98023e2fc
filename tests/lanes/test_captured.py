"""The three lanes of a captured step sum to the oracle's output, whatever the split.

By Triton's interpreter, in a process of its own that the last test here starts; with the expert
engine as the resident lane and as the CPU lane that answers the doorbell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import INTERPRETED, run_interpreted
from tests.engine import oracle
from tests.engine.shards import random_shard, tolerance
from tests.interrupted import Interruption, interruptions
from vllm_moe_offload.device import HostDevice
from vllm_moe_offload.device.streams import SideStream
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format
from vllm_moe_offload.lanes import (
    AskingLayer,
    CapturedLayer,
    Counters,
    CpuLane,
    EngineLane,
    OffloadedLayer,
)
from vllm_moe_offload.routing import POLICIES, waves_needed

CPU = torch.device("cpu")
TOP_K, MOST = 3, 5


class LateSide(SideStream):
    """A side stream that does what follows as late as it may, and spoils the slots meanwhile."""

    def __init__(self, *layers: tuple[CapturedLayer, dict[str, torch.Tensor]]) -> None:
        super().__init__(CPU)
        self._layers = layers
        self._late: list[tuple[CapturedLayer, torch.Tensor]] = []

    @contextmanager
    def follow(self) -> Iterator[None]:
        for layer, slots in self._layers:
            layer.fetch.launch = partial(self._put_off, layer, slots)  # type: ignore[method-assign]
        yield
        for layer, _ in self._layers:
            del layer.fetch.launch

    def _put_off(
        self,
        layer: CapturedLayer,
        slots: dict[str, torch.Tensor],
        pairs: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        assert all(other is not layer for other, _ in self._late), "has not been waited for"
        pairs = pairs[: int(count)].clone()
        self._late.append((layer, pairs))
        for tensor in slots.values():
            tensor[pairs[:, 1].long()] = float("nan")

    def join_followed(self) -> None:
        assert self._late
        for layer, pairs in self._late:
            layer.fetch.launch(pairs, torch.tensor([len(pairs)], dtype=torch.int32))
        self._late = []


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of the last test")


@interpreted
@settings(max_examples=15, deadline=None)
@given(
    num_experts=st.integers(3, 9),
    share=st.floats(0.1, 1.0),
    policy=st.sampled_from(sorted(POLICIES)),
    fetched=st.integers(0, 9),
    promoted=st.integers(0, 9),
    late=st.booleans(),
    few=st.booleans(),
    cache_topk=st.integers(1, TOP_K),
    seed=st.integers(0, 2**31),
)
def test_the_sum_of_the_lanes_is_the_oracles(
    num_experts: int,
    share: float,
    policy: str,
    fetched: int,
    promoted: int,
    late: bool,
    few: bool,
    cache_topk: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32, bool(seed % 2))
    host = random_shard(spec, num_experts, generator)
    num_slots = max(1, int(share * num_experts))
    slots = spec.layout.empty(num_slots)
    for tensor in slots.values():
        tensor.fill_(float("nan"))  # an expert computed from an unfilled slot shows
    with CpuExpertEngine(threads=1) as engine:
        cpu = CpuLane(engine, max_layers=1, max_tokens=MOST, device=CPU)
        over_host = engine.plan(spec, host, max_tokens=MOST, top_k=TOP_K)
        request = cpu.add("layer", over_host)
        layer = CapturedLayer(
            host,
            slots,
            EngineLane(engine, spec, slots, TOP_K, MOST),
            SideStream(CPU),
            request,
            policy=policy,
            top_k=TOP_K,
            cache_topk=cache_topk,
        )
        misses = np.arange(num_experts + 1)
        layer.split(np.minimum(misses, fetched), np.minimum(misses, promoted))
        if late:
            layer._side = LateSide((layer, slots))
        step = layer.step
        for number in range(6):
            tokens = int(rng.integers(1, MOST + 1))
            x = torch.randn((tokens, spec.hidden), generator=generator)
            ids = torch.stack(
                [torch.randperm(num_experts, generator=generator)[:TOP_K] for _ in range(tokens)]
            ).int()
            padded = torch.from_numpy(rng.random(tokens) < 0.2)
            ids[padded] = num_experts
            weights = torch.rand((tokens, TOP_K), generator=generator)
            request.operands.partial.fill_(float("nan"))
            if few:  # as a graph has them that was captured under another split
                layer._waves = {tokens: 1}
            got = layer.forward(x, weights, ids)
            everyone = torch.arange(num_experts + 1, dtype=torch.int32)
            everyone[-1] = -1
            expected = oracle.experts(spec, host, x, ids, weights, everyone)
            assert oracle.relative_error(got, expected) <= tolerance(spec), number
        counters = step.read_counters()
        assert counters["fetched"] + counters["cpu_experts"] == counters["misses"]
        assert counters["promoted"] <= counters["cpu_experts"]
        if fetched == 0:
            assert counters["fetched"] == 0
        if promoted == 0:
            assert counters["promoted"] == 0
        copied = layer.read_counters().bytes_fetched // layer.fetch.expert_bytes
        assert copied == counters["fetched"] + counters["promoted"]
        for name, tensor in slots.items():
            for expert, slot in enumerate(step.slot_of.tolist()):
                assert slot < 0 or torch.equal(tensor[slot], host[name][expert])
        asked = cpu.stats()["layer"].requests
        assert (asked > 0) == (counters["cpu_experts"] > 0)


@interpreted
def test_an_expert_that_the_cpu_computes_is_in_a_slot_for_the_next_step() -> None:
    generator = torch.Generator().manual_seed(0)
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
    host = random_shard(spec, 6, generator)
    slots = spec.layout.empty(4)
    with CpuExpertEngine(threads=1) as engine:
        lane = EngineLane(engine, spec, host, TOP_K, MOST)
        cpu = CpuLane(engine, max_layers=1, max_tokens=MOST, device=CPU)
        layer = CapturedLayer(
            host,
            slots,
            EngineLane(engine, spec, slots, TOP_K, MOST),
            SideStream(CPU),
            cpu.add("layer", lane.plan),
            policy="lfru",
            top_k=TOP_K,
        )
        layer._side = LateSide((layer, slots))
        layer.split(np.zeros(7, np.int64), np.ones(7, np.int64))
        ids = torch.tensor([[4, 0, 5]], dtype=torch.int32)
        weights = torch.rand((1, TOP_K), generator=generator)
        everyone = torch.tensor([*range(6), -1], dtype=torch.int32)
        hits = []
        for _ in range(5):
            x = torch.randn((1, spec.hidden), generator=generator)
            got = layer.forward(x, weights, ids)
            expected = oracle.experts(spec, host, x, ids, weights, everyone)
            assert oracle.relative_error(got, expected) <= tolerance(spec)
            hits.append(layer.read_counters().hits)
        assert hits == [0, 1, 3, 6, 9]
        done = layer.read_counters()
        assert (done.misses, done.cpu_experts, done.promoted) == (6, 6, 3)
        assert done.bytes_fetched == 3 * layer.fetch.expert_bytes
        assert cpu.stats()["layer"].requests == 3


def check_steps_after(interruption: Interruption) -> None:
    generator = torch.Generator().manual_seed(interruption.number)
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
    host = random_shard(spec, 9, generator)
    everyone = torch.cat((torch.arange(9, dtype=torch.int32), torch.tensor([-1]).int()))

    def allocate(count: int) -> dict[str, torch.Tensor]:
        empty = spec.layout.empty(count)
        return {name: tensor.fill_(float("nan")) for name, tensor in empty.items()}

    def lane(of: dict[str, torch.Tensor]) -> EngineLane:
        return EngineLane(engine, spec, of, TOP_K, MOST)

    def capture(slots: dict[str, torch.Tensor], resident: EngineLane) -> CapturedLayer:
        side = SideStream(CPU)
        return CapturedLayer(host, slots, resident, side, request, policy="lru", top_k=TOP_K)

    def step(*ids: list[int]) -> None:
        x = torch.randn((len(ids), spec.hidden), generator=generator)
        weights = torch.rand((len(ids), TOP_K), generator=generator)
        routed = torch.tensor(ids).int()
        got = layer.forward(x, weights, routed)
        expected = oracle.experts(spec, host, x, routed, weights, everyone)
        assert oracle.relative_error(got, expected) <= tolerance(spec), interruption.number

    with CpuExpertEngine(threads=1) as engine:
        cpu = CpuLane(engine, max_layers=1, max_tokens=MOST, device=CPU)
        request = cpu.add("layer", engine.plan(spec, host, max_tokens=MOST, top_k=TOP_K))
        layer = OffloadedLayer(
            *(host, HostDevice(), allocate, lane, lane(host)),
            **dict(num_slots=4, policy="lru", capture=capture),
        )
        captured = layer.captured
        captured.split(np.arange(10) // 2, np.arange(10) // 3)
        step([0, 1, 2], [1, 2, 3])
        calls = [
            *((request, name) for name in ("submit", "wait", "join")),
            *((captured.step, "launch"), (captured.fetch, "launch")),
            *((layer._slots.resident, name) for name in ("compute", "output")),
        ]
        with interruption.of(*calls):
            step([4, 5, 6], [6, 7, 8])
        for ids in ([4, 5, 6], [0, 7, 8], [0, 1, 2], [4, 5, 6]):
            step(ids, [6, 5, 4])
        cpu.close()


@interpreted
def test_after_a_step_that_was_interrupted_anywhere_the_next_ones_are_right() -> None:
    """Between the asking of the CPU and the taking of its answer too."""
    for interruption in interruptions(least=13):
        check_steps_after(interruption)


@interpreted
def test_another_split_has_as_many_waves_as_it_takes() -> None:
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
    host = random_shard(spec, 9, torch.Generator().manual_seed(0))
    slots, every = spec.layout.empty(4), np.arange(10)
    with CpuExpertEngine(threads=1) as engine:
        cpu = CpuLane(engine, max_layers=1, max_tokens=MOST, device=CPU)
        request = cpu.add("layer", engine.plan(spec, host, max_tokens=MOST, top_k=TOP_K))
        resident = EngineLane(engine, spec, slots, TOP_K, MOST)
        side = SideStream(CPU)
        layer = CapturedLayer(host, slots, resident, side, request, policy="lru", top_k=TOP_K)
        waves = set()
        for limits in (every // 5, every, np.minimum(every, 6), np.minimum(every, 1)):
            layer.split(limits)
            waves.add(layer.num_waves(3))
            assert layer.num_waves(3) == waves_needed(limits, 3 * TOP_K, 4, "lru")
        assert len(waves) > 1
        cpu.close()


@interpreted
def test_what_layers_promote_is_waited_for_when_the_step_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
    hosts = [random_shard(spec, 6, generator) for _ in range(3)]
    slots = [spec.layout.empty(4) for _ in hosts]
    everyone = torch.tensor([*range(6), -1], dtype=torch.int32)
    with CpuExpertEngine(threads=1) as engine:
        cpu = CpuLane(engine, max_layers=3, max_tokens=MOST, device=CPU)
        layers = [
            CapturedLayer(
                host,
                own,
                EngineLane(engine, spec, own, TOP_K, MOST),
                SideStream(CPU),
                cpu.add(f"{number}", EngineLane(engine, spec, host, TOP_K, MOST).plan),
                policy="lfru",
                top_k=TOP_K,
                ends_step=lambda number=number: number == 2,
            )
            for number, (host, own) in enumerate(zip(hosts, slots, strict=True))
        ]
        side = LateSide(*zip(layers, slots, strict=True))
        for layer in layers:
            layer._side = side
            layer.split(np.arange(7) // 2, np.full(7, 2))
        for _ in range(8):
            for number, layer in enumerate(layers):
                assert len(side._late) == number, "later layers run beside it"
                x = torch.randn((2, spec.hidden), generator=generator)
                ids = np.stack([rng.permutation(6)[:TOP_K] for _ in range(2)])
                ids = torch.from_numpy(ids).int()
                weights = torch.rand((2, TOP_K), generator=generator)
                got = layer.forward(x, weights, ids)
                expected = oracle.experts(spec, hosts[number], x, ids, weights, everyone)
                assert oracle.relative_error(got, expected) <= tolerance(spec)
            assert not side._late
        assert all(layer.read_counters().promoted for layer in layers)


@interpreted
def test_a_step_without_slots_asks_the_cpu_for_every_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
    host = random_shard(spec, 6, generator)
    everyone = torch.tensor([*range(6), -1], dtype=torch.int32)
    with CpuExpertEngine(threads=1) as engine:
        lane = EngineLane(engine, spec, host, TOP_K, MOST)
        cpu = CpuLane(engine, max_layers=1, max_tokens=MOST, device=CPU)
        asking = AskingLayer(6, TOP_K, cpu.add("layer", lane.plan), CPU)
        layer = OffloadedLayer(
            host, HostDevice(), dict, lambda _: lane, lane, num_slots=0, policy="lru", asking=asking
        )
        used = 0
        for tokens in (1, MOST, 2):
            x = torch.randn((tokens, spec.hidden), generator=generator)
            ids = torch.stack(
                [torch.randperm(6, generator=generator)[:TOP_K] for _ in range(tokens)]
            )
            weights = torch.rand((tokens, TOP_K), generator=generator)
            padding = torch.arange(tokens) == 1
            got = layer.forward(x, weights, ids, padding)
            routed = ids.masked_fill(padding[:, None], 6).int()
            expected = oracle.experts(spec, host, x, routed, weights, everyone)
            assert oracle.relative_error(got, expected) <= tolerance(spec)
            used += len(ids[~padding].unique())
        done = layer.counters
        assert (done.steps, done.tokens, done.cpu_experts) == (3, 1 + MOST - 1 + 1, used)
        assert (done.hits, done.misses, done.bytes_fetched, done.waves) == (0, 0, 0, 0)
        layer.reset_counters()
        assert layer.counters == Counters()


@interpreted
def test_without_a_cpu_lane_there_is_nothing_to_split() -> None:
    spec = ExpertSpec(24, 10, Activation.SILU, Format.FP32)
    host = random_shard(spec, 6, torch.Generator())
    with CpuExpertEngine(threads=1) as engine:
        slots = spec.layout.empty(2)
        resident = EngineLane(engine, spec, slots, TOP_K, MOST)
        layer = CapturedLayer(host, slots, resident, SideStream(CPU), policy="lru", top_k=TOP_K)
    with pytest.raises(ValueError, match="nothing to split"):
        layer.split(np.zeros(7, np.int64))


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
