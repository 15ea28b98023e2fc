"""Every setting: its name, default, unit and check, in one place.

Settings come from ``--additional-config '{"moe_offload": {...}}'`` and from environment variables
``VLLM_MOE_OFFLOAD_<NAME>``, under the same names. Nothing set means that offload is off.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from vllm_moe_offload.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ADDITIONAL_CONFIG_KEY = "moe_offload"
# Below vLLM's, so that its log has it.
_logger = logging.getLogger(f"vllm.{__name__}")

ENVIRONMENT_PREFIX = "VLLM_MOE_OFFLOAD_"
# Read by the expert engine itself (it also runs without vLLM), so not a setting of this model.
ENGINE_VARIABLES = frozenset({"VLLM_MOE_OFFLOAD_ISA"})

# What asks for offload with mode="stream" without any setting: as --quantization, and as the
# architecture of a model.
PING_PONG_QUANTIZATION = "pingpong_moe"
OFFLOAD_ARCHITECTURE = "Qwen3MoeForCausalLMOffload"

# The names under which vLLM finds the plugin.
PLUGIN_NAMES = frozenset({"moe_offload", "cpu_offload_moe"})
# And those by which its section may be called in error.
_OTHER_NAMES = PLUGIN_NAMES - {ADDITIONAL_CONFIG_KEY} | {"vllm_moe_offload"}

Mode = Literal["auto", "cache", "hybrid", "cpu", "stream"]
# Those in which the misses of a step are split between fetching and the CPU.
SPLIT_MODES = ("auto", "hybrid")
# How they are split: of no use in the other modes.
SPLIT_SETTINGS = ("cache_topk", "update_expert_num", "correct_rates")
# What happens to experts that are in no slot: of no use where every expert has one.
MISS_SETTINGS = ("policy", *SPLIT_SETTINGS, "stream_threshold", "stream_experts")
# What decides which parameters beside the experts are prefetched; all else here is of experts.
PREFETCH_SETTINGS = ("group_size", "num_in_group", "prefetch_step", "params")
# Those without slots, and why.
SLOTLESS_MODES = {"cpu": "fetches nothing", "stream": "copies every expert every step"}
# Words that another plugin may have in additional_config: ours beside one that is ours for certain.
_COMMON_WORDS = frozenset({"mode", "params", "policy"})
# Settings that need others, which the other source may have: checked when both are together.
_ONE_OF_TWO_SOURCES = {"is_part": True}
PolicyName = Literal["lfru", "lru", "lfu", "static"]
Auto = Literal["auto"]


def _a_number(error: Literal["int_type", "float_type"]) -> BeforeValidator:
    """For a setting that is a number: pydantic would take true for 1, and '8_0' for 80."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
            raise PydanticKnownError(error)
        return value

    return BeforeValidator(check)


Whole = Annotated[int, _a_number("int_type")]
Number = Annotated[float, _a_number("float_type")]


