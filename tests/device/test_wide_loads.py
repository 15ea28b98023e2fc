"""What crosses the bus by a kernel's loads crosses it once: compiled for a GPU, without one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.device.kernels import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def loads(kernel: Any, signature: dict[str, str], **constants: int) -> list[str]:
    """The loads from global memory that a Hopper GPU is told to do, aligned pointers given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = signature | dict.fromkeys(constants, "constexpr")
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, type_of in enumerate(signature.values())
        if type_of.startswith("*")
    }
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return re.findall(r"ld\.(?:volatile\.)?global\S*", ptx)


@pytest.mark.parametrize("addend", ["*bf16", "*fp32"])
def test_a_sum_of_the_host_is_read_by_16_bytes(addend: str) -> None:
    from vllm_moe_offload.device.mapped_kernel import add_kernel

    given = {"total": "*fp32", "addend": addend, "rows": "i32"}
    found = loads(add_kernel, given, WIDTH=2048, BLOCK=4096)
    assert set(found) == {"ld.global.v4.b32", "ld.volatile.global.v4.b32"}
    size = 2 if addend == "*bf16" else 4
    assert sum("volatile" in load for load in found) == 4096 * size // 128 // 16


def test_the_sum_of_a_captured_step_is_read_by_16_bytes() -> None:
    from vllm_moe_offload.device.request_kernel import join_kernel

    pointers = {"resident": "*fp32", "partial": "*fp32", "cpu_map": "*i32", "out": "*bf16"}
    found = loads(join_kernel, pointers | {"tokens": "i32"}, H=2048, E=128, BLOCK=2048, N=128)
    of_the_host = [load for load in found if "volatile" in load]
    assert of_the_host == ["ld.volatile.global.v4.b32"] * 4
