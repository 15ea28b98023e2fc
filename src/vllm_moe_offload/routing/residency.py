"""The state of one layer across steps: its slot table and its policy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_moe_offload.routing.kept import LastUses, observe_last
from vllm_moe_offload.routing.policy import make_policy
from vllm_moe_offload.routing.table import SlotTable
from vllm_moe_offload.routing.waves import StepPlan, plan_step


class Residency:
    """Slot table and policy of one layer; `step` advances both."""

    def __init__(self, num_experts: int, num_slots: int, policy: str) -> None:
        if num_slots < 1:
            raise ValueError(f"a layer needs at least one slot, got {num_slots}")
        self.table = SlotTable(num_experts, num_slots)
        self.policy = make_policy(policy, num_experts)

    def step(self, used: npt.NDArray[np.bool_], last: LastUses | None = None) -> StepPlan:
        """Plan a step that uses the experts marked in `used` (bool [E]) and take its state.

        last: with requests of many rows, what the policy sees of the step instead of `used`.
        """
        if last is None:
            self.policy.observe(used)
        else:
            observe_last(self.policy, last)
        return plan_step(self.table, self.policy, used)

    def resize(self, num_slots: int) -> None:
        """Start again with `num_slots` empty slots; the policy keeps what it has seen."""
        self.table = SlotTable(self.table.num_experts, num_slots)

    def invalidate(self) -> None:
        """Forget what is in the slots: the experts in host memory have changed."""
        self.table.clear()
