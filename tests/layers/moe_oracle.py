"""The mixture of experts once more: every expert on every token of the whole batch, in one process."""

import math

import torch
from torch.nn import functional as F


def oracle(p, x, mask, *, top_k, score="softmax", normalize=True, routed_scale=1.0, groups=1, top_groups=None,
           aux_loss=None, aux_coefficient=0.01, z_loss=0.0, capacity_factor=None, micro_batches=1,
           scale=1.0, **_):  # fmt: skip
    """Values of the layer and of its balance losses.

    Args:
        p: `router.weight`, `experts.gate_up.weight`, `experts.down.weight`, maybe `router.expert_bias`,
            `router.fractions` and `shared.*`.
        x: [B, T, D], the whole batch.
        mask: [B, T].
        micro_batches: runs of rows that are micro-batches of their own.

    Returns:
        y, the scaled loss, and a dict of counts and sums.
    """
    (B, T, _), E, hidden = x.shape, len(p["router.weight"]), p["experts.down.weight"].shape[2]
    logits = x @ p["router.weight"].t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    probabilities = scores / scores.sum(-1, keepdim=True)
    ranked = (scores + p.get("router.expert_bias", torch.zeros(E))).detach()
    if top_groups is not None and top_groups < groups:
        best = ranked.unflatten(-1, (groups, -1)).sort(dim=-1, descending=True).values[..., : -(-top_k // top_groups)]
        first = best.sum(-1).sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        kept = F.one_hot(first, groups).sum(-2).repeat_interleave(E // groups, -1)
        ranked = ranked.masked_fill(kept == 0, -math.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]  # of equals the lower
    picks = F.one_hot(order, E) * mask[..., None, None]
    chosen = taken = picks.sum(2)
    if capacity_factor is not None:  # first choices before second ones, and earlier tokens before later ones
        room = torch.tensor([math.ceil(capacity_factor * int(row.sum()) * top_k / E) for row in mask])
        turns = picks.transpose(1, 2).flatten(1, 2)
        taken = (turns * (turns.cumsum(1) <= room[:, None, None])).view(B, top_k, T, E).sum(1)
    total = (scores * chosen).sum(-1, keepdim=True) + ~mask[..., None] if normalize else 1
    h = torch.einsum("efd,btd->btef", p["experts.gate_up.weight"], x)
    h = F.silu(h[..., :hidden]) * h[..., hidden:]
    y = torch.einsum("bte,edf,btef->btd", routed_scale * scores * taken / total, p["experts.down.weight"], h)
    if "shared.up.weight" in p:
        h = x @ p["shared.up.weight"].t()
        y = y + (F.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :]) @ p["shared.down.weight"].t()
    fractions = p.get("router.fractions", torch.ones(E)).detach()
    if aux_loss in ("sequence", "micro_batch"):
        rows = 1 if aux_loss == "sequence" else B // micro_batches
        counts = chosen.sum(1).unflatten(0, (-1, rows)).sum(1).repeat_interleave(rows, 0)[:, None]
        fractions = counts.double() * E / counts.sum(-1, keepdim=True).clamp(min=1)
    aux = (fractions * probabilities * mask[..., None]).sum() if aux_loss else x.new_zeros(())
    z = (logits.logsumexp(-1).square() * mask).sum()
    loss, n = scale * (aux_coefficient * aux + z_loss * z), mask.sum().clamp(min=1)
    entropy = -(torch.special.xlogy(probabilities, probabilities).sum(-1) * mask).sum()
    dropped = (chosen - taken).sum().double() / chosen.sum().clamp(min=1)
    facts = {"tokens_per_expert": chosen.sum((0, 1)).double(), "entropy": entropy / n, "aux_loss": aux / n,
             "z_loss": z / n, "dropped": dropped}  # fmt: skip
    return y, loss, {name: value.detach() for name, value in facts.items()}
