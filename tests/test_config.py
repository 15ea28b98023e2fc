"""Settings: where they come from, and every way they can be wrong."""

from __future__ import annotations

import pickle

import pytest

from vllm_moe_offload import ConfigError, OffloadConfig, OffloadError, moe_offload_args


def test_off_unless_configured() -> None:
    assert OffloadConfig.resolve({}, {}) is None
    assert OffloadConfig.resolve({"other_plugin": 1}, {"PATH": "x"}) is None
    assert OffloadConfig.resolve(object(), {}) is None


def test_an_empty_section_turns_it_on_with_defaults() -> None:
    config = OffloadConfig.resolve({"moe_offload": {}}, {})
    assert config == OffloadConfig()
    assert (config.mode, config.policy, config.slots_per_layer) == ("auto", "lfru", None)


def test_environment_alone_turns_it_on() -> None:
    config = OffloadConfig.resolve(
        {}, {"VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER": "8", "VLLM_MOE_OFFLOAD_POLICY": "lru"}
    )
    assert config is not None
    assert (config.slots_per_layer, config.policy) == (8, "lru")


def test_the_engines_own_variable_does_not_turn_it_on() -> None:
    assert OffloadConfig.resolve({}, {"VLLM_MOE_OFFLOAD_ISA": "scalar"}) is None


def test_both_sources_add_up_and_may_repeat_each_other() -> None:
    config = OffloadConfig.resolve(
        {"moe_offload": {"slots_per_layer": 8}},
        {"VLLM_MOE_OFFLOAD_POLICY": "lfu", "VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER": "8"},
    )
    assert config is not None
    assert (config.slots_per_layer, config.policy) == (8, "lfu")


@pytest.mark.parametrize(
    ("given", "variables", "where"),
    [
        (
            {"slots_per_layer": 8},
            {"GPU_MEMORY_GIB": "1"},
            r"slots_per_layer is set by me, gpu_memory_gib is set in VLLM_MOE_OFFLOAD_GPU_MEMORY_",
        ),
        (
            {},
            {"GPU_MEMORY_GIB": "1", "SLOTS_PER_LAYER": "8"},
            r"slots_per_layer is set in VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER, gpu_memory_gib is set in",
        ),
        (
            {"mode": "cpu"},
            {"SLOTS_PER_LAYER": "8", "CPU_THREADS": "1"},
            r"\(mode is set by me, slots_per_layer is set in VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER\)$",
        ),
        ({"slots_per_layer": 8, "gpu_memory_gib": 1}, {}, r"give one of them$"),
        (
            {"slots_per_layer": 8, "gpu_memory_gib": 1},
            {"GPU_MEMORY_GIB": "1"},
            r"gpu_memory_gib is set by me and in VLLM_MOE_OFFLOAD_GPU_MEMORY_GIB\)$",
        ),
    ],
)
def test_a_clash_says_where_each_was_set(given: dict, variables: dict, where: str) -> None:
    environment = {f"VLLM_MOE_OFFLOAD_{name}": text for name, text in variables.items()}
    with pytest.raises(ConfigError, match=where):
        OffloadConfig.resolve({"moe_offload": given}, environment, "by me")


def test_settings_survive_the_way_to_the_workers() -> None:
    config = OffloadConfig.parse({"gpu_memory_gib": 1.5, "cpu_threads": 3})
    assert OffloadConfig.parse(config.settings()) == config
    cpu = OffloadConfig.parse({"mode": "cpu"})
    assert OffloadConfig.parse(cpu.settings()) == cpu


def test_params_are_a_list_or_separated_by_commas() -> None:
    listed = OffloadConfig.parse({"group_size": 2, "params": ["self_attn", "mlp.gate"]})
    text = OffloadConfig.parse({"group_size": "2", "params": "self_attn, mlp.gate"})
    assert listed == text
    assert text.settings() == {"group_size": 2, "params": ["self_attn", "mlp.gate"]}
    assert OffloadConfig.resolve(
        {"moe_offload": listed.settings()}, {"VLLM_MOE_OFFLOAD_PARAMS": "self_attn,mlp.gate"}
    ) == OffloadConfig.parse(listed.settings())


