"""The modes in one running engine, and its steps in graphs or not: starting takes most of the time.

The engine is started in mode `auto` with graphs, by the V1 runner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM
from vllm.compilation.cuda_graph import CUDAGraphWrapper

from tests.gpu.oracle import checked_layers
from vllm_moe_offload.config import OffloadConfig
from vllm_moe_offload.lanes import AskingLayer, CapturedLayer
from vllm_moe_offload.planning import LaneRates

# Both lanes alike: each has its share of the misses, whatever the machine.
EVEN = LaneRates(1.0, 1.0, 1.0, 1.0)


class Modes:
    """Lets the layers serve their steps as in an engine that was started in another mode."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        (self._runtime,) = llm.collective_rpc(lambda worker: worker._moe_offload_runtime)
        (self._runner,) = llm.collective_rpc(lambda worker: worker.worker.model_runner)
        self._layers = list(checked_layers(llm))
        self._requests = [checked.layer.captured._cpu for checked in self._layers]
        self._rates = self._runtime._share.rates
        self._device = self._layers[0].layer.captured.step.slot_of.device

    def to(self, mode: str, num_slots: int) -> None:
        """Empty slots and no graphs; what was counted is forgotten.

        `auto` by the measured rates; `hybrid` by even ones, and with limits on what is fetched.
        """
        CUDAGraphWrapper.clear_all_graphs()
        limits = {}
        if mode == "hybrid":
            top_k = min(checked.module.top_k for checked in self._layers)
            limits = {"cache_topk": top_k - 1, "update_expert_num": 2}
        config = OffloadConfig.parse({"mode": mode, **limits})
        share = self._runtime._share
        self._runtime.config = share._config = config
        share.rates_now = EVEN if mode == "hybrid" else self._rates
        share._meter = None  # the split is to stay as it is
        for checked, request in zip(self._layers, self._requests, strict=True):
            layer, top_k = checked.layer, checked.module.top_k
            layer._is_in_graph = False
            layer._asking = None
            layer.resize(num_slots)
            if mode == "cpu":
                layer._residency = layer._slots = None
                layer._asking = AskingLayer(layer.num_experts, top_k, request, self._device)
            if mode == "cache":
                layer._slots.captured = CapturedLayer(
                    layer._host,
                    layer._slots.cache.tensors,
                    layer._slots.resident,
                    self._runtime._side(self._device),
                    policy=config.policy,
                    top_k=top_k,
                )
        self._llm.collective_rpc("moe_offload_reset_stats")

    def capture(self) -> None:
        """Graphs over what the layers do now, as at start-up."""
        CUDAGraphWrapper.clear_all_graphs()
        self._runner.capture_model()
        assert all(checked.layer._is_in_graph for checked in self._layers)
        # The steps of capturing are counted, and have filled slots.
        self._llm.collective_rpc("moe_offload_reset_stats")

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Inside, every step runs without a graph."""
        dispatcher: Any = self._runner.cudagraph_dispatcher
        dispatcher.keys_initialized = False
        try:
            yield
        finally:
            dispatcher.keys_initialized = True
        assert not any(checked.layer._is_in_graph for checked in self._layers)
