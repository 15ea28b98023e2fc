"""The CPU's share in the captured steps of one worker's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from vllm_moe_offload.config import OffloadConfig
from vllm_moe_offload.device.request import CpuRequest
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.errors import ConfigError
from vllm_moe_offload.lanes import (
    MAX_CAPTURED,
    CapturedLayer,
    CpuLane,
    EngineLane,
    OffloadedLayer,
)
from vllm_moe_offload.lanes.meter import LaneMeter
from vllm_moe_offload.lanes.rates import measure_rates
from vllm_moe_offload.planning import (
    LaneRates,
    LaneTrials,
    check_slots,
    fetch_limits,
    promotion_limits,
)

logger = init_logger(f"vllm.{__name__}")

# Places for layers on the CPU lane's board, of a few cache lines each; a draft model's come later.
_MOST_LAYERS = 1024


def check_limits(config: OffloadConfig, layer: str, num_experts: int, top_k: int) -> None:
    """ConfigError where slots or a limit on what is fetched are above what this layer has."""
    if isinstance(config.slots_per_layer, int):
        check_slots(config.slots_per_layer, layer, num_experts)
    for name, what, there in (
        ("cache_topk", f"routes a token to {top_k} experts", top_k),
        ("update_expert_num", f"has {num_experts} experts", num_experts),
    ):
        most = getattr(config, name)
        if most != "auto" and most > there:
            raise ConfigError(
                f"{name}={most}, but {layer} {what}: give at most {there}, or 'auto' for no limit"
            )


class CpuShare:
    """The CPU lane, and how many misses it leaves to be fetched. Made where there is a GPU.

    `rates`: as last measured; `rates_now`: those the split is made by; both None before.
    `corrections`: how often another split was made since because of what the lanes had done.
    """

    def __init__(
        self, config: OffloadConfig, engine: CpuExpertEngine, device: torch.device
    ) -> None:
        self.rates: LaneRates | None = None
        self.rates_now: LaneRates | None = None
        self.corrections = 0
        self._trials = LaneTrials()
        self._config = config
        self._device = device
        self._layers: dict[str, OffloadedLayer] = {}
        self._meter: LaneMeter | None = None
        self._lane: CpuLane | None = None
        if config.mode not in ("cache", "stream"):
            self._lane = CpuLane(
                engine, max_layers=_MOST_LAYERS, max_tokens=MAX_CAPTURED, device=device
            )

    def request(self, layer: str, cpu: EngineLane) -> CpuRequest | None:
        """The layer's side of the lane; None in a mode that has none."""
        return self._lane.add(layer, cpu.plan) if self._lane is not None else None

    @property
    def cache_topk(self) -> int | None:
        """Of a token's experts, how many may be fetched; None for all."""
        most = self._config.cache_topk
        return None if most == "auto" else most

    def split(self, num_experts: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What is fetched and what is promoted by the rates now, for `CapturedLayer.split`.

        Before they are measured half is fetched and nothing promoted.
        """
        asked = self._config.update_expert_num
        most = num_experts if asked == "auto" else asked
        if self.rates_now is None:
            half = np.minimum(np.arange(num_experts + 1) // 2, most)
            return half, np.zeros_like(half)
        limits = fetch_limits(self.rates_now, num_experts, most)
        return limits, promotion_limits(self.rates_now, limits, most)

    def measure(
        self, layers: Mapping[str, OffloadedLayer], lanes: Mapping[str, EngineLane]
    ) -> None:
        """Measure over the largest layer whose misses both lanes may take, and split all by it.

        `lanes`: over the host memory of the same layers. May be called again, between steps.
        """
        self._layers = dict(layers)
        split = self._split_layers()
        if self._lane is None or not split:
            return
        name = max(split, key=lambda name: layers[name].host_bytes)
        captured = split[name]
        try:
            self.rates = measure_rates(
                captured.fetch, captured.step.num_slots, lanes[name].plan, self._device
            )
        finally:
            layers[name].invalidate()  # it fetches into slots whatever they hold
        self.corrections, self._trials = 0, LaneTrials()
        self._split_by(self.rates)
        if self._config.correct_rates == "auto":
            self._meter = LaneMeter(lambda: list(self._split_layers().values()), self._lane)
        rates = {lane: rate / 1e9 for lane, rate in asdict(self.rates).items()}
        fetched, promoted = (
            ", ".join(map(str, table[1:9])) for table in self.split(layers[name].num_experts)
        )
        logger.info(
            "moe_offload: fetching %.1f GB/s, beside the CPU %.1f; the CPU %.1f GB/s, beside "
            "fetching %.1f: of 1 to 8 misses of a step %s are fetched, and %s more for later steps",
            rates["fetch"],
            rates["fetch_beside_cpu"],
            rates["cpu"],
            rates["cpu_beside_fetch"],
            fetched,
            promoted,
        )

    def correct(self) -> None:
        """Between steps: now and then, another split by what the lanes have done; never waits."""
        if self._meter is None or (use := self._meter.read()) is None:
            return
        assert self.rates is not None and self.rates_now is not None
        rates = self._trials.correct(self.rates_now, self.rates, use)
        if rates != self.rates_now:
            self._split_by(rates)
            self.corrections += 1

    def restart(self) -> None:
        """What the layers have counted is forgotten, or the slots are others."""
        if self._meter is not None:
            self._meter.restart()

    def _split_by(self, rates: LaneRates) -> None:
        self.rates_now = rates
        tables: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        for captured in self._split_layers().values():
            num_experts = captured.step.num_experts
            if num_experts not in tables:
                tables[num_experts] = self.split(num_experts)
            captured.split(*tables[num_experts])

    def _split_layers(self) -> dict[str, CapturedLayer]:
        """Those whose misses both lanes may take."""
        return {
            name: captured
            for name, layer in self._layers.items()
            if (captured := layer.captured) is not None and layer.num_slots < layer.num_experts
        }

    def wake(self) -> None:
        """Before a step is launched: the lane watches for its requests."""
        if self._lane is not None:
            self._lane.wake()

    def check(self) -> None:
        """Before a step's output is used: CpuLaneError when the lane has failed."""
        if self._lane is not None:
            self._lane.check()

    def close(self) -> None:
        """No step comes any more: the lane ends. May be called twice."""
        self._meter = None
        if self._lane is not None:
            self._lane.close()
            self._lane = None
