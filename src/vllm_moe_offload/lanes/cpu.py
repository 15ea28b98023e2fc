"""The CPU lane of captured steps: the engine answers what the layers' launches ask."""

from __future__ import annotations

import weakref

import torch

from vllm_moe_offload.device.request import CpuRequest, Operands
from vllm_moe_offload.device.streams import shared_zeros
from vllm_moe_offload.engine import CpuExpertEngine, Doorbell, ExpertPlan, MailboxStats
from vllm_moe_offload.errors import CpuLaneError


class CpuLane:
    """Serves the requests of a model's layers, from when it is made until `close`.

    The layers run on one stream, one after another: those alike in their sizes share the memory of
    their operands.

    Args:
        engine: Computes; the plans given to `add` are its own.
        max_layers: How many can be added.
        max_tokens: The most rows of a step.
        device: Where the launches run: CUDA, or the CPU where Triton interprets them.
        timeout: Seconds without an answer after which the CPU has failed. Every request is answered
            then, and `check` raises.

    A graph that captured a layer's requests needs this object to live, and open.
    """

    def __init__(
        self,
        engine: CpuExpertEngine,
        *,
        max_layers: int,
        max_tokens: int,
        device: torch.device,
        timeout: float = 3.0,
    ) -> None:
        self._max_tokens = max_tokens
        self._device = device
        self._board = shared_zeros(
            Doorbell.board_bytes(max_layers), dtype=torch.uint8, device=device
        )
        self._operands: dict[tuple[object, ...], Operands] = {}
        self._layers: list[str] = []
        self._doorbell = engine.doorbell(self._board, max_layers, timeout=timeout)
        self._doorbell.start()
        # Also when the interpreter exits, where it comes before the doorbell's own end.
        self._end = weakref.finalize(self, _end, self._doorbell, device)

    def add(self, layer: str, plan: ExpertPlan) -> CpuRequest:
        """A layer's side of the lane; best in the order in which a step runs them.

        layer: what errors and `stats` call it. plan: over all E experts of the layer, in host
        memory: `cpu_map` says which are the CPU's in a step. Raises ValueError when there are
        `max_layers` already, RuntimeError when the lane or the plan's engine is closed.
        """
        operands = self._operands_for(plan)
        mailbox = self._doorbell.add(
            layer,
            plan,
            x=operands.x,
            topk_ids=operands.ids,
            topk_weights=operands.weights,
            expert_map=operands.cpu_map,
            out=operands.partial,
        )
        self._layers.append(layer)
        return CpuRequest(self._board, mailbox, operands, self._device)

    def wake(self) -> None:
        """Call before a step is launched: the CPU watches for its requests without a break then."""
        self._doorbell.wake()

    def check(self) -> None:
        """Raises CpuLaneError, with the layer and the cause, when the lane has failed.

        To be called behind a step's launch, before its output is used. It reads one flag while all
        is well; any thread may call it. A lane that has failed stays so.
        """
        error = self._doorbell.error
        if error is not None:
            raise CpuLaneError(
                f"{error}. What was computed since then is wrong and is not used: restart the "
                "engine"
            )

    def stats(self) -> dict[str, MailboxStats]:
        """What each layer asked for and how long the CPU was busy with it, since it was added."""
        return dict(zip(self._layers, self._doorbell.stats, strict=False))

    def close(self) -> None:
        """Waits for what is launched, then stops serving. May be called twice.

        No graph that captured a request may be launched afterwards: it would wait for ever.
        """
        self._end()

    def _operands_for(self, plan: ExpertPlan) -> Operands:
        spec = plan.spec
        sizes = (spec.hidden, spec.activation_dtype, plan.experts, plan.top_k)
        if sizes not in self._operands:
            self._operands[sizes] = Operands.allocate(
                self._max_tokens,
                spec.hidden,
                spec.activation_dtype,
                num_experts=plan.experts,
                top_k=plan.top_k,
                device=self._device,
            )
        return self._operands[sizes]


def _end(doorbell: Doorbell, device: torch.device) -> None:
    # First: a stream that waits for an answer waits for ever once nothing answers.
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        doorbell.close()
