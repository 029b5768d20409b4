"""The table of cases: layers and small models, each with its formula in plain torch.

A row says how to build the layer, and computes the same from the logical parameters with torch alone. Each case is one
block: a trained scale before the layer makes the gradient of the layer's input visible as that of a parameter.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from mpcore import collectives
from mpcore.experimental import (
    BiasedExperts,
    GatedAttention,
    GatedDeltaNet,
    IndependentHeads,
    KimiDeltaAttention,
    LatentMoE,
    Mamba2,
    MultiTokenPrediction,
    clamped_swiglu,
    overlap_experts,
    overlap_halves,
    shift_tokens,
)
from mpcore.layers.attention.documents import document_ends
from mpcore.parallel.precision import convert_to_fp8
from tests.oracles.gpt import words as draws

B, T, D, FF, V, H, K = 8, 12, 8, 16, 12, 4, 4  # samples, tokens, model width, hidden width, vocabulary, heads, head dim
RANK, ALPHA = 2, 4.0  # of LoRA
DROPOUT = 0.3
Params = Mapping[str, Tensor]
Truth = Callable[[Params, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        build: makes the layer from its axes and options, `build(tp=axis, sequence_parallel=True)`; no argument makes
            the unsharded layer.
        truth: computes the layer's output [B, T, ..] from its logical parameters, in plain torch.
        takes, gives: what input and output are with sequence parallel: "sequence" is a shard of the tokens, "whole" is
            replicated, "features" is a shard of the last dimension.
        mesh: the sizes of the mesh.
        axes: the axes that `build` gets, by their names in the mesh and in the layer.
        context: the kind of context parallelism, which shards the tokens of inputs and targets.
        stages: the number of pipeline stages; each has the layer that `build(stage=number, ..)` makes.
        tolerance: the largest relative error. In FP8 the smallest entries of a block are rounded more coarsely where
            the block is larger, with the tokens of other ranks.
        draws: whether the layer takes the numbers of the samples, for dropout; the formula then does so too.
        refuses: the features that this layer or mesh refuses.
    """

    build: Callable[..., nn.Module]
    truth: Callable[..., Tensor]
    takes: str = "sequence"
    gives: str = "sequence"
    mesh: Mapping[str, int] = field(default_factory=lambda: {"tp": 2, "dp": 2})
    axes: tuple[str, ...] = ("tp",)
    context: str = ""
    stages: int = 1
    tolerance: float = 1e-10
    draws: bool = False
    refuses: tuple[str, ...] = ()


class Stages(nn.Sequential):
    """The layers of the pipeline stages of this rank, or of all, with their numbers in the whole model."""

    def __init__(self, case: Case, mesh: mp.Mesh | None, **on: Any) -> None:
        own = range(case.stages) if mesh is None else [mesh.pp.rank]
        super().__init__(OrderedDict((str(stage), case.build(stage=stage, **on)) for stage in own))

    def forward(self, x: Tensor, *samples: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, T, ..]."""
        for layer in self:
            x = layer(x, *samples)
        return x


class Block(nn.Module):
    """A scale of the input's features, the layer, and its output with all features of all tokens.

    With pipeline stages the first has the scale, and the last the whole output.
    """

    def __init__(self, case: Case, mesh: mp.Mesh | None = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        on: dict[str, Any] = {} if mesh is None else {name: getattr(mesh, name) for name in case.axes}
        self.tp = mp.Axis() if mesh is None else mesh.tp
        self.sequence_parallel = sequence_parallel and self.tp.size > 1
        if sequence_parallel:
            on["sequence_parallel"] = True
        self.first, self.last = (True, True) if mesh is None else (mesh.pp.rank == 0, mesh.pp.rank == mesh.pp.size - 1)
        self.scale = nn.Parameter(torch.empty(D, dtype=torch.float64)) if self.first else None
        self.layer = (case.build(**on) if case.stages == 1 else Stages(case, mesh, **on)).double()
        self.takes, self.gives = case.takes, case.gives
        shards = self.tp.size if self.sequence_parallel and case.takes == "sequence" else 1
        shards *= mesh.cp.size if mesh is not None and case.context else 1
        self.layer.input_shape, self.layer.draws = (1, T // shards, D), case.draws
        self.sometimes: nn.Parameter | None = None  # [D, D], multiplies the input in the first step alone
        self.again: nn.Parameter | None = None  # the scale once more
        self.step = 0
        if self.sequence_parallel and self.takes == "sequence" and self.first:
            mp.add_partial(self, "scale", self.tp)  # it multiplies this rank's tokens alone

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, ..]. `samples` [B] are the numbers of the samples, for a layer that draws."""
        y = self.layer(self.scaled(x) if self.first else x, *[samples] * self.layer.draws)
        if not self.last:
            return y
        if self.gives == "features" or not self.sequence_parallel:
            return y if self.gives != "features" else collectives.gather(y, self.tp, -1)
        return collectives.gather(y, self.tp, 1) if self.gives == "sequence" else y

    def scaled(self, x: Tensor) -> Tensor:
        """[B, T, D] -> the input of the first layer."""
        sharded = self.sequence_parallel and self.takes == "sequence"
        if sharded:
            x = collectives.split(x, self.tp, 1)
        if self.sometimes is not None and self.step == 0:
            x = x @ self.sometimes
        return x * self.scale if self.again is None else x * self.scale * self.again


