"""Train the demo model: a Qwen3-MoE language model small enough to live in a git repository.

The model is a compact re-implementation of ``Qwen3MoeForCausalLM``. While training, all experts
are computed for all tokens and the outputs of those not chosen are multiplied by zero: with experts
this small, two large matrix products are faster than any dispatch. The checkpoint is written in the
layout of the ``transformers`` class, one tensor per expert and projection.

Data comes from ``corpus.py``. One GPU is enough::

    python models/train_demo.py --data /tmp/demo-data --out models/demo-moe --minutes 10

``--init`` starts a second run from the weights of a first one, with fresh optimizers.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model."""

    vocab_size: int = 4096
    hidden: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    expert_hidden: int = 64
    max_length: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    aux_coef: float = 0.01

    def to_hf(self) -> dict[str, object]:
        """Return the contents of the ``config.json`` that transformers and vLLM read."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.expert_hidden * self.top_k,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": self.aux_coef,
            "output_router_logits": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_length,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "use_cache": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys and rotary positions."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q_proj = nn.Linear(cfg.hidden, cfg.heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.hidden, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.hidden, cfg.kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_dim, cfg.hidden, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over ``x`` of shape (batch, length, hidden)."""
        batch, length, _ = x.shape

        def rotate(head: Tensor) -> Tensor:
            first, second = head.chunk(2, dim=-1)
            return head * cos + torch.cat((-second, first), dim=-1) * sin

        shape = (batch, length, -1, self.cfg.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2).float())
        k = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2).float())
        v = self.v_proj(x).view(shape).transpose(1, 2)
        groups = self.cfg.heads // self.cfg.kv_heads
        k, v = (t.to(v.dtype).repeat_interleave(groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q.to(v.dtype), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MoE(nn.Module):
    """Top-k mixture of SwiGLU experts, computed densely."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.hidden, cfg.experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(cfg.experts, cfg.expert_hidden, cfg.hidden))
        self.up_proj = nn.Parameter(torch.empty(cfg.experts, cfg.expert_hidden, cfg.hidden))
        self.down_proj = nn.Parameter(torch.empty(cfg.experts, cfg.hidden, cfg.expert_hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output for ``x`` (tokens, hidden), the balance loss and the expert load."""
        cfg = self.cfg
        with torch.autocast(x.device.type, enabled=False):
            probs = F.linear(x.float(), self.gate.weight).softmax(-1)
        top, chosen = probs.topk(cfg.top_k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probs).scatter(1, chosen, top)
        load = (weights.detach() > 0).float().mean(0) / cfg.top_k
        balance = cfg.experts * (load * probs.mean(0)).sum()

        gate = F.linear(x, self.gate_proj.flatten(0, 1)).view(-1, cfg.experts, cfg.expert_hidden)
        up = F.linear(x, self.up_proj.flatten(0, 1)).view(-1, cfg.experts, cfg.expert_hidden)
        inner = (F.silu(gate) * up * weights.unsqueeze(-1)).to(gate.dtype).flatten(1)
        down = self.down_proj.transpose(0, 1).reshape(cfg.hidden, -1)
        return F.linear(inner, down), balance, load


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden, cfg.norm_eps)
        self.mlp = MoE(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new residual stream, the balance loss and the expert load."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out, balance, load = self.mlp(self.post_attention_layernorm(x).flatten(0, 1))
        return x + out.view_as(x), balance, load


class DemoMoE(nn.Module):
    """The language model, with input and output embeddings tied."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.hidden, cfg.norm_eps)
        frequencies = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2) / cfg.head_dim)
        angles = torch.outer(torch.arange(cfg.max_length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                writes_residual = name.endswith(("o_proj.weight", "down_proj"))
                scale = math.sqrt(2 * cfg.layers) if writes_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, the mean balance loss and the load of each layer's experts."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embed_tokens(ids)
        balances, loads = [], []
        for layer in self.layers:
            x, balance, load = layer(x, cos, sin)
            balances.append(balance)
            loads.append(load)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return logits, torch.stack(balances).mean(), torch.stack(loads)


def language_loss(model: DemoMoE, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropy, the balance loss and the expert loads of one batch."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits, balance, loads = model(ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), balance, loads


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Return the nearest semi-orthogonal matrices to a stack of wide matrices (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Muon: momentum whose update is orthogonalised per matrix, scaled to the RMS of AdamW's.

    Matrices of one shape (up to transposition) are stacked and orthogonalised together, so that the
    hundreds of small expert matrices cost a few batched products.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in params:
            rows, columns = sorted(p.shape[-2:])
            by_shape.setdefault((rows, columns), []).append(p)
        groups = [{"params": stack} for stack in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Apply one update to all matrices."""
        del closure
        for group in self.param_groups:
            params, rate = group["params"], group["lr"]
            wide = [p.shape[-2] <= p.shape[-1] for p in params]
            views = [
                (p.grad if w else p.grad.mT).flatten(0, -3) if p.ndim > 2 else
                (p.grad if w else p.grad.mT).unsqueeze(0)
                for p, w in zip(params, wide, strict=True)
            ]  # fmt: skip
            grad = torch.cat(views)
            state = self.state[params[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grad)
            buffer = state["momentum"]
            buffer.lerp_(grad, 1 - group["momentum"])
            update = orthogonalise(grad.lerp(buffer, group["momentum"]))
            update = update.float() * (0.2 * math.sqrt(update.shape[-1]))
            parts = update.split([v.shape[0] for v in views])
            for p, w, part in zip(params, wide, parts, strict=True):
                p.mul_(1 - rate * group["weight_decay"])
                p.add_((part if w else part.mT).reshape(p.shape), alpha=-rate)


def make_optimizers(model: DemoMoE, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the weight matrices and AdamW for embeddings, routers and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = "_proj" in name
        (matrices if is_matrix else others).append(parameter)
    cuda = others[0].is_cuda
    return [
        Muon(matrices, lr=lr, momentum=0.95, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=lr * 0.6, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda),
    ]


class TokenStream:
    """Random windows of a flat token file, cut on the device."""

    def __init__(self, path: Path, device: torch.device, length: int, seed: int = 0) -> None:
        self.tokens = torch.from_numpy(np.fromfile(path, dtype="<u2").astype(np.int64)).to(device)
        self.length = length
        self.offsets = torch.arange(length + 1, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def sample(self, batch: int) -> Batch:
        """Return inputs and targets of ``batch`` windows at random places."""
        starts = torch.randint(
            len(self.tokens) - self.length,
            (batch, 1),
            device=self.tokens.device,
            generator=self.generator,
        )
        windows = self.tokens[starts + self.offsets]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def sweep(self, batch: int) -> Iterable[Batch]:
        """Yield all whole windows of the file once, in order."""
        count = (len(self.tokens) - 1) // self.length
        starts = torch.arange(count, device=self.tokens.device).unsqueeze(1) * self.length
        for part in starts.split(batch):
            windows = self.tokens[part + self.offsets]
            yield windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def evaluate(
    model: DemoMoE, stream: TokenStream, batch: int, limit: int | None = None
) -> tuple[float, list[list[float]]]:
    """Return the mean cross-entropy and each layer's expert load over (part of) a token file."""
    total, windows = 0.0, 0
    loads = torch.zeros(model.cfg.layers, model.cfg.experts)
    for index, (ids, targets) in enumerate(stream.sweep(batch)):
        if limit is not None and index >= limit:
            break
        loss, _, load = language_loss(model, ids, targets)
        total += loss.item() * len(ids)
        loads += load.float().cpu() * len(ids)
        windows += len(ids)
    return total / windows, (loads / windows).tolist()


def save_checkpoint(model: DemoMoE, folder: Path) -> None:
    """Write the weights in bfloat16 under the names that transformers uses, and the configs."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().to("cpu", torch.bfloat16)
        if value.ndim == 3:
            prefix, projection = name.rsplit(".", 1)
            for expert, matrix in enumerate(value):
                key = f"model.{prefix}.experts.{expert}.{projection}.weight"
                tensors[key] = matrix.contiguous()
        else:
            tensors[f"model.{name}"] = value.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    for name, content in (("config", model.cfg.to_hf()), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def load_checkpoint(folder: Path, cfg: ModelConfig) -> DemoMoE:
    """Read a checkpoint written by ``save_checkpoint`` into a float32 model on the CPU."""
    tensors = load_file(folder / "model.safetensors")
    model = DemoMoE(cfg)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if value.ndim == 3:
            prefix, projection = name.rsplit(".", 1)
            keys = [f"model.{prefix}.experts.{e}.{projection}.weight" for e in range(len(value))]
            state[name] = torch.stack([tensors[key] for key in keys]).float()
        else:
            state[name] = tensors[f"model.{name}"].float()
    model.load_state_dict(state)
    return model


def learning_rate_factor(progress: float, warmup: float = 0.02, floor: float = 0.01) -> float:
    """Return the schedule's factor at ``progress`` from 0 to 1: linear warm-up, then cosine."""
    if progress < warmup:
        return progress / warmup
    along = min(1.0, (progress - warmup) / (1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * along))


def compiled_loss(
    model: DemoMoE, batch: Batch, enabled: bool
) -> Callable[[DemoMoE, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return the loss function compiled for ``batch``'s shape, or as it is if that fails."""
    if not enabled:
        return language_loss
    compiled = torch.compile(language_loss, dynamic=False)
    try:
        loss, balance, _ = compiled(model, *batch)
        (loss + model.cfg.aux_coef * balance).backward()
    except Exception as error:  # the compiler has no narrower common base
        print(f"torch.compile failed, going on without it: {error!r:.500}", flush=True)
        compiled = language_loss
    model.zero_grad(set_to_none=True)
    return compiled


def train(args: argparse.Namespace) -> None:
    """Train until the time is up, evaluating and saving on the way."""
    begin = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    manifest = json.loads((args.data / "manifest.json").read_text())
    cfg = ModelConfig(vocab_size=manifest["vocab_size"])
    earlier_runs: list[dict[str, object]] = []
    if args.init:
        model = load_checkpoint(args.init, cfg).to(device)
        earlier_runs = json.loads((args.init / "training_log.json").read_text())["runs"]
    else:
        model = DemoMoE(cfg).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    stream = TokenStream(args.data / "train.bin", device, args.length, args.seed)
    heldout = TokenStream(args.data / "heldout.bin", device, args.length)
    optimizers = make_optimizers(model, args.lr, args.weight_decay)
    loss_of = compiled_loss(model, stream.sample(args.batch), device.type == "cuda")
    print(f"{parameters / 1e6:.3f}M parameters; ready in {time.monotonic() - begin:.0f} s")

    args.out.mkdir(parents=True, exist_ok=True)
    for file in (args.data / "tokenizer").iterdir():
        shutil.copy(file, args.out / file.name)
    start, deadline = time.monotonic(), begin + 60 * args.minutes
    next_save, step = start + args.save_every, 0
    history: list[dict[str, float]] = []
    recent: list[Tensor] = []
    while (now := time.monotonic()) < deadline:
        factor = learning_rate_factor((now - start) / (deadline - start))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * factor
        loss, balance, _ = loss_of(model, *stream.sample(args.batch))
        (loss + cfg.aux_coef * balance).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        recent.append(torch.stack((loss.detach(), balance.detach())))
        step += 1
        if step % args.log_every and time.monotonic() < deadline:
            continue
        mean_loss, mean_balance = torch.stack(recent).mean(0).tolist()
        recent.clear()
        tokens, seconds = step * args.batch * args.length, time.monotonic() - start
        entry = {
            "step": step,
            "seconds": round(seconds, 2),
            "tokens": tokens,
            "loss": round(mean_loss, 4),
            "balance": round(mean_balance, 4),
        }
        if time.monotonic() >= next_save:
            next_save += args.save_every
            entry["heldout_loss"] = round(evaluate(model, heldout, args.eval_batch, 4)[0], 4)
            save_checkpoint(model, args.out)
        history.append(entry)
        if "heldout_loss" in entry or len(history) % 10 == 1:
            print(f"{entry} {tokens / seconds / 1e6:.3f}M tokens/s", flush=True)

    save_checkpoint(model, args.out)
    saved = load_checkpoint(args.out, cfg).to(device)
    heldout_loss, loads = evaluate(saved, heldout, args.eval_batch)
    bytes_per_token = manifest["heldout"]["bytes"] / manifest["heldout"]["tokens"]
    run = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": {k: str(getattr(args, k)) for k in ("minutes", "batch", "length", "lr")},
        "steps": step,
        "tokens_seen": step * args.batch * args.length,
        "train_tokens": len(stream.tokens),
        "training_seconds": round(time.monotonic() - start, 1),
        "history": history,
    }
    log = {
        "parameters": parameters,
        "heldout_tokens": len(heldout.tokens),
        "heldout_loss": heldout_loss,
        "heldout_perplexity": math.exp(heldout_loss),
        "heldout_bits_per_byte": heldout_loss / math.log(2) / bytes_per_token,
        "expert_load": loads,
        "runs": [*earlier_runs, run],
    }
    (args.out / "training_log.json").write_text(json.dumps(log) + "\n")
    summary = {
        k: v for k, v in {**run, **log}.items() if k not in ("history", "runs", "expert_load")
    }
    print(summary, flush=True)


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--init", type=Path, help="start from this model folder's weights")
    parser.add_argument("--minutes", type=float, default=10, help="time for the whole training")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--eval-batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate of Muon")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=20, help="steps per line of the log")
    parser.add_argument("--save-every", type=float, default=60, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
