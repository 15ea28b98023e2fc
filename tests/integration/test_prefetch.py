"""Group prefetch in a running engine: dense models, and attention beside cached experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")

import torch  # noqa: E402
import transformers  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.offloader.base import (  # noqa: E402
    NoopOffloader,
    get_offloader,
    set_offloader,
)

from tests.e2e.engines import Prompts, engine, greedy, stats  # noqa: E402
from tests.interrupted import Interruption  # noqa: E402
from vllm_moe_offload import (  # noqa: E402
    ConfigError,
    InactiveError,
    UnsupportedError,
    moe_offload_args,
)
from vllm_moe_offload.config import OffloadConfig  # noqa: E402
from vllm_moe_offload.device import HostDevice  # noqa: E402
from vllm_moe_offload.host import HostStore  # noqa: E402
from vllm_moe_offload.integration.prefetch import GroupOffloader  # noqa: E402
from vllm_moe_offload.stream import LayerPrefetcher  # noqa: E402

DEMO = Path(__file__).parents[2] / "models" / "demo-moe"
PROMPTS = Prompts.draw(checkpoints.VOCAB)
LAYERS = 5
# float32 numbers of a layer of the dense model, by the module that has them.
ATTENTION = 64 * (4 + 2 * 2) * 32 + 4 * 32 * 64 + 2 * 32
MLP = 3 * 64 * 96
NORMS = 2 * 64
PADDING = 2 * 128  # bytes behind the two norms of attention


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def moe_tokens(moe: Path) -> list[list[int]]:
    with engine(moe) as stock:
        return greedy(stock, PROMPTS)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    config = transformers.Qwen3Config(
        **(checkpoints.COMMON | {"num_hidden_layers": LAYERS}),
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)  # norms that differ from layer to layer
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense_tokens(dense: Path) -> list[list[int]]:
    with engine(dense) as stock:
        return greedy(stock, PROMPTS)


@pytest.mark.parametrize(
    ("settings", "layers", "copied", "numbers", "padding", "buffers"),
    [
        ({"group_size": 1}, 5, 5, ATTENTION + MLP + NORMS, PADDING, 1),
        ({"group_size": 1, "prefetch_step": 2}, 5, 5, ATTENTION + MLP + NORMS, PADDING, 2),
        # The third layer has the third buffer to itself.
        ({"group_size": 1, "prefetch_step": 3, "params": ["mlp"]}, 5, 4, MLP, 0, 3),
        (
            {"group_size": 2, "params": ["self_attn", "mlp.down_proj"]},
            2,
            2,
            ATTENTION + MLP // 3,
            PADDING,
            1,
        ),
        ({"group_size": 3, "num_in_group": 2, "params": "qkv_proj.weight"}, 3, 3, 16384, 0, 1),
    ],
)
def test_a_dense_model_gives_the_same_tokens(
    dense: Path,
    dense_tokens: list[list[int]],
    settings: dict[str, Any],
    layers: int,
    copied: int,
    numbers: int,
    padding: int,
    buffers: int,
) -> None:
    with engine(dense, **moe_offload_args(**settings)) as ours:
        assert greedy(ours, PROMPTS) == dense_tokens
        done = stats(ours)
        assert done["layers"] == {}
        assert done["prefetch"] == {
            "layers": layers,
            "host_bytes": layers * (4 * numbers + padding),
            "device_bytes": buffers * (4 * numbers + padding),
            "predicted_bytes": buffers * (4 * numbers + padding),
            "step_bytes": copied * 4 * numbers,
        }
    assert isinstance(get_offloader(), NoopOffloader), "the next engine of this process is stock"


def test_compiled_gives_the_same_tokens(dense: Path, dense_tokens: list[list[int]]) -> None:
    settings = moe_offload_args(group_size=1, prefetch_step=2)
    with engine(dense, enforce_eager=False, **settings) as ours:
        assert greedy(ours, PROMPTS) == dense_tokens


@pytest.mark.parametrize("eager", [True, False])
def test_attention_beside_cached_experts_gives_the_same_tokens(
    moe: Path, moe_tokens: list[list[int]], eager: bool
) -> None:
    settings = moe_offload_args(
        slots_per_layer=4, group_size=1, prefetch_step=2, params=["self_attn"]
    )
    with engine(moe, enforce_eager=eager, **settings) as ours:
        assert greedy(ours, PROMPTS) == moe_tokens
        done = stats(ours)
        assert done["misses"] > 0
        assert {layer["slots"] for layer in done["layers"].values()} == {4}
        assert done["prefetch"]["layers"] == 3
        assert done["prefetch"]["host_bytes"] == 3 * (4 * ATTENTION + PADDING)


def test_two_engines_in_turns_have_their_own_weights(
    dense: Path, dense_tokens: list[list[int]], moe: Path, moe_tokens: list[list[int]]
) -> None:
    """vLLM's offloader is the process's: each step is to find its engine's."""
    beside = moe_offload_args(slots_per_layer=4, group_size=1, params=["self_attn"])
    with (
        engine(moe, **beside) as one,  # first: vLLM makes its groups of ranks once
        engine(dense, **moe_offload_args(group_size=1)) as other,
    ):
        for _ in range(2):
            assert greedy(one, PROMPTS) == moe_tokens
            assert greedy(other, PROMPTS) == dense_tokens


