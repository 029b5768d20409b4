"""Small transformers of unusual make, in plain torch, for `parallelize`, `suggest_plan` and `verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from mpcore._torch.pytree import leaves

V, D, H, T, B = 37, 24, 4, 6, 4


def heads_attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """[B, T, H, D/H] each -> [B, T, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


class Words(nn.Module):
    """An embedding, blocks with a residual each, a norm and a head."""

    def __init__(self, *blocks: nn.Module, table: nn.Module | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D) if table is None else table
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in blocks)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(self.norm(x))


class Separate(nn.Module):
    """Attention from three linear layers; KV heads as said."""

    def __init__(self, groups: int = H) -> None:
        super().__init__()
        self.heads, self.groups, size = H, groups, D // H
        self.to_q, self.to_k, self.to_v = nn.Linear(D, D), nn.Linear(D, groups * size), nn.Linear(D, groups * size)
        self.back = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        k, v = (layer(x).unflatten(-1, (self.groups, -1)) for layer in (self.to_k, self.to_v))
        return self.back(heads_attend(q, k, v, is_causal=True, enable_gqa=True))


class Packed(nn.Module):
    """Attention from one linear layer whose features are packed in one of four ways."""

    def __init__(self, way: str, causal: bool = True) -> None:
        super().__init__()
        self.way, self.n, self.causal = way, H, causal
        self.w, self.back = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.w(x)
        if self.way == "kind, head":
            q, k, v = x.unflatten(-1, (3, self.n, -1)).unbind(-3)
        elif self.way == "head, kind":
            q, k, v = x.unflatten(-1, (self.n, 3, -1)).unbind(-2)
        elif self.way == "head, feature, kind":
            q, k, v = x.unflatten(-1, (self.n, -1, 3)).unbind(-1)
        else:  # "feature, kind, head"
            q, k, v = (part.transpose(-1, -2) for part in x.unflatten(-1, (-1, 3, self.n)).unbind(-2))
        return self.back(heads_attend(q, k, v, is_causal=self.causal))


class Grouped(nn.Module):
    """Attention from one linear layer of [two query heads, a key, a value] for each KV head."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.w, self.back = 2, nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.w(x).unflatten(-1, (self.kv, 4, -1))
        q, k, v = x[..., :2, :].flatten(-3, -2), x[..., 2, :], x[..., 3, :]
        return self.back(heads_attend(q, k, v, is_causal=True, enable_gqa=True))


class FusedGate(nn.Module):
    """A gated MLP whose gate and up are one linear layer, as two halves or alternating."""

    def __init__(self, alternating: bool) -> None:
        super().__init__()
        self.alternating = alternating
        self.wi, self.wo = nn.Linear(D, 64), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wi(x)
        gate, up = (x[..., ::2], x[..., 1::2]) if self.alternating else x.chunk(2, -1)
        return self.wo(F.silu(gate) * up)


class Both(nn.Module):
    """Attention and an MLP side by side, of one input, with one linear layer before both and one behind both."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.before, self.behind = nn.Linear(D, 3 * D + 48), nn.Linear(D + 48, D)
        else:
            self.attention, self.up, self.down = Separate(), nn.Linear(D, 48), nn.Linear(48, D)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return self.attention(x) + self.down(F.gelu(self.up(x)))
        *qkv, up = self.before(x).split([D, D, D, 48], -1)
        seen = heads_attend(*(part.unflatten(-1, (H, -1)) for part in qkv), is_causal=True)
        return self.behind(torch.cat([seen, F.gelu(up)], -1))


