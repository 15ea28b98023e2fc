"""Listed experts arrive in their slots byte for byte, and no other slot changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.kernels import DEVICE, INTERPRETED, marked, on_host, run_interpreted
from vllm_moe_offload.device.cuda import CudaDevice
from vllm_moe_offload.device.fetch import ExpertFetch
from vllm_moe_offload.device.streams import Stopwatch
from vllm_moe_offload.experts import ExpertLayout, TensorSpec
from vllm_moe_offload.host.store import HostStore

Pairs = list[tuple[int, int]]
FASTEST_BUS = 140e9  # bytes a second: no bus of 16 lanes reads host memory as fast
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8]
SHAPES = [(), (1,), (3,), (16,), (7, 5), (8, 12), (130, 3)]
LAYOUTS = {
    "bf16": {"w13": ((48, 32), torch.bfloat16), "w2": ((32, 24), torch.bfloat16)},
    "fp8_block": {
        "w13": ((256, 128), torch.float8_e4m3fn),
        "w2": ((128, 128), torch.float8_e4m3fn),
        "w13_scale": ((2, 1), torch.float32),
        "w2_scale": ((1, 1), torch.float32),
    },
    "odd": {"w13": ((5, 3), torch.bfloat16), "w2": ((3, 3), torch.uint8), "s": ((), torch.float32)},
}


def layout_of(specs: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> ExpertLayout:
    return ExpertLayout(tuple(TensorSpec(name, *spec) for name, spec in specs.items()))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Byte for byte, [E or S, bytes of one]: NaNs are equal to themselves."""
    return tensor.cpu().reshape(-1).view(torch.uint8).view(len(tensor), -1)


