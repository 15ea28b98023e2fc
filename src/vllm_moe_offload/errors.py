"""Every exception this package raises on purpose.

OffloadError
├── ConfigError        a setting is unknown, malformed or contradicts another (a ValueError)
├── UnsupportedError   the model, the vLLM version or another feature does not go with offload
├── MemoryShortError   host or device memory does not hold what was asked for
├── InactiveError      offload was asked for and would be active on no layer
└── CpuLaneError       the CPU lane failed while it served
"""

# What every message begins with, so that one search of a log finds it.
PREFIX = "moe_offload"


class OffloadError(Exception):
    """Base class of the errors below."""

    def __init__(self, message: str) -> None:
        super().__init__(message if message.startswith(PREFIX) else f"{PREFIX}: {message}")


class ConfigError(OffloadError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


class UnsupportedError(OffloadError):
    """The model, the vLLM version or another vLLM feature does not go with offload."""


class MemoryShortError(OffloadError):
    """Host or device memory does not hold what was asked for."""


class InactiveError(OffloadError):
    """Offload was asked for and would be active on no layer."""


class CpuLaneError(OffloadError):
    """The CPU lane failed while it served: what steps since then have computed is wrong."""
