"""Threads, instruction sets, life and death of an engine, and what it refuses."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
import torch

from tests.engine import oracle
from tests.engine.interpreters import printed_by
from tests.engine.shards import make_spec, random_batch, random_shard
from vllm_moe_offload.engine import ISA_VARIABLE, CpuExpertEngine, ExpertPlan, _engine
from vllm_moe_offload.experts import Activation, ExpertSpec, Format

CORES = CpuExpertEngine().threads
SPEC = ExpertSpec(72, 40, Activation.SILU, Format.FP32)


def small_plan(engine: CpuExpertEngine, generator: torch.Generator) -> ExpertPlan:
    return engine.plan(SPEC, random_shard(SPEC, 4, generator), max_tokens=16, top_k=2)


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("format", list(Format), ids=lambda f: f.value)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_result_does_not_depend_on_the_thread_count(
    engine: CpuExpertEngine, generator: torch.Generator, format: Format, tokens: int
) -> None:
    spec = make_spec(333, 215, format, bias=True)
    shard = random_shard(spec, 5, generator)
    x, ids, weights = random_batch(spec, tokens, 3, (-1, 5), generator)
    results = []
    for threads in range(1, min(CORES, 4) + 1):
        with CpuExpertEngine(threads, isa=engine.isa) as other:
            out = torch.empty(x.shape)
            other.plan(spec, shard, max_tokens=70, top_k=3).run(x, ids, weights, out)
            results.append(out)
    assert all(torch.equal(results[0], out) for out in results)


def test_chunks_do_not_change_the_result(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    shard = random_shard(SPEC, 4, generator)
    x, ids, weights = random_batch(SPEC, 50, 2, (0, 4), generator)
    whole, chunked = torch.empty(x.shape), torch.empty(x.shape)
    engine.plan(SPEC, shard, max_tokens=50, top_k=2).run(x, ids, weights, whole)
    engine.plan(SPEC, shard, max_tokens=7, top_k=2).run(x, ids, weights, chunked)
    assert oracle.relative_error(chunked, whole.double()) < 1e-6


def test_isa_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in CpuExpertEngine(1).isas_available:
        monkeypatch.setenv(ISA_VARIABLE, isa)
        assert CpuExpertEngine(1).isa == isa
    monkeypatch.delenv(ISA_VARIABLE)
    assert CpuExpertEngine(1).isa == CpuExpertEngine(1).isas_available[-1]


def test_unknown_isa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"'sse9' is not available on this host \(it has: scalar"
    monkeypatch.setenv(ISA_VARIABLE, "scalar")
    with pytest.raises(ValueError, match="^isa=sse9: .*" + message) as raised:
        CpuExpertEngine(1, isa="sse9")
    assert ISA_VARIABLE not in str(raised.value)
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match=f"^{ISA_VARIABLE}=sse9: .*" + message):
        CpuExpertEngine(1)


@pytest.mark.parametrize("threads", [0, -1, 100_000, 2**31, 2**40, 2**70])
def test_impossible_thread_counts_are_refused(threads: int) -> None:
    with CpuExpertEngine(1) as engine:
        possible = f"ask for {'1 to ' * (engine.cores > 1)}{engine.cores}, or"
    with pytest.raises(ValueError, match=rf"{re.escape(str(threads))} threads.*{possible}"):
        CpuExpertEngine(threads)


def test_affinity_is_respected() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from vllm_moe_offload.engine import CpuExpertEngine\n"
        "print(CpuExpertEngine().threads)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "1"


def test_idle_engine_burns_no_core(generator: torch.Generator) -> None:
    with CpuExpertEngine() as engine:
        plan = small_plan(engine, generator)
        x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
        plan.run(x, ids, weights, torch.empty(x.shape))
        time.sleep(0.1)
        process = psutil.Process()
        before = process.cpu_times()
        time.sleep(1.5)
        after = process.cpu_times()
    assert (after.user + after.system - before.user - before.system) / 1.5 < 0.01


def test_python_threads_take_turns(engine: CpuExpertEngine, generator: torch.Generator) -> None:
    errors: list[float] = []

    def hammer(seed: int) -> None:
        mine = torch.Generator().manual_seed(seed)
        spec = ExpertSpec(40 + 33 * seed, 24 + 17 * seed, Activation.SILU, Format.FP32)
        shard = random_shard(spec, 4, mine)
        plan = engine.plan(spec, shard, max_tokens=8, top_k=2)
        for _ in range(150):
            tokens = int(torch.randint(1, 20, (), generator=mine))
            x, ids, weights = random_batch(spec, tokens, 2, (-1, 4), mine)
            out = torch.empty(x.shape)
            plan.run(x, ids, weights, out)
            expected = oracle.experts(spec, shard, x, ids, weights)
            errors.append(oracle.relative_error(out, expected))

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 300
    assert max(errors) < 1e-5


def test_a_started_run_computes_while_python_is_busy(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    spec = make_spec(256, 256, Format.FP32)
    shard = random_shard(spec, 4, generator)
    plan = engine.plan(spec, shard, max_tokens=64, top_k=2)
    x, ids, weights = random_batch(spec, 64, 2, (-1, 4), generator)
    expert_map = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)
    ids[ids < 0] = 4
    expected, out = torch.empty(x.shape), torch.full(x.shape, torch.inf)
    plan.run(x, ids, weights, expected, expert_map=expert_map)
    last = ctypes.c_float.from_address(out[-1:, -1:].data_ptr())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e3)
    try:
        run, until = plan.start(x, ids, weights, out, expert_map=expert_map), time.monotonic() + 20
        while last.value == math.inf and time.monotonic() < until:  # never without the GIL
            pass
        assert last.value != math.inf
    finally:
        sys.setswitchinterval(interval)
    assert 0 < run.wait() < 20
    assert run.wait() > 0, "may be asked again"
    assert torch.equal(out, expected)


def test_what_a_started_run_raises_is_raised_where_it_is_waited_for(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    plan = small_plan(engine, generator)
    x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
    with pytest.raises(ValueError, match="out"):
        plan.start(x, ids, weights, torch.empty(1, 1))
    run = plan.start(x, ids + 1000, weights, torch.empty(x.shape))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"topk_ids\[0, 0\] is 100[0-3]"):
            run.wait()
    assert plan.start(x[:0], ids[:0], weights[:0], torch.empty(0, x.shape[1])).wait() == 0.0


def test_a_started_run_says_when_it_is_done(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    """Also one that has failed, and one of no rows."""
    plan = small_plan(engine, generator)
    x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
    out = torch.empty(x.shape)
    for rows, more in ((4, 0), (4, 1000), (0, 0)):
        done = torch.zeros(1, dtype=torch.int32)
        plan.start(x[:rows], ids[:rows] + more, weights[:rows], out[:rows], done=done)
        until = time.monotonic() + 20
        while not done.item() and time.monotonic() < until:
            time.sleep(0)
        assert done.item() == 1
    with pytest.raises(ValueError, match="done"):
        plan.start(x, ids, weights, out, done=torch.zeros(1))


def test_a_started_run_can_be_waited_for_a_while_or_not_at_all(generator: torch.Generator) -> None:
    spec = make_spec(1024, 1024, Format.FP32)
    with CpuExpertEngine(1) as engine:
        plan = engine.plan(spec, random_shard(spec, 4, generator), max_tokens=1024, top_k=4)
        batch = random_batch(spec, 1024, 4, (0, 4), generator)
        out, done = torch.empty(batch[0].shape), torch.zeros(1, dtype=torch.int32)
        run = plan.start(*batch, out, done=done)
        with pytest.raises(TimeoutError, match="more than 0 s"):
            run.wait(0)
        assert run.wait(60) > 0
        done.zero_()
        run = plan.start(*batch, out, done=done)
        run.abandon()
        del run
        assert not done.item(), "nobody has waited"
        while not done.item():
            time.sleep(0.001)


def test_a_run_may_be_abandoned_while_another_thread_waits(generator: torch.Generator) -> None:
    spec = make_spec(1024, 1024, Format.FP32)
    with CpuExpertEngine(1) as engine:
        plan = engine.plan(spec, random_shard(spec, 4, generator), max_tokens=1024, top_k=4)
        batch = random_batch(spec, 1024, 4, (0, 4), generator)
        run = plan.start(*batch, torch.empty(batch[0].shape))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(run.wait, 60)
            time.sleep(0.002)
            run.abandon()
            assert waiting.result() >= 0
        assert run.wait() == 0.0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs another CPU")
def test_a_started_run_has_the_first_core_and_who_starts_it_leaves_that(
    generator: torch.Generator,
) -> None:
    allowed, current_cpu = os.sched_getaffinity(0), ctypes.CDLL(None).sched_getcpu
    spec = make_spec(1024, 1024, Format.FP32)
    with CpuExpertEngine(1) as engine:
        plan = engine.plan(spec, random_shard(spec, 4, generator), max_tokens=1024, top_k=4)
        batch = random_batch(spec, 1024, 4, (0, 4), generator)
        (first, _), *_ = _engine.physical_cores()

        def pinned() -> int:
            masks = []
            for thread in os.listdir("/proc/self/task"):
                with suppress(OSError):  # it has ended
                    masks.append(os.sched_getaffinity(int(thread)))
            return masks.count({first})

        before, left, has_core = pinned(), False, False
        # What the kernel does with a thread that has moved is its own affair.
        for _ in range(3):
            os.sched_setaffinity(0, {first})
            os.sched_setaffinity(0, allowed)
            done = torch.zeros(1, dtype=torch.int32)
            run = plan.start(*batch, torch.empty(batch[0].shape), done=done)
            left |= current_cpu() != first
            while not done.item():
                has_core |= pinned() > before
            run.wait()
        assert left and has_core
        assert os.sched_getaffinity(0) == allowed


def test_a_started_run_that_is_let_go_of_has_ended(
    engine: CpuExpertEngine, generator: torch.Generator
) -> None:
    plan = small_plan(engine, generator)
    x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
    out = torch.full(x.shape, torch.inf)
    del (run := [plan.start(x, ids, weights, out)])[0]
    assert not run and out.isfinite().all()


# Started, and let go of by the collector of cycles with the tensors that it uses.
_COLLECT_DURING_RUN = """
import gc, torch
from tests.engine.shards import make_spec, random_batch, random_shard
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Format
from vllm_moe_offload.host.pages import map_pages

