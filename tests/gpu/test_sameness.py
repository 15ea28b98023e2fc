"""On a GPU: no further from float32 than stock vLLM of the same format, and faults are noticed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engines import (
    engine,
    errors,
    is_no_further,
    log_probabilities,
    resize,
    sequences_for,
    stats,
)
from tests.e2e.faults import FAULTS
from tests.gpu import checkpoints
from tests.gpu.memory import anonymous_bytes, watch_loading, watch_serving
from vllm_moe_offload import moe_offload_args

pytestmark = pytest.mark.gpu
# Formats that the kernel reads as the checkpoint has them.
KEPT = ("bf16", "fp8_block", "fp8_channel")
SLOTS = (8, 32, 127, 128)
# Steps of more rows than are decided on the device: here the host plans them.
SIZES = {
    "gpu_memory_utilization": 0.25,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_batched_tokens": 512,
}


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_no_further_from_float32_than_stock(kind: str, tmp_path: Path) -> None:
    quantised, plain = checkpoints.write(kind, tmp_path)
    sequences = sequences_for(checkpoints.VOCABULARY)
    with engine(plain, dtype="float32", enforce_eager=True, **SIZES) as llm:
        reference = log_probabilities(llm, sequences)
    with (
        engine(quantised, dtype="bfloat16", enforce_eager=True, **SIZES) as llm,
        watch_serving() as stock_serving,
    ):
        stock = log_probabilities(llm, sequences)
    print(f"\n{kind}: stock {errors(stock, reference)}")

    from vllm_moe_offload.device.cuda import CudaSlotCache

    settings = moe_offload_args(mode="cache", slots_per_layer=SLOTS[0], stream_threshold="off")
    host_before = anonymous_bytes()
    with (
        watch_loading() as loading,
        engine(quantised, dtype="bfloat16", enforce_eager=True, **settings, **SIZES) as llm,
    ):
        done = stats(llm)
        print(f"{kind}: {loading}, slots {done['device_bytes'] / 2**30:.3f} GiB")
        expected = loading.dense + done["device_bytes"]
        # Where the kernel's layout is another than the checkpoint's: one layer's slots once more.
        buffers = 0 if kind in KEPT else done["device_bytes"] // checkpoints.LAYERS
        assert loading.gpu_peak <= 1.1 * (expected + buffers), "dense weights and slots"
        assert loading.gpu_after <= 1.1 * expected
        assert done["host_bytes"] <= loading.host_after <= 1.1 * done["host_bytes"] + 2**30
        for slots in SLOTS:
            resize(llm, slots)
            began = time.perf_counter()
            with watch_serving() as serving:
                got = log_probabilities(llm, sequences)
            seconds = time.perf_counter() - began
            done = stats(llm)
            print(
                f"{kind}: {slots} slots {errors(got, reference)}, {seconds:.2f} s, "
                f"hits {done['hits']} misses {done['misses']} waves {done['waves']}"
            )
            assert is_no_further(got, stock, reference), slots
            if slots == checkpoints.EXPERTS:
                assert (got == stock).all(), "all experts in slots: stock's own numbers"
            print(
                f"{kind}: serving takes {serving.gpu_peak / 2**20:.0f} MiB of the GPU, stock's "
                f"{stock_serving.gpu_peak / 2**20:.0f} MiB"
            )
            # Beyond stock's activations: a float32 sum of the waves and the rounded result.
            assert serving.gpu_peak <= 1.1 * stock_serving.gpu_peak + 2**26, slots
        host = anonymous_bytes() - host_before
        print(
            f"{kind}: {host / 2**30:.2f} GiB of the host, {done['host_bytes'] / 2**30:.2f} experts"
        )
        assert host <= 1.1 * done["host_bytes"] + 1.5 * 2**30
        for name, plant in FAULTS.items():
            with pytest.MonkeyPatch.context() as patch:
                plant(patch, CudaSlotCache)
                resize(llm, 32)
                got = log_probabilities(llm, sequences)
            print(f"{kind}: {name} {errors(got, reference)}")
            assert not is_no_further(got, stock, reference), name