def test_the_helper_for_llm_builds_the_same() -> None:
    assert moe_offload_args(slots_per_layer=4) == {
        "additional_config": {"moe_offload": {"slots_per_layer": 4}}
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cards": 4}, r"unknown: 'cards'; what exists: mode, slots_per_layer, gpu_memory_gib"),
        (
            {"slots_per_layr": 4, "mode": "cached"},
            r"unknown: 'slots_per_layr' \(did you mean slots_per_layer\?\); .*; mode='cached'",
        ),
        ({1: 4}, r"unknown: '1'; what exists"),
        ({"": 1}, r"unknown: ''; what exists"),
        ({"slots": 4}, r"unknown: 'slots' \(did you mean slots_per_layer\?\); what exists"),
        ({"mode ": "cpu"}, r"unknown: 'mode ' \(did you mean mode\?\); what exists"),
        ({"mode": "gpu"}, r"mode='gpu': give one of auto, cache, hybrid, cpu, stream \("),
        (
            {"mode": "stream", "slots_per_layer": 4},
            r"copies every .*slots_per_layer would",
        ),
        (
            {"mode": "stream", "gpu_memory_gib": 4.0},
            r"copies every .*gpu_memory_gib would",
        ),
        ({"mode": "stream", "policy": "lru"}, r"mode='stream' has no slots, so policy would"),
        ({"mode": "stream", "stream_threshold": 64}, r"'stream' has no slots, so stream_threshold"),
        ({"mode": "stream", "cache_topk": 2}, r"mode='stream' leaves no choice.*cache_topk"),
        ({"mode": "cache", "cache_topk": 2}, r"mode='cache' leaves no choice.*cache_topk"),
        ({"mode": "cpu", "update_expert_num": 2}, r"mode='cpu' leaves no choice.*update_expert"),
        (
            {"mode": "cache", "correct_rates": "off"},
            r"mode='cache' leaves no choice.*correct_rates",
        ),
        ({"correct_rates": "on"}, r"correct_rates='on': give one of auto, off \("),
        ({"cache_topk": 0}, r"cache_topk=0: give at least 1"),
        ({"mode": "hybrid", "update_expert_num": 0}, r"update_expert_num=0: give at least 1"),
        ({"policy": "clock"}, r"policy='clock': give one of lfru, lru, lfu, static \("),
        ({"slots_per_layer": 0}, r"slots_per_layer=0: give at least 1"),
        ({"slots_per_layer": 0, "polcy": "lru"}, r"unknown: 'polcy' .*; slots_per_layer=0: give"),
        ({"slots_per_layer": 2.5}, r"slots_per_layer=2.5: give a whole number or 'auto' \("),
        ({"slots_per_layer": "many"}, r"slots_per_layer='many': give a whole number or 'auto' \("),
        ({"slots_per_layer": float("inf")}, r"slots_per_layer=inf: give a whole number or 'auto'"),
        ({"gpu_memory_gib": "much"}, r"gpu_memory_gib='much': give a number or 'auto' \("),
        ({"gpu_memory_gib": 0}, r"gpu_memory_gib=0"),
        ({"gpu_memory_gib": -1.0}, r"gpu_memory_gib=-1.0"),
        ({"gpu_memory_gib": float("nan")}, r"gpu_memory_gib=nan"),
        ({"gpu_memory_gib": 1e300}, r"gpu_memory_gib=1e\+300: give GiB above 0"),
        ({"stream_threshold": -1}, r"stream_threshold=-1: give at least 0, 'auto' or 'off'"),
        ({"stream_threshold": "never"}, r"='never': give a whole number or 'auto' or 'off' \("),
        ({"mode": "cpu", "stream_threshold": 64}, r"mode='cpu' has no slots, so stream_threshold"),
        ({"stream_experts": 0}, r"stream_experts=0: give at least 1, or 'auto'"),
        ({"stream_experts": "all"}, r"stream_experts='all'"),
        ({"stream_experts": True}, r"stream_experts=True: give a whole number or 'auto' \("),
        (
            {"stream_threshold": "off", "stream_experts": 4},
            r"with stream_threshold='off' nothing is streamed, so stream_experts would",
        ),
        ({"mode": "cpu", "stream_experts": 4}, r"with mode='cpu' nothing .* stream_experts would"),
        ({"cpu_threads": 0}, r"cpu_threads=0"),
        ({"slots_per_layer": 4, "gpu_memory_gib": 1}, r"both size the slots: give one"),
        ({"mode": "cpu", "slots_per_layer": 4}, r"mode='cpu' fetches nothing.*slots_per_layer"),
        ({"mode": "cpu", "policy": "lru"}, r"mode='cpu' has no slots"),
        ({"num_in_group": 2}, r"without group_size nothing is prefetched, so num_in_group"),
        ({"params": ["mlp"]}, r"without group_size nothing is prefetched, so params"),
        ({"group_size": 0}, r"group_size=0: give at least 1"),
        ({"group_size": 2, "num_in_group": 0}, r"num_in_group=0: give at least 1"),
        ({"group_size": 2, "prefetch_step": 0}, r"prefetch_step=0: give at least 1"),
        ({"group_size": 2, "num_in_group": 3}, r"num_in_group=3 of group_size=2.*from 1 to 2"),
        ({"group_size": 2, "params": "mlp,"}, r"params has '', which matches no name"),
        ({"group_size": 2, "params": ["mlp..gate"]}, r"params has 'mlp..gate', which matches no"),
        ({"group_size": 2, "params": 3}, r"params=3: give a list of names \("),
        ({"group_size": 2, "params": [3, 4]}, r"params\[1\]=4: give a list of names \("),
        ({"group_size": "two"}, r"group_size='two': give a whole number \("),
        ({"group_size": True}, r"group_size=True: give a whole number \("),
        (["mode"], r"must be a mapping"),
        ({"slots_per_layer": True}, r"slots_per_layer=True: give a whole number or 'auto' \("),
        ({"cpu_threads": False}, r"cpu_threads=False: give a whole number or 'auto' \("),
        ({"gpu_memory_gib": True}, r"gpu_memory_gib=True: give a number or 'auto' \("),
        ({"slots_per_layer": "8_0"}, r"slots_per_layer='8_0': give a whole number or 'auto' \("),
        ({"gpu_memory_gib": "1_0"}, r"gpu_memory_gib='1_0': give a number or 'auto' \("),
        ({"correct_rates": False}, r"correct_rates=False: give one of auto, off \("),
        ({"mode": True}, r"mode=True: give one of auto, cache, hybrid, cpu, stream \("),
        ({"stream_threshold": False}, r"=False: give a whole number or 'auto' or 'off' \("),
        ({"group_size": 2, "params": True}, r"params=True: give a list of names \("),
        ({"mode": "Cache"}, r"mode='Cache' \(did you mean cache\?\): give one of auto, cache"),
        ({"policy": "LRU"}, r"policy='LRU' \(did you mean lru\?\): give one of lfru, lru"),
        ({"policy": "lrfu"}, r"policy='lrfu' \(did you mean lfru\?\): give one of lfru, lru"),
        ({"POLICY": "lru"}, r"unknown: 'POLICY' \(did you mean policy\?\)"),
        ({"stream_threshold": "Off"}, r"='Off' \(did you mean off\?\): give a whole number or"),
    ],
)
def test_a_wrong_setting_is_an_error_that_says_what_to_do(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig.parse(settings)


@pytest.mark.parametrize(
    "name", ["slots_per_layer", "gpu_memory_gib", "cache_topk", "update_expert_num", "cpu_threads"]
)
def test_an_error_describes_a_setting_once(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        OffloadConfig.parse({name: "eight", "policy": "clock"})
    message = str(raised.value)
    assert message.count(OffloadConfig.model_fields[name].description) == 1
    assert message.count(f"{name}='eight': ") == 1
    assert "number or 'auto'" in message and "policy='clock'" in message


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "cpu", "gpu_memory_gib": "auto", "slots_per_layer": "auto"},
        {"mode": "stream", "policy": "lfru", "stream_threshold": "auto", "stream_experts": "auto"},
        {"mode": "cache", "correct_rates": "auto", "cache_topk": "auto"},
        {"gpu_memory_gib": 4, "slots_per_layer": "auto"},
        {"gpu_memory_gib": "auto", "slots_per_layer": 4},
    ],
)
def test_a_setting_given_as_it_is_by_itself_goes_with_all_others(given: dict) -> None:
    OffloadConfig.parse(given)


