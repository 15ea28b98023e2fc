"""One engine of one contestant: ``python -m bench.child``, started by `bench.runner`.

It imports vLLM and then reads the path of its order, a file made by the runner, from standard
input; when the engine is up it reads another line before it gets ready, and one before each cell
that it measures. Every figure is appended to the order's result file as soon as it is there, so
that what was measured outlives a crash; when it has done what a line told it to, so is `TURN`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import MIN_REPEATS, SIMULATED, SWITCHING, summary

_GIB = 2**30
# Tells vLLM, and our plugin when it is loaded, to impose a routing.
ROUTING_VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
TURN = "turn"  # no figure of the engine: see above
PROMPT = 16  # tokens before the steps that decode.py times
REPEATS = 7
# A repeat is the mean of up to so many steps, after up to so many that fill caches. Stock's take
# two milliseconds: fewer of these last no longer than what disturbs them.
_CHUNK, _WARM = 64, 64
# Serving corrects the rates, at most every two seconds and by the root of what they are off: so
# long at once, so often at most.
_SETTLE_SECONDS, _SETTLE_TURNS = 3.0, 3
_SETTLE_TOKENS = 16  # at once, which slow steps take seconds for


class _Loaded(Exception):
    """Raised to end an engine that was started for its loading only."""


class Sampler:
    """The most that host and GPU memory grew by, looked at every few milliseconds."""

    def __init__(self) -> None:
        import psutil
        import torch

        self._available = lambda: psutil.virtual_memory().available
        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sampler:
        gc.collect()
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
        self.host_before = self.host_least = self._available()
        self.gpu_before = self.gpu_most = self.gpu_now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        self._stop.set()
        self._thread.join()

    def gpu_now(self) -> int:
        """Bytes of GPU memory that torch has given out."""
        return self._cuda.memory_allocated() if self._cuda else 0

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._look()

    def _look(self) -> None:
        self.host_least = min(self.host_least, self._available())
        if self._cuda:
            # torch's own peak is set back by vLLM when it has loaded, hence the looking.
            self.gpu_most = max(self.gpu_most, self._cuda.max_memory_allocated())


class Child:
    """Carries an order out."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self._result = Path(order["result"])

    def emit(self, metric: str, unit: str, value: dict[str, Any], **cell: Any) -> None:
        """Write one figure down."""
        with self._result.open("a") as file:
            file.write(json.dumps({"metric": metric, "unit": unit, **value, **cell}) + "\n")

    def run(self) -> None:
        """Start the engine and measure every cell."""
        import torch
        from vllm import LLM
        from vllm.plugins import load_general_plugins

        # First, since the plugin adds to the same class as `_watch_loading`.
        load_general_plugins()
        self._watch_loading()
        if self.order["stock_offload"] and torch.cuda.is_available():
            fill_quickly()
        engine = dict(self.order["engine"])
        for name in ("cpu_offload_params", "offload_params"):
            if name in engine:
                engine[name] = set(engine[name])
        began = time.perf_counter()
        try:
            llm = LLM(**engine)
        except _Loaded:
            return
        self._single("start_s", "s", time.perf_counter() - began)
        for cell in (None, *self.order["cells"]):
            if not sys.stdin.readline():
                return  # the runner has ended
            if cell is None:
                self._check_fit(llm)
                self._measure(llm)
                self._settle(llm)
            else:
                self._cell(llm, cell)
            self._single(TURN, "", 1)

    def _cell(self, llm: Any, cell: dict[str, Any]) -> None:
        if cell.get("routing") not in (None, "model", SWITCHING):
            _route(llm, cell["routing"])
        if "batch" in cell:
            self._decode(llm, cell)
        else:
            self._prefill(llm, cell)

    def _check_fit(self, llm: Any) -> None:
        """RuntimeError where every expert was to be on the GPU and is not."""
        if self.order["all_fit"] and (layers := self._stats(llm)["layers"]):
            slots = next(iter(layers.values()))["slots"]
            raise RuntimeError(
                f"every expert was to fit on the GPU, and {slots} of a layer do: give this run a "
                "GPU that no other has"
            )

    def _measure(self, llm: Any) -> None:
        """An engine that has started beside others measures the machine as one alone finds it."""
        stats = self._stats(llm)
        if stats is not None and stats["rates"] is not None:
            llm.collective_rpc("moe_offload_measure")

    def _settle(self, llm: Any) -> None:
        """Serve until no other split of the misses is made any more, where they are split."""
        batch = max((cell["batch"] for cell in self.order["cells"] if "batch" in cell), default=0)
        stats = self._stats(llm)
        if not batch or stats is None or stats["rates"] is None:
            return
        corrections = stats["rate_corrections"]
        for _ in range(_SETTLE_TURNS):
            ends = time.perf_counter() + _SETTLE_SECONDS
            while time.perf_counter() < ends:
                Requests(llm, batch, PROMPT, _SETTLE_TOKENS).finish()
            before, corrections = corrections, self._stats(llm)["rate_corrections"]
            if corrections == before:
                break
        self._single("rate_corrections", "", corrections)

    def _decode(self, llm: Any, cell: dict[str, Any]) -> None:
        """Steps of a full batch after its prefill; their number follows from how long they take."""
        # None: as it is.
        turns = SIMULATED if cell["routing"] == SWITCHING else (None,)
        budget = self.order["seconds"] / len(turns)
        calibration = Requests(llm, cell["batch"], PROMPT, 5)
        calibration.advance(2)
        step = calibration.advance(2) / 2
        calibration.finish()
        chunk = max(1, min(_CHUNK, int(budget * 0.6 / REPEATS / step)))
        warm = max(4, min(_WARM, int(budget * 0.4 / step)))
        # Exchanging a routing waits for the step that vLLM has under way; with the first step after
        # it there is one under way again, as there is when the time has been taken.
        untimed = 0 if turns == (None,) else 1
        steps = REPEATS * (untimed + chunk) * len(turns)
        requests = Requests(llm, cell["batch"], PROMPT, 1 + warm + steps + 1)

        def step_ms() -> float:
            seconds = 0.0
            for routing in turns:
                if routing is not None:
                    _route(llm, routing, goes_on=True)
                    requests.advance(untimed)
                seconds += requests.advance(chunk)
            return 1e3 * seconds / len(turns) / chunk

        requests.advance(1 + warm)
        self._reset(llm)
        times = [step_ms() for _ in range(REPEATS)]
        stats = self._stats(llm)
        requests.finish()
        self.emit("step_ms", "ms", summary(times), **cell)
        if stats is not None:
            self._hits(stats, cell)

    def _prefill(self, llm: Any, cell: dict[str, Any]) -> None:
        """The time to the one token that is asked for."""
        times = []
        for repeat in range(1 + MIN_REPEATS):
            if repeat == 1:
                self._reset(llm)
            times.append(Requests(llm, 1, cell["tokens"], 1, seed=repeat).finish() * 1e3)
        self.emit("ttft_ms", "ms", summary(times[1:]), **cell)
        stats = self._stats(llm)
        if stats is not None:
            self._hits(stats, cell)
            self._tail(stats, cell)

    def _hits(self, stats: dict[str, Any], cell: dict[str, Any]) -> None:
        used = stats["hits"] + stats["misses"]
        if used:
            self._single("hit_percent", "%", 100 * stats["hits"] / used, **cell)

    def _tail(self, stats: dict[str, Any], cell: dict[str, Any]) -> None:
        """Where the time of streamed steps went, in which the CPU had a part."""
        tail = stats["tail"]
        if tail is None or not tail["passed"]:
            return
        for metric, seconds in (("cpu_busy_percent", "computed"), ("host_wait_percent", "waited")):
            self._single(metric, "%", 100 * tail[seconds] / tail["passed"], **cell)
        self._single("by_copies_percent", "%", 100 * tail["by_copies"] / tail["passed"], **cell)
        self._single("cpu_layers", "", tail["layers"], **cell)
        self._single("cpu_experts_a_layer", "", stats["cpu_experts"] / tail["layers"], **cell)
        self._single("experts_ahead_a_layer", "", tail["ahead"] / tail["layers"], **cell)
        rates = tail["rates"]
        for name in ("copy", "cpu", "cpu_row"):
            self._single(f"expert_{name}_us", "us", 1e6 * rates[name], **cell)
        self._single("expert_slowed", "", rates["slowed"], **cell)

    def _single(self, metric: str, unit: str, value: float, **cell: Any) -> None:
        self.emit(metric, unit, {"value": value, "min": value, "max": value, "repeats": 1}, **cell)

    def _reset(self, llm: Any) -> None:
        if self.order["ours"]:
            llm.collective_rpc("moe_offload_reset_stats")

    def _stats(self, llm: Any) -> dict[str, Any] | None:
        """What has been counted since `_reset`; None of engines that are not ours."""
        if not self.order["ours"]:
            return None
        (stats,) = llm.collective_rpc("moe_offload_stats")
        return stats

    def _watch_loading(self) -> None:
        """Measure the time and memory of a worker's `load_model`, whoever does it."""
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        load = WorkerWrapperBase.load_model

        def load_model(worker: Any, *args: Any, **kwargs: Any) -> None:
            for repeat in range(self.order["repeats"]):
                if repeat:
                    forget_model(worker)
                with Sampler() as seen, weights_timed(worker) as weights:
                    began = time.perf_counter()
                    load(worker, *args, **kwargs)
                    seconds = time.perf_counter() - began
                if not repeat:  # what is forgotten may go only when something takes its place
                    gpu_before = seen.gpu_before
                if self.order["stock_offload"] and not offloaded_bytes():
                    raise RuntimeError("vLLM took the settings and offloaded nothing")
                grew = seen.gpu_now() - gpu_before
                dense = dense_bytes(worker.worker.get_model())
                self._single("load_s", "s", seconds)
                if self.order["task"] == "load":
                    self._single("weights_s", "s", sum(weights))
                self._single("peak_gpu_gib", "GiB", (seen.gpu_most - seen.gpu_before) / _GIB)
                self._single("peak_host_gib", "GiB", (seen.host_before - seen.host_least) / _GIB)
                self._single("expert_gpu_gib", "GiB", max(0, grew - dense) / _GIB)
            if self.order["task"] == "load":
                raise _Loaded

        WorkerWrapperBase.load_model = load_model