def fill(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same tensors, every byte drawn."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        drawn = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        tensor.view(-1).view(torch.uint8).copy_(drawn)
    return tensors


class Case:
    """A layer's host memory and its poisoned slots."""

    def __init__(self, layout: ExpertLayout, num_experts: int, num_slots: int) -> None:
        drawn = fill(layout.empty(num_experts), 1)
        self.host = {name: on_host(tensor) for name, tensor in drawn.items()}
        self.slots = fill(layout.empty(num_slots, DEVICE), 2)
        self.expected = {name: as_bytes(tensor).clone() for name, tensor in self.slots.items()}
        # What follows the listed pairs is stale and may be anything.
        self.pairs = torch.full((num_slots + 1, 2), 2**30, dtype=torch.int32, device=DEVICE)
        self.count = torch.zeros((), dtype=torch.int32, device=DEVICE)

    def set(self, pairs: Pairs) -> None:
        self.pairs.fill_(2**30)
        if pairs:
            self.pairs[: len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
        self.count.fill_(len(pairs))

    def check(self, pairs: Pairs) -> None:
        """After `pairs` were fetched the slots hold them, and else what they held before."""
        for name, tensor in self.slots.items():
            host = as_bytes(self.host[name])
            for expert, slot in pairs:
                self.expected[name][slot] = host[expert]
            assert torch.equal(as_bytes(tensor), self.expected[name]), name


@marked
@settings(max_examples=40 if INTERPRETED else 300, deadline=None)
@given(data=st.data())
def test_drawn_lists_over_drawn_layouts(data: st.DataObject) -> None:
    specs = data.draw(
        st.lists(
            st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=4
        )
    )
    layout = layout_of({str(i): spec for i, spec in enumerate(specs)})
    num_experts, num_slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    case = Case(layout, num_experts, num_slots)
    fetch = ExpertFetch(case.host, case.slots, data.draw(st.integers(1, 7)), block=32)
    for _ in range(2):
        into = data.draw(st.permutations(range(num_slots)))
        count = data.draw(st.integers(0, num_slots))
        pairs = [(data.draw(st.integers(0, num_experts - 1)), slot) for slot in into[:count]]
        case.set(pairs)
        fetch.launch(case.pairs, case.count)
        case.check(pairs)


@marked
@settings(max_examples=20 if INTERPRETED else 100, deadline=None)
@given(data=st.data())
def test_experts_in_other_rows_and_some_in_none(data: st.DataObject) -> None:
    case = Case(layout_of(LAYOUTS["odd"]), num_experts=6, num_slots=5)
    in_rows = data.draw(st.lists(st.integers(0, 8), min_size=6, max_size=6, unique=True))
    rows = torch.full((9,), -1, dtype=torch.int32)
    rows[torch.tensor(in_rows)] = torch.arange(6, dtype=torch.int32)
    experts = data.draw(st.permutations(range(9)))
    pairs = list(zip(experts, range(data.draw(st.integers(0, 5))), strict=False))
    case.set(pairs)
    fetch = ExpertFetch(case.host, case.slots, data.draw(st.integers(1, 7)), block=32)
    fetch.launch(case.pairs, case.count, rows.to(DEVICE))
    case.check([(in_rows.index(expert), slot) for expert, slot in pairs if expert in in_rows])


@marked
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_formats(name: str) -> None:
    case = Case(layout_of(LAYOUTS[name]), num_experts=9, num_slots=8)
    fetch = ExpertFetch(case.host, case.slots)
    for pairs in ([], [(8, 0)], [(i, 7 - i) for i in range(8)]):
        case.set(pairs)
        fetch.launch(case.pairs, case.count)
        case.check(pairs)


@marked
def test_a_host_tensor_that_starts_anywhere() -> None:
    """Three bytes into its memory: the words must be bytes."""
    case = Case(layout_of({"w": ((64,), torch.uint8)}), num_experts=4, num_slots=3)
    moved = on_host(torch.zeros(3 + 4 * 64, dtype=torch.uint8))[3:].view(4, 64)
    case.host["w"] = moved.copy_(case.host["w"])
    fetch = ExpertFetch(case.host, case.slots)
    case.set([(3, 1), (1, 2)])
    fetch.launch(case.pairs, case.count)
    case.check([(3, 1), (1, 2)])


@marked
def test_what_does_not_fit_together_is_refused() -> None:
    layout = layout_of(LAYOUTS["bf16"])
    host, slots = layout.empty(4), layout.empty(2, DEVICE)
    with pytest.raises(ValueError, match="the slots are for"):
        ExpertFetch(host, slots | {"w2": slots["w2"][:, :1]})
    with pytest.raises(ValueError, match="0 programs"):
        ExpertFetch(host, slots, 0)
    with pytest.raises(ValueError, match="w2 must be contiguous"):
        ExpertFetch(host, slots | {"w2": slots["w2"].mT.contiguous().mT})


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_captured_fetch_from_registered_memory_follows_the_list(name: str) -> None:
    layout = layout_of(LAYOUTS[name])
    case = Case(layout, num_experts=9, num_slots=8)
    device = CudaDevice(0.9, torch.cuda.mem_get_info()[0])
    store = HostStore(device.register, device.unregister)
    registered = store.allocate(layout, 9)
    store.prepare()
    store.wait(registered.values())  # beside a capture nothing may be registered
    for tensor, drawn in zip(registered.values(), case.host.values(), strict=True):
        tensor.copy_(drawn)
    case.host = registered
    fetch = ExpertFetch(case.host, case.slots)
    fetch.launch(case.pairs, case.count)  # compiles, which capturing does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetch.launch(case.pairs, case.count)
    generator = torch.Generator().manual_seed(3)
    for number in range(50):
        experts = torch.randperm(9, generator=generator).tolist()
        into = torch.randperm(8, generator=generator).tolist()
        pairs = list(zip(experts, into, strict=False))[: number % 9]
        case.set(pairs)
        graph.replay()
        case.check(pairs)


@marked
def test_it_says_how_long_it_was_busy() -> None:
    host = {"w": on_host(torch.zeros(8, 1 << (10 if INTERPRETED else 22), dtype=torch.int32))}
    slots = {"w": torch.ones(4, host["w"].shape[1], dtype=torch.int32, device=DEVICE)}
    fetch = ExpertFetch(host, slots)
    pairs = torch.tensor([[e, e] for e in range(4)], dtype=torch.int32, device=DEVICE)
    none, all_of_them = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (0, 4))
    fetch.launch(pairs, none)
    assert int(fetch.busy_ns) == 0
    fetch.launch(pairs, all_of_them)  # compiles
    before = int(fetch.busy_ns)
    watch = Stopwatch(DEVICE)
    watch.start()
    for _ in range(3):
        fetch.launch(pairs, all_of_them)
        fetch.launch(pairs, none)
    watch.stop()
    seconds = (int(fetch.busy_ns) - before) / 1e9
    assert 0 < seconds <= watch.seconds()
    if not INTERPRETED:  # others may use the GPU, so no share of the time that has passed
        assert seconds >= 3 * host["w"][:4].nbytes / FASTEST_BUS


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_by_the_interpreter() -> None:
    run_interpreted(__file__)