class OffloadConfig(BaseModel):
    """How the weights of a model are offloaded. Immutable; raises ConfigError through `parse`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = Field(
        default="auto",
        description="cache: every missing expert is fetched into a slot of the device; "
        "hybrid: some are fetched and the CPU computes the others meanwhile, by the rates of both "
        "as measured at start-up; cpu: nothing is fetched, the CPU computes every expert from host "
        "memory; stream: there are no slots, every expert is copied every step, through two "
        "buffers of the device, each as large as a layer's experts; auto: hybrid on a GPU, cache "
        "in vLLM's CPU build.",
    )
    slots_per_layer: Whole | Auto | None = Field(
        default=None,
        description="Experts that each layer keeps on the device, at least 1; "
        "auto: as many as the device's free memory holds.",
    )
    gpu_memory_gib: Number | Auto | None = Field(
        default=None,
        description="Device memory for all slots and the two buffers of streamed layers together, "
        "GiB; instead of slots_per_layer.",
    )
    policy: PolicyName = Field(
        default="lfru",
        description="Which expert leaves a slot first: lfru (decayed frequency over age), "
        "lru, lfu, static (the first experts used stay).",
    )
    cache_topk: Whole | Auto = Field(
        default="auto",
        description="In the modes auto and hybrid: a missing expert is fetched only if it is among "
        "so many heaviest experts of some token; auto: any may be. In steps of up to 64 rows.",
    )
    update_expert_num: Whole | Auto = Field(
        default="auto",
        description="In the modes auto and hybrid: at most so many experts are fetched a layer a "
        "step; auto: as many as the measured rates say. In steps of up to 64 rows.",
    )
    correct_rates: Literal["auto", "off"] = Field(
        default="auto",
        description="In the modes auto and hybrid: the rates by which misses are split, measured "
        "at start-up, are corrected every few seconds by how long both lanes took; off: they stay "
        "as measured.",
    )
    stream_threshold: Whole | Literal["auto", "off"] = Field(
        default="auto",
        description="Steps of more rows than this pass each layer's missing experts through two "
        "buffers of the device; on a GPU at least 64, up to which steps are decided on the device. "
        "auto: from where it is faster, as measured at start-up, if the buffers leave half of the "
        "memory to the slots (not in vLLM's CPU build); off: never.",
    )
    stream_experts: Whole | Auto = Field(
        default="auto",
        description="Experts that each of the two buffers of streamed layers holds: a layer of "
        "more passes in waves. auto: an eighth of a layer's experts, on a GPU more of small ones "
        "(256 MiB, where both fit and are then at most a tenth of what slots and buffers take); "
        "all of them in the mode stream, which takes no fewer.",
    )
    cpu_threads: Whole | Auto = Field(
        default="auto",
        description="Threads of the CPU expert engine; auto: one a physical core of the process, "
        "or as many as the CPUs of its container's limit if these are fewer, less one for vLLM "
        "itself where there are four or more; one in vLLM's CPU build on fewer than four CPUs.",
    )
    group_size: Whole | None = Field(
        default=None,
        description="Turns group prefetch on: of every so many layers the last num_in_group keep "
        "their parameters (params) in host memory, and each is copied to the device ahead of its "
        "turn. For dense models too; experts have the settings above.",
    )
    num_in_group: Whole = Field(
        default=1, description="Layers of a group that are prefetched, at most group_size."
    )
    prefetch_step: Whole = Field(
        default=1,
        description="Buffers of the device for each parameter that is prefetched: when a layer has "
        "run, the prefetched layer that comes so many after it is copied into its buffers.",
    )
    params: tuple[str, ...] = Field(
        default=(),
        description="Which parameters of these layers are prefetched, by whole segments of their "
        "dotted names (self_attn, mlp.down_proj, weight), as a list or separated by commas; "
        "none given: all but the experts.",
    )

    @field_validator("params", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [name.strip() for name in value.split(",")]
        return value

    @field_validator(
        "slots_per_layer", "cache_topk", "update_expert_num", "stream_experts", "cpu_threads"
    )
    @classmethod
    def _at_least_one_or_auto(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError("give at least 1, or 'auto'")
        return value

    @field_validator("group_size", "num_in_group", "prefetch_step")
    @classmethod
    def _at_least_one(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("give at least 1")
        return value

    @field_validator("stream_threshold")
    @classmethod
    def _at_least_zero(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("give at least 0, 'auto' or 'off'")
        return value

    @field_validator("gpu_memory_gib")
    @classmethod
    def _is_an_amount(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and not 0 < value * 2**30 < float("inf"):
            raise ValueError("give GiB above 0 that a device can have, or 'auto'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _are_named(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(
                f"the settings must be a mapping of names to values, got {type(data).__name__}"
            )
        return data

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> OffloadConfig:
        if info.context == _ONE_OF_TWO_SOURCES:
            return self
        sizes = [n for n in ("slots_per_layer", "gpu_memory_gib") if self.says(n)]
        if len(sizes) == 2:
            raise ValueError(
                "slots_per_layer and gpu_memory_gib both size the slots: give one of them"
            )
        if self.mode not in SPLIT_MODES:
            for name in SPLIT_SETTINGS:
                if self.says(name):
                    raise ValueError(
                        f"mode={self.mode!r} leaves no choice between fetching and the CPU, so "
                        f"{name} would decide nothing: leave it out, or use mode='hybrid'"
                    )
        if self.mode in SLOTLESS_MODES:
            why = SLOTLESS_MODES[self.mode]
            if sizes:
                raise ValueError(
                    f"mode={self.mode!r} {why}, so {sizes[0]} would fill no slot: "
                    "leave it out, or use mode='cache'"
                )
            for name in ("policy", "stream_threshold"):
                if self.says(name):
                    raise ValueError(
                        f"mode={self.mode!r} has no slots, so {name} would decide nothing: "
                        "leave it out, or use mode='cache'"
                    )
        if self.says("stream_experts") and (self.mode == "cpu" or self.stream_threshold == "off"):
            why = f"mode={self.mode!r}" if self.mode == "cpu" else "stream_threshold='off'"
            raise ValueError(
                f"with {why} nothing is streamed, so stream_experts would decide nothing: leave "
                "one of them out"
            )
        self._check_prefetch()
        return self

    def says(self, name: str) -> bool:
        """Whether the setting is another than where it is not given."""
        return getattr(self, name) not in ("auto", type(self).model_fields[name].default)

    def _check_prefetch(self) -> None:
        given = [name for name in PREFETCH_SETTINGS if name in self.model_fields_set]
        if self.group_size is None:
            if any(name != "group_size" for name in given):
                raise ValueError(
                    f"without group_size nothing is prefetched, so {given[-1]} would decide "
                    "nothing: give group_size, or leave it out"
                )
            return
        if self.num_in_group > self.group_size:
            raise ValueError(
                f"num_in_group={self.num_in_group} of group_size={self.group_size}: a group has no "
                f"more layers than that: give num_in_group from 1 to {self.group_size}"
            )
        for name in self.params:
            if not all(name.split(".")):
                raise ValueError(
                    f"params has {name!r}, which matches no name of a parameter: give names or "
                    "whole segments of them, such as self_attn or mlp.down_proj"
                )

    @classmethod
    def parse(
        cls, settings: Mapping[str, Any], *, context: Mapping[str, Any] | None = None
    ) -> OffloadConfig:
        """The checked configuration; raises ConfigError naming each setting that is wrong."""
        try:
            return cls.model_validate(settings, context=context)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def resolve(
        cls,
        additional_config: Any,
        environment: Mapping[str, str],
        given_where: str = "in additional_config",
    ) -> OffloadConfig | None:
        """The configuration asked for by either source, or None when neither asks for offload.

        Raises ConfigError when a setting is wrong, or two clash, of which either source may have
        one. given_where: the first source, in the words of that error.
        """
        given = _section(additional_config)
        from_environment = _variables(environment)
        if given is None and not from_environment:
            return None
        explicit = cls.parse(given or {}, context=_ONE_OF_TWO_SOURCES)
        variables = cls._parse_variables(from_environment)
        for name in set(explicit.model_fields_set) & set(variables.model_fields_set):
            if getattr(explicit, name) != getattr(variables, name):
                raise ConfigError(
                    f"{name} is {getattr(explicit, name)!r} {given_where} and "
                    f"{getattr(variables, name)!r} in {ENVIRONMENT_PREFIX}{name.upper()}: "
                    "set it in one place"
                )
        try:
            return cls.parse({**explicit.settings(), **variables.settings()})
        except ConfigError as error:
            sources = {name: [given_where] for name in explicit.model_fields_set}
            for name in variables.model_fields_set:
                sources.setdefault(name, []).append(f"in {ENVIRONMENT_PREFIX}{name.upper()}")
            named = [n for n in cls.model_fields if re.search(rf"\b{n}\b", str(error))]
            said = [f"{n} is set {' and '.join(sources[n])}" for n in named if n in sources]
            where = f" ({', '.join(said)})" if variables.model_fields_set else ""
            raise ConfigError(f"{error}{where}") from None

    @classmethod
    def _parse_variables(cls, settings: Mapping[str, str]) -> OffloadConfig:
        """As `parse`, whose error names the variables that are wrong."""
        try:
            return cls.model_validate(settings, context=_ONE_OF_TWO_SOURCES)
        except ValidationError as error:
            wrong = dict.fromkeys(str(item["loc"][0]).upper() for item in error.errors())
            names = ", ".join(ENVIRONMENT_PREFIX + name for name in wrong)
            raise ConfigError(f"{_explain(error)} (set in the environment: {names})") from None

    @classmethod
    def streaming(cls, config: OffloadConfig | None, asked_by: str) -> OffloadConfig:
        """`config`, or what is set of it, with mode='stream', for which `asked_by` stands.

        Raises ConfigError where another mode is set, or a setting does not go with it.
        """
        settings = {} if config is None else config.settings()
        if settings.get("mode", "stream") != "stream":
            raise ConfigError(
                f"mode is {settings['mode']!r}, and {asked_by} asks for mode='stream': leave out "
                "one of them"
            )
        try:
            return cls.parse({**settings, "mode": "stream"})
        except ConfigError as error:
            raise ConfigError(f"{error} (mode='stream' is what {asked_by} asks for)") from None

    @property
    def engine_threads(self) -> int | None:
        """`cpu_threads` as the CPU expert engine takes it: None leaves the choice to it."""
        return None if self.cpu_threads == "auto" else self.cpu_threads

    def settings(self) -> dict[str, Any]:
        """The settings that were given, as plain JSON values: `parse` of them gives this again."""
        return self.model_dump(mode="json", exclude_unset=True)


def moe_offload_args(**settings: Any) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM(...)`` that turn offload on with these settings.

    ``LLM(model, **moe_offload_args(slots_per_layer=8))``. Raises ConfigError like the server does,
    and when VLLM_PLUGINS keeps vLLM from loading this plugin.
    """
    config = OffloadConfig.parse(settings)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not PLUGIN_NAMES & set(allowed.split(",")):
        raise ConfigError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading this plugin, so nothing would be "
            "offloaded: add moe_offload to it, or unset it"
        )
    return {"additional_config": {ADDITIONAL_CONFIG_KEY: config.settings()}}