class MLP(nn.Module):
    """An MLP whose layers `change` may replace."""

    def __init__(self, change: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.up, self.down = change(nn.Linear(D, 48)), change(nn.Linear(48, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


class Transposed(nn.Module):
    """A linear layer of one's own that stores [in_features, out_features], as GPT-2's Conv1D does."""

    def __init__(self, layer: nn.Module, named: bool = True) -> None:
        super().__init__()
        weight = layer.get_parameter("weight").detach()
        if named:
            self.nf = len(weight)
        self.weight, self.bias = nn.Parameter(weight.t().contiguous()), nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Scaled(Words):
    """Reads the table as a head, by its weight, and scales and caps the logits."""

    def __init__(self) -> None:
        super().__init__(Separate(), MLP())
        del self.head
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * D**0.5
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return 5 * torch.tanh(F.linear(self.norm(x), self.table.get_parameter("weight")) * self.scale / 5)


class Tied(Words):
    """A head that is tied to the table, and scaled."""

    def __init__(self) -> None:
        super().__init__(Separate(), MLP())
        self.head.weight = self.table.weight  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * D**-0.5


class Twice(Words):
    """One block for several layers, and one MLP for two streams, as ALBERT shares its layers."""

    def __init__(self) -> None:
        shared, mlp = Separate(), MLP()
        super().__init__(shared, mlp, shared, mlp)

    def forward(self, ids: Tensor) -> Tensor:
        x, y = self.table(ids), self.table(ids.flip(1))
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x, y = x + block(norm(x)), y + block(norm(y))
        return self.head(self.norm(x + y))


class Tuple(Words):
    """Returns logits, hidden states of each layer, and a number for each row."""

    def __init__(self) -> None:
        super().__init__(Separate(), MLP())
        self.value = nn.Linear(D, 1)

    def forward(self, ids: Tensor) -> tuple:
        x, seen = self.table(ids), []
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
            seen.append(x)
        return self.head(self.norm(x)), tuple(seen), self.value(x)[:, -1, 0]


class Bert(nn.Module):
    """An encoder with token types, positions, a padding mask, norms behind the sums, and a pooled class."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.types = nn.Embedding(V, D, padding_idx=0), nn.Embedding(T, D), nn.Embedding(2, D)
        self.first = nn.LayerNorm(D)
        self.layers = nn.ModuleList(nn.ModuleList([Unmasked(), nn.LayerNorm(D), MLP(), nn.LayerNorm(D)]) for _ in "ab")
        self.pool, self.classes = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, ids: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> Any:
        types = ids % 2 if types is None else types
        seen = (ids != 0 if mask is None else mask.bool())[:, None, None]
        x = self.first(self.words(ids) + self.places.get_parameter("weight")[: ids.shape[1]] + self.types(types))
        for layer in self.layers:  # each is a list of four
            attention, norm, mlp, last = layer.children()
            x = norm(x + attention(x, seen))
            x = last(x + mlp(x))
        return self.classes(torch.tanh(self.pool(x[:, 0]))), x


class Unmasked(Separate):
    """Sees both ways, where the mask says so."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        return self.back(heads_attend(q, k, v, attn_mask=mask))


class Vision(nn.Module):
    """A convolution makes patches of an image; a token for the class, places, attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, D, 4, 4)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, D)), nn.Parameter(torch.zeros(1, 5, D))
        self.attention, self.mlp, self.norm, self.head = (
            Packed("kind, head", False),
            MLP(),
            nn.LayerNorm(D),
            nn.Linear(D, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        x = x + self.attention(self.norm(x))
        return self.head((x + self.mlp(self.norm(x)))[:, 0])


class StateSpace(nn.Module):
    """Mamba's block: a convolution over time, a scan of states, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        inner, states = 32, 4
        self.into, self.conv = nn.Linear(D, 2 * inner), nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.select, self.step, self.out = nn.Linear(inner, 2 * states + 2), nn.Linear(2, inner), nn.Linear(inner, D)
        self.decay, self.skip = nn.Parameter(torch.rand(inner, states)), nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.into(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.select(x).split([2, 4, 4], -1)
        step, state, out = F.softplus(self.step(step)), x.new_zeros(len(x), x.shape[-1], 4), []
        for t in range(x.shape[1]):
            state = state * torch.exp(-step[:, t, :, None] * self.decay.exp())
            state = state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
            out.append((state * c[:, t, None]).sum(-1))
        return self.out((torch.stack(out, 1) + self.skip * x) * F.silu(gate))


class Slopes(Separate):
    """ALiBi by a buffer of slopes, a learned temperature of each head, and heads that talk before the softmax."""

    def __init__(self, talk: bool) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, H + 1))
        self.warmth = nn.Parameter(torch.ones(H, 1, 1))
        self.talk = nn.Linear(H, H, bias=False) if talk else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v)
        )
        far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        score = q @ k.transpose(-1, -2) * self.warmth - self.slopes[:, None, None] * far
        if self.talk is not None:
            score = self.talk(score.transpose(1, -1)).transpose(1, -1)
        score = score.masked_fill(far < 0, -torch.inf).softmax(-1)
        return self.back((score @ v).transpose(1, 2).flatten(2))