@pytest.mark.parametrize("given", [None, {}, {"mode": "stream"}, {"cpu_threads": 2}])
def test_what_asks_for_streaming_sets_the_mode(given: dict | None) -> None:
    config = None if given is None else OffloadConfig.parse(given)
    streaming = OffloadConfig.streaming(config, "the architecture X")
    assert streaming == OffloadConfig.parse({**(given or {}), "mode": "stream"})


def test_what_asks_for_streaming_goes_with_no_other_mode_and_no_slots() -> None:
    for mode in ("auto", "cache"):
        with pytest.raises(ConfigError, match=rf"'{mode}', and X asks for mode='stream': leave"):
            OffloadConfig.streaming(OffloadConfig.parse({"mode": mode}), "X")
    with pytest.raises(ConfigError, match=r"no slot.*\(mode='stream' is what X asks for\)"):
        OffloadConfig.streaming(OffloadConfig.parse({"slots_per_layer": 4}), "X")


def test_a_section_that_is_no_mapping_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"must be a mapping of settings.*got 8"):
        OffloadConfig.resolve({"moe_offload": 8}, {})


def test_sources_that_disagree_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"slots_per_layer is 4 in additional_config and 8 in"):
        OffloadConfig.resolve(
            {"moe_offload": {"slots_per_layer": 4}}, {"VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER": "8"}
        )


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"variable VLLM_MOE_OFFLOAD_SLOT is no setting; those"):
        OffloadConfig.resolve({}, {"VLLM_MOE_OFFLOAD_SLOT": "8"})
    meant = r"SLOT_PER_LAYER is no setting \(did you mean VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER\?\)"
    with pytest.raises(ConfigError, match=meant):
        OffloadConfig.resolve({}, {"VLLM_MOE_OFFLOAD_SLOT_PER_LAYER": "8"})
    for name, meant in (
        ("VLLM_MOE_OFLOAD_MODE", "MODE"),
        ("VLM_MOE_OFFLOAD_CPU_THREADS", "CPU_THREADS"),
        ("VLLM_MOE_OFFLAOD_ISA", "ISA"),
        ("MOE_OFFLOAD_SLOTS_PER_LAYER", "SLOTS_PER_LAYER"),
        ("moe_offload_mode", "MODE"),
    ):
        message = rf"{name} is no setting \(did you mean VLLM_MOE_OFFLOAD_{meant}\?\); those"
        with pytest.raises(ConfigError, match=message):
            OffloadConfig.resolve({}, {name: "4"})


