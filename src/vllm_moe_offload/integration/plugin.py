"""The entry point vLLM calls in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Install the two hooks through which offload can be turned on. May be called again.

    Neither does anything until a configuration asks for offload; see docs/vllm-seams.md.
    """
    from vllm_moe_offload.integration import frontend, worker

    frontend.install()
    worker.install()