class FullNorm(Separate):
    """Norms over all features of queries and keys, as OLMo 2's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(x)), self.to_v(x)
        return self.back(heads_attend(*(part.unflatten(-1, (self.heads, -1)) for part in (q, k, v)), is_causal=True))


class Router(nn.Module):
    """Two experts of a list for each token, of four."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4), nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (weights * (chosen == i)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class Functional(nn.Module):
    """Reads the weights of its layers itself, and never calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 48), nn.Linear(48, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)


class Torchs(nn.Module):
    """nn.MultiheadAttention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(D, H, batch_first=True), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0])


class Mixed(nn.Module):
    """A sum, a softmax and a normalization over hidden features, where shards would need each other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(D, 48), nn.Linear(48, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.way == "softmax":
            x = x.softmax(-1)
        elif self.way == "mean":
            x = x - x.mean(-1, keepdim=True)
        elif self.way == "roll":
            x = torch.relu(x).roll(1, -1)
        elif self.way == "normalize":
            x = F.normalize(x, dim=-1)
        elif self.way == "group":
            x = F.group_norm(x.transpose(1, 2), 8).transpose(1, 2)
        elif self.way == "topk":
            x = x * (x >= x.topk(10, -1).values[..., -1:])
        return self.down(x)


def normed(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def old_normed(layer: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(layer)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": Bert,
    "side by side": lambda: Words(Both(False), Both(False)),
    "side by side, fused": lambda: Words(Both(True), Both(True)),
    **{f"qkv of {way}": lambda way=way: Words(Packed(way), MLP()) for way in (
        "kind, head", "head, kind", "head, feature, kind", "feature, kind, head")},
    "qkv of groups": lambda: Words(Grouped(), MLP()),
    "one kv head": lambda: Words(Separate(1), MLP()),
    "two kv heads": lambda: Words(Separate(2), MLP()),
    "tied head": Tied,
    "table read as a head": Scaled,
    "gate and up": lambda: Words(Separate(), FusedGate(False)),
    "gate and up in turns": lambda: Words(Separate(), FusedGate(True)),
    "conv1d": lambda: Words(Separate(), MLP(Transposed)),
    "conv1d without nf": lambda: Words(Separate(), MLP(lambda layer: Transposed(layer, False))),
    "weight norm": lambda: Words(Separate(), MLP(normed)),
    "old weight norm": lambda: Words(Separate(), MLP(old_normed)),
    "spectral norm": lambda: Words(Separate(), MLP(nn.utils.parametrizations.spectral_norm)),
    "max norm": lambda: Words(Separate(), MLP(), table=nn.Embedding(V, D, max_norm=1.0)),
    "padding": lambda: Words(Separate(), MLP(), table=nn.Embedding(V, D, padding_idx=3)),
    "vision": Vision,
    "state space": lambda: Words(StateSpace(), MLP()),
    "used twice": Twice,
    "tuple": Tuple,
    "slopes": lambda: Words(Slopes(False), MLP()),
    "talking heads": lambda: Words(Slopes(True), MLP()),
    "full norm": lambda: Words(FullNorm(), MLP()),
    "router": lambda: Words(Separate(), Router()),
    "functional": lambda: Words(Separate(), Functional()),
    "torch's": lambda: Words(Torchs(), MLP()),
    **{f"mixed by {way}": lambda way=way: Words(Separate(), Mixed(way)) for way in (
        "softmax", "mean", "roll", "normalize", "group", "topk")},
}  # fmt: skip


def example(name: str) -> Tensor:
    """What a model's forward takes."""
    generator = torch.Generator().manual_seed(2)
    if name == "vision":
        return torch.randn(B, 3, 8, 8, generator=generator)
    return torch.randint(V, (B, T), generator=generator)


def build(name: str, plan: dict, mesh: mp.Mesh) -> nn.Module:
    """A model on a mesh, by a plan."""
    torch.manual_seed(3)
    return mp.parallelize(MODELS[name](), plan if mesh.tp.size > 1 else {"": "replicate"}, mesh.tp, check=False)


def loss(output: Any, target: Tensor, mesh: mp.Mesh) -> Tensor:
    """Of all that a model returns, a sum over rows."""
    return sum(((x - 1).square().sum() for x in leaves(output)), torch.zeros(()))
