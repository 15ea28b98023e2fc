"""The doorbell, with Python playing the GPU."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from tests.engine import oracle
from tests.engine.faults import end_service_thread, kept_busy
from tests.engine.interpreters import printed_by
from tests.engine.shards import Batch, Shard, random_batch, random_shard, tolerance
from vllm_moe_offload.engine import (
    ASKED,
    BOARD_ALIGN,
    DONE,
    FAILED,
    CpuExpertEngine,
    Doorbell,
    ExpertPlan,
    Mailbox,
)
from vllm_moe_offload.experts import Activation, ExpertSpec, Format

EXPERTS = 6
MOST_TOKENS = 12
TOP_K = 3
SPECS = [
    ExpertSpec(72, 40, Activation.SILU, Format.FP32),
    ExpertSpec(96, 64, Activation.GELU, Format.BF16),
    ExpertSpec(128, 96, Activation.SILU, Format.FP32),
]

_fence = threading.Lock()


def make_board(mailboxes: int) -> torch.Tensor:
    """An aligned board in memory that held something else before."""
    size = Doorbell.board_bytes(mailboxes)
    memory = torch.full((size + BOARD_ALIGN,), 0xAB, dtype=torch.uint8)
    begin = -memory.data_ptr() % BOARD_ALIGN
    return memory[begin : begin + size]


@dataclass
class GpuLayer:
    """A layer's shard, its request's memory, and the GPU's side of its mailbox."""

    spec: ExpertSpec
    shard: Shard
    plan: ExpertPlan
    board: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    map: torch.Tensor
    out: torch.Tensor
    mailbox: Mailbox

    def __post_init__(self) -> None:
        at = self.mailbox
        self.request = self.board[at.request :][:4].view(torch.int32).numpy()
        self.tokens = self.board[at.tokens :][:4].view(torch.int32).numpy()
        self.answer = self.board[at.answer :][:4].view(torch.int32).numpy()
        self.times = [self.board[i:][:8].view(torch.int64) for i in (at.seen_ns, at.done_ns)]

    def write(self, batch: Batch) -> None:
        for target, value in zip((self.x, self.ids, self.weights), batch, strict=True):
            target[: len(value)] = value
        self.tokens[0] = len(batch[0])
        self.out.fill_(float("nan"))

    def ring(self) -> None:
        self.answer[0] = 0
        # Writes before a release stay before it, and those behind an acquire behind it.
        for _ in range(2):
            with _fence:
                pass
        self.request[0] = ASKED

    def wait(self, seconds: float = 30.0) -> int:
        deadline = time.monotonic() + seconds
        while self.answer[0] == 0 and time.monotonic() < deadline:
            time.sleep(0)
        return int(self.answer[0])

    def check(self, batch: Batch) -> None:
        expected = oracle.experts(self.spec, self.shard, *batch, self.map)
        error = oracle.relative_error(self.out[: len(batch[0])], expected)
        assert error < tolerance(self.spec)
        assert self.out[len(batch[0]) :].isnan().all()


def add_layer(
    engine: CpuExpertEngine,
    doorbell: Doorbell,
    board: torch.Tensor,
    spec: ExpertSpec,
    name: str,
    generator: torch.Generator,
) -> GpuLayer:
    """A layer whose shard holds all experts but the last two, in another order."""
    shard = random_shard(spec, EXPERTS - 2, generator)
    plan = engine.plan(spec, shard, max_tokens=MOST_TOKENS, top_k=TOP_K)
    x = torch.zeros(MOST_TOKENS, spec.hidden, dtype=spec.activation_dtype)
    ids = torch.zeros(MOST_TOKENS, TOP_K, dtype=torch.int32)
    weights = torch.zeros(MOST_TOKENS, TOP_K)
    rows = torch.randperm(EXPERTS - 2, generator=generator).tolist()
    expert_map = torch.tensor([*rows, -1, -1, -1], dtype=torch.int32)
    out = torch.zeros(MOST_TOKENS, spec.hidden)
    mailbox = doorbell.add(
        name, plan, x=x, topk_ids=ids, topk_weights=weights, expert_map=expert_map, out=out
    )
    return GpuLayer(spec, shard, plan, board, x, ids, weights, expert_map, out, mailbox)


@pytest.fixture
def engine() -> Iterator[CpuExpertEngine]:
    with CpuExpertEngine() as engine:
        yield engine


def make(
    engine: CpuExpertEngine, generator: torch.Generator, timeout: float = 30.0
) -> tuple[Doorbell, list[GpuLayer]]:
    board = make_board(len(SPECS))
    doorbell = engine.doorbell(board, len(SPECS), timeout=timeout)
    layers = [
        add_layer(engine, doorbell, board, spec, f"layers.{i}", generator)
        for i, spec in enumerate(SPECS)
    ]
    doorbell.start()
    return doorbell, layers


