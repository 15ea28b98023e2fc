"""What is made of the times at which tokens came, and how a server is asked for."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from bench import serve
from bench.common import ROOT, read
from bench.serve import Measured, _gaps
from bench.server import call, flags


def test_gaps_are_those_that_end_meanwhile() -> None:
    arrivals = [[0.0, 1.0, 2.5, 9.0], [0.5, 2.0]]
    assert _gaps(arrivals, 0.9, 2.0) == [1.0, 1.5]
    assert _gaps(arrivals, 2.0, 9.0) == [1.5, 6.5]
    with pytest.raises(RuntimeError, match="no token came meanwhile"):
        _gaps(arrivals, 9.0, 10.0)


def test_figures_of_repeats() -> None:
    measured = Measured(4)
    for repeat in range(5):
        measured.ttft_alone.append(2.0 + repeat)  # a chunk takes 1 s, of the median
        measured.ttft.append(10.0 + repeat)
        measured.gaps.append(([0.1] * 99 + [0.2], list(np.linspace(1, 2, 101) + repeat)))
    alone, loaded = dict(tokens=9), dict(batch=2)
    assert measured.of("ttft_ms", alone) == dict(value=4e3, min=2e3, max=6e3, repeats=5)
    assert measured.of("ttft_ms", alone | loaded)["value"] == 12e3
    assert measured.of("chunk_ms", alone)["value"] == 1e3
    assert measured.of("itl_p50_ms", loaded)["value"] == pytest.approx(100)
    assert measured.of("itl_p50_ms", alone | loaded)["value"] == pytest.approx(3.5e3)
    assert measured.of("itl_p99_ms", alone | loaded)["value"] == pytest.approx(3.99e3)
    assert measured.of("itl_p99_chunks", alone | loaded)["value"] == pytest.approx(3.99)


def test_a_server_that_ends_is_a_row_of_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise RuntimeError("the server ended: OutOfMemoryError: no room")

    monkeypatch.setattr(serve, "server", ended)
    model = ROOT / "models" / "demo-moe"
    words = f"serve --eager --model {model} --contestants vllm-gpu --json {tmp_path / 'rows.json'}"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit, match=r"of 16385 tokens.*has 1024 positions"):
        serve.main()
    monkeypatch.setattr(sys, "argv", [*words.split(), "--tokens", "512", "--room", "256"])
    serve.main()
    rows = read(tmp_path / "rows.json")
    assert {row["metric"] for row in rows} == set(serve.METRICS)
    assert all(row["value"] is None and "no room" in row["note"] for row in rows)


def test_arguments_of_an_engine_are_flags_of_a_server() -> None:
    engine = {
        "max_model_len": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "offload_params": ["a", "b"],
        "additional_config": {"x": {"y": 1}},
    }
    assert flags(engine) == [
        *("--max-model-len", "8", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--offload-params", "a", "b", "--additional-config", '{"x": {"y": 1}}'),
    ]


@pytest.mark.parametrize("status", [200, 500])
def test_a_method_of_the_workers_is_called(status: int) -> None:
    asked: list[tuple[str, object]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"nothing is measured")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as answers:
        thread = threading.Thread(target=answers.handle_request)
        thread.start()
        with (
            nullcontext()
            if status == 200
            else pytest.raises(RuntimeError, match=r"moe_offload_measure: .* 500: nothing is")
        ):
            call(f"http://127.0.0.1:{answers.server_port}", "moe_offload_measure")
        thread.join()
    assert asked == [("/collective_rpc", {"method": "moe_offload_measure"})]