def _section(additional_config: Any) -> dict[str, Any] | None:
    """The settings in `additional_config`, or None; ConfigError for some beside their section."""
    if not isinstance(additional_config, Mapping):
        return None
    for key, value in additional_config.items():
        name = str(key).lower().replace("-", "_")
        if key != ADDITIONAL_CONFIG_KEY and (
            name in _OTHER_NAMES
            or difflib.get_close_matches(name, [ADDITIONAL_CONFIG_KEY], cutoff=0.85)
        ):
            raise ConfigError(
                f"additional_config has {key!r}: did you mean {ADDITIONAL_CONFIG_KEY!r}?"
            )
        if name == "additional_config" and _section(value) is not None:
            raise ConfigError(
                f"additional_config has {key!r}, in which the settings stand: leave out one of "
                f"the two, so that it is {json.dumps(dict(value), default=str)}"
            )
    section = additional_config.get(ADDITIONAL_CONFIG_KEY, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] must be a mapping of settings "
            f"(what exists: {', '.join(OffloadConfig.model_fields)}), got {section!r}"
        )
    beside = {
        name: additional_config[name]
        for name in OffloadConfig.model_fields
        if name in additional_config
    }
    if beside.keys() - _COMMON_WORDS:
        whole = {ADDITIONAL_CONFIG_KEY: {**section, **beside}}
        raise ConfigError(
            f"additional_config has {', '.join(map(repr, beside))}: settings of "
            f"{ADDITIONAL_CONFIG_KEY} stand in its section: {json.dumps(whole, default=str)}"
        )
    if ADDITIONAL_CONFIG_KEY not in additional_config:
        return None
    if read := [name for name, value in beside.items() if _is_one(name, value)]:
        _logger.warning(
            "moe_offload: additional_config has %s beside the section %r and not in it, where it "
            "decides nothing here: move it there, unless it is another plugin's",
            ", ".join(f"{name}={beside[name]!r}" for name in read),
            ADDITIONAL_CONFIG_KEY,
        )
    return dict(section)


