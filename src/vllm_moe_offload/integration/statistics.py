"""What the layers of one worker have counted, summed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vllm_moe_offload.device.readout import Readout
from vllm_moe_offload.engine import CpuExpertEngine
from vllm_moe_offload.integration.metrics import DecodeClock, FloorClock, Totals
from vllm_moe_offload.integration.prefetch import GroupOffloader
from vllm_moe_offload.integration.share import CpuShare
from vllm_moe_offload.integration.streaming import Streaming
from vllm_moe_offload.lanes import Counters, OffloadedLayer


def worker_totals(
    layers: Sequence[OffloadedLayer],
    readout: Readout,
    share: CpuShare | None,
    clock: DecodeClock,
    floor: FloorClock,
) -> Totals:
    """For the reporter's thread, which waits for the device; no step does.

    clock: of decode steps; floor: of what they missed. There is to be a layer at least.
    """
    readings = [layer.readings() for layer in layers]
    flat = iter(readout.read([t for named in readings for t in named.values()]))
    values = [{name: next(flat) for name in named} for named in readings]
    counted = [layer.counted(v) for layer, v in zip(layers, values, strict=True)]
    nbytes = [layer.layout.nbytes for layer in layers]
    both = 0.0
    if share is not None and (rates := share.rates) is not None:
        both = rates.fetch_beside_cpu + rates.cpu_beside_fetch
    missed = sum(one.misses * n for (_, one), n in zip(counted, nbytes, strict=True))
    every = [one for one, _ in counted]
    return Totals(
        steps=max(one.steps for one in every),
        tokens=max(one.tokens for one in every),
        streamed_steps=max(one.streamed for one in every),
        hits=sum(one.hits for one in every),
        misses=sum(one.misses for one in every),
        bytes_fetched=sum(one.bytes_fetched for one in every),
        bytes_cpu=sum(one.cpu_experts * n for one, n in zip(every, nbytes, strict=True)),
        bytes_streamed=sum(one.bytes_streamed for one in every),
        bytes_kept=sum(one.bytes_kept for one in every),
        decode_seconds=clock.seconds,
        floor_seconds=floor.seconds(missed, both),
    )


def worker_stats(
    layers: Mapping[str, OffloadedLayer],
    *,
    mode: str,
    engine: CpuExpertEngine,
    share: CpuShare | None,
    streaming: Streaming | None,
    prefetch: GroupOffloader | None,
) -> dict[str, Any]:
    """Totals and, under `layers`, each layer: the fields of `Counters`, sizes and bytes.

    The totals are sums over the layers, but for steps and tokens: every layer sees each once.
    `buffer_experts`: how many experts of a layer each buffer of streamed layers holds;
    `rates`: bytes a second of the lanes as last measured, None where nothing is split;
    `rates_now`: those the split is made by, after so many `rate_corrections` in service;
    `buffer_bytes`: what the buffers of streamed layers take of the device's memory beside
    `device_bytes`; `stream_threshold`: the most rows of a step that is not streamed, or None;
    `tail`: the CPU's part of streamed steps, seconds that an expert takes of each lane
    (`TailRates`) as measured and as corrected since, and `TailTimes`; None where it has none;
    `prefetch`: see `GroupOffloader.stats`, None without group prefetch. Waits for the device.
    """
    total = Counters()
    each = {}
    for name, layer in layers.items():
        counters = layer.counters
        total += counters
        each[name] = {
            **asdict(counters),
            "slots": layer.num_slots,
            "experts": layer.num_experts,
            "buffer_experts": layer.buffer_experts,
            "policy": layer.policy,
            "expert_bytes": layer.layout.nbytes,
            "device_bytes": layer.device_bytes,
            "host_bytes": layer.host_bytes,
        }
    total.steps = max((layer["steps"] for layer in each.values()), default=0)
    total.tokens = max((layer["tokens"] for layer in each.values()), default=0)
    rates = share.rates if share is not None else None
    rates_now = share.rates_now if share is not None else None
    return {
        **asdict(total),
        "mode": mode,
        "rates": asdict(rates) if rates is not None else None,
        "rates_now": asdict(rates_now) if rates_now is not None else None,
        "rate_corrections": share.corrections if share is not None else 0,
        "cpu_threads": engine.threads,
        "isa": engine.isa,
        "device_bytes": sum(layer["device_bytes"] for layer in each.values()),
        "buffer_bytes": streaming.device_bytes if streaming is not None else 0,
        "stream_threshold": streaming.threshold if streaming is not None else None,
        "tail": streaming.tail_stats() if streaming is not None else None,
        "host_bytes": sum(layer["host_bytes"] for layer in each.values()),
        "prefetch": prefetch.stats() if prefetch is not None else None,
        "layers": each,
    }
