"""A draft model with experts of its own: planned when the other model's slots are taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")

from tests.e2e.engines import decoded, engine, stats  # noqa: E402
from vllm_moe_offload import MemoryShortError, moe_offload_args  # noqa: E402
from vllm_moe_offload.device import HostDevice  # noqa: E402
from vllm_moe_offload.integration import runtime, sizing  # noqa: E402
from vllm_moe_offload.integration.reserve import draft_model, layers_of_experts  # noqa: E402

EXPERT_BYTES = 24576
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def drafting(model: Path) -> dict[str, Any]:
    """The model drafts for itself."""
    return {
        "speculative_config": {
            "model": str(model),
            "method": "draft_model",
            "num_speculative_tokens": 2,
        }
    }


def limit_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """A device of so many bytes, which slots take."""
    left = nbytes
    slot_cache = HostDevice.slot_cache

    def take(self: HostDevice, host: Any, tensors: Any) -> Any:
        nonlocal left
        left -= sum(tensor.nbytes for tensor in tensors.values())
        return slot_cache(self, host, tensors)

    monkeypatch.setattr(HostDevice, "slot_cache", take)
    monkeypatch.setattr(HostDevice, "free_memory", lambda self, host_bytes: left)


@pytest.mark.parametrize("slots", [1, 7])
def test_slots_sized_automatically_are_shared_with_it(
    slots: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model) as stock:
        expected = decoded(stock, PROMPTS, 6)[0]
    limit_memory(monkeypatch, 6 * slots * EXPERT_BYTES + EXPERT_BYTES)
    with engine(model, **drafting(model), **moe_offload_args(mode="cache")) as ours:
        assert decoded(ours, PROMPTS, 6)[0] == expected
        layers = stats(ours)["layers"]
    assert len(layers) == 6
    assert {layer["slots"] for layer in layers.values()} == {slots}
    assert all(layer["steps"] for layer in layers.values())


def test_memory_that_does_not_suffice_for_both_stops_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 6 * EXPERT_BYTES - 1)
    with (
        pytest.raises(MemoryShortError, match=r"one expert for each of 6 layers"),
        engine(model, **drafting(model), **moe_offload_args(mode="cache")),
    ):
        pass


def test_one_that_was_not_expected_is_an_error_that_says_what_to_set(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 6 * EXPERT_BYTES)
    monkeypatch.setattr(sizing, "layers_of_experts", lambda *_: 0)
    with (
        pytest.raises(
            MemoryShortError,
            match=r"The slots of 3 layers .* before draft_model\.model\.layers\.0.*slots_per_layer",
        ),
        engine(model, **drafting(model), **moe_offload_args(mode="cache")),
    ):
        pass


def test_layers_of_a_draft_beside_a_model_without_experts_are_no_others() -> None:
    """They are the first that are planned, and theirs is all there is for slots."""
    shape = SimpleNamespace(get_num_experts=lambda: 0)
    draft = SimpleNamespace(get_num_experts=lambda: 4)
    speculative = SimpleNamespace(method="draft_model", draft_model_config=draft)
    ours = SimpleNamespace(
        _slots={}, _vllm_config=SimpleNamespace(model_config=shape, speculative_config=speculative)
    )
    are_the_drafts = runtime.OffloadRuntime._are_the_drafts.fget
    assert are_the_drafts(ours)
    shape.get_num_experts = lambda: 8
    assert not are_the_drafts(ours)
    ours._slots = {"layers.0": 4}
    assert are_the_drafts(ours)


def test_which_models_are_counted() -> None:
    def of(speculative: Any) -> Any:
        return SimpleNamespace(
            model_config=target, speculative_config=speculative, parallel_config=None
        )

    def model_of(experts: int) -> Any:
        return SimpleNamespace(get_num_experts=lambda: experts, get_num_layers=lambda parallel: 5)

    target, draft, dense = model_of(8), model_of(4), model_of(0)
    assert draft_model(of(None)) is None
    for method, its, found in (
        ("mtp", draft, draft),
        ("eagle", dense, dense),
        ("ngram", target, None),
        ("extract_hidden_states", model_of(8), None),
        ("suffix", None, None),
    ):
        speculative = SimpleNamespace(method=method, draft_model_config=its)
        assert draft_model(of(speculative)) is found
    counted = [layers_of_experts(of(None), each) for each in (None, draft, dense)]
    assert counted == [0, 5, 0]