def _route(llm: Any, routing: str, goes_on: bool = False) -> None:
    """Impose a simulated routing from the next step on: from its beginning, or where it is now."""
    llm.collective_rpc("moe_offload_routing", args=(routing, goes_on))


@contextmanager
def weights_timed(worker: Any) -> Iterator[list[float]]:
    """Seconds of each call by which a loader of this worker fills a model's weights."""
    from vllm.model_executor.model_loader import get_model_loader

    kind = type(get_model_loader(worker.vllm_config.load_config))
    original, seconds = kind.load_weights, []

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    kind.load_weights = load_weights
    try:
        yield seconds
    finally:
        kind.load_weights = original


def forget_model(worker: Any) -> None:
    """Free the model that a worker has loaded, so that it can be loaded again."""
    worker.worker.model_runner.model = None
    worker.__dict__.pop("_moe_offload_runtime", None)
    worker.vllm_config.compilation_config.static_forward_context.clear()
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fill_quickly() -> None:
    """Let vLLM draw the dummy weights that it keeps on the host on the GPU: it has one thread."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    original = weight_utils.initialize_single_dummy_weight

    def fill(param: Any, low: float = -1e-3, high: float = 1e-3, *rest: Any, **more: Any) -> None:
        if param.device.type == "cpu" and param.dtype in (torch.bfloat16, torch.float16):
            drawn = torch.empty(param.shape, dtype=param.dtype, device="cuda")
            param.data.copy_(drawn.uniform_(low, high))
        else:
            original(param, low, high, *rest, **more)

    for module in (weight_utils, dummy_loader):
        if hasattr(module, original.__name__):
            setattr(module, original.__name__, fill)


def offloaded_bytes() -> int:
    """What vLLM's own offloader has moved to host memory; some runners and devices ignore it."""
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    return sum(
        getattr(offloader, name, 0) for name in ("cpu_offload_bytes", "total_offloaded_bytes")
    )