def test_vllms_own_variables_are_left_alone() -> None:
    names = (
        "VLLM_MOE_DP_CHUNK_SIZE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_MLA_OFFLOAD_NUM_IN_GROUP",
        "VLLM_OFFLOAD_SLOTS_PER_LAYER",
        "VLLM_MOE_OFLOAD_NOTHING_LIKE_IT",  # another's, for all that is known
        "MOE_OFFLOAD_METRICS_DIR",  # of this package, and no setting
        "MODE",
    )
    assert OffloadConfig.resolve({}, dict.fromkeys(names, "1")) is None


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [("SLOTS_PER_LAYER", "0", "at least 1"), ("POLICY", "lra", "one of lfru"), ("MODE", "", "one")],
)
def test_a_wrong_variable_is_named(name: str, value: str, cause: str) -> None:
    variable = f"VLLM_MOE_OFFLOAD_{name}"
    with pytest.raises(ConfigError, match=rf"give {cause}.*in the environment: {variable}\)"):
        OffloadConfig.resolve(
            {"moe_offload": {"cpu_threads": 1}},
            {variable: value, "VLLM_MOE_OFFLOAD_UPDATE_EXPERT_NUM": "2"},
        )


def test_all_wrong_variables_are_named() -> None:
    variables = {"VLLM_MOE_OFFLOAD_POLICY": "lra", "VLLM_MOE_OFFLOAD_CPU_THREADS": "0"}
    named = r"in the environment: VLLM_MOE_OFFLOAD_(POLICY|CPU_THREADS), VLLM_MOE_OFFLOAD_\w+\)"
    with pytest.raises(ConfigError, match=named):
        OffloadConfig.resolve({}, variables)


