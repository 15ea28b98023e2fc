"""Copies in a loader are torch's, whoever makes them, and wait for no thread that has not begun."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from threading import Event
from threading import enumerate as enumerate_threads

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_offload.host import SharedCopies, copying

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int32)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_PART_BYTES", 8)


def by_own_threads(threads: int) -> SharedCopies:
    """That have found torch's slower."""
    copies = SharedCopies(threads)
    copies._took[False].extend([inf] * copying._COUNTED)
    return copies


@pytest.fixture
def copies() -> Iterator[SharedCopies]:
    copies = by_own_threads(3)
    yield copies
    copies.close()


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    threads=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    other=st.sampled_from((None, *DTYPES)),
    wide=st.booleans(),
    turned=st.booleans(),
    spread=st.booleans(),
)
def test_what_is_copied_is_torchs(
    shape: list[int],
    threads: int,
    dtype: torch.dtype,
    other: torch.dtype | None,
    wide: bool,
    turned: bool,
    spread: bool,
) -> None:
    """Into parts of rows, from rows that lie apart or columns, one row for many, and converted."""
    source = torch.randint(0, 100, shape).to(dtype)
    if spread:
        source = source[:1].expand(shape)
    if turned:
        source = source.mT.contiguous().mT if source.ndim > 1 else source
    made = torch.zeros([*shape[:-1], shape[-1] + 5 * wide], dtype=other or dtype)
    expected = made.clone()
    expected[..., : shape[-1]].copy_(source)
    shared = by_own_threads(threads)
    with shared:
        to = made[..., : shape[-1]]
        assert to.copy_(source) is to
    shared.close()
    assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8))


def test_a_thread_that_has_not_begun_is_not_waited_for(copies: SharedCopies) -> None:
    made, source = torch.zeros(6, 8), torch.randn(6, 8)
    with copies:
        made.copy_(source)
    assert copies._pool is not None
    held, free = Event(), Event()

    def hold() -> None:
        held.set()
        free.wait()

    busy = [copies._pool.submit(hold) for _ in range(2)]
    held.wait()
    made.zero_()
    with copies:
        made.copy_(source)
    assert not any(each.done() for each in busy)
    free.set()
    assert torch.equal(made, source)


@pytest.mark.parametrize("is_own_faster", [False, True])
def test_the_faster_way_is_taken_and_the_other_tried_again(
    is_own_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the two is faster changes after 300 copies; every ninth is slow whoever makes it."""
    now, own = 0.0, []

    def pass_by(is_own: bool) -> None:
        nonlocal now
        is_fast = is_own == (is_own_faster != (len(own) >= 300)) and len(own) % 9
        now += 1.0 if is_fast else 3.0
        own.append(is_own)

    monkeypatch.setattr(copying.time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source: pass_by(False))
    monkeypatch.setattr(SharedCopies, "_copy", lambda copies, to, source: pass_by(True))
    copies, made, source = SharedCopies(2), torch.zeros(4, 8), torch.zeros(4, 8)
    for _ in range(800):
        copies.__torch_function__(torch.Tensor.copy_, (), (made, source))
    begin = 2 * copying._COUNTED
    assert set(own[:begin]) == {False, True}, "both are tried at first"
    assert own[begin:300].count(not is_own_faster) <= 300 // copying._TRIED_AGAIN
    assert own[500:].count(is_own_faster) <= 1 + 300 // copying._TRIED_AGAIN


def test_large_copies_alone_are_shared_and_outside_none(
    copies: SharedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    copy = SharedCopies._copy

    def noted(self: SharedCopies, to: copying.Bytes, source: copying.Bytes) -> None:
        seen.append(to.nbytes)
        copy(self, to, source)

    monkeypatch.setattr(SharedCopies, "_copy", noted)
    made, source = torch.zeros(4, 8), torch.randn(4, 8)
    made.copy_(source)
    with copies:
        made.copy_(source)
        made[0, :1].copy_(source[0, :1])
        made.copy_(source.double())
        made.copy_(source, non_blocking=True)
    assert seen == [4 * 8 * 4] * 2
    copies.close()
    copies.close()
    with copies:
        made.zero_().copy_(source)
    assert torch.equal(made, source), "after closing, by other threads"


def test_what_torch_refuses_is_refused(copies: SharedCopies) -> None:
    """And what it keeps account of is its own: gradients, memory that is its own source."""
    line, learnt = torch.arange(32.0), torch.nn.Parameter(torch.zeros(4, 8))
    with torch.inference_mode():
        inferred = torch.zeros(4, 8)
    numbers = torch.randn(4, 8, dtype=torch.complex64)
    for to, source in [
        (line[8:], line[:-8]),
        (torch.zeros(1, 8).expand(4, 8), torch.randn(4, 8)),
        (learnt, torch.randn(4, 8)),
        (inferred, torch.randn(4, 8)),
    ]:
        with copies, pytest.raises(RuntimeError):
            to.copy_(source)
    made = torch.zeros_like(numbers)
    with copies:
        assert torch.equal(made.copy_(numbers.conj()), numbers.conj())
        assert torch.zeros(4, 8).copy_(learnt).requires_grad


def test_closing_waits_for_a_copy_of_another_thread(copies: SharedCopies) -> None:
    source = torch.randn(64, 8)

    def copy(_: int) -> bool:
        made = torch.zeros(64, 8)
        with copies:
            made.copy_(source)
        return torch.equal(made, source)

    with ThreadPoolExecutor(4) as pool:
        copying = pool.map(copy, range(2000))
        for _ in range(200):
            copies.close()
        assert all(copying)
    copies.close()
    assert not [each for each in enumerate_threads() if "moe-offload-copies" in each.name]
