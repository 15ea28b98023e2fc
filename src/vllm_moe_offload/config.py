"""Every setting: its name, default, unit and check, in one place.

Settings come from ``--additional-config '{"moe_offload": {...}}'`` and from environment variables
``VLLM_MOE_OFFLOAD_<NAME>``, under the same names. Nothing set means that offload is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_moe_offload.errors import ConfigError

ADDITIONAL_CONFIG_KEY = "moe_offload"
ENVIRONMENT_PREFIX = "VLLM_MOE_OFFLOAD_"
# Read by the expert engine itself (it also runs without vLLM), so not a setting of this model.
ENGINE_VARIABLES = frozenset({"VLLM_MOE_OFFLOAD_ISA"})

Mode = Literal["cache", "cpu"]
PLANNED_MODES = ("hybrid", "auto", "stream")
PolicyName = Literal["lfru", "lru", "lfu", "static"]
Auto = Literal["auto"]


class OffloadConfig(BaseModel):
    """How the experts of a model are offloaded. Immutable; raises ConfigError through `parse`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = Field(
        default="cache",
        description="cache: every missing expert is fetched into a slot of the device; "
        "cpu: nothing is fetched, the CPU computes every expert from host memory.",
    )
    slots_per_layer: int | Auto | None = Field(
        default=None,
        description="Experts that each layer keeps on the device, at least 1; "
        "auto: as many as the device's free memory holds.",
    )
    gpu_memory_gib: float | Auto | None = Field(
        default=None,
        description="Device memory for all slots together, GiB; instead of slots_per_layer.",
    )
    policy: PolicyName = Field(
        default="lfru",
        description="Which expert leaves a slot first: lfru (decayed frequency over age), "
        "lru, lfu, static (the first experts used stay).",
    )
    cpu_threads: int | Auto = Field(
        default="auto",
        description="Threads of the CPU expert engine; auto: one a physical core of the process.",
    )

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(
                f"the settings must be a mapping of names to values, got {type(data).__name__}"
            )
        unknown = sorted(set(data) - set(cls.model_fields))
        if unknown:
            raise ValueError(
                f"unknown: {', '.join(map(str, unknown))}; "
                f"what exists: {', '.join(cls.model_fields)}"
            )
        if data.get("mode") in PLANNED_MODES:
            raise ValueError(
                f"mode={data['mode']!r} is not built yet; modes that are: "
                f"{', '.join(get_args(Mode))}"
            )
        return data

    @model_validator(mode="after")
    def _consistent(self) -> OffloadConfig:
        for name in ("slots_per_layer", "cpu_threads"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name}={value}: give at least 1, or 'auto'")
        if isinstance(self.gpu_memory_gib, float) and not 0 < self.gpu_memory_gib < float("inf"):
            raise ValueError(f"gpu_memory_gib={self.gpu_memory_gib}: give GiB above 0, or 'auto'")
        if self.slots_per_layer is not None and self.gpu_memory_gib is not None:
            raise ValueError(
                "slots_per_layer and gpu_memory_gib both size the slots: give one of them"
            )
        if self.mode == "cpu":
            sized = [n for n in ("slots_per_layer", "gpu_memory_gib") if getattr(self, n)]
            if sized:
                raise ValueError(
                    f"mode='cpu' fetches nothing, so {sized[0]} would fill no slot: "
                    "leave it out, or use mode='cache'"
                )
            if "policy" in self.model_fields_set:
                raise ValueError(
                    "mode='cpu' has no slots, so policy would decide nothing: "
                    "leave it out, or use mode='cache'"
                )
        return self

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> OffloadConfig:
        """The checked configuration; raises ConfigError naming each setting that is wrong."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def resolve(
        cls, additional_config: Any, environment: Mapping[str, str]
    ) -> OffloadConfig | None:
        """The configuration asked for by either source, or None when neither asks for offload.

        Raises ConfigError when a setting is wrong or the two sources disagree on one.
        """
        given: dict[str, Any] = {}
        if isinstance(additional_config, Mapping) and ADDITIONAL_CONFIG_KEY in additional_config:
            value = additional_config[ADDITIONAL_CONFIG_KEY]
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] must be a mapping of settings "
                    f"(what exists: {', '.join(cls.model_fields)}), got {value!r}"
                )
            given = dict(value)
            asked = True
        else:
            asked = False
        from_environment = {
            name[len(ENVIRONMENT_PREFIX) :].lower(): text
            for name, text in environment.items()
            if name.startswith(ENVIRONMENT_PREFIX) and name not in ENGINE_VARIABLES
        }
        if not asked and not from_environment:
            return None
        checked = cls.parse(from_environment) if from_environment else None
        for name in from_environment:
            value = getattr(checked, name)
            if name in given and given[name] != value:
                raise ConfigError(
                    f"{name} is {given[name]!r} in additional_config and {value!r} in "
                    f"{ENVIRONMENT_PREFIX}{name.upper()}: set it in one place"
                )
            given[name] = value
        return cls.parse(given)

    def settings(self) -> dict[str, Any]:
        """The settings that were given, as plain JSON values: `parse` of them gives this again."""
        return self.model_dump(exclude_unset=True)


def moe_offload_args(**settings: Any) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM(...)`` that turn offload on with these settings.

    ``LLM(model, **moe_offload_args(slots_per_layer=8))``. Raises ConfigError like the server does.
    """
    config = OffloadConfig.parse(settings)
    return {"additional_config": {ADDITIONAL_CONFIG_KEY: config.settings()}}


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"][:1])
        message = item["msg"].removeprefix("Value error, ")
        known = OffloadConfig.model_fields.get(where)
        if known is not None:
            message = f"{where}={item['input']!r}: {message} ({known.description})"
        if message not in lines:
            lines.append(message)
    return "moe_offload settings: " + "; ".join(lines)
