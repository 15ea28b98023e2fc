"""Routings for vLLM's routing simulator, which imposes them on a model for measuring.

``VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform`` or ``local``, with offload or without. While the
engine runs, ``llm.collective_rpc("moe_offload_routing", args=("local",))`` exchanges one for the
other and starts it from its first step, or with a second argument of true goes on with the next.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import vllm.envs as envs
from torch import library
from typing_extensions import override
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    RoutingSimulator,
    RoutingSimulatorRouter,
    RoutingStrategy,
)
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_moe_offload.integration.playback import Playback
from vllm_moe_offload.routing.simulate import ROUTINGS

# The simulator's strategies are one to a process and see no layer. A playback lives as long as the
# layers that it was made for: it is found by the first of them.
_playbacks: WeakKeyDictionary[torch.nn.Module, dict[tuple[int, int], Playback]] = (
    WeakKeyDictionary()
)
# What `moe_offload_routing` chose, instead of the strategy in the environment.
_chosen: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
_without_layers = torch.nn.Module()

_library = library.Library("moe_offload", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "play_routing(Tensor router_logits, int top_k, str routing) -> (Tensor, Tensor)"
)


class PlayedRouting(RoutingStrategy):
    """A strategy of vLLM's simulator that plays one of ROUTINGS back."""

    def __init__(self, routing: str) -> None:
        self.routing = routing

    @override
    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 [T, K] and ids [T, K] of `indices_type`, by default int32.

        One opaque operator: torch.compile must neither look in nor run it while tracing.
        """
        weights, ids = torch.ops.moe_offload.play_routing(router_logits, top_k, self.routing)
        return weights, ids if indices_type is None else ids.to(indices_type)


def install() -> None:
    """Register every routing with the simulator, and the worker's method to exchange them."""
    for routing in ROUTINGS:
        RoutingSimulator.register_strategy(routing, PlayedRouting(routing))
    WorkerWrapperBase.moe_offload_routing = _select  # type: ignore[attr-defined]


def playback_of(router_logits: torch.Tensor, top_k: int, routing: str) -> Playback:
    """The playback for layers of this shape in the engine that is running a step now.

    `router_logits`: [T, E]. Without a forward context (a router called by hand) there is one layer.
    """
    layers = get_forward_context().no_compile_layers if is_forward_context_available() else {}
    num_experts = router_logits.shape[-1]
    first = next(iter(layers.values()), _without_layers)
    of_engine = _playbacks.setdefault(first, {})
    playback = of_engine.get((num_experts, top_k))
    if playback is None:
        alike = [
            router
            for router in _simulated(layers)
            if (router.global_num_experts, router.top_k) == (num_experts, top_k)
        ]
        playback = of_engine[num_experts, top_k] = Playback(
            _chosen.get(first, routing),
            layers=max(1, len(alike)),
            num_experts=num_experts,
            top_k=top_k,
            device=router_logits.device,
        )
    return playback


def _simulated(layers: dict[str, Any]) -> list[RoutingSimulatorRouter]:
    """The simulator's routers among the modules that a forward context names."""
    routers = [getattr(layer, "router", None) for layer in layers.values()]
    return [router for router in routers if isinstance(router, RoutingSimulatorRouter)]


def _play(
    router_logits: torch.Tensor, top_k: int, routing: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return playback_of(router_logits, top_k, routing).play(len(router_logits))


def _fake(
    router_logits: torch.Tensor, top_k: int, routing: str
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (router_logits.shape[0], top_k)
    return (
        router_logits.new_empty(shape, dtype=torch.float32),
        router_logits.new_empty(shape, dtype=torch.int32),
    )


_library.impl("play_routing", _play, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
library.register_fake("moe_offload::play_routing", _fake, lib=_library)


def _select(self: WorkerWrapperBase, routing: str, goes_on: bool = False) -> None:
    """Play `routing` in every layer of this worker, as `Playback.select`; between steps only."""
    layers: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
    strategy = envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY
    if routing not in ROUTINGS or strategy not in ROUTINGS or not _simulated(layers):
        raise RuntimeError(
            f"routing {routing!r} cannot be played in this engine, started with "
            f"VLLM_MOE_ROUTING_SIMULATION_STRATEGY={strategy!r}: both have to be one of "
            f"{', '.join(ROUTINGS)}, and the model needs mixture-of-experts layers"
        )
    first = next(iter(layers.values()))
    _chosen[first] = routing
    for playback in _playbacks.get(first, {}).values():
        playback.select(routing, goes_on)
