"""vLLM has what the plugin leans on: the installed release, and every other one by its record.

Running is shown on 0.32 (CPU) only; for the versions in between this is what is known of them.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest

from tests.contract.surface import RECORDED, missing, record

KNOWN = ("0.24", "0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
RECORDS = sorted(RECORDED.glob("*.json"))


def test_every_release_series_is_recorded() -> None:
    assert tuple(path.stem.rsplit(".", 1)[0] for path in RECORDS) == KNOWN


def test_the_supported_range_is_the_recorded_one() -> None:
    pytest.importorskip("vllm")
    from vllm_moe_offload.integration import compat

    assert ".".join(map(str, compat.OLDEST)) == KNOWN[0]
    assert ".".join(map(str, compat.NEWEST)) == KNOWN[-1]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_release_has_it_all(path: Path) -> None:
    assert missing(json.loads(path.read_text())) == []


def test_the_installed_release_has_it_all() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    assert missing(record(Path(spec.origin).parents[1])) == []


def test_a_change_is_noticed() -> None:
    surface = json.loads(RECORDS[-1].read_text())
    worker = "vllm/v1/worker/worker_base.py"
    layers = "vllm/model_executor/layers/fused_moe/routed_experts.py"
    changed = copy.deepcopy(surface)
    changed[worker]["WorkerWrapperBase"]["load_model"] = ["self"]
    del changed[layers]["RoutedExperts"]["top_k"]
    changed[layers]["RoutedExperts"]["forward_modular"].remove("topk_ids")
    assert len(missing(changed)) == 3
