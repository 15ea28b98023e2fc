"""Before the first request: the slots and the CPU engine agree on the experts in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_moe_offload.errors import OffloadError
from vllm_moe_offload.experts import ExpertSpec, Format
from vllm_moe_offload.lanes import MAX_CAPTURED, Lane, OffloadedLayer

ROWS = 8
# Relative error of the norm over all rows. Unquantised: the kernel rounds its activations to the
# format. FP8: the kernel quantises its input rows and its activations to e4m3 (2^-4 each, averaged
# over a row's sum), the engine does not.
_FLOOR = {Format.FP32: 1e-4, Format.FP16: 5e-3, Format.BF16: 2e-2}
_QUANTISED_FLOOR = 8e-2
# A row by itself may be off by so many times as much. A wrong expert or slot gives about 1 in the
# row that is this expert's.
_OF_A_ROW = 2.0
# What a row smaller than this share of most of them is off by is compared with that share: an
# expert of hardly any weight may be at fp16's least numbers, which are coarse.
_WEAK = 1 / 16
# Router weights of a row: its own expert's, and the others'.
_OWN, _OTHERS = 0.5, 0.5 / 16
# Rows of fp16 may overflow it with experts that are large because the model's rows are small: such
# a row is made smaller by so much, so many times. The other dtypes have the engine's own range:
# what only the device finds infinite there is a fault.
_SMALLER, _TIMES = 2.0**-4, 2
# Of a step of a layer whose kind has been checked.
_BRIEF = 2
# How often experts that shared their rows with one of no finite numbers get rows with others.
_ROUTINGS = 4

logger = init_logger(f"vllm.{__name__}")


class SelfCheckError(OffloadError):
    """The device and the CPU do not compute the same from the same experts."""


def check_layer(
    name: str,
    layer: OffloadedLayer,
    spec: ExpertSpec,
    cpu: Lane,
    top_k: int,
    *,
    rows: int | None = None,
    is_brief: bool = False,
) -> None:
    """Compute random rows through slots and through the engine; SelfCheckError if they differ.

    `top_k`: experts a row is routed to. Each expert has a row that is mostly its own, so all of
    them pass through the slots in waves. Where the device decides steps, there is one of each power
    of two of rows, which compiles its kernels, up to one that the host plans, and more of these
    until every row has come. rows: of every step instead of those; is_brief: steps of two rows
    and no more, for a layer of a kind that has been checked.

    Rows that both find infinite or NaN, by what the checkpoint holds, cannot be compared. Their
    experts are routed otherwise then, and those that are left get a warning.
    """
    sizes = [rows or layer.num_experts]
    if rows is None and layer.decides_on_device:
        sizes = [1 << n for n in range(MAX_CAPTURED.bit_length() + 1)]
    if is_brief:
        sizes = [_BRIEF]
    floor = _FLOOR.get(spec.format, _QUANTISED_FLOOR)
    used: set[int] = set()
    compared: set[int] = set()
    for routing in range(_ROUTINGS):
        given = _rows_of_each(layer.num_experts, spec, top_k, seed=routing)
        x, weights, ids = (tensor[: _BRIEF if is_brief else None] for tensor in given)
        for _ in range(1 + (_TIMES if spec.activation_dtype == torch.float16 else 0)):
            step = _Step(x, weights, ids, layer, cpu)
            worst = step.error(sizes)
            layer.reset_counters()
            layer.invalidate()
            if math.isfinite(worst):
                break
            x[step.overflowed] *= _SMALLER
        if not worst <= floor:
            raise SelfCheckError(
                f"{name}: {spec.format.value} experts computed from {layer.num_slots} slots differ "
                f"from the same experts on the CPU by {worst:.1e} of the norm (allowed: "
                f"{floor:.0e}); this is a fault of vllm-moe-offload or of the kernel: serve "
                "without moe_offload and report the model, the vLLM version and this line"
            )
        used |= step.used
        compared |= step.compared
        if used == compared:
            return
    logger.warning(
        "moe_offload: rows of %d of %d experts of %s are infinite or NaN, from the slots and on "
        "the CPU alike, and were not compared: is the checkpoint whole?",
        len(used - compared),
        layer.num_experts,
        name,
    )


class _Step:
    """Rows through the slots beside the same rows by the engine.

    `used`: experts whose own rows were computed; `compared`: of those whose results are finite;
    `overflowed`: rows whose results are finite on one side alone.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        layer: OffloadedLayer,
        cpu: Lane,
    ) -> None:
        self.used: set[int] = set()
        self.compared: set[int] = set()
        self.overflowed = torch.zeros(len(x), dtype=torch.bool)
        self._layer = layer
        self._own = ids[:, 0]
        self._expected = torch.empty(x.shape, dtype=torch.float32)
        cpu.compute(x, weights, ids, None, self._expected, False)
        # In float64, where no norm overflows: the error would be NaN, which `max` passes over.
        norms = self._expected.double().norm(dim=1)
        norms = norms[norms.isfinite()]
        typical = float(norms.median()) if len(norms) else 0.0
        least = torch.finfo(x.dtype).tiny * math.sqrt(x.shape[1])
        self._comparable = max(typical * _WEAK, least)
        device = current_platform.device_type
        self._given = [tensor.to(device) for tensor in (x, weights, ids)]

    def error(self, sizes: Sequence[int]) -> float:
        """The largest of steps of so many rows, the last size until every row has come.

        Rows follow one another, the first behind the last. Of the norm; of a row by itself a part
        of that. 0 where none is finite on both sides; infinite where one is on one side alone.
        """
        count = len(self._own)
        left = max(count - sum(sizes), 0)
        worst, first = 0.0, 0
        for size in [*sizes, *[sizes[-1]] * -(-left // sizes[-1])]:
            worst = max(worst, self._error(torch.arange(first, first + size) % count))
            first += size
        return worst

    def _error(self, these: torch.Tensor) -> float:
        on_device = these.to(self._given[0].device)
        got = self._layer.forward(*(t[on_device] for t in self._given)).cpu().float()
        expected, own = self._expected[these], self._own[these]
        finite = expected.isfinite().all(1)
        differ = finite != got.isfinite().all(1)
        if differ.any():
            self.overflowed[these[differ]] = True
            return math.inf
        self.used |= set(own.tolist())
        self.compared |= set(own[finite].tolist())
        if not finite.any():
            return 0.0
        right = expected[finite].double()
        off, norms = (got[finite] - right).norm(dim=1), right.norm(dim=1)
        each = off / norms.clamp_min(self._comparable)
        all_of_them = off.norm() / norms.norm().clamp_min(self._comparable)
        return float(max(all_of_them, each.max() / _OF_A_ROW))


def _rows_of_each(
    num_experts: int, spec: ExpertSpec, top_k: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and ids of a row for each expert, which is the first of it and weighs most."""
    generator = torch.Generator().manual_seed(seed)
    # Types are given: while a model is loaded the default is the model's.
    x = torch.randn((num_experts, spec.hidden), generator=generator, dtype=torch.float32)
    order = torch.randperm(num_experts, generator=generator)
    following = torch.arange(num_experts)[:, None] + torch.arange(top_k)
    ids = order[following % num_experts].to(torch.int32)
    weights = torch.full((num_experts, top_k), _OTHERS, dtype=torch.float32)
    weights[:, 0] = _OWN
    return x.to(spec.activation_dtype), weights, ids


def random_step(
    num_experts: int, spec: ExpertSpec, top_k: int, rows: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and ids of so many rows, or of as many as it takes to use every expert."""
    generator = torch.Generator().manual_seed(0)
    rows = max(rows, -(-num_experts // top_k))
    # Types are given: while a model is loaded the default is the model's.
    x = torch.randn((rows, spec.hidden), generator=generator, dtype=torch.float32).to(
        spec.activation_dtype
    )
    order = torch.randperm(rows * top_k, generator=generator) % num_experts
    ids = order.view(rows, top_k).to(torch.int32)
    weights = torch.rand((rows, top_k), generator=generator, dtype=torch.float32) / top_k
    return x, weights, ids
