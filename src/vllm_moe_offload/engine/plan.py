"""One layer's shard, checked and ready to run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_moe_offload.engine import _engine, native
from vllm_moe_offload.experts import ExpertSpec


class ExpertPlan:
    """Computes routed experts of one shard; made by `CpuExpertEngine.plan`.

    Products accumulate in float32. The activated intermediate rows stay float32 too, except where
    the inputs are bf16 and the instruction set multiplies bf16 (avx512_bf16, but for INT8; amx, for
    bf16 weights, and for others where an expert has 8 tokens or more, 10 of INT4, MXFP4 and INT8,
    16 of NVFP4): there they are rounded to bf16. By weights of 4 bits and INT8, avx512_vnni and,
    for fewer tokens, amx multiply activations rounded to 15 bits of the largest of each 128
    columns. Where that would leave more than half of those less than 7 bits, they take 8 more:
    finer than bf16, but for those beside as many that are hundreds of times as large. FP8 of fewer
    tokens amx multiplies by activations in fp16, where the CPU has AVX512-FP16, and adds up to 32
    products in fp16. Sums run in a fixed order: the result does not depend on the thread count.
    """

    def __init__(
        self,
        engine: _engine.Engine,
        spec: ExpertSpec,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_tokens: int,
        top_k: int,
    ) -> None:
        for name, value, most in (
            ("max_tokens", max_tokens, _engine.MOST_PLAN_TOKENS),
            ("top_k", top_k, _engine.MOST_TOP_K),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"a plan of {name}={value} was asked for: give 1 to {most}")
        self._experts = _check_tensors(spec, tensors)
        self._top_k = top_k
        self._spec = spec
        self._dtype = spec.activation_dtype
        if self._dtype not in native.DTYPES:
            raise ValueError(
                f"activations of {self._dtype} are not supported "
                f"(supported: {', '.join(map(str, native.DTYPES))})"
            )
        plan = native.make_plan(engine, spec, tensors, max_tokens=max_tokens, top_k=top_k)
        # With the weights that it reads: who has taken the one has the other.
        self._native: tuple[_engine.Plan, dict[str, torch.Tensor]] | None = (plan, dict(tensors))

    @property
    def spec(self) -> ExpertSpec:
        """What one expert computes."""
        return self._spec

    @property
    def experts(self) -> int:
        """N: experts (or slots) in this shard."""
        return self._experts

    @property
    def top_k(self) -> int:
        """K: the most experts a token is routed to."""
        return self._top_k

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        accumulate: bool = False,
        intermediate: tuple[int, int] | None = None,
    ) -> None:
        """Writes into `out` the weighted sum of each token's experts that this shard holds.

        Allocates no scratch and releases the GIL. All tensors are on the CPU and contiguous.

        Args:
            x: ``[T, H]`` in the layer's dtype; any T, 0 included.
            topk_ids: ``[T, K]`` int32; an id may repeat, and -1 contributes nothing.
            topk_weights: ``[T, K]`` float32.
            out: ``[T, H]`` float32 or bfloat16. A row without an expert here becomes zero.
            expert_map: int32 ``[E]``, id to row of the shard, or -1 for an expert that is not here
                and contributes nothing; E is at least 1. None: an id is the row.
            accumulate: Add to `out`, which is float32 then, instead of overwriting it.
            intermediate: Compute only this part of the intermediate dimension, and the partial sum
                it gives: (begin, end), multiples of the format's group of columns (of 128 for
                FP8_BLOCK; the end may be the dimension's own). w2's bias counts with the part
                that begins at 0. None: all of it.

        Raises:
            ValueError: A tensor is not as described, or an id or a map entry is out of range;
                `out` is then untouched.
            RuntimeError: The engine is closed, or was made before a fork.
        """
        # Held until the call returns: another thread may close the plan meanwhile.
        held = self.open()
        given = x, topk_ids, topk_weights, out, expert_map
        call = self._call(held[0], *given, accumulate, intermediate)
        if call is not None:
            held[0].run(call)

    def start(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        done: torch.Tensor | None = None,
    ) -> ExpertRun:
        """`run` in a thread that never waits for Python's: returns when it is under way.

        The tensors are to be left alone until `ExpertRun.wait` returns. done: int32 [1], becomes 1
        when the sum is in `out`, or the computation has failed.

        Raises:
            ValueError: A tensor is not as `run` describes.
            RuntimeError: The engine is closed, or the thread that computes cannot start.

        What else `run` raises `ExpertRun.wait` does.
        """
        held = self.open()
        given = x, topk_ids, topk_weights, out, expert_map
        if done is not None:
            check_tensor("done", done, (1,), torch.int32)
        call = self._call(held[0], *given, False, None)
        if call is not None:
            address = 0 if done is None else done.data_ptr()
            return ExpertRun(held[0].start(call, address, (held, given, done)))
        if done is not None:
            done.fill_(1)
        return ExpertRun(None)

    def _call(
        self,
        plan: _engine.Plan,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        expert_map: torch.Tensor | None,
        accumulate: bool,
        intermediate: tuple[int, int] | None,
    ) -> _engine.Call | None:
        """Checked, for the compiled plan; None where there is nothing to compute, which is done."""
        tokens, top_k = batch_size(x, topk_ids)
        check_tensor("x", x, (tokens, self._spec.hidden), self._dtype)
        check_tensor("topk_ids", topk_ids, (tokens, top_k), torch.int32)
        check_tensor("topk_weights", topk_weights, (tokens, top_k), torch.float32)
        out_dtype = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32
        check_tensor("out", out, (tokens, self._spec.hidden), out_dtype)
        if accumulate and out_dtype != torch.float32:
            raise ValueError("out is torch.bfloat16, and only float32 sums are added to")
        begin, end = self._part(intermediate)
        if expert_map is not None:
            check_map(expert_map)
        if tokens == 0 or top_k == 0:
            if not accumulate:
                out.zero_()
            return None
        return _engine.Call(
            plan,
            x.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            tokens,
            top_k,
            0 if expert_map is None else expert_map.data_ptr(),
            0 if expert_map is None else expert_map.numel(),
            out.data_ptr(),
            out_dtype == torch.bfloat16,
            accumulate,
            begin,
            end,
        )

    def _part(self, intermediate: tuple[int, int] | None) -> tuple[int, int]:
        size = self._spec.intermediate
        if intermediate is None:
            return 0, size
        begin, end = intermediate
        multiple = native.column_multiple(self._spec)
        if not 0 <= begin < end <= size or begin % multiple or (end % multiple and end != size):
            raise ValueError(
                f"intermediate={intermediate} is not a part of 0 to {size} in multiples of "
                f"{multiple}, the columns that share a scale"
            )
        return begin, end

    def open(self) -> tuple[_engine.Plan, Mapping[str, torch.Tensor]]:
        """The compiled plan and the weights it reads, which whoever uses the one has to keep.

        For other parts of the engine. Raises RuntimeError once closed.
        """
        if self._native is None:
            raise RuntimeError(
                "this plan's CPU expert engine is closed: make another and plan again"
            )
        return self._native

    def close(self) -> None:
        """Lets go of the engine and of the weights; a later `run` raises RuntimeError.

        A `run` of another thread that has begun ends as ever, and keeps both until then.
        """
        self._native = None


class ExpertRun:
    """A computation that goes on by itself; made by `ExpertPlan.start`.

    Whoever lets go of it waits for its end, unless by `abandon`.
    """

    def __init__(self, running: _engine.Running | None) -> None:
        self._running = running

    def wait(self, timeout: float | None = None) -> float:
        """Return when it is done: the seconds it took. May be asked again.

        Raises as `ExpertPlan.run`, and TimeoutError where it goes on after `timeout` seconds.
        """
        if self._running is None:
            return 0.0
        seconds = self._running.wait(-1.0 if timeout is None else timeout)
        if seconds is None:
            raise TimeoutError(f"the CPU has computed for more than {timeout:g} s")
        return seconds

    def abandon(self) -> None:
        """It does not end: let go of it without waiting. What it uses is never freed."""
        running, self._running = self._running, None
        if running is not None:
            running.abandon()


def batch_size(x: torch.Tensor, topk_ids: torch.Tensor) -> tuple[int, int]:
    """T and K; raises ValueError unless the tensors have two dimensions each."""
    if x.dim() != 2 or topk_ids.dim() != 2:
        raise ValueError(
            f"x {tuple(x.shape)} and topk_ids {tuple(topk_ids.shape)} must be [T, H] and [T, K]"
        )
    return x.shape[0], topk_ids.shape[1]


def check_map(expert_map: torch.Tensor) -> None:
    """Raises ValueError unless it is int32 ``[E]`` with an entry at least.

    An empty tensor has no address, which the compiled engine takes for no map.
    """
    check_tensor("expert_map", expert_map, (expert_map.numel(),), torch.int32)
    if expert_map.numel() == 0:
        raise ValueError("expert_map has no entries: give one for each expert id")


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raises ValueError unless the tensor is contiguous on the CPU, and of this shape and dtype."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, {dtype} is needed: convert it with .to()")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {shape} is needed")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is on {tensor.device}, the engine reads the CPU's memory: copy it"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: make it contiguous")


def _check_tensors(spec: ExpertSpec, tensors: Mapping[str, torch.Tensor]) -> int:
    """The number of experts; raises ValueError unless the tensors are `spec.layout`'s."""
    needed = spec.layout.names
    missing = [name for name in needed if name not in tensors]
    unknown = [name for name in tensors if name not in needed]
    if missing or unknown:
        raise ValueError(
            f"the shard's tensors are {sorted(tensors)}; {spec} needs {sorted(needed)}"
            + (f"; missing: {missing}" if missing else "")
            + (f"; not part of it: {unknown}" if unknown else "")
        )
    experts = tensors[needed[0]].shape[0] if tensors[needed[0]].dim() else 0
    if experts < 1:
        raise ValueError(f"{needed[0]} holds no expert: its first dimension must count at least 1")
    for part in spec.layout.tensors:
        check_tensor(part.name, tensors[part.name], (experts, *part.shape), part.dtype)
    return experts
