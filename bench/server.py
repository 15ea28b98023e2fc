"""`vllm serve` as a process, and requests to its completions API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import ROOT
from bench.runner import reason

if TYPE_CHECKING:
    import aiohttp

_NAME = "model"


def flags(engine: Mapping[str, Any]) -> list[str]:
    """Arguments of ``vllm.LLM`` as those of ``vllm serve``."""
    words: list[str] = []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


@contextmanager
def server(
    engine: Mapping[str, Any], environment: Mapping[str, str], log: Path, seconds: float
) -> Iterator[str]:
    """The URL of a server that answers.

    engine: arguments of ``vllm.LLM``, `model` among them; log: what it prints goes there. Raises
    RuntimeError when it has ended or `seconds` have passed before it answers.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = dict(engine)
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", given.pop("model")]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", _NAME]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, *flags(given)],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        until = time.monotonic() + seconds
        while not _answers(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended: {reason(log.read_text())}")
            if time.monotonic() > until:
                raise RuntimeError(f"no server after {seconds:.0f} s")
            time.sleep(0.2)
        yield url
    finally:
        _end(process)


async def stream(
    session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, times: list[float]
) -> int:
    """Let the server generate `tokens`; when some arrived is put into `times` as they do.

    Returns how many it has made: those that it has together when it sends arrive together. Raises
    RuntimeError where the server refuses.
    """
    made = 0
    body = {
        "model": _NAME,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the server says {answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the server says {event['error']}")
                if event["choices"]:
                    times.append(time.perf_counter())
                else:
                    made = event["usage"]["completion_tokens"]
    return made


def metrics(url: str) -> str:
    """What the server counts, as it gives it to Prometheus."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def call(url: str, method: str) -> None:
    """Call this method of the server's workers; RuntimeError with what it says where that fails."""
    body = json.dumps({"method": method}).encode()
    request = urllib.request.Request(
        f"{url}/collective_rpc", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120):
            pass
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise RuntimeError(f"{method}: the server says {error.code}: {said[:200]}") from None


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=1)
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and what it has started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
