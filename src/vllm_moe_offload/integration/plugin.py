"""The entry point vLLM calls in each of its processes."""

from __future__ import annotations

import os


def register() -> None:
    """Install the two hooks through which offload can be turned on. May be called again.

    Neither does anything until a configuration asks for offload; see docs/vllm-seams.md. Where
    vLLM's routing simulator is on, it gets this package's routings as well.
    """
    from vllm_moe_offload.integration import frontend, worker

    frontend.install()
    worker.install()
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"):
        from vllm_moe_offload.integration import simulation

        simulation.install()