def _is_one(name: str, value: Any) -> bool:
    """Whether a setting of that name may have this value."""
    try:
        OffloadConfig.parse({name: value}, context=_ONE_OF_TWO_SOURCES)
    except ConfigError:
        return False
    return True


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings in the environment; ConfigError for a variable that looks like one."""
    known = variable_names()
    every = [*known, *ENGINE_VARIABLES]
    found = {}
    for name, text in environment.items():
        if name in ENGINE_VARIABLES or not _is_like_a_variable(name, every):
            continue
        if name not in known:
            prefix = len(ENVIRONMENT_PREFIX) if _has_prefix(name) else 0
            near = meant(name, every, prefix)
            raise ConfigError(
                f"the environment variable {name} is no setting{near}; those are: "
                f"{', '.join(known)}"
            )
        found[name.removeprefix(ENVIRONMENT_PREFIX).lower()] = text
    return found


def _is_like_a_variable(name: str, known: list[str]) -> bool:
    """Whether it has the prefix, or that but for a letter or vLLM's part, and a setting's end."""
    if _has_prefix(name):
        return True
    length = len(ENVIRONMENT_PREFIX)
    ends = [each[length:] for each in known]
    if f"VLLM_{name.upper()}" in known:
        return True
    start, rest = name[:length].upper(), name[length:].upper()
    if difflib.SequenceMatcher(None, start, ENVIRONMENT_PREFIX).ratio() < 0.9:
        return False
    return bool(difflib.get_close_matches(rest, ends, n=1, cutoff=0.75))


def _has_prefix(name: str) -> bool:
    return name.upper().startswith(ENVIRONMENT_PREFIX.rstrip("_"))


def variable_names() -> list[str]:
    """The environment variables of the settings."""
    return [ENVIRONMENT_PREFIX + name.upper() for name in OffloadConfig.model_fields]


# What a setting should have been, by the first word of pydantic's name for the error.
_WANTED = {
    "int": "a whole number",
    "finite": "a whole number",
    "float": "a number",
    "tuple": "a list of names",
    "string": "a list of names",
}


def _explain(error: ValidationError) -> str:
    # A setting of several types has an error for each of them.
    found: dict[str, list[ErrorDetails]] = {}
    unknown = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"][:1])
        if item["type"] in ("extra_forbidden", "invalid_key"):
            unknown.append(name)
        else:
            found.setdefault(name, []).append(item)
    known_names = list(OffloadConfig.model_fields)
    lines = []
    if unknown:
        names = ", ".join(repr(name) + meant(name, known_names) for name in sorted(unknown))
        lines.append(f"unknown: {names}; what exists: {', '.join(known_names)}")
    for where, items in found.items():
        line = _cause(items)
        known = OffloadConfig.model_fields.get(where)
        if known is not None:
            # Of a list one entry may be wrong.
            at = "".join(f"[{part}]" for part in items[-1]["loc"][1:] if isinstance(part, int))
            given = items[-1]["input"]
            near = meant(given, _words(items)) if isinstance(given, str) else ""
            line = f"{where}{at}={given!r}{near}: {line} ({known.description})"
        lines.append(line)
    return "moe_offload settings: " + "; ".join(lines)


def meant(name: str, known: Iterable[str], prefix: int = 0) -> str:
    """Which of the known names this one may have been meant for, in words; or nothing.

    prefix: how many characters all have in common, which say nothing.
    """
    ends = {each[prefix:].lower(): each for each in known}
    given = name[prefix:].lower()
    near = [end for end in ends if sorted(end) == sorted(given)]  # letters in another order
    near = near or difflib.get_close_matches(given, ends, n=1, cutoff=0.75)
    near = near or [end for end in ends if given and end.startswith(f"{given}_")]
    return f" (did you mean {ends[near[0]]}?)" if near else ""


def _cause(items: list[ErrorDetails]) -> str:
    """What is wrong with one setting, in our words where pydantic found it."""
    kinds = [_wanted(item) for item in items]
    if None in kinds:
        return " or ".join(item["msg"].removeprefix("Value error, ") for item in items)
    if items[0]["type"] == "literal_error":
        return f"give one of {', '.join(_words(items))}"
    return f"give {' or '.join(map(str, dict.fromkeys(kinds)))}"


def _words(items: list[ErrorDetails]) -> list[str]:
    """The words that one setting may be, by what pydantic found wrong with it."""
    expected = [item["ctx"]["expected"] for item in items if item["type"] == "literal_error"]
    return re.findall(r"'(\w+)'", " ".join(expected))


def _wanted(item: ErrorDetails) -> str | None:
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"])
    return _WANTED.get(item["type"].partition("_")[0])