def test_all_but_the_experts_of_the_demo_model() -> None:
    """Whether the experts are all on the device, in slots, or streamed."""
    prompts = Prompts.draw(2048)
    with engine(DEMO) as stock:
        expected = greedy(stock, prompts)
    for settings in ({}, {"slots_per_layer": 3}, {"slots_per_layer": 3, "stream_threshold": 0}):
        with engine(DEMO, **moe_offload_args(group_size=1, **settings)) as ours:
            assert greedy(ours, prompts) == expected
            done = stats(ours)
            assert bool(done["layers"]) == bool(settings)
            assert 0 < done["prefetch"]["step_bytes"] <= done["prefetch"]["host_bytes"]
            section = ours.llm_engine.vllm_config.additional_config["moe_offload"]
            assert section["group_size"] == 1, "vLLM's key of compiled graphs counts it"


def test_layers_of_other_shapes(tmp_path: Path) -> None:
    """One dense layer before those of experts, shared ones among them; latent attention."""
    model = checkpoints.write("deepseek_v2", tmp_path)
    with engine(model) as stock:
        expected = greedy(stock, PROMPTS)
    names = ["mlp", "input_layernorm", "o_proj"]
    with pytest.raises(Exception, match="params has 'mlp', which names experts too"):
        start(model, {"group_size": 1, "params": names})
    names = ["mlp.gate", "gate_up_proj", "down_proj", "input_layernorm", "o_proj"]
    settings = moe_offload_args(slots_per_layer=3, group_size=1, params=names)
    with engine(model, **settings) as ours:
        assert greedy(ours, PROMPTS) == expected
        done = stats(ours)["prefetch"]
        dense_mlp, shared, router = 3 * 64 * 128, 2 * 3 * 64 * 32, 12 * 64
        every = 3 * (4 * 128 * 64 + 64)
        assert done["host_bytes"] >= 4 * (dense_mlp + 2 * (shared + router) + every)
        assert done["step_bytes"] == 4 * (2 * (shared + router) + every), "the dense one stays"


def test_slots_leave_room_for_the_buffers(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = 2 * (4 * ATTENTION + PADDING)
    monkeypatch.setattr(HostDevice, "free_memory", lambda self, host_bytes: 3 * 24576 * 7 + buffers)
    settings = {"group_size": 1, "prefetch_step": 2, "params": ["self_attn"]}
    with engine(moe, **moe_offload_args(**settings)) as ours:
        assert {layer["slots"] for layer in stats(ours)["layers"].values()} == {7}
        assert stats(ours)["prefetch"]["predicted_bytes"] == buffers


def stop_refilling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerPrefetcher, "refill", lambda self, number: None)
    patch.setattr(LayerPrefetcher, "wait", lambda self, number: None)


def exchange_two_layers(patch: pytest.MonkeyPatch) -> None:
    fill = LayerPrefetcher._fill
    patch.setattr(
        LayerPrefetcher, "_fill", lambda self, n, b: fill(self, {1: 2, 2: 1}.get(n, n), b)
    )


def lose_a_norm(patch: pytest.MonkeyPatch) -> None:
    keep = GroupOffloader._keep

    def faulty(self: GroupOffloader, layer: Any) -> list[torch.Tensor]:
        if len(self._places) and layer is self._stacks[0].layers[1]:
            self._parameters(layer)["input_layernorm.weight"].data.fill_(1)
        return keep(self, layer)

    patch.setattr(GroupOffloader, "_keep", faulty)


