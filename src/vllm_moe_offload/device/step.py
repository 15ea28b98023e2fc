"""A layer's decisions taken on the device: one launch a step, nothing read back.

What is decided is `routing.plan_lanes`, number for number. The state lives in device memory, so
that a captured graph goes on from where the step before it ended.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device.copies import sendable
from vllm_moe_offload.routing import POLICIES, LanePlan, Residency, SlotTable, Wave

MAX_EXPERTS = 512
# `steps` those that have a token; `waves` those that compute an expert. `fetched` experts are
# computed in slots, `promoted` ones are among `cpu_experts`.
COUNTERS = ("steps", "tokens", "hits", "misses", "fetched", "cpu_experts", "waves", "promoted")

# Ids read at once; more are read in turns. Fewer than there are threads cost as much, and each
# number of them a compilation.
_MIN_BLOCK, _MAX_BLOCK = 128, 1024


class DeviceStep:
    """State and decisions of one layer.

    Written by every launch, and read by the kernels after it, all int32:

    - `expert_maps` ``[W, E + 1]``: for each wave expert -> slot, -1 for those it does not compute;
    - `fetches` ``[W, E, 2]`` and `fetch_counts` ``[W]``: for each wave the (expert, slot) pairs to
      copy before it, the first `fetch_counts` of them; what follows those is stale;
    - `cpu_map` ``[E + 1]``: expert -> expert for those of the CPU lane, else -1;
    - `promoted` ``[E, 2]`` and `promoted_count` ``[1]``: as the fetches, those of the CPU lane that
      are to be in slots before the next step. No wave of this step reads or fills these slots, so
      the copies may run beside all of them.

    Entry E of the maps is the sentinel that padding rows are routed to, always -1.

    `num_warps`: of the program; fixed for a graph when it is captured. `width`: E or more, how many
    experts it handles: a power of two.

    State, carried from step to step: `slot_of` int32 ``[E]``, the slot of each expert or -1 (the
    empty slots are always the last ones); `last_used` int32 ``[E]``, the step of the last use or
    -1; `value` int32 ``[E]``, what the policy counts; `step` int32 ``[1]``; `counters` int64
    ``[len(COUNTERS)]``; `limits` int32 ``[2, E + 1]``, set by the host: of fetches, of promotions.

    Args:
        num_experts: E, at most `MAX_EXPERTS`.
        num_slots: S, from 1 to E.
        policy: A name of `routing.POLICIES`.
        top_k: K, how many experts a token is routed to.
        cache_topk: A miss is fetched only if it is one of so many heaviest of some token; 1 to K.
        num_waves: W; each is a launch of the layer's kernel, whether it has experts or not.
        device: Where the tensors are.

    Raises ValueError for numbers outside these.

    Ages above 2**23 - 1 steps count as equal, where `plan_lanes` tells them apart.
    """

    def __init__(
        self,
        num_experts: int,
        num_slots: int,
        policy: str,
        *,
        top_k: int,
        cache_topk: int,
        num_waves: int,
        device: torch.device,
    ) -> None:
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ValueError(f"{num_experts} experts: the step takes 1 to {MAX_EXPERTS}")
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; what exists: {', '.join(POLICIES)}")
        if not 1 <= cache_topk <= top_k:
            raise ValueError(f"cache_topk is {cache_topk}: give 1 to {top_k}, the model's top-k")
        if num_waves < 1:
            raise ValueError(f"{num_waves} waves leave none to fetch into: give 1 or more")
        self.num_experts = num_experts
        self.policy = policy
        self.top_k = top_k
        self.cache_topk = cache_topk
        self.num_waves = num_waves
        self.num_slots = self._checked(num_slots)
        self.width = max(_power_of_two(num_experts), 32)

        def table(*shape: int, fill: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        # Ordinary tensors, so that the host may write to them in and out of inference mode.
        with torch.inference_mode(False):
            self.expert_maps = table(num_waves, num_experts + 1, fill=-1)
            self.fetches = table(num_waves, num_experts, 2, fill=-1)
            self.fetch_counts = table(num_waves, fill=0)
            self.cpu_map = table(num_experts + 1, fill=-1)
            self.promoted = table(num_experts, 2, fill=-1)
            self.promoted_count = table(1, fill=0)
            # One tensor, so that the host reads it, and writes it, at once.
            self._state = table(4, self.width, fill=-1)
            self.slot_of, self.last_used, self.value = self._state[:3, :num_experts]
            self.step = self._state[3, :1]
            self._state[2:].zero_()
            self.counters = table(len(COUNTERS), fill=0, dtype=torch.int64)
            self.limits = table(2, num_experts + 1, fill=num_experts)
            self.limits[1].zero_()
            # The step in which an expert was last heavy enough to be fetched: of no use after it.
            self._last_heavy = table(num_experts, fill=-1)
        self.num_warps = max(self.width // 32, 4)
        self._kernel = _kernel()

    def launch(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_waves: int | None = None
    ) -> None:
        """Decide a step on the current stream; may be captured.

        topk_ids: integers [T, K], a number outside 0..E-1 is no expert; topk_weights: floats
        [T, K]. Both contiguous, on the tables' device. num_waves: fewer waves than W for this
        step; what lies behind them in the tables is stale. Raises ValueError for other shapes and
        numbers.
        """
        waves = self.num_waves if num_waves is None else num_waves
        if not 1 <= waves <= self.num_waves:
            raise ValueError(f"{waves} waves in a step: give 1 to {self.num_waves}")
        if topk_ids.shape != topk_weights.shape or topk_ids.shape[1:] != (self.top_k,):
            raise ValueError(
                f"ids {tuple(topk_ids.shape)} and weights {tuple(topk_weights.shape)}: "
                f"both must be [T, {self.top_k}]"
            )
        if not (topk_ids.is_contiguous() and topk_weights.is_contiguous()):
            raise ValueError("ids and weights must be contiguous")
        total = topk_ids.numel()
        self._kernel[(1,)](
            topk_ids,
            topk_weights,
            self.limits,
            self.step,
            self.slot_of,
            self.last_used,
            self._last_heavy,
            self.value,
            self.expert_maps,
            self.cpu_map,
            self.fetches,
            self.fetch_counts,
            self.promoted,
            self.promoted_count,
            self.counters,
            total,
            self.num_slots,
            waves,
            E=self.num_experts,
            K=self.top_k,
            POLICY=self.policy,
            CACHE_TOPK=self.cache_topk,
            BLOCK=min(max(_power_of_two(total), _MIN_BLOCK), _MAX_BLOCK),
            N=self.width,
            num_warps=self.num_warps,
        )

    def set_limits(
        self,
        limits: npt.NDArray[np.integer[Any]],
        promotions: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """How many misses are fetched at most, and how many of the others promoted: [E + 1] each.

        By how many misses there are. The tables are all a captured step knows of the split between
        the lanes: a limit on the experts fetched a step (`update_expert_num`) is folded into them.
        limits: ``arange(E + 1)`` fetches every miss that may be fetched, zeros leave every miss to
        the CPU. promotions: None for none. Raises ValueError for other shapes.
        """
        if promotions is None:
            promotions = np.zeros_like(limits)
        for table in (limits, promotions):
            if table.shape != (self.num_experts + 1,):
                raise ValueError(
                    f"limits {table.shape}: give one for 0 to {self.num_experts} misses"
                )
        tables = np.stack([limits, promotions]).astype(np.int32)
        # Ordered on the current stream, for which nobody waits.
        self.limits.copy_(sendable(tables, self.limits), non_blocking=True)

    def reset_counters(self) -> None:
        """Start to count anew."""
        self.counters.zero_()

    def invalidate(self) -> None:
        """Every slot is empty: the experts in host memory, or the slots' memory, have changed."""
        self.slot_of.fill_(-1)

    def resize(self, num_slots: int) -> None:
        """Start again with `num_slots` empty slots; the policy keeps what it has seen.

        The number is an argument of the launch: a graph captured before must be captured again.
        Raises ValueError for less than one slot or more than there are experts.
        """
        self.num_slots = self._checked(num_slots)
        self.invalidate()

    def seed(self, table: SlotTable) -> None:
        """Take over what `table` says is in the slots.

        Raises ValueError if it is of other sizes, or an empty slot is followed by a filled one.
        """
        self._check_table(table)
        self.slot_of.copy_(torch.from_numpy(table.slot_of))

    def read_table(self) -> SlotTable:
        """A copy of what is in the slots; waits for the device."""
        return self._table(self.slot_of.cpu().numpy())

    def read_into(self, residency: Residency) -> None:
        """Bring `residency` to this state, so that the host can plan the next step; waits."""
        slot_of, last_used, value, step = self._state.cpu().numpy()
        residency.table = self._table(slot_of[: self.num_experts])
        residency.policy.last_used[:] = last_used[: self.num_experts]
        residency.policy.value[:] = value[: self.num_experts]
        residency.policy.step = int(step[0])

    def take_over(self, residency: Residency) -> None:
        """Go on from where `residency`, of the same policy, has come to; ValueError as `seed`."""
        self._check_table(residency.table)
        state = np.full(self._state.shape, -1, np.int32)
        state[:3, : self.num_experts] = (
            residency.table.slot_of,
            residency.policy.last_used,
            residency.policy.value,
        )
        state[3, 0] = residency.policy.step
        self._state.copy_(torch.from_numpy(state))

    def read_plan(self) -> LanePlan:
        """What the last launch decided, its hits and misses included; waits for the device."""
        waves = []
        for wave in range(self.num_waves):
            slots = self.expert_maps[wave].tolist()
            pairs = self.fetches[wave, : int(self.fetch_counts[wave])].tolist()
            fetched = [expert for expert, _ in pairs]
            ready = [e for e, slot in enumerate(slots) if slot >= 0 and e not in fetched]
            experts = (*ready, *fetched)
            waves.append(Wave(experts, tuple(slots[e] for e in experts), len(fetched)))
        cpu = tuple(e for e in self.cpu_map.tolist() if e >= 0)
        promoted = self.promoted[: int(self.promoted_count)].tolist()
        fetches = sum(wave.fetched for wave in waves)
        return LanePlan(
            waves=tuple(waves),
            cpu=cpu,
            hits=sum(len(wave.experts) for wave in waves) - fetches,
            misses=fetches + len(cpu),
            promoted=tuple((expert, slot) for expert, slot in promoted),
        )

    def read_counters(self) -> dict[str, int]:
        """Sums over all steps since the last reset, by the names of `COUNTERS`; waits."""
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))

    def _table(self, slot_of: npt.NDArray[np.int32]) -> SlotTable:
        table = SlotTable(self.num_experts, self.num_slots)
        table.slot_of[:] = slot_of
        filled = np.flatnonzero(slot_of >= 0)
        table.expert_of[slot_of[filled]] = filled
        return table

    def _check_table(self, table: SlotTable) -> None:
        if (table.num_experts, table.num_slots) != (self.num_experts, self.num_slots):
            raise ValueError(
                f"a table of {table.num_experts} experts and {table.num_slots} slots for a layer "
                f"of {self.num_experts} and {self.num_slots}"
            )
        empty = table.expert_of < 0
        if np.any(empty[:-1] & ~empty[1:]):
            raise ValueError("the empty slots of a table must be its last ones")

    def _checked(self, num_slots: int) -> int:
        if not 1 <= num_slots <= self.num_experts:
            raise ValueError(f"{num_slots} slots: give 1 to {self.num_experts}")
        return num_slots


def _power_of_two(n: int) -> int:
    """The smallest one that is at least `n`, and 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def _kernel() -> Any:
    """The kernel; imported late, since only a CUDA device has Triton for certain."""
    from vllm_moe_offload.device.step_kernel import step_kernel

    return step_kernel
