"""Random calls of the CPU engine from several Python threads, each result held against float64.

    python -m tests.soak.engine --minutes 8

Ends with 1 and a message at the first wrong result, or where the idle engine keeps a core busy.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from tests.engine import oracle
from tests.engine.shards import Shard, make_spec, random_shard, tolerance
from vllm_moe_offload.engine import CpuExpertEngine, ExpertPlan
from vllm_moe_offload.engine.native import column_multiple
from vllm_moe_offload.experts import Activation, ExpertSpec, Format

EXPERTS = 5
MAX_TOP_K = 4
# Rows that batches are drawn from.
ROWS = 24
TOKENS = (1, 1, 1, 2, 2, 3, 4, 5, 7, 15, 16, 17, 33, 64, 130, 300)
# Where the router's weight goes into the expert, no sum over experts is linear in it.
INPUT_WEIGHTS = (0.5, 1.0, 1.75)
# A bf16 output is rounded once more.
BF16_ROUNDING = 2.0**-8
IDLE_SECONDS = 5.0


@dataclass(frozen=True)
class Case:
    """A shard with what its experts make of the rows, so that no call waits for the oracle.

    sums: ``[weights, ROWS, EXPERTS, cuts, H]`` float64: the partial sum up to each cut of the
    intermediate dimension, for each of INPUT_WEIGHTS (for 1 alone where they do not go in).
    """

    spec: ExpertSpec
    shard: Shard
    x: torch.Tensor
    cuts: tuple[int, ...]
    sums: torch.Tensor
    plans: dict[str, ExpertPlan]


def make_case(format: Format, engines: Sequence[CpuExpertEngine], seed: int) -> Case:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    spec = make_spec(
        choose.randrange(2, 320),
        choose.randrange(2, 400),
        format,
        activation=choose.choice(list(Activation)),
        bias=choose.random() < 0.5,
        apply_router_weight_on_input=choose.random() < 0.3,
        **({"dtype": choose.choice(dtypes)} if format.quantised else {}),
    )
    shard = random_shard(spec, EXPERTS, generator)
    x = torch.randn((ROWS, spec.hidden), generator=generator).to(spec.activation_dtype)
    step = column_multiple(spec) * -(-spec.intermediate // (6 * column_multiple(spec)))
    cuts = (*range(0, spec.intermediate, step), spec.intermediate)
    values = {**shard}
    for name in ("w13", "w2"):
        values[f"{name}_weight"] = oracle.dequantise(spec, shard, name)
    weights = INPUT_WEIGHTS if spec.apply_router_weight_on_input else (1.0,)
    sums = torch.zeros(len(weights), ROWS, EXPERTS, len(cuts), spec.hidden, dtype=torch.float64)
    for w, weight in enumerate(weights):
        for expert in range(EXPERTS):
            for i, part in enumerate(itertools.pairwise(cuts)):
                value = oracle.expert(spec, values, expert, x.double() * weight, part)
                sums[w, :, expert, i + 1] = sums[w, :, expert, i] + value
    plans = {
        engine.isa: engine.plan(spec, shard, max_tokens=choose.choice([1, 8, 300]), top_k=MAX_TOP_K)
        for engine in engines
    }
    return Case(spec, shard, x, cuts, sums, plans)


def call(case: Case, isa: str, choose: random.Random) -> str | None:
    """One random call; what is wrong with its result, or None."""
    generator = torch.Generator().manual_seed(choose.getrandbits(48))
    spec, tokens, top_k = case.spec, choose.choice(TOKENS), choose.randint(1, MAX_TOP_K)
    rows = torch.randint(0, ROWS, (tokens,), generator=generator)
    expert_map, ids_end = None, EXPERTS
    if choose.random() < 0.5:
        ids_end = EXPERTS + 3
        expert_map = torch.full((ids_end,), -1, dtype=torch.int32)
        expert_map[torch.randperm(ids_end, generator=generator)[:EXPERTS]] = torch.randperm(
            EXPERTS, generator=generator
        ).int()
    shape = (tokens, top_k)
    ids = torch.randint(-1, ids_end, shape, generator=generator, dtype=torch.int32)
    weight_index = torch.randint(0, case.sums.shape[0], shape, generator=generator)
    if spec.apply_router_weight_on_input:
        weights = torch.tensor(INPUT_WEIGHTS)[weight_index]
        scale = torch.ones(shape, dtype=torch.float64)
    else:
        weights = torch.rand(shape, generator=generator)
        scale = weights.double()
    begin, end = 0, len(case.cuts) - 1
    if choose.random() < 0.4:
        begin, end = sorted(choose.sample(range(len(case.cuts)), 2))
    kind = choose.choice(["float32", "bfloat16", "accumulate"])
    out = torch.full(
        (tokens, spec.hidden),
        1.0 if kind == "accumulate" else torch.nan,
        dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32,
    )
    case.plans[isa].run(
        case.x[rows].contiguous(),
        ids,
        weights,
        out,
        expert_map=expert_map,
        accumulate=kind == "accumulate",
        intermediate=(case.cuts[begin], case.cuts[end]),
    )

    experts = ids if expert_map is None else torch.where(ids < 0, ids, expert_map[ids.clamp(min=0)])
    index = (weight_index, rows[:, None].expand(shape), experts.clamp(min=0).long())
    parts = case.sums[(*index, end)] - case.sums[(*index, begin)]
    expected = (parts * (scale * (experts >= 0))[..., None]).sum(1)
    got = out.double() - (1.0 if kind == "accumulate" else 0.0)
    allowed = (tolerance(spec) + BF16_ROUNDING * (kind == "bfloat16")) * expected.norm()
    # What was there before is rounded with the sum.
    allowed += 2.0**-23 * out.numel() ** 0.5 * (kind == "accumulate")
    error = (got - expected).norm()
    if error <= allowed:
        return None
    return (
        f"{isa}: error {error:.3g} where {allowed:.3g} is allowed: {spec}, {tokens} tokens, top "
        f"{top_k}, columns {case.cuts[begin]} to {case.cuts[end]}, {kind}, map {expert_map}"
    )


def soak(
    cases: Sequence[Case], seconds: float, threads: int, seed: int
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Calls by format and instruction set, and what was wrong: at most one a thread."""
    counts: list[Counter[tuple[str, str]]] = [Counter() for _ in range(threads)]
    faults: list[str] = []
    deadline = time.monotonic() + seconds

    def work(thread: int) -> None:
        choose = random.Random(f"{seed} {thread}")
        while not faults and time.monotonic() < deadline:
            case = choose.choice(cases)
            isa = choose.choice(list(case.plans))
            try:
                fault = call(case, isa, choose)
            except Exception as error:
                fault = f"{isa}: {error!r}: {case.spec}"
            if fault is not None:
                faults.append(fault)
            counts[thread][case.spec.format.value, isa] += 1

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts, Counter()), faults


