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
from vllm_moe_offload.lanes import MAX_CAPTURED, CpuLane, EngineLane, OffloadedLayer
from vllm_moe_offload.lanes.rates import measure_rates
from vllm_moe_offload.planning import LaneRates, fetch_limits, promotion_limits

logger = init_logger(f"vllm.{__name__}")

# Places for layers on the CPU lane's board, of a few cache lines each; a draft model's come later.
_MOST_LAYERS = 1024


class CpuShare:
    """The CPU lane, and how many misses it leaves to be fetched. Made where there is a GPU."""

    def __init__(
        self, config: OffloadConfig, engine: CpuExpertEngine, device: torch.device
    ) -> None:
        self.rates: LaneRates | None = None
        self._config = config
        self._device = device
        self._lane: CpuLane | None = None
        if config.mode not in ("cache", "stream"):
            self._lane = CpuLane(
                engine, max_layers=_MOST_LAYERS, max_tokens=MAX_CAPTURED, device=device
            )

    def request(self, layer: str, cpu: EngineLane) -> CpuRequest | None:
        """The layer's side of the lane; None in a mode that has none."""
        return self._lane.add(layer, cpu.plan) if self._lane is not None else None

    def cache_topk(self, layer: str, top_k: int) -> int | None:
        """Of a token's `top_k` experts, how many may be fetched; None for all, or ConfigError."""
        most = self._config.cache_topk
        if most == "auto":
            return None
        if most > top_k:
            raise ConfigError(
                f"cache_topk={most}, but {layer} routes a token to {top_k} experts: give at most "
                f"{top_k}"
            )
        return most

    def split(self, num_experts: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What is fetched and what is promoted by the measured rates, for `CapturedLayer.split`.

        Before they are measured half is fetched and nothing promoted.
        """
        asked = self._config.update_expert_num
        most = num_experts if asked == "auto" else asked
        if self.rates is None:
            half = np.minimum(np.arange(num_experts + 1) // 2, most)
            return half, np.zeros_like(half)
        limits = fetch_limits(self.rates, num_experts, most)
        return limits, promotion_limits(self.rates, limits, most)

    def measure(
        self, layers: Mapping[str, OffloadedLayer], lanes: Mapping[str, EngineLane]
    ) -> None:
        """Measure over the largest layer whose misses both lanes may take, and split all by it.

        `lanes`: over the host memory of the same layers.
        """
        split = {
            name: captured
            for name, layer in layers.items()
            if (captured := layer.captured) is not None and layer.num_slots < layer.num_experts
        }
        if self._lane is None or not split:
            return
        name = max(split, key=lambda name: layers[name].host_bytes)
        captured = split[name]
        self.rates = measure_rates(
            captured.fetch, captured.step.num_slots, lanes[name].plan, self._device
        )
        layers[name].invalidate()
        for captured in split.values():
            captured.split(*self.split(captured.step.num_experts))
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
        if self._lane is not None:
            self._lane.close()
            self._lane = None