def test_the_same_value_in_another_type_is_no_disagreement() -> None:
    config = OffloadConfig.resolve(
        {"moe_offload": {"slots_per_layer": "8", "gpu_memory_gib": None}},
        {"VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER": "8"},
    )
    assert config is not None
    assert config.slots_per_layer == 8


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("VLLM_MOE_OFFLOAD", ""),
        (
            "VLLM_MOE_OFFLOAD_slots_per_layer",
            r" \(did you mean VLLM_MOE_OFFLOAD_SLOTS_PER_LAYER\?\)",
        ),
        ("vllm_moe_offload_policy", r" \(did you mean VLLM_MOE_OFFLOAD_POLICY\?\)"),
    ],
)
def test_a_variable_that_looks_like_a_setting_is_an_error(name: str, near: str) -> None:
    message = rf"{name} is no setting{near}; those are: VLLM_MOE_OFFLOAD_MO"
    with pytest.raises(ConfigError, match=message):
        OffloadConfig.resolve({}, {name: "8"})


@pytest.mark.parametrize(
    "key", ["moe-offload", "moe_ofload", "MOE_OFFLOAD", "vllm_moe_offload", "vllm-moe-offload"]
)
def test_a_misspelt_section_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"has '{key}': did you mean 'moe_offload'"):
        OffloadConfig.resolve({key: {}}, {})


def test_a_section_one_level_too_deep_is_an_error() -> None:
    deep = {"additional_config": {"moe_offload": {"slots_per_layer": 4}}}
    with pytest.raises(ConfigError, match=r'so that it is \{"moe_offload": \{"slots_per_layer": 4'):
        OffloadConfig.resolve(deep, {})
    assert OffloadConfig.resolve({"additional_config": {"another": 1}}, {}) is None


@pytest.mark.parametrize(
    ("given", "named", "shown"),
    [
        ({"slots_per_layer": 8}, "'slots_per_layer'", '{"slots_per_layer": 8}'),
        (
            {"cpu_threads": 2, "mode": "cpu"},
            "'mode', 'cpu_threads'",
            '{"mode": "cpu", "cpu_threads": 2}',
        ),
        (
            {"moe_offload": {"policy": "lru"}, "gpu_memory_gib": 4, "another": 1},
            "'gpu_memory_gib'",
            '{"policy": "lru", "gpu_memory_gib": 4}',
        ),
    ],
)
def test_settings_beside_their_section_are_an_error(given: dict, named: str, shown: str) -> None:
    with pytest.raises(ConfigError) as raised:
        OffloadConfig.resolve(given, {})
    assert str(raised.value) == (
        f"moe_offload: additional_config has {named}: settings of moe_offload stand in its "
        f'section: {{"moe_offload": {shown}}}'
    )


def test_words_of_any_plugin_are_left_to_it() -> None:
    others = {"mode": "fast", "params": {}, "policy": "fifo"}
    assert OffloadConfig.resolve(others, {}) is None
    config = OffloadConfig.resolve({**others, "moe_offload": {"policy": "lru"}}, {})
    assert config == OffloadConfig(policy="lru")


@pytest.mark.parametrize("given", [{"mode": "cpu"}, {"policy": "lru", "params": ["mlp"]}])
def test_what_might_be_meant_for_the_section_beside_it_is_said(
    given: dict, caplog: pytest.LogCaptureFixture
) -> None:
    section = {"moe_offload": {"slots_per_layer": 3}}
    assert OffloadConfig.resolve({**section, **given}, {}) == OffloadConfig(slots_per_layer=3)
    (record,) = caplog.records
    named = ", ".join(f"{name}={value!r}" for name, value in given.items())
    assert f"moe_offload: additional_config has {named} beside the section" in record.getMessage()
    caplog.clear()
    assert OffloadConfig.resolve(given, {}) is None
    assert OffloadConfig.resolve({**section, "mode": "fast", "policy": 3}, {}) is not None
    assert not caplog.records


def test_vllm_plugins_without_this_plugin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(ConfigError, match=r"VLLM_PLUGINS='another' keeps vLLM from loading"):
        moe_offload_args(slots_per_layer=4)
    monkeypatch.setenv("VLLM_PLUGINS", "another,cpu_offload_moe")
    moe_offload_args(slots_per_layer=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policy is wrong", "moe_offload: policy is wrong"),
        ("moe_offload settings: policy is wrong", "moe_offload settings: policy is wrong"),
    ],
)
def test_every_error_is_found_by_one_word(text: str, said: str) -> None:
    error: OffloadError = ConfigError(text)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == said
