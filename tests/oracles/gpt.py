"""A GPT written out: no fused layer, every mask a table of booleans. It imports torch and numpy alone.

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama); Su et al. 2021 (RoPE); Shazeer 2020 (SwiGLU);
DeepSeek-V2 2024, section 2.1 (latent attention); Fedus et al. 2021, equations 4 to 6 (balance loss); Zoph et al. 2022,
equation 5 (z-loss); Wang et al. 2024, algorithm 1 (bias); Salmon et al. 2011, section 3.3 (Philox, for dropout).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.oracles.settings import Settings

LATENT = (48, 32, 32, 16, 32)  # of tiny-mla: ranks of queries and of keys with values; nope, rope and value widths


@dataclass
class Call:
    """What a forward needs besides tokens, and what the routers leave behind.

    Attributes:
        samples: [B] global index of each sample, for dropout and jitter.
        training: dropout, jitter and balance losses happen.
        fractions: by name of each router, the loads of the step before: f of the "global" balance loss.
        extra: [] the balance losses, summed over tokens.
        counts: by name of each router, choices of each expert.
    """

    samples: Tensor
    training: bool
    fractions: dict[str, Tensor]
    extra: Tensor | float = 0.0
    counts: dict[str, Tensor] = field(default_factory=dict)


def words(seed: int, name: str, samples: Tensor, length: int, width: int) -> Tensor:
    """[B, T, D] words of Philox4x32-10; its key is of (seed, name), its counter (feature / 4, token, sample)."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
    feature, token, sample = np.meshgrid(np.arange(-(-width // 4)), np.arange(length), samples.numpy(), indexing="ij")
    low = np.uint64(0xFFFFFFFF)
    c = [feature.astype(np.uint64), token.astype(np.uint64), sample.astype(np.uint64) & low,
         sample.astype(np.uint64) >> np.uint64(32)]  # fmt: skip
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
             a & low]  # fmt: skip
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    drawn = np.stack(c, -1).astype(np.int64)  # feature / 4, token, sample, word
    return torch.from_numpy(drawn.transpose(2, 1, 0, 3).reshape(len(samples), length, -1)[..., :width].copy())


class GPT:
    """Logits of a GPT from its weights by name.

    Args:
        settings: the run.
        weights: each parameter; a product rounds to `half` where that is given, as fp16 and bf16 runs do.
        half: dtype of matrix products, or None.
    """

    def __init__(self, settings: Settings, weights: dict[str, Tensor], half: torch.dtype | None = None) -> None:
        self.s, self.w, self.half = settings, weights, half

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.product(x, self.w[f"{name}.weight"].T) + self.w.get(f"{name}.bias", torch.zeros(()).to(x))

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y if self.half is None else (x.to(self.half) @ y.to(self.half)).to(x.dtype)

    def norm(self, x: Tensor, name: str, kind: str | None = None) -> Tensor:
        eps = self.s.norm[1]
        if (kind or self.s.norm[0]) == "rms":
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.w[f"{name}.weight"]
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def drop(self, x: Tensor, name: str, call: Call, p: float | None = None) -> Tensor:
        p = self.s.dropout if p is None else p
        if not call.training or p == 0:
            return x
        kept = words(self.s.seed, name, call.samples, *x.shape[1:]) >= int(p * 2**32)
        return x * kept / (1 - p)

    def logits(self, tokens: Tensor, call: Call) -> Tensor:
        """[B, T] -> [B, T, V]."""
        x = self.w["embedding.weight"][tokens]
        if self.s.learned_positions:
            x = x + self.w["position.weight"][: tokens.shape[1]]
        x = self.drop(x, "dropout", call)
        for i in range(self.s.layers):
            at = f"blocks.{i}"
            attend = self.latent_attention if self.s.preset == "tiny-mla" else self.attention
            y = attend(self.norm(x, f"{at}.attention_norm"), f"{at}.attention", call)
            x = x + self.drop(y, f"{at}.attention_dropout", call)
            y = self.norm(x, f"{at}.mlp_norm")
            mixed = self.s.experts and (i + 1) % self.s.moe_every == 0
            y = self.mixture(y, f"{at}.mlp", call) if mixed else self.mlp(y, f"{at}.mlp")
            x = x + self.drop(y, f"{at}.mlp_dropout", call)
        return self.product(self.norm(x, "norm"), self.w["embedding.weight" if self.s.tied else "head.weight"].T)

    # --- attention ----------------------------------------------------------------------------------------------------

    def attention(self, x: Tensor, at: str, call: Call) -> Tensor:
        B, T, D = x.shape
        H, G = self.s.heads, self.s.kv_heads or self.s.heads
        K = D // H
        q, k, v = self.linear(x, f"{at}.qkv").split([H * K, G * K, G * K], -1)
        q, k, v = q.view(B, T, H, K), k.view(B, T, G, K), v.view(B, T, G, K)
        if not self.s.learned_positions:
            q, k = turn(q), turn(k)
        k, v = k.repeat_interleave(H // G, 2), v.repeat_interleave(H // G, 2)
        return self.linear(self.attend(q, k, v, at, call), f"{at}.output")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: str, call: Call) -> Tensor:
        """[B, T, H, K] queries, keys, [B, T, H, W] values -> [B, T, H W]; a token sees itself and those before."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = self.product(q, k.mT) / math.sqrt(q.shape[-1])
        T = scores.shape[-1]
        sees = torch.tensor([[key <= query for key in range(T)] for query in range(T)])
        shares = scores.masked_fill(~sees, -math.inf).softmax(-1).transpose(1, 2)  # of a query, all heads' keys
        shares = self.drop(shares.flatten(2), f"{at}.dropout", call, self.s.attention_dropout).view(shares.shape)
        shares = shares.transpose(1, 2)
        return self.product(shares, v).transpose(1, 2).flatten(2)

    def latent_attention(self, x: Tensor, at: str, call: Call) -> Tensor:
        B, T, _ = x.shape
        H, (_, rank, nope, rotary, width) = self.s.heads, LATENT
        q = self.norm(self.linear(x, f"{at}.q_down"), f"{at}.q_norm", "rms")
        q = self.linear(q, f"{at}.q_up").view(B, T, H, nope + rotary)
        latent, k_rope = self.linear(x, f"{at}.kv_down").split([rank, rotary], -1)
        kv = self.linear(self.norm(latent, f"{at}.kv_norm", "rms"), f"{at}.kv_up").view(B, T, H, nope + width)
        q = torch.cat([q[..., :nope], turn(q[..., nope:], neighbours=True)], -1)
        k_rope = turn(k_rope.view(B, T, 1, rotary), neighbours=True).expand(B, T, H, rotary)
        heads = self.attend(q, torch.cat([kv[..., :nope], k_rope], -1), kv[..., nope:], at, call)
        return self.linear(heads, f"{at}.output")

    # --- feed-forward -------------------------------------------------------------------------------------------------

    def mlp(self, x: Tensor, at: str) -> Tensor:
        hidden = self.linear(x, f"{at}.up")
        if self.s.preset == "gpt2":
            cube = hidden + 0.044715 * hidden**3
            return self.linear(0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * cube)), f"{at}.down")
        return self.linear(swish(hidden), f"{at}.down")

    def mixture(self, x: Tensor, at: str, call: Call) -> Tensor:
        """Every token through each of its experts, one by one, and the balance losses of this micro-batch."""
        s, (B, T, D), E, name = self.s, x.shape, self.s.experts, f"{at}.router"
        seen = x
        if call.training and s.router_jitter:
            uniform = (words(s.seed, name, call.samples, T, D).to(x.dtype) + 0.5) / 2**31 - 1
            seen = x * (1 + s.router_jitter * uniform)
        logits = seen @ self.w[f"{name}.weight"].T  # never in half precision
        p = logits.softmax(-1)
        wanted = p.detach() + (self.w[f"{name}.expert_bias"] if s.balance == "bias" else 0)
        chosen = wanted.sort(dim=-1, descending=True, stable=True).indices[..., : s.top_k]
        weights = p.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * s.routed_scale
        taken = torch.ones_like(chosen, dtype=torch.bool)
        if s.capacity_factor is not None:
            room = math.ceil(s.capacity_factor * T * s.top_k / E)
            for b in range(B):
                load = [0] * E
                for choice in range(s.top_k):  # first choices before second ones, earlier tokens before later ones
                    for t in range(T):
                        expert = int(chosen[b, t, choice])
                        taken[b, t, choice] = load[expert] < room
                        load[expert] += 1
        y = torch.zeros_like(x)
        for expert in range(E):
            share = (weights * (chosen == expert) * taken).sum(-1, keepdim=True)
            hidden = swish(self.product(x, self.w[f"{at}.experts.gate_up.weight"][expert].T))
            y = y + share * self.product(hidden, self.w[f"{at}.experts.down.weight"][expert].T)
        if s.shared_experts:
            y = y + self.mlp(x, f"{at}.shared")
        if call.training:
            self.balance(p, logits, chosen, name, call)
        return y

    def balance(self, p: Tensor, logits: Tensor, chosen: Tensor, name: str, call: Call) -> None:
        s = self.s
        counts = torch.nn.functional.one_hot(chosen, s.experts).sum(2).to(p.dtype)  # b t e
        call.counts[name] = call.counts.get(name, 0) + counts.sum((0, 1))
        scopes = {
            "sequence": counts.sum(1, keepdim=True),
            "micro_batch": counts.sum((0, 1), keepdim=True),
            "global": call.fractions.get(name, torch.ones(s.experts, dtype=p.dtype)),
        }
        if s.balance == "aux":
            loads = scopes[s.aux_loss]
            call.extra = call.extra + s.aux_coefficient * (loads / loads.mean(-1, keepdim=True) * p).sum()
        call.extra = call.extra + s.router_z_loss * logits.logsumexp(-1).square().sum()


def swish(x: Tensor) -> Tensor:
    """SwiGLU of the gate above the other half."""
    gate, up = x.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def turn(x: Tensor, neighbours: bool = False) -> Tensor:
    """RoPE of [B, T, H, K]: pairs (i, i + K/2), or neighbours. Frequencies are rounded to float32, as Hugging Face."""
    T, K = x.shape[1], x.shape[3]
    frequency = torch.tensor([10000.0 ** (-2 * i / K) for i in range(K // 2)]).to(x.dtype)
    angle = (torch.arange(T, dtype=x.dtype)[:, None] * frequency)[None, :, None]
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)
