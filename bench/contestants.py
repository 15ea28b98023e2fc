"""Who is compared, and what each is started with: the same GPU bytes for the experts.

The bytes are those of `slots` slots a layer and of the two buffers of streamed layers. vLLM's own
ways to offload are coarser (a parameter of a layer, a layer): they get the next size up, so never
less than ours. `cpu` has no experts on the GPU and `stream` two buffers of a layer's size, whatever
`slots` says; with slots for every expert `auto` is given no size and finds that everything fits.
What each really took is measured and stands beside its figures (`expert_gpu_gib`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.models import Shape
from vllm_moe_offload.planning import are_small, larger_stream_experts, stream_experts

OURS = ("auto", "hybrid", "cache", "cpu", "stream")
STOCK = ("vllm-gpu", "vllm-uva", "vllm-prefetch")
WEIGHTS = ("w13_weight", "w2_weight")


@dataclass(frozen=True)
class Contestant:
    """`engine`: arguments of ``vllm.LLM`` beyond those that all contestants have in common."""

    name: str
    slots: int | None
    engine: dict[str, Any] = field(default_factory=dict)


def make(name: str, shape: Shape, slots: int) -> Contestant:
    """The contestant `name` with the GPU bytes of `slots` slots a layer and the buffers."""
    if name in OURS:
        from vllm_moe_offload import moe_offload_args

        sized = {} if name in ("cpu", "stream") else {"slots_per_layer": slots}
        # As `auto` is by itself where everything fits: vLLM's own layers.
        given = {} if name == "auto" and slots == shape.experts else sized
        return Contestant(
            name, sized.get("slots_per_layer", 0), moe_offload_args(mode=name, **given)
        )
    if name == "vllm-gpu":
        return Contestant(name, None)
    if name == "vllm-uva":
        return Contestant(name, None, uva_arguments(shape, slots))
    if name == "vllm-prefetch":
        return Contestant(name, None, prefetch_arguments(shape, slots))
    raise ValueError(f"unknown contestant {name!r}; what exists: {', '.join((*OURS, *STOCK))}")


def experts_on_gpu(shape: Shape, slots: int) -> int:
    """Experts of all layers that ours have memory for on the GPU, in slots and buffers."""
    in_slots = slots * shape.layers
    buffers = 2 * larger_stream_experts(shape.experts, shape.expert_bytes)
    if not are_small(buffers, in_slots):
        buffers = 2 * stream_experts(shape.experts)
    return min(in_slots + buffers, shape.experts * shape.layers)


def uva_arguments(shape: Shape, slots: int) -> dict[str, Any]:
    """``cpu_offload_gb`` for it: vLLM offloads parameters in order until it has reached that.

    An expert's first matrices (``w13``) are two thirds of it, the second one third.
    """
    keep = experts_on_gpu(shape, slots) * shape.expert_bytes
    total = shape.expert_bytes_total
    third = shape.experts * shape.expert_bytes / 3
    offloaded = 0.0
    for part in (2, 1) * shape.layers:
        if total - offloaded - part * third < keep:
            break
        offloaded += part * third
    # A little less than what is offloaded: vLLM goes on while it is below the limit.
    gib = max(offloaded - third / 2, 0) / 2**30
    return {"cpu_offload_gb": gib, "cpu_offload_params": list(WEIGHTS)}


def prefetch_arguments(shape: Shape, slots: int) -> dict[str, Any]:
    """A group and how many of its layers are offloaded; one buffer of a layer counts as well."""
    keep = experts_on_gpu(shape, slots) / shape.experts
    best: tuple[float, int, int] | None = None
    for group in range(1, shape.layers + 1):
        for offloaded in range(1, group + 1):
            resident = sum(i % group < group - offloaded for i in range(shape.layers))
            took = resident + 1.0
            if took >= keep and (best is None or (took, group) < best[:2]):
                best = took, group, offloaded
    assert best is not None, "one layer of many offloaded keeps the most, which is all"
    _, group, offloaded = best
    return {
        "offload_group_size": group,
        "offload_num_in_group": offloaded,
        "offload_prefetch_step": 1,
        "offload_params": list(WEIGHTS),
    }
