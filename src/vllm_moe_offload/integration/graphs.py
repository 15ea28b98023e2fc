"""Which CUDA graphs vLLM captures over offloaded layers."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger

from vllm_moe_offload.device.streams import is_capturing

logger = init_logger(f"vllm.{__name__}")


def limit_capture_sizes(vllm_config: VllmConfig, most: int) -> None:
    """Leave out graphs of more than `most` rows, and say so; without any left, capture none.

    Larger steps are planned by the host, which no graph can hold. To be called when the model is
    loaded: the runners read the sizes after that.
    """
    compilation = vllm_config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or []
    dropped = [size for size in sizes if size > most]
    if compilation.cudagraph_mode in (None, CUDAGraphMode.NONE) or not dropped:
        return
    kept = [size for size in sizes if size <= most]
    compilation.cudagraph_capture_sizes = kept
    compilation.max_cudagraph_capture_size = max(kept, default=0)
    if kept:
        logger.info(
            "moe_offload: no CUDA graphs of %s rows are captured: a step of an offloaded layer of "
            "more than %d rows is planned by the host",
            _as_text(dropped),
            most,
        )
    else:
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        logger.warning(
            "moe_offload: no CUDA graphs are captured: all sizes asked for (%s) are of more than "
            "%d rows, and such steps of an offloaded layer are planned by the host",
            _as_text(dropped),
            most,
        )


def most_captured(vllm_config: VllmConfig) -> int:
    """Rows of the largest step that may be replayed; 0 where no graphs are captured."""
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode in (None, CUDAGraphMode.NONE):
        return 0
    return compilation.max_cudagraph_capture_size or 0


def captures_a_piece() -> bool:
    """Whether a piece of the model is being captured: its expert layers are in graphs of their own.

    A full graph has all of them; vLLM splits the others at attention.
    """
    return (
        is_capturing()
        and is_forward_context_available()
        and get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
    )


def _as_text(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) <= 4 else f"{min(sizes)} to {max(sizes)}"
