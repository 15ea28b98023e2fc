"""The routed experts of a running engine's layer in float64, from what is in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm import LLM

from tests.engine.oracle import dequantise, expert
from vllm_moe_offload.integration.formats import EngineView, engine_view
from vllm_moe_offload.lanes import OffloadedLayer


@dataclass(frozen=True)
class Checked:
    """A layer of a running engine, and what computing it by hand needs."""

    name: str
    module: Any
    layer: OffloadedLayer
    view: EngineView
    host: Mapping[str, torch.Tensor]

    def routed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Float64 [T, H] on x's device; ids outside 0..E-1 (padding) add nothing."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for number in ids.unique().tolist():
            if not 0 <= number < self.layer.num_experts:
                continue
            token, k = (ids == number).nonzero(as_tuple=True)
            one = {name: t[number : number + 1].to(x.device) for name, t in self.host.items()}
            for name in ("w13", "w2"):
                one[f"{name}_weight"] = dequantise(self.view.spec, one, name)
            spec = self.view.spec
            value = expert(spec, one, 0, x[token].double(), (0, spec.intermediate))
            out.index_add_(0, token, weights[token, k].double()[:, None] * value)
        return out


def checked_layers(llm: LLM) -> Iterator[Checked]:
    """The offloaded layers of an engine that runs in this process."""
    (runtime,) = llm.collective_rpc(lambda worker: worker._moe_offload_runtime)
    for name, module in runtime._modules.items():
        if module.offload is not None:
            # Taken now: on a GPU the engine's view is that of the kernel's layout.
            view = engine_view(module)
            yield Checked(name, module, module.offload, view, view.of(module.offload._host))
