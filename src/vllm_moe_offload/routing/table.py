"""Which expert is in which slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EMPTY = -1


class SlotTable:
    """One layer's map between experts and slots, both ways, kept as each other's inverse.

    `expert_of`: int32 [S], the expert in each slot or -1.
    `slot_of`: int32 [E], the slot of each expert or -1.
    """

    def __init__(self, num_experts: int, num_slots: int) -> None:
        if num_experts < 1 or not 0 <= num_slots <= num_experts:
            raise ValueError(
                f"a layer of {num_experts} experts cannot have {num_slots} slots: "
                f"give 0 to {num_experts}"
            )
        self.expert_of: npt.NDArray[np.int32] = np.full(num_slots, EMPTY, np.int32)
        self.slot_of: npt.NDArray[np.int32] = np.full(num_experts, EMPTY, np.int32)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.slot_of)

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.expert_of)

    def place(self, expert: int, slot: int) -> None:
        """Put `expert` into `slot`; whoever was there is in no slot afterwards."""
        before = self.expert_of[slot]
        if before != EMPTY:
            self.slot_of[before] = EMPTY
        self.expert_of[slot] = expert
        self.slot_of[expert] = slot

    def clear(self) -> None:
        """Forget every placement."""
        self.expert_of.fill(EMPTY)
        self.slot_of.fill(EMPTY)
