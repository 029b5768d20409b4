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


class MLP(nn.Module):
    """An MLP whose layers `change` may replace."""

    def __init__(self, change: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.up, self.down = change(nn.Linear(D, 48)), change(nn.Linear(48, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


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
    """A sum, a softmax and a shift of hidden features, where shards would need each other."""

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
        return self.down(x)


def normed(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"qkv of {way}": lambda way=way: Words(Packed(way), MLP()) for way in (
        "kind, head", "head, kind", "head, feature, kind", "feature, kind, head")},
    "qkv of groups": lambda: Words(Grouped(), MLP()),
    "one kv head": lambda: Words(Separate(1), MLP()),
    "two kv heads": lambda: Words(Separate(2), MLP()),
    "table read as a head": Scaled,
    "gate and up": lambda: Words(Separate(), FusedGate(False)),
    "gate and up in turns": lambda: Words(Separate(), FusedGate(True)),
    "weight norm": lambda: Words(Separate(), MLP(normed)),
    "max norm": lambda: Words(Separate(), MLP(), table=nn.Embedding(V, D, max_norm=1.0)),
    "vision": Vision,
    "state space": lambda: Words(StateSpace(), MLP()),
    "used twice": Twice,
    "tuple": Tuple,
    "functional": lambda: Words(Separate(), Functional()),
    "torch's": lambda: Words(Torchs(), MLP()),
    **{f"mixed by {way}": lambda way=way: Words(Separate(), Mixed(way)) for way in (
        "softmax", "mean", "roll")},
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