def idle_percent(seconds: float) -> float:
    """CPU time of this process while it waits, in percent of one core."""
    process = psutil.Process()
    time.sleep(0.5)
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--python-threads", type=int, default=2)
    parser.add_argument("--engine-threads", type=int, help="default: the engine's own choice")
    parser.add_argument("--cases", type=int, default=6, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # torch's own threads would take the engine's cores.
    torch.set_num_threads(1)
    first = CpuExpertEngine(options.engine_threads)
    engines = [CpuExpertEngine(first.threads, isa) for isa in first.isas_available]
    seeds = range(options.seed, options.seed + options.cases)
    cases = [make_case(format, engines, seed) for format in Format for seed in seeds]
    print(f"{len(cases)} shards, {first.threads} engine threads", flush=True)

    counts, faults = soak(cases, 60 * options.minutes, options.python_threads, options.seed)
    isas = [engine.isa for engine in engines]
    print(f"{'calls':>12}" + "".join(f"{isa:>12}" for isa in isas))
    for format in Format:
        numbers = "".join(f"{counts[format.value, isa]:>12}" for isa in isas)
        print(f"{format.value:>12}{numbers}")
    print(f"{sum(counts.values())} calls")
    idle = idle_percent(IDLE_SECONDS)
    print(f"idle: {idle:.2f} % of a core")
    if idle >= 1:
        faults.append(f"the idle engine takes {idle:.2f} % of a core, and 1 % is the most")
    for fault in faults:
        print(f"WRONG {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