def dense_bytes(model: Any) -> int:
    """Bytes of the parameters on the GPU that are not routed experts'."""
    return sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if parameter.is_cuda and ".experts." not in f".{name}."
    )


class Requests:
    """`batch` requests of random tokens, prefilled in one step, each generating `new` tokens."""

    def __init__(self, llm: Any, batch: int, prompt: int, new: int, seed: int = 0) -> None:
        import numpy as np
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine = llm.llm_engine
        vocabulary = llm.model_config.get_vocab_size()
        tokens = np.random.default_rng(seed).integers(3, vocabulary, (batch, prompt)).tolist()
        self._began = time.perf_counter()
        self._done: dict[str, int] = {}
        for index, row in enumerate(tokens):
            self._engine.add_request(str(index), TokensPrompt(prompt_token_ids=row), parameters)
            self._done[str(index)] = 0

    def advance(self, tokens: int) -> float:
        """Go on until the slowest request has that many tokens more; the seconds it took."""
        until = min(self._done.values()) + tokens
        began = time.perf_counter()
        while min(self._done.values()) < until:
            self._step()
        return time.perf_counter() - began

    def finish(self) -> float:
        """Go on to the end; the seconds since the requests were made."""
        while self._engine.has_unfinished_requests():
            self._step()
        return time.perf_counter() - self._began

    def _step(self) -> None:
        for output in self._engine.step():
            self._done[output.request_id.split("-")[0]] += len(output.outputs[0].token_ids)


def main() -> None:
    import vllm  # noqa: F401 - most of a start, done before there is an order

    path = sys.stdin.readline().strip()
    if path:
        order = json.loads(Path(path).read_text())
        if order["routing"] is not None:
            os.environ[ROUTING_VARIABLE] = order["routing"]
        Child(order).run()
    # Everything is written: ending a process that has used a GPU in order takes ten seconds.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