def batch_of(layer: GpuLayer, generator: torch.Generator) -> Batch:
    tokens = int(torch.randint(1, MOST_TOKENS + 1, (), generator=generator))
    # EXPERTS, the last index of the map, is what padding rows are routed to.
    return random_batch(layer.spec, tokens, TOP_K, (-1, EXPERTS + 1), generator)


def test_answers_are_the_oracles(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    doorbell, layers = make(engine, generator)
    tokens = [0] * len(layers)
    for step in range(400):
        doorbell.wake()
        order = torch.randperm(len(layers), generator=generator).tolist()
        together = step % 2 == 1  # all outstanding at once
        batches = {i: batch_of(layers[i], generator) for i in order}
        for i in order:
            before = time.monotonic_ns()
            layers[i].write(batches[i])
            layers[i].ring()
            if not together:
                assert layers[i].wait() == DONE
                seen, done = (int(time) for time in layers[i].times)
                assert before <= seen <= done <= time.monotonic_ns()
        for i in order:
            assert layers[i].wait() == DONE
            layers[i].check(batches[i])
            tokens[i] += len(batches[i][0])
    assert doorbell.error is None
    for stats, asked in zip(doorbell.stats, tokens, strict=True):
        assert (stats.requests, stats.tokens) == (400, asked)
        assert stats.busy_seconds > 0


def test_two_streams(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    doorbell, layers = make(engine, generator)
    passed = []

    def stream(layer: GpuLayer, seed: int) -> None:
        mine = torch.Generator().manual_seed(seed)
        for _ in range(300):
            batch = batch_of(layer, mine)
            layer.write(batch)
            layer.ring()
            assert layer.wait() == DONE
            layer.check(batch)
        passed.append(seed)

    threads = [
        threading.Thread(target=stream, args=(layer, seed)) for seed, layer in enumerate(layers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(passed) == [0, 1, 2]
    assert doorbell.error is None


def test_a_request_without_tokens(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    _, layers = make(engine, generator)
    layers[0].tokens[0] = 0
    layers[0].ring()
    assert layers[0].wait() == DONE


def expect_failed(doorbell: Doorbell, layers: list[GpuLayer], *parts: str) -> None:
    """All answered, now and later, and the error says why."""
    begin = time.monotonic()
    for layer in layers:
        assert layer.wait() == FAILED
    assert time.monotonic() - begin < 5
    for _ in range(3):
        for layer in layers:
            layer.ring()
        for layer in layers:
            assert layer.wait() == FAILED
    error = doorbell.error
    assert error is not None
    for part in parts:
        assert part in error
    doorbell.stop()
    with pytest.raises(RuntimeError, match="failed"):
        doorbell.start()


@pytest.mark.parametrize("fault", ["row", "id", "tokens"])
def test_what_cannot_be_computed_ends_it(
    engine: CpuExpertEngine, generator: torch.Generator, fault: str
) -> None:
    doorbell, layers = make(engine, generator)
    for layer in layers:
        layer.write(batch_of(layer, generator))
    bad = layers[1]
    bad.ids[0, 0] = 2
    if fault == "row":
        bad.map[2] = EXPERTS
    elif fault == "id":
        bad.ids[0, 0] = EXPERTS + 1
    else:
        bad.tokens[0] = MOST_TOKENS + 1
    bad.ring()
    assert bad.wait() == FAILED
    for layer in layers:
        layer.ring()
    cause = {"row": "expert_map[2] is 6", "id": "topk_ids[0, 0]", "tokens": "of 13 tokens"}[fault]
    expect_failed(doorbell, layers, "layers.1", cause)


def test_a_stall_ends_it(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    """Another caller keeps the engine for longer than the timeout."""
    doorbell, layers = make(engine, generator, timeout=0.2)
    with kept_busy(engine, 2.5):
        for layer in layers:
            layer.write(batch_of(layer, generator))
            layer.ring()
        expect_failed(doorbell, layers, "layers.", "within 0.2 s")


def test_the_end_of_its_thread_ends_it(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    doorbell, layers = make(engine, generator)
    end_service_thread()
    for layer in layers:
        layer.write(batch_of(layer, generator))
        layer.ring()
    expect_failed(doorbell, layers, "the service thread ended; layers.0 was the next to ask")


def error_of(doorbell: Doorbell) -> str:
    """What has failed, or is about to."""
    while (error := doorbell.error) is None:
        time.sleep(0.001)
    return error


def test_an_end_while_nothing_is_asked_names_who_asks_next(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    """As behind a step's launch, before the GPU has got to its first layer."""
    doorbell, layers = make(engine, generator)
    end_service_thread()
    layers[1].tokens[0] = 1
    asked = []

    def ask() -> None:
        asked.append(time.monotonic())
        layers[1].ring()

    gpu = threading.Timer(0.3, ask)
    gpu.start()
    error = error_of(doorbell)
    assert time.monotonic() - asked[0] < 0.4, "it is told at once"
    gpu.join()
    assert error.endswith("the service thread ended; layers.1 was the next to ask")
    assert layers[1].wait() == FAILED


def test_an_end_while_nobody_asks_is_told_all_the_same(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    doorbell, _ = make(engine, generator)
    end_service_thread()
    began = time.monotonic()
    assert error_of(doorbell).endswith("the service thread ended")
    assert 0.9 < time.monotonic() - began < 5
    with pytest.raises(RuntimeError, match="service thread ended; make another doorbell"):
        doorbell.start()
    stopping = threading.Timer(0.1, doorbell.stop)
    stopping.start()
    began = time.monotonic()
    assert error_of(doorbell).endswith("the service thread ended")
    assert time.monotonic() - began < 0.6, "nobody asks a doorbell that has stopped"
    stopping.join()


def test_an_error_that_names_its_layer_is_told_at_once(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    doorbell, layers = make(engine, generator)
    layers[1].tokens[0] = MOST_TOKENS + 1
    layers[1].ring()
    assert layers[1].wait() == FAILED
    layers[0].ring()
    assert layers[0].wait() == FAILED
    began = time.monotonic()
    error = error_of(doorbell)
    assert time.monotonic() - began < 0.5
    assert "layers.1" in error and "was the next to ask" not in error


def test_stop_answers_what_is_outstanding(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    doorbell, layers = make(engine, generator)
    for _ in range(50):
        batch = batch_of(layers[0], generator)
        for layer in layers:
            layer.tokens[0] = 0
        layers[0].write(batch)
        for layer in layers:
            layer.ring()
        doorbell.stop()
        answers = [int(layer.answer[0]) for layer in layers]
        assert all(answer in (DONE, FAILED) for answer in answers)
        doorbell.start()
    layers[0].ring()
    assert layers[0].wait() == DONE
    layers[0].check(batch)
    assert doorbell.error is None


def test_an_idle_doorbell_burns_no_core(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    _, layers = make(engine, generator)
    batch = batch_of(layers[0], generator)
    layers[0].write(batch)
    layers[0].ring()
    assert layers[0].wait() == DONE
    time.sleep(1.2)
    before = seconds_of_threads("moe-")
    time.sleep(3)
    used = (seconds_of_threads("moe-") - before) / 3
    print(f"idle: {used:.2%} of a core")
    assert 0 < used < 0.02  # 0.7% on a busy virtual machine; 3% if it looked each millisecond
    layers[0].ring()
    assert layers[0].wait() == DONE


def seconds_of_threads(prefix: str) -> float:
    """On a processor, of this process's threads whose names begin so: others have other work."""
    nanoseconds = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith(prefix):
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def test_round_trip(generator: torch.Generator) -> None:
    """Printed, not judged: what a request costs, seen from Python, which spins on a core too."""
    engine = CpuExpertEngine(threads=1)
    doorbell, layers = make(engine, generator)
    for tokens in (0, 1, 8):
        layers[0].write(random_batch(layers[0].spec, 8, TOP_K, (0, 4), generator))
        layers[0].tokens[0] = tokens
        doorbell.wake()
        times = []
        for _ in range(500):
            begin = time.perf_counter()
            layers[0].ring()
            while layers[0].answer[0] == 0:
                pass
            times.append(time.perf_counter() - begin)
        print(f"{tokens} tokens: median {sorted(times)[250] * 1e6:.1f} us")
    assert doorbell.error is None


def test_refusals(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    board = make_board(1)
    with pytest.raises(ValueError, match="at least 1"):
        engine.doorbell(board, 0)
    with pytest.raises(ValueError, match="shape"):
        engine.doorbell(board, 20)
    with pytest.raises(ValueError, match="multiple of 64"):
        size = Doorbell.board_bytes(1)
        engine.doorbell(torch.cat((board, board))[4:][:size], 1)
    for name in ("timeout", "idle"):
        with pytest.raises(
            ValueError, match=rf"{name} of 4000\..* asked for: give 0\.001 to 3600 s"
        ):
            engine.doorbell(board, 1, **{name: 4000})
        with pytest.raises(ValueError, match=rf"{name} of 0\.0"):
            engine.doorbell(board, 1, **{name: 0})

    doorbell = engine.doorbell(board, 1)
    spec = SPECS[0]
    plan = engine.plan(spec, random_shard(spec, 2, generator), max_tokens=4, top_k=2)
    good = {
        "x": torch.zeros(4, spec.hidden),
        "topk_ids": torch.zeros(4, 2, dtype=torch.int32),
        "topk_weights": torch.zeros(4, 2),
        "expert_map": torch.zeros(3, dtype=torch.int32),
        "out": torch.zeros(4, spec.hidden),
    }
    bad = {
        "x": torch.zeros(4, spec.hidden).double(),
        "topk_ids": torch.zeros(4, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(3, 2),
        "expert_map": torch.zeros(3),
        "out": torch.zeros(4, spec.hidden, dtype=torch.bfloat16),
    }
    for name, tensor in bad.items():
        with pytest.raises(ValueError, match=name):
            doorbell.add("a", plan, **{**good, name: tensor})
    for name in ("x", "topk_ids"):
        with pytest.raises(ValueError, match="must be"):
            doorbell.add("a", plan, **{**good, name: good[name][0, 0]})
    with pytest.raises(ValueError, match="expert_map has no entries"):
        doorbell.add("a", plan, **{**good, "expert_map": torch.empty(0, dtype=torch.int32)})
    with CpuExpertEngine() as other:
        others = other.plan(spec, random_shard(spec, 2, generator), max_tokens=4, top_k=2)
        with pytest.raises(ValueError, match=r"plan of layers\.7 is another engine's"):
            doorbell.add("layers.7", others, **good)
    wide = {"topk_ids": torch.zeros(4, 3, dtype=torch.int32), "topk_weights": torch.zeros(4, 3)}
    with pytest.raises(ValueError, match="larger top_k"):
        doorbell.add("a", plan, **{**good, **wide})
    doorbell.add("a", plan, **good)
    with pytest.raises(ValueError, match="taken"):
        doorbell.add("b", plan, **good)


def test_the_engine_closes_it(generator: torch.Generator) -> None:
    engine = CpuExpertEngine()
    doorbell, layers = make(engine, generator)
    engine.close()
    doorbell.close()
    with pytest.raises(RuntimeError, match="closed"):
        doorbell.start()
    with pytest.raises(RuntimeError, match="closed"):
        layers[0].plan.open()


def test_its_threads_end_with_it(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    gc.collect()  # engines of other tests have threads too
    before = psutil.Process().num_threads()
    doorbell, layers = make(engine, generator)
    assert psutil.Process().num_threads() == before + 2
    del doorbell, layers
    gc.collect()
    assert psutil.Process().num_threads() == before


def test_interpreter_exits_while_it_serves() -> None:
    code = (
        "import torch\n"
        "from tests.engine import test_doorbell as t\n"
        "engine = t.CpuExpertEngine()\n"
        "doorbell, layers = t.make(engine, torch.Generator().manual_seed(0))\n"
        "layers[0].ring()\n"
    )
    printed_by(code)


def test_interpreter_exits_while_a_stalled_request_is_computed() -> None:
    """What the thread that is left to itself reads and writes stays until the process is gone."""
    code = (
        "from tests.engine import test_doorbell as t\n"
        "engine = t.CpuExpertEngine(isa='scalar')\n"
        "doorbell, layer = t.endless(engine)\n"
        "print(layer.wait(), doorbell.error)\n"
    )
    assert "computing it did not end within 0.3 s" in printed_by(code)


def endless(engine: CpuExpertEngine) -> tuple[Doorbell, GpuLayer]:
    """A doorbell at a request that takes the scalar kernels longer than an interpreter's exit."""
    spec = ExpertSpec(2048, 2048, Activation.SILU, Format.FP32)
    shard = {one.name: torch.zeros(1, *one.shape, dtype=one.dtype) for one in spec.layout.tensors}
    tokens, top_k = 2048, 16
    plan = engine.plan(spec, shard, max_tokens=tokens, top_k=top_k)
    board = make_board(1)
    x, out = torch.zeros(tokens, spec.hidden), torch.zeros(tokens, spec.hidden)
    ids, weights = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
    expert_map = torch.tensor([0, -1], dtype=torch.int32)
    doorbell = engine.doorbell(board, 1, timeout=0.3)
    mailbox = doorbell.add(
        "layers.0",
        plan,
        x=x,
        topk_ids=ids,
        topk_weights=weights,
        expert_map=expert_map,
        out=out,
    )
    doorbell.start()
    layer = GpuLayer(spec, shard, plan, board, x, ids, weights, expert_map, out, mailbox)
    layer.tokens[0] = tokens
    layer.ring()
    return doorbell, layer
