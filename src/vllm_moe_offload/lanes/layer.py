"""One offloaded layer: its slots, its counters, and who plans a step."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from vllm_moe_offload.device import Device, SlotCache
from vllm_moe_offload.device.streams import is_capturing
from vllm_moe_offload.experts import ExpertLayout
from vllm_moe_offload.lanes.base import Lane, LaneBeside
from vllm_moe_offload.lanes.captured import MAX_CAPTURED, AskingLayer, CapturedLayer, with_padding
from vllm_moe_offload.lanes.counters import Counters
from vllm_moe_offload.lanes.kept import Kept, KeptByHost, KeptOnDevice
from vllm_moe_offload.lanes.planned import PlannedLayer
from vllm_moe_offload.routing import LastUses, Residency
from vllm_moe_offload.stream import InSlots, Keep, LayerStreamer, StreamedLayer

Tensors = Mapping[str, torch.Tensor]

_NO_SLOTS = "no slots: taking them failed, or was interrupted, when this layer was resized"


class OffloadedLayer:
    """The experts of one layer in host memory, some of them in slots of a device.

    With `capture` or `asking`, a step of up to `MAX_CAPTURED` rows is decided on the device, by
    launches that a CUDA graph can hold; the device then has the state, and lends it to the host for
    a larger step. Without, the host plans every step.

    Without slots every step that the streamer of `stream_through` takes passes through its buffers;
    where these hold every expert such steps may be captured at any size. Others are the CPU's.

    Args:
        host: name -> ``[E, ...]``, every expert.
        device: Where the slots are.
        allocate: Gives the tensors of that many slots, name -> ``[S, ...]``.
        resident: Gives the lane that computes from such tensors.
        cpu: The lane over host memory, which computes every expert when there are no slots.
        num_slots: 0 for no slots, until `resize`.
        policy: Which expert leaves a slot first, a name of `routing.POLICIES`.
        capture: Gives what decides on the device, over such tensors and the lane over them; None
            for a device where the host plans.
        asking: Without slots, what asks the CPU lane from the device; None where the host calls
            `cpu`.
    """

    def __init__(
        self,
        host: Tensors,
        device: Device,
        allocate: Callable[[int], Tensors],
        resident: Callable[[Tensors], Lane],
        cpu: LaneBeside,
        *,
        num_slots: int,
        policy: str,
        capture: Callable[[Tensors, Lane], CapturedLayer] | None = None,
        asking: AskingLayer | None = None,
    ) -> None:
        self.layout = ExpertLayout.of(host)
        self.num_experts = next(iter(host.values())).shape[0]
        self._host = host
        self._device = device
        self._allocate = allocate
        self._make_resident = resident
        self._cpu = cpu
        self._policy = policy
        self._capture = capture
        self._asking = asking
        self._every_expert = torch.arange(self.num_experts + 1, dtype=torch.int32)
        self._every_expert[-1] = -1
        self._counted = Counters()
        # Of these what devices decided on over the slots that were there before.
        self._decided = Counters()
        self._residency: Residency | None = None
        self._slots: _Slots | None = None
        self._is_in_graph = False
        self._streamed: StreamedLayer | None = None
        # Of streamed steps, counted by the device, since a graph replays them: how many, their
        # tokens, the experts copied, the waves.
        self._passed = torch.zeros(4, dtype=torch.int64)
        if num_slots:
            self.resize(num_slots)

    @property
    def num_slots(self) -> int:
        """Slots of the device this layer has now; 0 when the CPU computes every expert."""
        if self._residency is None or self._slots is None:
            return 0
        return self._residency.table.num_slots

    @property
    def decides_on_device(self) -> bool:
        """Whether steps of up to `MAX_CAPTURED` rows are decided on the device."""
        return self._on_device() is not None

    @property
    def is_streamed(self) -> bool:
        """Whether large steps may pass through buffers."""
        return self._streamed is not None

    @property
    def buffer_experts(self) -> int:
        """How many experts each buffer of streamed steps holds; 0 where there are none."""
        return self._streamed.size if self._streamed is not None else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory the slots take."""
        return self.num_slots * self.layout.nbytes

    @property
    def policy(self) -> str | None:
        """Name of the policy in force, None without slots."""
        return self._residency.policy.name if self._residency else None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory the experts take."""
        return self.num_experts * self.layout.nbytes

    @property
    def counters(self) -> Counters:
        """A copy of what has been counted; waits for the device."""
        return self._count()[0]

    def _count(self) -> tuple[Counters, Counters]:
        return self.counted({name: each.tolist() for name, each in self.readings().items()})

    def readings(self) -> dict[str, torch.Tensor]:
        """What the device counts, for `counted`: int64 tensors by name, to be read at any time.

        By another thread too, but not while this one resizes: it might count some of it twice.
        """
        found = {}
        slots = self._slots
        if self._streamed is not None:
            found["passed"] = self._passed
        if slots is not None and slots.kept is not None:
            found["kept"] = slots.kept.counter
        if (on_device := self._on_device()) is not None:
            found["decided"] = on_device.step.counters
        return found

    def counted(self, values: Mapping[str, list[int]]) -> tuple[Counters, Counters]:
        """What has been counted, by what `readings` held; of it what the device decided on."""
        counted, decided = replace(self._counted), replace(self._decided)
        steps, tokens, copied, waves = values.get("passed", (0, 0, 0, 0))
        counted += Counters(
            steps=steps,
            waves=waves,
            streamed=steps,
            tokens=tokens,
            bytes_streamed=copied * self.layout.nbytes,
        )
        kept = sum(values.get("kept", ()))
        counted.kept += kept
        counted.bytes_kept += kept * self.layout.nbytes
        if (on_device := self._on_device()) is not None and "decided" in values:
            now = on_device.counted(values["decided"])
            counted += now
            decided += now
        return counted, decided

    def reset_counters(self) -> None:
        """Start to count anew."""
        self._counted, self._decided = Counters(), Counters()
        for tensor in self.readings().values():
            tensor.zero_()

    @property
    def captured(self) -> CapturedLayer | None:
        """What decides on the device over the slots there are, if anything does."""
        slots = self._slots
        return slots.captured if slots is not None else None

    def stream_through(
        self, streamer: LayerStreamer, buffers: Sequence[tuple[Tensors, Lane]], name: str
    ) -> None:
        """Let a step that `streamer` takes, larger than the device decides on, pass through it.

        buffers: as for `LayerStreamer.add`. Layers are to call this in the order in which a step
        runs them.
        """
        self._streamed = streamer.add(self._host, buffers, self._cpu, self._in_slots, name)
        if self._slots is not None:
            self._slots.kept = self._make_kept(self._slots)
        # An ordinary tensor: it is written to in and out of inference mode.
        with torch.inference_mode(False):
            device = next(iter(buffers[0][0].values())).device
            self._passed = torch.zeros(4, dtype=torch.int64, device=device)

    def resize(self, num_slots: int) -> None:
        """Take `num_slots` empty slots instead of those there are; no step may be under way.

        Raises ValueError as `check_resize` does, and what allocating the slots raised: there are as
        many as before then, empty ones. Where these cannot be had again either, none is left, and a
        step says so.
        """
        self.check_resize(num_slots)
        if self._residency is None:
            self._residency = Residency(self.num_experts, num_slots, self._policy)
        if self.captured is not None:
            self.captured.step.read_into(self._residency)
        before, counts = self.num_slots, self._count()
        with torch.inference_mode(False):
            passed = torch.zeros_like(self._passed)
        # At once, so that an interruption leaves nothing counted twice. The slots are freed before
        # the new ones are allocated: both may not fit.
        (self._counted, self._decided), self._passed, self._slots = counts, passed, None
        try:
            self._take(num_slots)
        except BaseException as error:
            # What has been allocated of them would be kept until the error is forgotten.
            traceback.clear_frames(error.__traceback__)
            self._slots = None
            if before:
                with contextlib.suppress(Exception):
                    self._take(before)
            raise

    def _take(self, num_slots: int) -> None:
        """Allocate slots where there are none."""
        assert self._residency is not None
        self._residency.resize(num_slots)
        tensors = self._allocate(num_slots)
        resident = self._make_resident(tensors)
        cache = self._device.slot_cache(self._host, tensors)
        planned = PlannedLayer(self._residency, cache, resident, self.layout.nbytes)
        captured = self._capture(tensors, resident) if self._capture is not None else None
        slots = _Slots(cache, resident, planned, captured)
        slots.kept = self._make_kept(slots)
        self._slots = slots
        self._empty()

    def check_resize(self, num_slots: int) -> None:
        """Raise ValueError where `resize` would for this number of slots, and change nothing.

        That is for less than one slot or more than there are experts, and when a CUDA graph holds
        the slots there are: replayed, it would go on using them.
        """
        if type(num_slots) is not int or not 1 <= num_slots <= self.num_experts:
            raise ValueError(
                f"asked for {num_slots!r} slots in a layer of {self.num_experts} experts: "
                f"give a whole number from 1 to {self.num_experts}"
            )
        if self._is_in_graph:
            raise ValueError(
                f"asked for {num_slots} slots, but CUDA graphs have been captured over the "
                f"{self.num_slots} there are: start the engine with --enforce-eager to resize "
                "them, or again with another slots_per_layer"
            )

    def invalidate(self) -> None:
        """The experts in host memory have changed: what is in slots is stale.

        What the policy has seen stays.
        """
        if self._residency is not None and self._slots is not None and self._slots.captured:
            self._slots.captured.step.read_into(self._residency)
        self._empty()

    def _empty(self) -> None:
        """No slot holds an expert, as the host's state says from now on."""
        self._leave_stream()
        slots = self._slots
        if self._residency is None or slots is None:
            return
        self._residency.invalidate()
        slots.is_filled = False
        if slots.captured is not None:
            slots.captured.step.take_over(self._residency)
            if self.num_slots == self.num_experts:
                self._fill(slots)
                slots.captured.step.take_over(self._residency)

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        padding: torch.Tensor | None = None,
        requests: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts' output, of x's dtype and on its device.

        x: [T, H]; topk_weights: [T, K]; topk_ids: integers [T, K] in 0..E-1; padding: bool [T],
        rows that are no tokens: they use no expert, and their output means nothing; requests: int32
        [R + 1], where the rows of each request begin and the last one's end. With these, a step
        that the device does not decide on leaves in the slots what its last rows use most.
        """
        x = x.contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        routed = topk_ids.to(torch.int32).contiguous()
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._is_in_graph = True
        if self.captured is not None and self.num_slots == self.num_experts:
            assert self._slots is not None
            if not self._slots.is_filled:
                self._empty()  # an error has ended the last filling
            return self.captured.forward_all(x, weights, routed, padding)
        if self._residency is None and self._streamed is not None and self._streamed.takes(len(x)):
            return self._through_buffers(self._streamed, x, weights, routed, routed, padding, None)
        ids = with_padding(routed, padding, self.num_experts)
        if self._residency is None:
            if self._asking is not None and len(x) <= MAX_CAPTURED:
                return self._asking.forward(x, weights, ids)
            return self._on_cpu(x, weights, ids)
        if self._slots is None:
            raise RuntimeError(_NO_SLOTS)
        if self.num_slots == self.num_experts:
            return self._all_resident(self._slots, x, weights, routed, ids)
        if self.captured is not None and len(x) <= MAX_CAPTURED:
            self._leave_stream()
            try:
                return self.captured.forward(x, weights, ids)
            except BaseException:
                self._forget_slots()
                raise
        if self._is_in_graph and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph is captured for {len(x)} rows, but a step of an offloaded layer "
                f"can be captured for {MAX_CAPTURED} at most"
            )
        if self._streamed is not None and self._streamed.takes(len(x)):
            return self._through_buffers(self._streamed, x, weights, routed, ids, padding, requests)
        self._leave_stream()
        try:
            return self._planned(self._slots, x, weights, ids, requests)
        except BaseException:
            self._forget_slots()
            raise

    def _forget_slots(self) -> None:
        """An error has ended a step: the tables may say of slots what is not copied to them.

        What was being captured has changed nothing.
        """
        if not is_capturing():
            self.invalidate()

    def _leave_stream(self) -> None:
        """What is in slots changes now, which copies for this layer do not know of."""
        if self._streamed is not None:
            self._streamed.forget()

    def _on_device(self) -> CapturedLayer | AskingLayer | None:
        captured = self.captured
        return captured if captured is not None else self._asking

    def _on_cpu(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32)
        self._cpu.compute(x.cpu(), weights.cpu(), ids.cpu(), self._every_expert, out, False)
        used, tokens = self._used(ids)
        self._counted += Counters(steps=1, tokens=tokens, cpu_experts=int(used.sum()))
        return out.to(x.device, x.dtype)

    def _all_resident(
        self,
        slots: _Slots,
        x: torch.Tensor,
        weights: torch.Tensor,
        routed: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        """As without offload: no map, and rows of padding go where the router sent them."""
        if not slots.is_filled:
            self._fill(slots)
        out = slots.resident.output(x, weights, routed, None)
        used, tokens = self._used(ids)
        self._counted += Counters(steps=1, tokens=tokens, hits=int(used.sum()), waves=1)
        return out.to(x.dtype)

    def _through_buffers(
        self,
        streamed: StreamedLayer,
        x: torch.Tensor,
        weights: torch.Tensor,
        routed: torch.Tensor,
        ids: torch.Tensor,
        padding: torch.Tensor | None,
        requests: torch.Tensor | None,
    ) -> torch.Tensor:
        kept = self._slots.kept if self._slots is not None else None
        keep = None
        if requests is not None and kept is not None:
            keep = Keep(partial(kept.decide, ids, requests), kept.take)
        try:
            done = streamed.output(x, weights, routed, ids, keep)
        except BaseException:
            if keep is not None:
                self._forget_slots()
            raise
        tokens = len(x) if padding is None else (~padding).sum()
        for counted, more in zip(self._passed, (1, tokens, done.copied, done.waves), strict=True):
            counted += more
        self._counted.cpu_experts += done.computed
        return done.out.to(x.dtype)

    def _in_slots(self) -> InSlots:
        """What is in slots now, for the streamer."""
        if self._residency is None:
            return InSlots({}, torch.full((self.num_experts,), -1, dtype=torch.int32), None)
        if self._slots is None:
            raise RuntimeError(_NO_SLOTS)
        if self.captured is not None:
            slot_of = self.captured.step.slot_of
        else:
            slot_of = torch.from_numpy(self._residency.table.slot_of)
        return InSlots(self._slots.cache.tensors, slot_of, self._slots.resident)

    def _make_kept(self, slots: _Slots) -> Kept | None:
        """What keeps experts of streamed steps in these slots."""
        if self._streamed is None or self._residency is None:
            return None
        buffers = [buffer.tensors for buffer in self._streamed.buffers]
        tensors = slots.cache.tensors
        if slots.captured is not None:
            return KeptOnDevice(slots.captured.step, buffers, tensors)
        return KeptByHost(self._residency, buffers, tensors)

    def _planned(
        self,
        slots: _Slots,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        requests: torch.Tensor | None,
    ) -> torch.Tensor:
        """A step of the host's; where the device has the state, it is borrowed for it."""
        planned = slots.planned
        used, tokens = self._used(ids)
        last = None
        if requests is not None and len(ids) >= len(requests):  # else a row a request
            last = LastUses.of(ids.cpu().numpy(), requests.cpu().numpy(), self.num_experts)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if slots.captured is not None:
            slots.captured.step.read_into(planned.residency)
        done = planned.forward(x, weights, ids, used, out, last)
        if slots.captured is not None:
            slots.captured.step.take_over(planned.residency)
        done.tokens = tokens
        self._counted += done
        return out.to(x.dtype)

    def _used(self, ids: torch.Tensor) -> tuple[npt.NDArray[np.bool_], int]:
        """Bool [E], the experts that are named, and how many rows are tokens; waits."""
        named = ids.cpu().numpy()
        used = np.zeros(self.num_experts + 1, np.bool_)
        used[named.ravel()] = True
        return used[:-1], int(np.count_nonzero((named < self.num_experts).any(1)))

    def _fill(self, slots: _Slots) -> None:
        """Every expert into the slot of its own number."""
        assert self._residency is not None
        every = range(self.num_experts)
        slots.cache.fetch([(expert, expert) for expert in every])
        for expert in every:
            self._residency.table.place(expert, expert)
        slots.is_filled = True


@dataclass
class _Slots:
    """What there is once a number of slots has been chosen.

    `kept`: where large steps pass through buffers. `is_filled`: with as many slots as experts,
    whether every expert is in its own.
    """

    cache: SlotCache
    resident: Lane
    planned: PlannedLayer
    captured: CapturedLayer | None
    kept: Kept | None = None
    is_filled: bool = False
