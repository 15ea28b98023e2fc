"""Generate from a few prompts, one after another, printing the text as it comes.

Run as a module in a process of its own: ``python -m vllm_moe_offload.integration.demo_run``
with one JSON argument, the fields of `DemoRun`. Text goes to standard output, the result to a file,
or as ``error`` the message of an error of this package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_moe_offload.errors import OffloadError


@dataclass(frozen=True)
class DemoRun:
    """What to run. `settings`: the moe_offload settings, or None for stock vLLM."""

    model: str
    prompts: list[str]
    max_tokens: int
    max_model_len: int
    settings: dict[str, Any] | None
    print_text: bool
    result: str


def run(order: DemoRun) -> dict[str, Any]:
    """Carry it out; returns tokens, seconds and, with offload, its counters."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_moe_offload.config import moe_offload_args

    offload = {} if order.settings is None else moe_offload_args(**order.settings)
    began = time.perf_counter()
    llm = LLM(
        order.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=order.max_model_len,
        max_num_seqs=4,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        **offload,
    )
    started = time.perf_counter() - began
    for prompt in order.prompts:
        count = len(llm.get_tokenizer().encode(prompt))
        if count >= order.max_model_len:
            raise OffloadError(
                f"a prompt has {count} tokens: it and its text are up to {order.max_model_len} "
                "here, give a shorter one"
            )
    # Greedy, so that two runs can be compared; the penalty keeps a small model out of loops.
    parameters = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.15,
        max_tokens=order.max_tokens,
        output_kind=RequestOutputKind.DELTA,
    )
    llm.generate(order.prompts[0], SamplingParams(max_tokens=2), use_tqdm=False)
    if order.settings is not None:
        llm.collective_rpc("moe_offload_reset_stats")

    engine = llm.llm_engine
    tokens: list[list[int]] = []
    seconds = 0.0
    for number, prompt in enumerate(order.prompts):
        began = time.perf_counter()
        engine.add_request(str(number), prompt, parameters)
        _say(order, f"\n\x1b[1m{prompt}\x1b[0m" if sys.stdout.isatty() else f"\n{prompt}")
        sequence: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                sequence += output.outputs[0].token_ids
                _say(order, output.outputs[0].text)
        seconds += time.perf_counter() - began
        tokens.append(sequence)
        _say(order, "\n")
    return {
        "tokens": tokens,
        "seconds": seconds,
        "start_seconds": started,
        "stats": llm.collective_rpc("moe_offload_stats")[0] if order.settings is not None else None,
    }


def _say(order: DemoRun, text: str) -> None:
    if order.print_text:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    the_order = DemoRun(**json.loads(sys.argv[1]))
    try:
        outcome = run(the_order)
    except OffloadError as error:
        outcome = {"error": str(error)}
    Path(the_order.result).write_text(json.dumps(outcome))
