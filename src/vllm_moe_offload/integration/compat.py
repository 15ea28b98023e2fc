"""Which vLLM versions this package knows, and every difference between them.

Between the oldest and the newest the places used here have the same names and signatures, but for
one (tests/contract holds them to that), so this file has little to say.
"""

from __future__ import annotations

from typing import Any

import vllm

from vllm_moe_offload.errors import UnsupportedError

OLDEST = (0, 24)
NEWEST = (0, 33)


def check_version(version: str = vllm.__version__) -> None:
    """Raise UnsupportedError, with the numbers, for a vLLM outside of the known range."""
    if not OLDEST <= release(version) <= NEWEST:
        raise UnsupportedError(
            f"vLLM {version} is not one vllm-moe-offload knows: it works with {_range()}. "
            "Install one of those, or remove the moe_offload settings"
        )


def release(version: str = vllm.__version__) -> tuple[int, int]:
    """Major and minor number; UnsupportedError where the version has none."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise UnsupportedError(
            f"vLLM calls itself version {version!r}, which is no release number: "
            f"vllm-moe-offload works with releases {_range()}"
        ) from None
    return major, minor


def loses_errors_of_outputs(version: str = vllm.__version__) -> bool:
    """Whether an error while an output is waited for ends a thread of the executor, unnoticed.

    Only with asynchronous scheduling by the multiprocess executor; caught from 0.25 on.
    """
    return release(version) < (0, 25)


def fused_moe_factory() -> Any:
    """What makes the runner of a layer of experts: called FusedMoE until 0.26."""
    from vllm.model_executor.layers import fused_moe

    return getattr(fused_moe, "FusedMoE" if release() < (0, 27) else "FusedMoEFactory")


def _range() -> str:
    return ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))
