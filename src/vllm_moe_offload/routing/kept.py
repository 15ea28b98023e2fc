"""What a step of many rows leaves in the slots: the experts that its last tokens use most.

A prompt is one step to a policy, in which nearly every expert is used: of no help to the tokens
that follow it. Those use what the prompt's last tokens use. So the policy is shown these one after
another, as if they had been generated. What is here is plain Python; a device makes the same
decisions on its own (`device/keep.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_moe_offload.routing.policy import Policy, make_policy
from vllm_moe_offload.routing.table import EMPTY, SlotTable
from vllm_moe_offload.routing.waves import victims

# How many of a request's last rows are looked at. Of 16, 32, 64 and 128 with simulated routings of
# section 1's layer, 26 slots, LFRU: 73 to 77 % hits in the ten steps after a prompt of 512 or 4096
# tokens with any of them, 53 to 60 % without; the fewer, the less they take from running requests.
LAST_TOKENS = 32


@dataclass(frozen=True)
class LastUses:
    """Which experts the last rows of the requests use.

    `experts`: bool [D, E], in row d those of the rows that d others of their request follow, D at
    most `LAST_TOKENS`. `elapsed`: in how many of these rows, the first ones, every request of the
    step takes part: where one is generated one by one, it is 1.
    """

    experts: npt.NDArray[np.bool_]
    elapsed: int

    @classmethod
    def of(
        cls, ids: npt.NDArray[np.integer], requests: npt.NDArray[np.integer], num_experts: int
    ) -> LastUses:
        """Read them from a step.

        ids: [T, K], the experts of each row; any number outside 0..E-1 is no expert. requests:
        [R + 1], where the rows of each request begin and the last one's end; those without a row
        are none.
        """
        lengths = np.minimum(np.diff(requests), LAST_TOKENS)
        experts = np.zeros((max(lengths, default=0), num_experts), np.bool_)
        for end, length in zip(requests[1:], lengths, strict=True):
            for ago in range(length):
                row = ids[end - 1 - ago]
                experts[ago, row[(row >= 0) & (row < num_experts)]] = True
        return cls(experts, int(min(lengths[lengths > 0], default=0)))


def observe_last(policy: Policy, last: LastUses) -> None:
    """Show the policy a step by its last rows.

    Those in which every request takes part are steps like any other. Longer requests count beyond
    them as they would alone, but nothing ages meanwhile: what running requests use stays valued. A
    step of one row a request is as to `Policy.observe`.
    """
    alone = make_policy(policy.name, len(policy.value))
    for used in last.experts[::-1]:
        alone.observe(used)
    for used in last.experts[: last.elapsed][::-1]:
        policy.observe(used)
    seen = last.experts.any(0)
    dated = alone.last_used - alone.step + policy.step
    policy.last_used[seen] = np.maximum(policy.last_used, dated)[seen]
    policy.value[:] = np.maximum(policy.value, alone.value)


def plan_kept(
    table: SlotTable, policy: Policy, last: LastUses, at_hand: npt.NDArray[np.bool_]
) -> tuple[tuple[int, int], ...]:
    """After a step that used no slot: the (expert, slot) pairs to copy, and `table` after it.

    policy: is shown the step here. at_hand: bool [E], the experts that can be copied; of those that
    are not, slots may hold some already. The most valued come in, each for a less valued one.
    """
    observe_last(policy, last)
    place = policy.order()
    wanted = np.flatnonzero(last.experts.any(0) & at_hand & (table.slot_of == EMPTY))
    wanted = wanted[np.argsort(-place[wanted])]
    nobody = np.zeros(table.num_experts, np.bool_)
    slots = victims(table, place, policy.evictable(table.num_slots), nobody)
    pairs = []
    for expert, slot in zip(wanted.tolist(), slots.tolist(), strict=False):
        there = table.expert_of[slot]
        if there != EMPTY and place[there] > place[expert]:
            break
        pairs.append((expert, slot))
    for expert, slot in pairs:
        table.place(expert, slot)
    return tuple(pairs)
