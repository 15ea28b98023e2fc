"""`vllm serve` with offload on, spoken to by the OpenAI client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

DEMO = Path(__file__).parents[2] / "models" / "demo-moe"
SETTINGS = {"moe_offload": {"mode": "cache", "slots_per_layer": 8}}


@contextmanager
def server(log: Path, *arguments: str) -> Iterator[str]:
    """The URL of a running server over the demo model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("vllm"), "serve", DEMO, "--port", port]
    command += ["--host", "127.0.0.1", "--served-model-name", "demo", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", 512, "--kv-cache-memory-bytes", 64 << 20]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "0.5"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, command), *arguments], stdout=out, stderr=out, env=environment
        )
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(240):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended:\n{log.read_text()[-4000:]}")
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=1)
                    break
                except OSError:
                    time.sleep(0.5)
            else:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def stream(url: str) -> str:
    """What the server streams after a prompt, greedily."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    chunks = client.completions.create(
        model="demo", prompt="In the beginning", max_tokens=24, temperature=0, stream=True
    )
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(texts) > 5, "streamed token by token"
    return "".join(texts)


def wait_for_metrics(url: str) -> None:
    """Until the server's own page shows hits and bytes of the worker's process."""
    for _ in range(40):
        page = urllib.request.urlopen(f"{url}/metrics", timeout=5).read().decode()
        shown = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[:1] != "#")
        hits = float(shown.get('vllm_moe_offload_hits_total{engine="0"}', 0))
        fetched = float(shown.get('vllm_moe_offload_bytes_total{engine="0",lane="fetched"}', 0))
        if hits and fetched:
            return
        time.sleep(0.5)
    raise AssertionError(f"no metrics of offload:\n{page[-2000:]}")


@pytest.mark.slow
def test_a_client_streams_the_same_text_with_and_without_offload(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server(log, "--additional-config", json.dumps(SETTINGS)) as url:
        offloaded = stream(url)
        wait_for_metrics(url)
    assert "of the used experts in slots, " in log.read_text()
    assert "8 slots a layer" in log.read_text()
    with server(log) as url:
        assert stream(url) == offloaded
    assert "moe_offload" not in log.read_text().replace(str(DEMO), "")


@pytest.mark.slow
def test_a_quantisation_by_name_asks_for_ping_pong(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server(log, "--quantization", "pingpong_moe") as url:
        assert stream(url)
    assert "moe_offload: mode=stream, 4 layers" in log.read_text()


@pytest.mark.slow
def test_a_wrong_setting_ends_the_server_with_what_exists(tmp_path: Path) -> None:
    log = tmp_path / "log"
    wrong = json.dumps({"moe_offload": {"slots": 8}})
    with (
        pytest.raises(RuntimeError, match="the server ended"),
        server(log, "--additional-config", wrong),
    ):
        pass
    assert "unknown: 'slots' (did you mean slots_per_layer?)" in log.read_text()