generator = torch.Generator().manual_seed(0)
spec = make_spec(512, 512, Format.FP32)

class Layer:
    pass

def in_pages(tensor):
    block = map_pages(tensor.nbytes)
    mine = torch.frombuffer(block, dtype=torch.uint8, count=tensor.nbytes)
    return mine.view(tensor.dtype).view(tensor.shape).copy_(tensor)

layer = Layer()
layer.cycle = layer
layer.engine = CpuExpertEngine(1)
layer.shard = {n: in_pages(t) for n, t in random_shard(spec, 4, generator).items()}
layer.plan = layer.engine.plan(spec, layer.shard, max_tokens=2048, top_k=2)
x, ids, weights = random_batch(spec, 2048, 2, (0, 4), generator)
layer.x, layer.out = in_pages(x), in_pages(torch.empty(x.shape))
layer.run = layer.plan.start(layer.x, ids, weights, layer.out)
"""


@pytest.mark.parametrize("then", ["del layer; gc.collect(); print('collected')", "print('exits')"])
def test_what_a_started_run_uses_outlives_it(then: str) -> None:
    assert printed_by(_COLLECT_DURING_RUN + then, 120).strip() in ("collected", "exits")


def test_closed_engine_says_so(generator: torch.Generator) -> None:
    engine = CpuExpertEngine()
    plan = small_plan(engine, generator)
    engine.close()
    engine.close()
    x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
    with pytest.raises(RuntimeError, match="closed"):
        plan.run(x, ids, weights, torch.empty(x.shape))
    with pytest.raises(RuntimeError, match="closed"):
        small_plan(engine, generator)


# Weights in pages that are unmapped when nothing holds them: a reader then dies of it.
_CLOSE_DURING_RUNS = """
import threading, time, torch
from tests.engine.shards import make_spec, random_batch, random_shard
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Format
from vllm_moe_offload.host.pages import map_pages

