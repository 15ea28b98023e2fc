"""The entry point vLLM calls in each of its processes."""

from __future__ import annotations

import os


def register() -> None:
    """Install the hooks and names through which offload can be turned on. May be called again.

    None does anything until a configuration asks for offload; see docs/vllm-seams.md. Where
    vLLM's routing simulator is on, it gets this package's routings as well.
    """
    from vllm import ModelRegistry

    from vllm_moe_offload.config import OFFLOAD_ARCHITECTURE
    from vllm_moe_offload.integration import frontend, quantization, worker

    frontend.install()
    worker.install()
    quantization.install()
    ModelRegistry.register_model(
        OFFLOAD_ARCHITECTURE, f"vllm_moe_offload.integration.models:{OFFLOAD_ARCHITECTURE}"
    )
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"):
        from vllm_moe_offload.integration import simulation

        simulation.install()