@pytest.mark.parametrize("fault", [stop_refilling, exchange_two_layers, lose_a_norm])
def test_a_fault_is_noticed(
    dense: Path, dense_tokens: list[list[int]], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with engine(dense, **moe_offload_args(group_size=1)) as ours:
        assert greedy(ours, PROMPTS) != dense_tokens


def test_dummy_weights_are_those_without_prefetch(dense: Path) -> None:
    tokens = []
    for settings in ({}, moe_offload_args(group_size=1)):
        with engine(dense, load_format="dummy", **settings) as llm:
            tokens.append(greedy(llm, PROMPTS))
    assert tokens[0] == tokens[1]


def test_the_environment_turns_it_on(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_GROUP_SIZE", "2")
    monkeypatch.setenv("VLLM_MOE_OFFLOAD_PARAMS", "self_attn, mlp")
    with engine(dense) as ours:
        done = stats(ours)["prefetch"]
        assert done["layers"] == 2
        assert done["host_bytes"] == 2 * (4 * (ATTENTION + MLP) + PADDING)


def test_another_offloader_during_a_step_ends_it(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another thread makes an engine: vLLM's offloader is that one's from then on."""
    wait = GroupOffloader._wait_for_layer

    def taken(self: GroupOffloader, number: int) -> None:
        wait(self, number)
        set_offloader(NoopOffloader())

    with engine(dense, **moe_offload_args(group_size=1)) as ours:
        monkeypatch.setattr(GroupOffloader, "_wait_for_layer", taken)
        with pytest.raises(UnsupportedError, match="another engine was made or ran in this proc"):
            greedy(ours, PROMPTS)


def test_weights_are_not_loaded_again(dense: Path) -> None:
    with engine(dense, **moe_offload_args(group_size=1)) as ours:
        for name in ("reload_weights", "update_weights", "start_weight_update"):
            with pytest.raises(Exception, match=f"{name}: weights cannot be loaded again"):
                ours.collective_rpc(name)
        with pytest.raises(UnsupportedError, match="load_weights: weights cannot be loaded again"):
            ours.apply_model(lambda model: model.load_weights([]))


def start(model: Path, settings: dict[str, Any], **arguments: Any) -> None:
    try:
        with engine(model, additional_config={"moe_offload": settings}, **arguments):
            pass
    finally:
        assert isinstance(get_offloader(), NoopOffloader)
        # A start that failed leaves its process groups, those of a dense model none for experts.
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"group_size": 6}, InactiveError, r"has 5 layers, and none .* group_size of no more"),
        (
            {"group_size": 1, "params": ["mlp", "attn"]},
            ConfigError,
            r"named by params=attn; what there is: self_attn.qkv_proj.weight, .*down_proj.weight",
        ),
        (
            {"group_size": 1, "params": ["self_at", "mlp.dwn_proj"]},
            ConfigError,
            r"=mlp.dwn_proj \(did you mean mlp.down_proj\?\), self_at \(did you mean self_attn",
        ),
        ({"group_size": 1, "prefetch_step": 5}, InactiveError, r"every one of 5 layers .* lower"),
        ({"group_size": 5}, InactiveError, r"every one of 1 layers .* prefetch more layers"),
        (
            {"group_size": 1, "slots_per_layer": 4, "policy": "lru"},
            InactiveError,
            r"nothing would be offloaded by policy, slots_per_layer: leave out policy, slots_per_l"
            r"ayer, or serve a mixture-of-experts model$",
        ),
        ({"group_size": 2, "num_in_group": 3}, ConfigError, r"num_in_group=3 of group_size=2"),
    ],
)
def test_what_would_do_nothing_stops_the_start(
    dense: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        start(dense, settings)


def test_who_asked_for_offload_is_named(dense: Path) -> None:
    with pytest.raises(
        InactiveError,
        match=r"by quantization='pingpong_moe': leave out quantization='pingpong_moe', serve a m",
    ):
        start(dense, {}, quantization="pingpong_moe")


def test_experts_are_not_prefetched(moe: Path) -> None:
    with pytest.raises(ConfigError, match=r"'experts', which names experts too .*slots_per_layer"):
        start(moe, {"group_size": 1, "params": ["self_attn", "experts"]})


def test_vllms_own_prefetcher_beside_it_stops_the_start(dense: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"--offload-group-size.*group_size"):
        start(dense, {"group_size": 1}, offload_group_size=2)


def test_a_parameter_of_two_layers_stops_the_start(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer

    init = Qwen3DecoderLayer.__init__
    norms = []

    def shared(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        norms.append(self.input_layernorm)
        self.input_layernorm = norms[0]

    monkeypatch.setattr(Qwen3DecoderLayer, "__init__", shared)
    with pytest.raises(UnsupportedError, match=r"input_layernorm.weight is one of several layers"):
        start(dense, {"group_size": 1})


def offloader(
    layer: type[torch.nn.Module], params: list[str]
) -> tuple[GroupOffloader, list[torch.nn.Module]]:
    """Of three such layers."""
    made = GroupOffloader(
        OffloadConfig.parse({"group_size": 1, "params": params}),
        HostStore(lambda address, nbytes: None, lambda address: None),
    )
    return made, made.wrap_modules(layer() for _ in range(3))


def test_a_format_that_leaves_none_of_what_was_named_stops_the_start() -> None:
    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

    ours, made = offloader(Packed, ["weight"])
    for layer in made:
        layer.weight_packed = torch.nn.Parameter(layer.weight.detach())
        del layer.weight
    with pytest.raises(
        InactiveError, match=r"none of these is prefetched \(params=weight\): name whole"
    ):
        ours.post_init()


def test_a_parameter_that_a_buffer_is_a_view_of_stays_where_it_is() -> None:
    """As Mamba2's mixer has its convolution: the buffer is read, and the parameter loaded."""

    class Mixer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Parameter(torch.randn(4, 1, 2))
            self.proj = torch.nn.Parameter(torch.randn(4, 4))
            self.register_buffer("conv_weights", self.conv.detach().view(4, 2), persistent=False)

    ours, mixers = offloader(Mixer, [])
    ours.post_init()
    assert ours.stats()["step_bytes"] == 3 * 4 * 4 * 4, "the projections alone"
    for mixer in mixers:
        mixer.conv.data.fill_(7.0)
        assert (mixer.conv_weights == 7).all()
    ours, _ = offloader(Mixer, ["conv"])
    with pytest.raises(ConfigError, match=r"named by params=conv; what there is: proj"):
        ours.post_init()


def test_the_model_has_to_call_its_layers(dense: Path) -> None:
    """Known when the worker has warmed up, which on a CPU it may not: asked for here."""
    with engine(dense, **moe_offload_args(group_size=1)) as ours:
        (runtime,) = ours.collective_rpc(lambda worker: worker._moe_offload_runtime)
        greedy(ours, PROMPTS)
        runtime.prefetch.check_run()
        runtime.prefetch._stacks[0].prefetcher.not_run.add(2)
        with pytest.raises(UnsupportedError, match="otherwise than by calling them"):
            runtime.prefetch.check_run()


def test_after_a_step_that_was_interrupted_the_next_ones_are_right(
    dense: Path, dense_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C between two layers, or while one's parameters are copied."""
    restarted: list[LayerPrefetcher] = []
    restart = LayerPrefetcher.restart

    def noted(prefetcher: LayerPrefetcher) -> None:
        restarted.append(prefetcher)
        restart(prefetcher)

    monkeypatch.setattr(LayerPrefetcher, "restart", noted)
    with engine(dense, **moe_offload_args(group_size=1)) as ours:
        (runtime,) = ours.collective_rpc(lambda worker: worker._moe_offload_runtime)
        (stack,) = runtime.prefetch._stacks
        calls = [(stack.prefetcher, name) for name in ("wait", "refill")]
        for done, number in enumerate((0, 3, 6, 9)):
            interruption = Interruption(number)
            with interruption.of(*calls, (runtime.prefetch._copies, "copy")):
                greedy(ours, PROMPTS)
            assert interruption.has_come
            left = list(ours.llm_engine.output_processor.request_states)
            ours.llm_engine.output_processor.abort_requests(left, internal=True)
            ours.llm_engine.engine_core.abort_requests(left)
            assert greedy(ours, PROMPTS) == dense_tokens
            assert len(restarted) == done + 1, "once, and not after steps that have ended"


def test_settings_are_json() -> None:
    given = moe_offload_args(group_size=4, params=("self_attn", "mlp"))
    assert json.loads(json.dumps(given)) == given
