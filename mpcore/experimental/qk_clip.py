"""QK-clip: keep attention logits below a threshold by scaling the weights of queries and keys after a step.

    S_h = the largest scale q_i . k_j of head h in the step,   gamma_h = min(1, threshold / S_h)

    each head has its own key    W_q^h and W_k^h times gamma^(1/2)
    grouped queries              W_q^h times gamma_h, because other heads read W_k too
    latent attention             W_uq^h (without RoPE) and W_uk^h times gamma^(1/2), W_qr^h times gamma_h, because all
                                 heads share the rotary key

A forward of the same tokens then has logits of at most the threshold, if the step itself changes nothing.

Source: Kimi K2 (arXiv:2507.20534), section 2.1 and algorithm 1. With `Muon` this is its MuonClip.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.collectives import all_gather, all_reduce
from mpcore.kernels.adamw import followed
from mpcore.kernels.attention import key_bounds
from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.attention.latent import MultiLatentAttention
from mpcore.layers.attention.multi_head import ParallelAttention
from mpcore.layers.attention.sequence import order_of_runs, sequence_index, sequence_runs
from mpcore.mesh.agreement import gather_objects
from mpcore.sharding.declarations import named_modules
from mpcore.sharding.local import data_run, is_dtensor, local_tensor
from mpcore.training.observers import Observer
from mpcore.training.run import Run

PAIRS = 2**24  # of queries and keys whose logits exist at once


class QKClip(Observer):
    """Clip the attention logits of each head on any layout: pass it to `prepare(.., observers=[QKClip()])`.

    Args:
        threshold: the largest logit that is left as it is; 100 in Kimi K2.

    Attributes:
        logits: the largest logit of each head of this rank in the last step, by the name of the attention layer:
            float [H/tp], before clipping, over all ranks of cp and dp.

    Raises:
        ValueError: on every rank, if the threshold is not positive, the model has no attention layer of mpcore, or a
            layer has `qk_norm`, which bounds the logits itself, a memory, or frozen projections.

    Note:
        - Logits are counted over the pairs that `causal`, `window` and documents show, without biases and soft caps,
          and also where a `mask` hides a key.
        - The layer computes its logits a second time, and under cp gathers all keys.

    Example:
        >>> clip = mpcore.experimental.QKClip(threshold=100.0)
        >>> model = mpcore.ParallelAttention(8, num_heads=2, device="meta")
        >>> run = mpcore.prepare(
        ...     model, mpcore.Mesh(), blocks=[model], loss=lambda y, t: (y - t).square().sum(),
        ...     optimizer=mpcore.Muon, observers=[clip],
        ... )
        >>> x = torch.randn(2, 3, 8)
        >>> loss, step = run.forward_backward(x, x, tokens=6), run.optimizer_step()
        >>> clip.logits[""].shape
        torch.Size([2])
    """

    def __init__(self, threshold: float = 100.0) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold {threshold} is not positive")
        self.threshold = threshold
        self.logits: dict[str, Tensor] = {}
        self.layers: dict[str, HeadAttention] = {}
        self._seen: dict[int, Tensor] = {}

    def attach(self, run: Run) -> None:
        """Watch the attention layers of the run."""
        self.layers = {name: each for name, each in named_modules(run.model) if isinstance(each, HeadAttention)}
        problems = [f"{name or 'the model'}: {why}" for name, each in self.layers.items() if (why := _problem(each))]
        found = gather_objects((len(self.layers), problems), run.mesh.pp.group)
        if not any(count for count, _ in found):
            raise ValueError("QKClip found no attention layer of mpcore in the model: leave it out")
        if first := next((each[0] for _, each in found if each), None):
            raise ValueError(f"QKClip can't clip {first}")
        for layer in self.layers.values():
            layer.qk_clip = self  # type: ignore[assignment]
            layer.core = MethodType(_core, layer)  # type: ignore[method-assign]

    def dropped(self, run: Run) -> None:
        """Forget the logits of a step that is computed again."""
        self._seen = {}

    @torch.no_grad()
    def after_step(self, run: Run, taken: bool) -> None:
        """Scale the weights of heads whose logits were too large."""
        layers, seen, self._seen = self.layers, self._seen, {}
        none = torch.full((), -torch.inf, dtype=torch.float64, device=run.mesh.device)
        rows = [seen.get(id(layer), none).double().expand(layer.local_heads) for layer in layers.values()]
        if not rows:
            return
        largest = all_reduce(torch.cat(rows), run.mesh.data, "max").split([len(each) for each in rows])
        self.logits = dict(zip(layers, largest, strict=True))
        for layer, top in zip(layers.values(), largest, strict=True) if taken else ():
            gamma = torch.where(top > self.threshold, self.threshold / top, 1.0)
            for projection, factors in _factors(layer, gamma):
                for p in projection.parameters(recurse=False):
                    _scale_rows(p, factors, run.optimizer.state.get(p, {}))

    @torch.no_grad()
    def see(self, layer: HeadAttention, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, length: int) -> None:
        """Note the largest logit of each head, of queries [B, T/cp, H/tp, K] and this rank's keys."""
        rows = 1 if cu_seqlens is None else max(len(q), 1)
        ends = None if cu_seqlens is None else cu_seqlens.to(q.device)
        low, high = key_bounds(
            rows * length, causal=layer.causal, window=layer.window, cu_seqlens=ends, device=q.device
        )
        index = sequence_index(length, layer.cp, layer.context, q.device)
        first = length * torch.arange(rows, device=q.device)[:, None]
        low, high = ((bound.view(rows, length) - first)[:, index] for bound in (low, high))
        if layer.cp.size > 1:
            order = order_of_runs(sequence_runs(length, layer.cp, layer.context), q.device)
            k = all_gather(k, layer.cp, 1, length).index_select(1, order.argsort())
        repeats = layer.kv_repeats or [q.shape[2] // max(k.shape[2], 1)] * k.shape[2]
        k = k.repeat_interleave(torch.tensor(repeats, device=k.device), 2)
        scale = q.shape[-1] ** -0.5 if layer.scale is None else layer.scale
        wide, key = torch.promote_types(q.dtype, torch.float32), torch.arange(length, device=q.device)
        top, k = torch.full(q.shape[2:3], -torch.inf, dtype=wide, device=q.device), k.to(wide)
        step = max(PAIRS // max(q.shape[0] * q.shape[2] * length, 1), 1)
        for part, start, end in zip(q.split(step, 1), low.split(step, 1), high.split(step, 1), strict=True):
            hidden = (key < start[..., None]) | (key >= end[..., None])  # [1 or B, step, T]
            with torch.autocast(q.device.type, enabled=False):  # a product of 16 bits may overflow before it is scaled
                logits = torch.einsum("bqhk,bshk->bhqs", part.to(wide), k) * scale
            if logits.numel():
                top = torch.maximum(top, logits.masked_fill(hidden.unsqueeze(1), -torch.inf).amax((0, 2, 3)))
        self._seen[id(layer)] = torch.maximum(top, self._seen.get(id(layer), top))


def _core(self: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, length: int, *others: Any) -> Tensor:
    if self.training:
        self.qk_clip.see(self, q, k, cu_seqlens, length)
    return type(self).core(self, q, k, v, cu_seqlens, length, *others)


def _problem(layer: HeadAttention) -> str:
    """Return why a layer can't be clipped; "" if it can."""
    if isinstance(layer, MultiLatentAttention):
        frozen = not (layer.q_up.weight.requires_grad and layer.kv_up.weight.requires_grad)
        return "its q_up or kv_up is frozen" if frozen else ""
    if not isinstance(layer, ParallelAttention):
        return f"a {type(layer).__name__} is neither a ParallelAttention nor a MultiLatentAttention"
    if layer.q_norm is not None:
        return "its qk_norm bounds the logits, and undoes a scale of the weights: build it with qk_norm=False"
    if layer.memory_dim is not None:
        return f"it reads a memory of width {layer.memory_dim}"
    return "" if layer.qkv.weight.requires_grad else "its qkv is frozen"


def _factors(layer: HeadAttention, gamma: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """Return each projection to scale, and the factors of this rank's rows."""
    root = gamma.sqrt()

    def rows(*parts: tuple[Tensor, int]) -> Tensor:  # of each head: so many rows with this factor
        return torch.stack([factor for factor, width in parts for _ in range(width)], 1).flatten()

    if isinstance(layer, MultiLatentAttention):
        (nope, rope), (keys, values) = layer.qk_dims, layer.kv_dims
        one = torch.ones_like(gamma)
        return [(layer.q_up, rows((root, nope), (gamma, rope))), (layer.kv_up, rows((root, keys), (one, values)))]
    assert isinstance(layer, ParallelAttention)
    own = layer.qkv.num_heads == layer.qkv.num_kv_heads
    k = root if own else gamma.new_ones(layer.local_kv_heads)
    v = gamma.new_ones(layer.local_kv_heads)
    return [(layer.qkv, torch.cat([root if own else gamma, k, v]).repeat_interleave(layer.head_dim))]


def _scale_rows(p: nn.Parameter, factors: Tensor, state: dict[str, Any]) -> None:
    """Multiply the rows of a parameter, and of its master weight."""
    if is_dtensor(p):
        start, end = data_run(p)
        factors = factors[start:end]
    held = local_tensor(p.detach())
    factors = factors.view(-1, *[1] * (held.dim() - 1))
    if "master" not in state:
        held.mul_(factors.to(held.dtype))
        return
    master = local_tensor(state["master"])
    master.copy_(followed(master, held)).mul_(factors.to(master.device, master.dtype))
    held.copy_(master)
