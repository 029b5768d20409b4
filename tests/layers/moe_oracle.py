"""The mixture of experts once more, token by token and expert by expert, on the whole batch in one process."""

import math

import torch
from torch.nn import functional as F


def choose(row, k, bias, groups, top_groups):
    """The best k of the scores in `row`, of equals the lower, from the best groups."""
    values = [float(s) + float(b) for s, b in zip(row, bias, strict=True)]
    size = len(values) // groups
    if top_groups < groups:
        each = -(-k // top_groups)
        merit = [sum(sorted(values[g * size : (g + 1) * size], reverse=True)[:each]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-merit[g], g))[:top_groups]
        allowed = [e for e in range(len(values)) if e // size in kept]
    else:
        allowed = list(range(len(values)))
    return sorted(allowed, key=lambda e: (-values[e], e))[:k]


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
    B, T, D = x.shape
    W, up, down = p["router.weight"], p["experts.gate_up.weight"], p["experts.down.weight"]
    E, hidden = len(W), down.shape[2]
    logits = x @ W.t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    probabilities = scores / scores.sum(-1, keepdim=True)
    bias = p.get("router.expert_bias", torch.zeros(E)).detach()
    picked = {}
    for b in range(B):
        for t in range(T):
            if mask[b, t]:
                picked[b, t] = choose(scores[b, t].detach(), top_k, bias, groups, top_groups or groups)
    taken = {(b, t, e) for (b, t), es in picked.items() for e in es}
    if capacity_factor is not None:
        taken = set()
        for b in range(B):
            room = math.ceil(capacity_factor * int(mask[b].sum()) * top_k / E)
            load = [0] * E
            for k in range(top_k):
                for t in range(T):
                    if (b, t) in picked and load[picked[b, t][k]] < room:
                        load[picked[b, t][k]] += 1
                        taken.add((b, t, picked[b, t][k]))
    rows = []
    for b in range(B):
        for t in range(T):
            y = x.new_zeros(D)
            total = sum((scores[b, t, e] for e in picked.get((b, t), [])), x.new_zeros(()))
            for e in picked.get((b, t), []):
                if (b, t, e) in taken:
                    h = up[e] @ x[b, t]
                    out = down[e] @ (F.silu(h[:hidden]) * h[hidden:])
                    y = y + routed_scale * scores[b, t, e] / (total if normalize else 1) * out
            rows.append(y)
    y = torch.stack(rows).view(B, T, D)
    if "shared.up.weight" in p:
        h = x @ p["shared.up.weight"].t()
        y = y + (F.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :]) @ p["shared.down.weight"].t()

    def fractions(tokens):
        counts = torch.zeros(E, dtype=torch.float64)
        for place in tokens:
            for e in picked[place]:
                counts[e] += 1
        return counts * E / max(top_k * len(tokens), 1) if len(tokens) else torch.ones(E, dtype=torch.float64)

    aux = z = x.new_zeros(())
    each = B // micro_batches
    for b, t in picked:
        if aux_loss == "sequence":
            f = fractions([place for place in picked if place[0] == b])
        elif aux_loss == "micro_batch":
            f = fractions([place for place in picked if place[0] // each == b // each])
        elif aux_loss == "global":
            f = p["router.fractions"].detach()
        if aux_loss is not None:
            aux = aux + sum(float(f[e]) * probabilities[b, t, e] for e in range(E))
        z = z + torch.logsumexp(logits[b, t], 0) ** 2
    loss = scale * ((aux_coefficient * aux if aux_loss else 0.0) + z_loss * z)
    counts = torch.zeros(E, dtype=torch.float64)
    for es in picked.values():
        for e in es:
            counts[e] += 1
    n = max(len(picked), 1)
    entropy = -sum((torch.special.xlogy(probabilities[i], probabilities[i]).sum() for i in picked), x.new_zeros(()))
    facts = {"tokens_per_expert": counts, "entropy": entropy / n, "aux_loss": aux / n, "z_loss": z / n}
    facts["dropped"] = 1 - torch.tensor(len(taken) / max(float(counts.sum()), 1), dtype=torch.float64)
    if not picked:
        facts["dropped"] = torch.zeros((), dtype=torch.float64)
    return y, loss, {name: value.detach() for name, value in facts.items()}
