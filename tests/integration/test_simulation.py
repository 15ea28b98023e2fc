"""Routings inside vLLM's simulator: what is played is what is in the table, in any engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

checkpoints = pytest.importorskip("tests.e2e.checkpoints", reason="needs transformers")
pytest.importorskip("vllm")

from vllm import LLM  # noqa: E402
from vllm.model_executor.layers.fused_moe.router.router_factory import (  # noqa: E402
    create_fused_moe_router,
)
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (  # noqa: E402
    RoutingSimulator,
    RoutingSimulatorRouter,
)

from tests.e2e.engines import Prompts, engine, greedy, stats  # noqa: E402
from vllm_moe_offload import moe_offload_args  # noqa: E402
from vllm_moe_offload.integration import simulation  # noqa: E402
from vllm_moe_offload.integration.playback import STRIDE, Playback  # noqa: E402
from vllm_moe_offload.integration.plugin import register  # noqa: E402
from vllm_moe_offload.routing.simulate import ROUTINGS, simulate  # noqa: E402

VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
SMALL = dict(layers=3, num_experts=16, top_k=4, steps=1024, rows=4)
PROMPTS = Prompts.draw(checkpoints.VOCAB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation.Playback.__init__, "__kwdefaults__", dict(steps=64, rows=16))


def small(routing: str = "local") -> Playback:
    return Playback(routing, device=torch.device("cpu"), **SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_layer_called_in_turn_sees_its_own_sequence(routing: str) -> None:
    table = simulate(routing, **SMALL)  # type: ignore[arg-type]
    playback = small(routing)
    for step in (*range(1024), 0, 1):
        for layer in range(3):
            weights, ids = playback.play(2)
            np.testing.assert_array_equal(ids, table.ids[step, layer, :2])
            np.testing.assert_array_equal(weights, table.weights[step, layer, :2])


def test_rows_beyond_the_table_are_rows_of_far_later_steps() -> None:
    table = simulate("local", **SMALL).ids  # type: ignore[arg-type]
    playback = small()
    for layer in range(3):
        _, ids = playback.play(11)
        for row in range(11):
            later = row // 4 * STRIDE % 1024
            np.testing.assert_array_equal(ids[row], table[later, layer, row % 4])


def test_exchanging_the_routing_keeps_the_memory_that_a_graph_reads() -> None:
    playback = small("uniform")
    before = [t.data_ptr() for t in (playback.ids, playback.weights, playback.calls)]
    playback.play(4)
    playback.select("local")
    assert [t.data_ptr() for t in (playback.ids, playback.weights, playback.calls)] == before
    np.testing.assert_array_equal(playback.play(4)[1], small("local").play(4)[1])


def test_a_routing_that_goes_on_is_where_it_would_have_been() -> None:
    alone, playback = small("local"), small("uniform")
    for _ in range(3):
        alone.play(4)
        playback.play(4)
    playback.select("local", goes_on=True)
    np.testing.assert_array_equal(playback.play(4)[1], alone.play(4)[1])


def test_the_kernel_plays_what_the_plain_operations_play() -> None:
    """By Triton's interpreter, in a process of its own since it is switched on at import."""
    pytest.importorskip("triton")
    code = """
import torch
from vllm_moe_offload.integration.playback import Playback
kernel, plain = [Playback("local", layers=3, num_experts=16, top_k=k, steps=40, rows=4,
                 device=torch.device("cpu")) for k in (3, 3)]
for rows in (1, 3, 4, 11, 0, 200, *[1] * 130):
    got, expected = kernel._launch(rows), plain._gather(rows)
    kernel.calls.add_(1), plain.calls.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(got, expected)), rows
print("the same")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.stdout.strip() == "the same", done.stderr


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_simulators_router_plays_the_table(
    routing: str, monkeypatch: pytest.MonkeyPatch, small_tables: None
) -> None:
    monkeypatch.setenv(VARIABLE, routing)
    register()
    simulation._playbacks.clear()
    router = create_fused_moe_router(top_k=4, global_num_experts=16)
    assert isinstance(router, RoutingSimulatorRouter)
    table = simulate(routing, steps=64, layers=1, rows=16, num_experts=16, top_k=4)
    for step in range(3):
        hidden, logits = torch.zeros(5, 64), torch.zeros(5, 16)
        weights, ids = router.select_experts(hidden, logits, topk_indices_dtype=torch.int64)
        assert ids.dtype == torch.int64
        np.testing.assert_array_equal(ids, table.ids[step, 0, :5])
        np.testing.assert_array_equal(weights, table.weights[step, 0, :5])


def test_an_unknown_strategy_lists_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "zipf")
    register()
    assert set(ROUTINGS) <= set(RoutingSimulator.get_available_strategies())


def test_without_the_variable_nothing_of_it_is_imported() -> None:
    code = (
        "import sys; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "import json; print(json.dumps(list(sys.modules)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    loaded = json.loads(printed.splitlines()[-1])
    assert not [m for m in loaded if m.endswith((".simulate", ".simulation", ".playback"))]


def played(llm: LLM, routing: str) -> list[list[int]]:
    llm.collective_rpc("moe_offload_routing", args=(routing,))
    return greedy(llm, PROMPTS)


def test_the_same_routing_gives_the_same_tokens_with_and_without_offload(
    model: Path, monkeypatch: pytest.MonkeyPatch, small_tables: None
) -> None:
    """Eager: vLLM's simulator writes a log line, which the CPU build's compilation refuses."""
    monkeypatch.setenv(VARIABLE, "uniform")
    simulation._playbacks.clear()
    with engine(model) as stock:
        uniform, local = played(stock, "uniform"), played(stock, "local")
        assert played(stock, "uniform") == uniform
        assert uniform != local
        ((playback,),) = [of_engine.values() for of_engine in simulation._playbacks.values()]
        assert (playback.layers, playback.num_experts, playback.top_k) == (3, 16, 4)
        assert int(playback.calls) % 3 == 0, "every step called every layer once"
    with engine(model, **moe_offload_args(slots_per_layer=5, policy="lru")) as ours:
        assert played(ours, "uniform") == uniform
        ours.collective_rpc("moe_offload_reset_stats")
        assert played(ours, "local") == local
        assert stats(ours)["hits"] > 0


def test_exchanging_what_is_not_simulated_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation.install()
    monkeypatch.delenv(VARIABLE, raising=False)
    with (
        engine(model) as stock,
        pytest.raises(RuntimeError, match=r"routing 'local' cannot be played .*STRATEGY=''"),
    ):
        stock.collective_rpc("moe_offload_routing", args=("local",))