generator = torch.Generator().manual_seed(0)
spec = make_spec(512, 512, Format.FP32)
shard = random_shard(spec, 4, generator)
x, ids, weights = random_batch(spec, 32, 2, (0, 4), generator)
with CpuExpertEngine() as engine:
    expected = torch.empty(x.shape)
    engine.plan(spec, shard, max_tokens=32, top_k=2).run(x, ids, weights, expected)

def in_pages(tensor):
    copy = torch.frombuffer(map_pages(tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)

def run_until_closed(plan):
    out = torch.empty(x.shape)
    while True:
        try:
            plan.run(x, ids, weights, out)
        except RuntimeError as error:
            assert "closed" in str(error)
            ends.append(True)
            return
        assert torch.equal(out, expected)

for attempt in range(20):
    ends = []
    engine = CpuExpertEngine()
    held = {name: in_pages(tensor) for name, tensor in shard.items()}
    plan = engine.plan(spec, held, max_tokens=32, top_k=2)
    del held
    threads = [threading.Thread(target=run_until_closed, args=(plan,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    engine.close()
    for thread in threads:
        thread.join()
    assert len(ends) == len(threads)
"""


def test_closing_does_not_disturb_running_calls() -> None:
    printed_by(_CLOSE_DURING_RUNS, seconds=120)


def _run_in_child(plan: ExpertPlan, connection: multiprocessing.connection.Connection) -> None:
    try:
        plan.run(
            torch.zeros(1, 72),
            torch.zeros(1, 2, dtype=torch.int32),
            torch.zeros(1, 2),
            torch.zeros(1, 72),
        )
        connection.send("ran")
    except RuntimeError as error:
        connection.send(str(error))
    with CpuExpertEngine() as engine:
        connection.send(engine.threads)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_told_and_may_make_its_own(generator: torch.Generator) -> None:
    with CpuExpertEngine() as engine:
        plan = small_plan(engine, generator)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=_run_in_child, args=(plan, there)
        )
        child.start()
        assert here.poll(20)
        assert "fork" in here.recv()
        assert here.poll(20)
        assert here.recv() == engine.threads
        child.join()


# The child makes an engine of its own, then lets go of its parent's: threads of the one have the
# numbers of the other's, which stayed behind. And the same with a doorbell.
_OWN_BEFORE_THE_PARENTS = """
import os, torch
from tests.engine import test_doorbell as t
from tests.engine.shards import make_spec, random_batch, random_shard
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Format

torch.set_num_threads(1)  # torch's own threads do not come along either

def make():
    generator, spec = torch.Generator().manual_seed(0), make_spec(64, 64, Format.FP32)
    engine = CpuExpertEngine()
    shard = random_shard(spec, 2, generator)
    plan = engine.plan(spec, shard, max_tokens=1, top_k=1)
    plan.start(*random_batch(spec, 1, 1, (0, 2), generator), torch.empty(1, 64)).wait()
    return plan, *t.make(engine, generator)

parents = make()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(30)
    mine = make()
    del parents
    more = make()
    del mine, more
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_lets_go_of_its_parents_engine_after_its_own() -> None:
    assert printed_by(_OWN_BEFORE_THE_PARENTS).strip() == "7"


# A process that is stopped for 3 s while it waits 1 s for a run.
_STOP_DURING_WAIT = """
import os, subprocess, time, torch
from tests.engine.shards import make_spec, random_batch, random_shard
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Format

generator = torch.Generator().manual_seed(0)
spec = make_spec(1024, 1024, Format.FP32)
plan = CpuExpertEngine(1).plan(
    spec, random_shard(spec, 4, generator), max_tokens=8192, top_k=4
)
batch = random_batch(spec, 8192, 4, (0, 4), generator)
out = torch.empty(batch[0].shape)
script = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"
began = time.monotonic()  # before the stop, however late this process goes on
stopping = subprocess.Popen(["sh", "-c", script])
run = plan.start(*batch, out)
try:
    run.wait(1.0)
    print("ended")
except TimeoutError:
    print("late" if time.monotonic() - began > 3.7 else "too soon")
stopping.wait()
"""


def test_a_process_that_was_stopped_waits_on() -> None:
    assert printed_by(_STOP_DURING_WAIT).strip() in ("ended", "late")


# Of a run that is under way when the process forks: the child asks how long it took, waits for it,
# and lets go of it.
_FORK_DURING_RUN = """
import os, time, torch
from tests.engine.shards import make_spec, random_batch, random_shard
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.experts import Format

generator = torch.Generator().manual_seed(0)
spec = make_spec(512, 512, Format.FP32)
engine = CpuExpertEngine(1)
plan = engine.plan(spec, random_shard(spec, 4, generator), max_tokens=2048, top_k=2)
x, ids, weights = random_batch(spec, 2048, 2, (0, 4), generator)
run = plan.start(x, ids, weights, torch.empty(x.shape))
time.sleep(0.02)
child = os.fork()
try:
    engine.phase_seconds
    assert child != 0
except RuntimeError as error:
    assert child == 0 and "fork" in str(error)
try:
    run.wait()
    print("waited")
except RuntimeError as error:
    assert child == 0 and "fork" in str(error)
    del run
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_a_run_of_its_parent() -> None:
    assert printed_by(_FORK_DURING_RUN, 60).split() == ["waited", "7"]


def test_interpreter_exits_with_an_engine_alive() -> None:
    code = (
        "import torch\n"
        "from vllm_moe_offload.engine import CpuExpertEngine\n"
        "from vllm_moe_offload.experts import Activation, ExpertSpec, Format\n"
        "engine = CpuExpertEngine()\n"
        "spec = ExpertSpec(8, 8, Activation.SILU, Format.FP32)\n"
        "shard = {p.name: torch.zeros(1, *p.shape) for p in spec.layout.tensors}\n"
        "plan = engine.plan(spec, shard, max_tokens=1, top_k=1)\n"
    )
    printed_by(code)


class TestRefusals:
    @pytest.fixture
    def plan(self, generator: torch.Generator) -> ExpertPlan:
        self.engine = CpuExpertEngine()
        return small_plan(self.engine, generator)

    @pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1, -(2**31)])
    def test_ids_out_of_range(self, plan: ExpertPlan, generator: torch.Generator, bad: int) -> None:
        x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
        ids[2, 1] = bad
        out = torch.full(x.shape, 7.0)
        with pytest.raises(ValueError, match=rf"topk_ids\[2, 1\] is {bad}, .* 0 to 3"):
            plan.run(x, ids, weights, out)
        assert (out == 7).all()

    def test_map_entries_out_of_range(self, plan: ExpertPlan, generator: torch.Generator) -> None:
        x, ids, weights = random_batch(SPEC, 4, 2, (0, 3), generator)
        for entry in (4, -2):
            expert_map = torch.tensor([entry] * 3, dtype=torch.int32)
            with pytest.raises(ValueError, match=rf"is {entry}, and this shard has rows 0 to 3"):
                plan.run(x, ids, weights, torch.empty(x.shape), expert_map=expert_map)
        ids[0, 0] = 3
        with pytest.raises(ValueError, match="expert_map has entries 0 to 2"):
            plan.run(x, ids, weights, torch.empty(x.shape), expert_map=expert_map)

    def test_an_empty_map_is_not_none(self, plan: ExpertPlan, generator: torch.Generator) -> None:
        x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
        out = torch.full(x.shape, 7.0)
        with pytest.raises(ValueError, match="expert_map has no entries"):
            plan.run(x, ids, weights, out, expert_map=torch.empty(0, dtype=torch.int32))
        assert (out == 7).all()

    def test_numbers_of_dimensions(self, plan: ExpertPlan, generator: torch.Generator) -> None:
        x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
        for wrong_x, wrong_ids in ((x[0, 0], ids), (x[0], ids), (x, ids[0, 0]), (x, ids[0])):
            with pytest.raises(ValueError, match=r"must be \[T, H\] and \[T, K\]"):
                plan.run(wrong_x, wrong_ids, weights, torch.empty(x.shape))

    def test_operands(self, plan: ExpertPlan, generator: torch.Generator) -> None:
        x, ids, weights = random_batch(SPEC, 4, 2, (0, 4), generator)
        out = torch.empty(x.shape)
        with pytest.raises(ValueError, match=r"x is torch.float64, torch.float32 is needed"):
            plan.run(x.double(), ids, weights, out)
        with pytest.raises(ValueError, match=r"x has shape \(4, 71\), \(4, 72\) is needed"):
            plan.run(x[:, :-1], ids, weights, out)
        with pytest.raises(ValueError, match=r"topk_ids is torch.int64"):
            plan.run(x, ids.long(), weights, out)
        with pytest.raises(ValueError, match=r"topk_weights has shape"):
            plan.run(x, ids, weights[:, :1], out)
        with pytest.raises(ValueError, match=r"out has strides .* contiguous"):
            plan.run(x, ids, weights, torch.empty(72, 4).T)
        with pytest.raises(ValueError, match=r"out is on meta"):
            plan.run(x, ids, weights, out.to("meta"))
        wide = torch.zeros(4, 3, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"3 experts a token, .* at most 2"):
            plan.run(x, wide, torch.zeros(4, 3), out)

    def test_tensors_of_a_plan(self, generator: torch.Generator) -> None:
        shard = random_shard(SPEC, 4, generator)
        with CpuExpertEngine() as engine:
            for wrong, message in [
                ({"w13_weight": shard["w13_weight"]}, "missing: .'w2_weight'"),
                ({**shard, "w2_bias": torch.zeros(4, 72)}, "not part of it: .'w2_bias'"),
                (
                    {**shard, "w2_weight": shard["w2_weight"][:3]},
                    r"w2_weight has shape \(3, 72, 40\)",
                ),
                (
                    {**shard, "w2_weight": shard["w2_weight"].bfloat16()},
                    "w2_weight is torch.bfloat16",
                ),
                ({**shard, "w13_weight": shard["w13_weight"].mT.contiguous().mT}, "contiguous"),
                ({name: tensor[:0] for name, tensor in shard.items()}, "holds no expert"),
            ]:
                with pytest.raises(ValueError, match=message):
                    engine.plan(SPEC, wrong, max_tokens=1, top_k=1)
            for wrong in (0, -1, 2**24 + 1, 2**55, 2**62, 2**70):
                with pytest.raises(ValueError, match=f"max_tokens={wrong} .*1 to {2**24}$"):
                    engine.plan(SPEC, shard, max_tokens=wrong, top_k=1)
                with pytest.raises(ValueError, match=f"top_k={wrong} .*1 to 1024$"):
                    engine.plan(SPEC, shard, max_tokens=1, top_k=wrong)

    def test_the_largest_plan_computes(self, generator: torch.Generator) -> None:
        shard = random_shard(SPEC, 4, generator)
        x, ids, weights = random_batch(SPEC, 3, 2, (0, 4), generator)
        out = torch.empty(x.shape)
        with CpuExpertEngine() as engine:
            plan = engine.plan(SPEC, shard, max_tokens=2**24, top_k=1024)
            plan.run(x, ids, weights, out)
        expected = oracle.experts(SPEC, shard, x, ids, weights)
        assert oracle.relative_error(out, expected) < 1e-5
