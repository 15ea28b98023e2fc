"""The CPU expert engine: computes routed experts where their weights lie, in host memory."""

from vllm_moe_offload.engine.doorbell import (
    ASKED,
    BOARD_ALIGN,
    DONE,
    FAILED,
    Doorbell,
    Mailbox,
    MailboxStats,
)
from vllm_moe_offload.engine.engine import ISA_VARIABLE, CpuExpertEngine
from vllm_moe_offload.engine.plan import ExpertPlan, ExpertRun

__all__ = [
    "ASKED",
    "BOARD_ALIGN",
    "DONE",
    "FAILED",
    "ISA_VARIABLE",
    "CpuExpertEngine",
    "Doorbell",
    "ExpertPlan",
    "ExpertRun",
    "Mailbox",
    "MailboxStats",
]