def _linear(p: Params, x: Tensor, at: str = "") -> Tensor:
    return F.linear(x, p[f"{at}weight"], p.get(f"{at}bias"))


def _mlp(activation: Callable[[Tensor], Tensor], at: str = "") -> Truth:
    return lambda p, x: _linear(p, activation(_linear(p, x, f"{at}up.")), f"{at}down.")


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """RoPE of [B, H, T, K]: each pair (i, i + K/2) is rotated by the angle token * base^(-2i/K)."""
    half = x.shape[-1] // 2
    rates = (base ** (-torch.arange(half, dtype=torch.float64) / half)).float().double()  # stored in float32
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _attention(
    kv: int = H, window: int | None = None, rope: bool = False, causal: bool = True, mask: Tensor | None = None
) -> Truth:
    def truth(p: Params, x: Tensor, at: str = "") -> Tensor:
        parts = _linear(p, x, f"{at}qkv.").split([H * K, kv * K, kv * K], -1)
        q, k, v = (part.unflatten(-1, (-1, K)).transpose(1, 2) for part in parts)
        q, k = (_rotate(q), _rotate(k)) if rope else (q, k)
        k, v = (part.repeat_interleave(H // kv, 1) for part in (k, v))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        seen = seen.tril() if causal else seen
        seen = seen if window is None else seen & seen.triu(1 - window)
        seen = seen if mask is None else seen & mask
        weights = (q @ k.mT / math.sqrt(K)).masked_fill(~seen, -math.inf).exp()
        beside = p["sinks.weight"].exp().view(-1, 1, 1) if "sinks.weight" in p else 0.0
        y = (weights / (weights.sum(-1, keepdim=True) + beside) @ v).transpose(1, 2)
        if "gate.weight" in p:
            y = y * _linear(p, x, "gate.").sigmoid().unflatten(-1, (H, -1))
        return _linear(p, y.flatten(2), "output.")

    return truth


DOCUMENTS = (torch.arange(T) >= 5).long()  # of each token; rows are alike
SHOWN = torch.arange(T) % 5 != 3  # the keys that are no padding
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": K}


class Packed(nn.Module):
    """A layer within two documents."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return super().forward(x, cu_seqlens=document_ends(DOCUMENTS.expand(len(x), T)))


class Documents(Packed, mp.ParallelAttention): ...


class PackedDelta(Packed, GatedDeltaNet): ...


class PackedMamba(Packed, Mamba2): ...


class Padded(mp.ParallelAttention):
    """Attention with keys that are padding."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return super().forward(x, mask=SHOWN.expand(len(x), 1, T))


def _latent(p: Params, x: Tensor) -> Tensor:
    low, k_rope = _linear(p, x, "kv_down.").split([6, 2], -1)
    q = _linear(p, x, "q_up.").unflatten(-1, (H, 4)).transpose(1, 2)
    kv = (
        _linear(p, F.rms_norm(low, (6,), p["kv_norm.weight"], 1e-6), "kv_up.").unflatten(-1, (H, 2 + K)).transpose(1, 2)
    )
    k = torch.cat([kv[..., :2], k_rope.unsqueeze(1).expand(-1, H, -1, -1)], -1)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    shares = (q @ k.mT / 2).masked_fill(~seen, -math.inf).softmax(-1)
    return _linear(p, (shares @ kv[..., 2:]).transpose(1, 2).flatten(2), "output.")


def delta(p: Params, x: Tensor, keys: int = 2, starts: Tensor | None = None) -> Tensor:
    """Gated DeltaNet token by token, with `keys` key heads and heads of width K; `starts` begin documents."""
    values, weight, outputs = len(p["A_log"]), p["conv_weight"], []
    parts = _linear(p, x, "in_proj.").split([2 * keys * K + values * K, values * K, values, values], -1)
    state, window = x.new_zeros(len(x), values, K, K), [torch.zeros_like(parts[0][:, 0])] * weight.shape[1]
    for t in range(x.shape[1]):
        if starts is not None and starts[t]:
            state, window = torch.zeros_like(state), [torch.zeros_like(part) for part in window]
        mixed, z, b, a = (part[:, t] for part in parts)
        window = [*window[1:], mixed]
        mixed = F.silu((torch.stack(window, -1) * weight).sum(-1))
        q, k, v = (part.unflatten(-1, (-1, K)) for part in mixed.split([keys * K, keys * K, values * K], -1))
        q, k = ((h / (h.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(values // keys, 1)
                for h in (q, k))  # fmt: skip
        state = state * torch.exp(-p["A_log"].exp() * F.softplus(a + p["dt_bias"]))[..., None, None]
        error = v - torch.einsum("bhkv,bhk->bhv", state, k)
        state = state + torch.einsum("bhk,bhv->bhkv", k, b.sigmoid().unsqueeze(-1) * error)
        o = torch.einsum("bhkv,bhk->bhv", state, q) / math.sqrt(K)
        outputs.append((F.rms_norm(o, (K,), p["norm.weight"], 1e-6) * F.silu(z.unflatten(-1, (-1, K)))).flatten(1))
    return _linear(p, torch.stack(outputs, 1), "output.")


def kimi(p: Params, x: Tensor, starts: Tensor | None = None) -> Tensor:
    """Kimi Delta Attention token by token, with heads of width K; `starts` begin documents."""
    heads, weight, outputs = len(p["A_log"]), p["conv_weight"], []
    mixed, beta = _linear(p, x, "in_proj.").split([3 * heads * K, heads], -1)
    decay = _linear(p, _linear(p, x, "decay_down."), "decay_up.") + p["dt_bias"]
    decay = torch.exp(-p["A_log"].exp()[:, None] * F.softplus(decay.unflatten(-1, (heads, K))))
    gate = _linear(p, _linear(p, x, "gate_down."), "gate_up.").sigmoid().unflatten(-1, (heads, K))
    state, window = x.new_zeros(len(x), heads, K, K), [torch.zeros_like(mixed[:, 0])] * weight.shape[1]
    for t in range(x.shape[1]):
        if starts is not None and starts[t]:
            state, window = torch.zeros_like(state), [torch.zeros_like(part) for part in window]
        window = [*window[1:], mixed[:, t]]
        q, k, v = F.silu((torch.stack(window, -1) * weight).sum(-1)).unflatten(-1, (3, heads, K)).unbind(1)
        q, k = (h / (h.square().sum(-1, keepdim=True) + 1e-6).sqrt() for h in (q, k))
        state = state * decay[:, t, :, :, None]
        error = v - torch.einsum("bhkv,bhk->bhv", state, k)
        state = state + torch.einsum("bhk,bhv->bhkv", k, beta[:, t].sigmoid().unsqueeze(-1) * error)
        o = torch.einsum("bhkv,bhk->bhv", state, q) / math.sqrt(K)
        outputs.append((F.rms_norm(o, (K,), p["norm.weight"], 1e-5) * gate[:, t]).flatten(1))
    return _linear(p, torch.stack(outputs, 1), "output.")


def mamba(p: Params, x: Tensor, groups: int = 2, starts: Tensor | None = None) -> Tensor:
    """Mamba-2 token by token, with heads of width K and states of width 3; `starts` begin documents."""
    heads, weight, outputs = len(p["A_log"]), p["conv_weight"], []
    parts = _linear(p, x, "in_proj.").split([heads * K, heads * K + 6 * groups, heads], -1)
    state, window = x.new_zeros(len(x), heads, 3, K), [torch.zeros_like(parts[1][:, 0])] * weight.shape[1]
    for t in range(x.shape[1]):
        if starts is not None and starts[t]:
            state, window = torch.zeros_like(state), [torch.zeros_like(part) for part in window]
        z, mixed, step = (part[:, t] for part in parts)
        window = [*window[1:], mixed]
        mixed = F.silu((torch.stack(window, -1) * weight).sum(-1) + p["conv_bias"])
        v, k, q = mixed.split([heads * K, 3 * groups, 3 * groups], -1)
        v = v.unflatten(-1, (-1, K))
        k, q = (t.unflatten(-1, (-1, 3)).repeat_interleave(heads // groups, 1) for t in (k, q))
        step = F.softplus(step + p["dt_bias"])
        state = state * torch.exp(-p["A_log"].exp() * step)[..., None, None]
        state = state + torch.einsum("bhn,bhp->bhnp", k, step[..., None] * v)
        y = torch.einsum("bhnp,bhn->bhp", state, q) + p["D"][:, None] * v
        y = (y * F.silu(z.unflatten(-1, (-1, K)))).flatten(1).unflatten(1, (groups, -1))
        outputs.append(F.rms_norm(y, y.shape[-1:], eps=1e-5).flatten(1) * p["norm_weight"])
    return _linear(p, torch.stack(outputs, 1), "output.")


def _norm(p: Params, x: Tensor, at: str = "") -> Tensor:
    return F.rms_norm(x, (D,), p[f"{at}weight"], 1e-6)


def _block(p: Params, x: Tensor, mlp: Truth | None = None) -> Tensor:
    def of(at: str) -> Params:
        return {name.removeprefix(f"{at}."): value for name, value in p.items() if name.startswith(f"{at}.")}

    x = x + _attention()(of("attention"), _norm(of("attention_norm"), x))
    return x + (mlp or _mlp(_swiglu))(of("mlp"), _norm(of("mlp_norm"), x))


class Dropped(mp.TransformerBlock):
    """A block with dropout on what attention and the MLP add."""

    def __init__(self, cp: mp.Axis | None = None, context: str = "ring", **on: Any) -> None:
        self.cp, self.context = cp or mp.Axis(name="cp"), context
        attention = mp.ParallelAttention(D, H, head_dim=K, cp=self.cp, context=context, **on)
        norms = (mp.RMSNorm(D, **on) for _ in range(2))
        super().__init__(attention, mp.ParallelMLP(D, FF, **on), *norms, dropout=DROPOUT, **on)

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return super().forward(x, samples=samples, tokens=mp.sequence_index(T, self.cp, self.context))


def _dropped(p: Params, x: Tensor, samples: Tensor | None = None, at: str = "layer") -> Tensor:
    for name, formula in (("attention", _attention()), ("mlp", _mlp(_swiglu))):
        of = {leaf.removeprefix(f"{name}."): value for leaf, value in p.items() if leaf.startswith(f"{name}.")}
        y = formula(of, _norm(p, x, f"{name}_norm."))
        if samples is not None:
            y = y * (draws(0, f"{at}.{name}_dropout", samples, T, D) >= int(DROPOUT * 2**32)) / (1 - DROPOUT)
        x = x + y
    return x


def _dropped_twice(p: Params, x: Tensor, samples: Tensor | None = None) -> Tensor:
    for stage in ("0", "1"):
        of = {leaf.removeprefix(f"{stage}."): value for leaf, value in p.items() if leaf.startswith(f"{stage}.")}
        x = _dropped(of, x, samples, f"layer.{stage}")
    return x


def words(x: Tensor) -> Tensor:
    """Token ids [B, T] of the inputs, the same in every sample."""
    return (torch.arange(x.shape[1]) * 5 % V).expand(x.shape[:2])


class Embedded(nn.Module):
    """The features of token ids times the input."""

    def __init__(self, **on: Any) -> None:
        super().__init__()
        self.table = mp.VocabParallelEmbedding(V, D, **on)
        self.tp, self.sequence_parallel = self.table.tp, self.table.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        full = x.new_empty(x.shape[0], x.shape[1] * (self.tp.size if self.sequence_parallel else 1))
        return self.table(words(full)) * x


class Tied(Embedded):
    """The logits of the features of token ids times the input, with one matrix for both."""

    def __init__(self, **on: Any) -> None:
        super().__init__(**on)
        self.head = mp.ColumnParallelLinear(D, V, bias=False, **on)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, V]."""
        return self.head(super().forward(x))


class EightBits(torch.autograd.Function):
    """A product with factors in FP8: blocks of 128 entries of a row, and of 128 x 128 of a weight, share a scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """x [M, K] and w [N, K] -> [M, N]; each fits into one block."""
        ctx.save_for_backward(x, w)
        return eight_bits(x, 1) @ eight_bits(w, 0, 1).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize the gradient by rows for dx, and both by columns for dw."""
        x, w = ctx.saved_tensors
        return eight_bits(dy, 1) @ eight_bits(w, 0, 1), eight_bits(dy, 0).T @ eight_bits(x, 0)


def eight_bits(x: Tensor, *dims: int) -> Tensor:
    """Round x to e4m3, with one scale, a power of two, for the entries along `dims`."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(dims, keepdim=True) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


def _linear_fp8(p: Params, x: Tensor, at: str) -> Tensor:
    weight, a, b = p[f"{at}weight"], *(p.get(f"{at}lora_{factor}.weight") for factor in "AB")
    low = torch.zeros_like(weight) if a is None else ALPHA / RANK * b @ a  # adapters stay in high precision
    return EightBits.apply(x, weight - low) + F.linear(x, low, p[f"{at}bias"])


def _mlp_fp8(p: Params, x: Tensor) -> Tensor:
    return _linear_fp8(p, _swiglu(_linear_fp8(p, x.flatten(0, 1), "up.")), "down.").unflatten(0, x.shape[:2])


def _converted(**on: Any) -> nn.Module:
    layer = mp.ParallelMLP(D, FF, **on)
    convert_to_fp8([layer])
    return layer


def _later(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return shift_tokens(words(x), 2, DOCUMENTS.expand(x.shape[:2]))


class Predicted(nn.Module):
    """The hidden states of two more tokens, next to each other, with a shared embedding."""

    def __init__(self, cp: mp.Axis | None = None, context: str | None = None, **on: Any) -> None:
        super().__init__()
        of = {} if cp is None else {"cp": cp, "context": context}
        self.cp, self.context = cp or mp.Axis(name="cp"), context or "ring"
        self.table = mp.VocabParallelEmbedding(V, D, **on)
        self.chain = MultiTokenPrediction(D, [
            mp.TransformerBlock(mp.ParallelAttention(D, H, head_dim=K, **of, **on), mp.ParallelMLP(D, FF, **on),
                                mp.RMSNorm(D, **on), mp.RMSNorm(D, **on)) for _ in range(2)], **on)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, 2 D]."""
        inputs, _ = _later(x.new_empty(len(x), T))
        inputs = [mp.shard_sequence(each, self.cp, self.context) for each in inputs]
        return torch.cat(self.chain(x, inputs, self.table), -1)


def _predicted(p: Params, x: Tensor) -> Tensor:
    ids, end, outputs = words(x)[0], DOCUMENTS.tolist(), []
    for depth in range(2):
        later = [t + depth + 1 for t in range(len(ids))]
        later = [ids[u] if u < len(ids) and end[u] == end[t] else ids[t] for t, u in enumerate(later)]
        token = _norm(p, p["table.weight"][torch.stack(later)], f"chain.embedding_norms.{depth}.").expand_as(x)
        both = torch.cat([token, _norm(p, x, f"chain.hidden_norms.{depth}.")], -1)
        at = f"chain.blocks.{depth}."
        of = {name.removeprefix(at): value for name, value in p.items() if name.startswith(at)}
        x = _block(of, _linear(p, both, f"chain.projections.{depth}."))
        outputs.append(_norm(p, x, f"chain.norms.{depth}."))
    return torch.cat(outputs, -1)


class Independent(nn.Module):
    """Two heads that read the same hidden states, next to each other."""

    def __init__(self, **on: Any) -> None:
        super().__init__()
        self.heads = IndependentHeads(D, [mp.ParallelMLP(D, FF, **on) for _ in range(2)], **on)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, 2 D]."""
        return torch.cat(self.heads(x), -1)


def _independent(p: Params, x: Tensor) -> Tensor:
    return torch.cat([_norm(p, _mlp(_swiglu, f"heads.blocks.{i}.")(p, x), f"heads.norms.{i}.") for i in range(2)], -1)


class Scored(nn.Module):
    """A head and the cross-entropy of each token's next word; `fused` never has the full logits."""

    def __init__(self, fused: bool, **on: Any) -> None:
        super().__init__()
        self.fused, self.head = fused, mp.ColumnParallelLinear(D, V, bias=False, **on)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> losses [B, T, 1]; every third token has no target."""
        tp, sharded = self.head.tp, self.head.sequence_parallel
        target = words(x.new_empty(x.shape[0], x.shape[1] * (tp.size if sharded else 1))).roll(-1, 1)
        target = target.masked_fill(torch.arange(target.shape[1]) % 3 == 2, -100)
        how: dict[str, Any] = {"tp": tp, "vocab_size": V, "reduction": "none", "label_smoothing": 0.1, "z_loss": 0.01}
        if self.fused:
            losses = mp.linear_cross_entropy(x, self.head.weight, target, sequence_parallel=sharded, **how)
        else:
            losses = mp.vocab_parallel_cross_entropy(self.head(x), target, **how)
        return losses.unsqueeze(-1)


def _scored(p: Params, x: Tensor) -> Tensor:
    logits, target = F.linear(x, p["head.weight"]), words(x).roll(-1, 1)
    target = target.masked_fill(torch.arange(x.shape[1]) % 3 == 2, -100)
    losses = F.cross_entropy(logits.mT, target, reduction="none", label_smoothing=0.1)
    return (losses + 0.01 * logits.logsumexp(-1).square() * (target >= 0)).unsqueeze(-1)


def given(rows: int, tokens: int) -> Tensor:
    """Experts [rows, tokens, 2] that no router would choose."""
    return (torch.arange(tokens)[:, None] * 3 + torch.arange(2)).remainder(4).expand(rows, tokens, 2)


class Given(mp.ParallelMoE):
    """A mixture whose tokens go to experts that are given."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        whole = x.shape[1] * (self.tp.size if self.sequence_parallel else 1)
        return super().forward(x, experts=given(len(x), whole))


def _experts(p: Params, x: Tensor, given: Callable[[int, int], Tensor] | None = None) -> Tensor:
    scores = F.linear(x, p["router.weight"]).softmax(-1)
    chosen = scores.topk(2, -1).indices if given is None else given(*x.shape[:2])
    best = scores.gather(-1, chosen)
    best = best / best.sum(-1, keepdim=True)
    low = F.linear(x, p["latent_down.weight"]) if "latent_down.weight" in p else x
    y = torch.zeros_like(low)
    for e in range(len(p["experts.gate_up.weight"])):
        share = (best * (chosen == e)).sum(-1, keepdim=True)
        y = y + share * F.linear(_swiglu(F.linear(low, p["experts.gate_up.weight"][e])), p["experts.down.weight"][e])
    y = F.linear(y, p["latent_up.weight"]) if "latent_up.weight" in p else y
    return y + _mlp(_swiglu, "shared.")(p, x) if "shared.up.weight" in p else y


LIMIT = 0.3  # of the clamped activation, so small that it is met


def _biased_experts(p: Params, x: Tensor) -> Tensor:
    best, chosen = F.linear(x, p["router.weight"]).softmax(-1).topk(2, -1)
    best = best / best.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e in range(len(p["experts.down.weight"])):
        up, down = ({n: p[f"experts.{at}.{n}"][e] for n in ("weight", "bias")} for at in ("gate_up", "down"))
        gate, value = _linear(up, x).chunk(2, -1)
        gate, value = (
            torch.where(gate > LIMIT, LIMIT, gate),
            torch.where(value.abs() > LIMIT, LIMIT * value.sign(), value),
        )
        hidden = gate / (1 + torch.exp(-1.702 * gate)) * (value + 1)
        y = y + (best * (chosen == e)).sum(-1, keepdim=True) * _linear(down, hidden)
    return y


BIASED: dict[str, Any] = {"activation": partial(clamped_swiglu, limit=LIMIT), "expert_class": BiasedExperts}


def _moe(**options: Any) -> Callable[..., nn.Module]:
    return lambda **on: mp.ParallelMoE(D, FF, num_experts=4, top_k=2, **options, **on)


def _halves(**on: Any) -> nn.Module:
    dense = {name: value for name, value in on.items() if name in ("tp", "sequence_parallel")}
    experts, norms = _moe(dispatch="all_to_all", shared_experts=1)(**on), (mp.RMSNorm(D, **dense) for _ in range(2))
    block = mp.TransformerBlock(mp.ParallelAttention(D, H, head_dim=K, **dense), experts, *norms)
    if on:
        overlap_experts(block)
    return block


def _dense(halves: bool = False, **on: Any) -> nn.Module:
    attention, norms = mp.ParallelAttention(D, H, head_dim=K, **on), (mp.RMSNorm(D, **on) for _ in range(2))
    block = mp.TransformerBlock(attention, mp.ParallelMLP(D, FF, **on), *norms)
    if on and halves:
        overlap_halves(block)
    return block


MOVES = "resume on other axes"  # the other mesh refuses the layer, or the number of samples
ON_THREE: dict[str, Any] = {"mesh": {"tp": 3}, "refuses": ("invariant", MOVES)}  # its degrees are powers of two
KEEPS_ALL = ("recompute budget",)  # a linear layer keeps its input alone
CASES: dict[str, Case] = {
    "column": Case(lambda **on: mp.ColumnParallelLinear(D, FF, **on), _linear, gives="features", refuses=KEEPS_ALL),
    "column, gathered": Case(lambda **on: mp.ColumnParallelLinear(D, FF, False, gather_output=True, **on), _linear,
                             gives="whole", refuses=KEEPS_ALL),
    "column, uneven": Case(lambda **on: mp.ColumnParallelLinear(D, 2 * V + 1, gather_output=True, **on), _linear,
                           gives="whole", mesh={"tp": 3}, refuses=("invariant", MOVES, *KEEPS_ALL)),
    "row": Case(lambda **on: mp.RowParallelLinear(D, FF, input_is_parallel=False, **on), _linear, takes="whole"),
    "row, uneven": Case(lambda **on: mp.RowParallelLinear(D, FF, input_is_parallel=False, **on), _linear,
                        takes="whole", **ON_THREE),
    "swiglu": Case(lambda **on: mp.ParallelMLP(D, FF, **on), _mlp(_swiglu)),
    "gelu": Case(lambda **on: mp.ParallelMLP(D, FF, "gelu", **on), _mlp(F.gelu)),
    "attention": Case(lambda **on: mp.ParallelAttention(D, H, head_dim=K, **on), _attention()),
    "grouped queries": Case(lambda **on: mp.ParallelAttention(D, H, 2, head_dim=K, rope=mp.RotaryEmbedding(K), **on),
                            _attention(2, rope=True), refuses=("invariant",)),
    "one KV head": Case(lambda **on: mp.ParallelAttention(D, H, 1, head_dim=K, **on), _attention(1),
                        refuses=("invariant",)),
    "uneven heads": Case(lambda **on: mp.ParallelAttention(D, H, 2, head_dim=K, window=3, **on),
                         _attention(2, window=3), **ON_THREE),
    "sinks": Case(lambda **on: mp.ParallelAttention(D, H, 2, head_dim=K, sinks=True, **on), _attention(2),
                  refuses=("invariant",)),
    "not causal": Case(lambda **on: mp.ParallelAttention(D, H, head_dim=K, causal=False, **on),
                       _attention(causal=False)),
    "gated attention": Case(lambda **on: GatedAttention(D, H, 2, head_dim=K, rope=mp.RotaryEmbedding(K), **on),
                            _attention(2, rope=True), refuses=("invariant",)),
    "gated attention, uneven heads": Case(lambda **on: GatedAttention(D, H, head_dim=K, gate="head", **on),
                                          _attention(), **ON_THREE),
    "documents": Case(lambda **on: Documents(D, H, head_dim=K, **on),
                      _attention(mask=DOCUMENTS[:, None] == DOCUMENTS), refuses=("invariant",)),
    "padding": Case(lambda **on: Padded(D, H, head_dim=K, **on), _attention(mask=SHOWN), refuses=("invariant",)),
    "latent attention": Case(lambda **on: mp.MultiLatentAttention(D, H, **LATENT, **on), _latent,
                             refuses=("invariant",)),
    "gated DeltaNet": Case(lambda **on: GatedDeltaNet(D, 2, H, K, K, chunk=5, **on), delta, refuses=("invariant",)),
    "gated DeltaNet, uneven": Case(lambda **on: GatedDeltaNet(D, 2, H, K, K, chunk=4, **on), delta, **ON_THREE),
    "Kimi delta": Case(lambda **on: KimiDeltaAttention(D, H, K, chunk=5, **on), kimi, refuses=("invariant",)),
    "Mamba-2": Case(lambda **on: Mamba2(D, H, K, 3, 2, chunk=5, **on), mamba, refuses=("invariant",)),
    "Mamba-2, uneven": Case(lambda **on: Mamba2(D, H, K, 3, chunk=4, **on), partial(mamba, groups=1), **ON_THREE),
    "rms norm": Case(
        lambda **on: nn.Sequential(mp.RMSNorm(D, **on), mp.ColumnParallelLinear(D, FF, False, **on)),
        lambda p, x: _linear(p, _norm(p, x, "0."), "1."), gives="features",
    ),
    "layer norm": Case(
        lambda **on: nn.Sequential(mp.LayerNorm(D, **on), mp.ColumnParallelLinear(D, FF, **on)),
        lambda p, x: _linear(p, F.layer_norm(x, (D,), p["0.weight"], p["0.bias"], 1e-5), "1."), gives="features",
    ),
    "block": Case(_dense, _block),
    "block, in halves": Case(partial(_dense, True), _block, refuses=("invariant", MOVES)),
    "dropout": Case(Dropped, _dropped, draws=True, refuses=("invariant",)),
    "dropout, zigzag": Case(partial(Dropped, context="zigzag"), _dropped, axes=("tp", "cp"), context="zigzag",
                            mesh={"tp": 2, "cp": 2}, draws=True, refuses=("invariant",)),
    "dropout in two stages": Case(lambda stage, **on: Dropped(**on), _dropped_twice, mesh={"pp": 2, "dp": 2}, stages=2,
                                  draws=True, refuses=("invariant",)),
    "embedding": Case(lambda **on: Embedded(**on), lambda p, x: p["table.weight"][words(x)] * x),
    "tied embedding": Case(Tied, lambda p, x: F.linear(p["table.weight"][words(x)] * x, p["head.weight"]),
                           gives="features", refuses=("LoRA",)),
    "FP8": Case(_converted, _mlp_fp8, mesh={"dp": 2}, tolerance=1e-6, refuses=("invariant", MOVES)),
    **{
        f"two stages{on}": Case(lambda stage, **on: mp.ParallelMLP(D, FF, "gelu" if stage else "swiglu", **on),
                                lambda p, x: _mlp(F.gelu, "1.")(p, _mlp(_swiglu, "0.")(p, x)), mesh=mesh, stages=2)
        for on, mesh in (("", {"tp": 2, "pp": 2}), (" on dp", {"pp": 2, "dp": 2}))
    },
    "multi-token prediction": Case(lambda **on: Predicted(**on), _predicted, refuses=("invariant",)),
    "multi-token prediction, zigzag": Case(lambda **on: Predicted(context="zigzag", **on), _predicted,
                                           axes=("tp", "cp"), context="zigzag", mesh={"tp": 2, "cp": 2},
                                           refuses=("invariant",)),
    "independent heads": Case(lambda **on: Independent(**on), _independent, refuses=("invariant",)),
    "cross entropy": Case(lambda **on: Scored(False, **on), _scored, gives="whole"),
    "fused cross entropy": Case(lambda **on: Scored(True, **on), _scored, gives="whole", refuses=("invariant", "LoRA")),
    "experts": Case(_moe(), _experts, axes=("tp", "data"), refuses=("invariant",)),
    "experts on ep": Case(_moe(), _experts, axes=("ep", "data"), mesh={"dp": 2, "ep": 2}, refuses=("invariant",)),
    "experts, all-to-all": Case(_moe(dispatch="all_to_all"), _experts, axes=("tp", "ep", "etp", "data"),
                                mesh={"tp": 2, "dp": 2, "ep": 2}, refuses=("invariant",)),
    "experts, all-to-all, one shared": Case(_moe(dispatch="all_to_all", shared_experts=1), _experts,
        axes=("tp", "ep", "etp", "data"), mesh={"dp": 2, "ep": 2}, refuses=("invariant",)),
    "experts, in halves": Case(_halves, partial(_block, mlp=_experts), axes=("tp", "ep", "etp", "data"),
                               mesh={"tp": 2, "dp": 2, "ep": 2}, refuses=("invariant", MOVES)),
    "latent experts": Case(lambda **on: LatentMoE(D, FF, 4, 2, latent_dim=3, **on), _experts, axes=("tp", "data"),
                           refuses=("invariant", "overlapped communication")),  # its linears are replicated over tp
    "latent experts, all-to-all, one shared": Case(
        lambda **on: LatentMoE(D, FF, 4, 2, latent_dim=3, dispatch="all_to_all", shared_experts=1, **on),
        _experts, axes=("tp", "ep", "etp", "data"), mesh={"tp": 2, "dp": 2, "ep": 2}, refuses=("invariant",)),
    "experts, given": Case(lambda **on: Given(D, FF, num_experts=4, top_k=2, **on), partial(_experts, given=given),
                           axes=("tp", "data"), refuses=("invariant",)),
    "biased experts": Case(_moe(**BIASED), _biased_experts, axes=("tp", "data"), refuses=("invariant",)),
    "biased experts, all-to-all": Case(_moe(dispatch="all_to_all", **BIASED), _biased_experts,
                                       axes=("tp", "ep", "etp", "data"), mesh={"tp": 2, "dp": 2, "ep": 2},
                                       refuses=("invariant",)),
    **{
        f"context, {kind}": Case(
            lambda kind=kind, **on: mp.ParallelAttention(D, H, 2, head_dim=K, context=kind, **on), _attention(2),
            axes=("tp", "cp"), context=kind, mesh={"tp": 1 if kind == "alltoall" else 2, "cp": 2},
            refuses=("invariant",),
        )
        for kind in ("ring", "zigzag", "alltoall", "allgather")
    },
    **{
        f"{name}, {kind}": Case(
            lambda kind=kind, build=build, **on: build(context=kind, **on), truth, axes=("tp", "cp"), context=kind,
            mesh={"tp": 2, "cp": 2}, refuses=("invariant",),
        )
        for name, build, truth, kinds in (
            ("latent attention", lambda **on: mp.MultiLatentAttention(D, H, **LATENT, **on), _latent,
             ("ring", "zigzag", "alltoall", "allgather")),
            ("documents", lambda **on: Documents(D, H, head_dim=K, **on),
             _attention(mask=DOCUMENTS[:, None] == DOCUMENTS), ("ring", "zigzag", "allgather")),
            ("padding", lambda **on: Padded(D, H, head_dim=K, **on), _attention(mask=SHOWN), ("alltoall",)),
            ("gated DeltaNet", lambda **on: GatedDeltaNet(D, 2, H, K, K, chunk=2, **on), delta, ("ring", "zigzag")),
            ("gated DeltaNet, documents", lambda **on: PackedDelta(D, 2, H, K, K, chunk=4, **on),
             lambda p, x: delta(p, x, starts=torch.arange(T) == 5), ("zigzag",)),
            ("Kimi delta", lambda **on: KimiDeltaAttention(D, H, K, chunk=3, **on), kimi, ("zigzag",)),
            ("Mamba-2, documents", lambda **on: PackedMamba(D, H, K, 3, 2, chunk=4, **on),
             lambda p, x: mamba(p, x, starts=torch.arange(T) == 5), ("ring", "zigzag")),
        )
        for kind in kinds
    },
}  # fmt: skip
