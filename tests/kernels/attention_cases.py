"""What attention is tried on: inputs, masks, and results without what has no error."""

import laws
import torch


def mask(name, T, keys=None):
    """Options of a mask of T queries, and of as many keys unless it can do with others."""
    ends = torch.tensor([0, T // 3, T // 3, T // 3 + 1, T])
    if name == "bounds":  # the first queries see nothing, nor do the last; both bounds jump
        index, keys = torch.arange(T, dtype=torch.int32), T if keys is None else keys
        low = (index - T // 2) // 8 * 8
        return {"bounds": (torch.where(index > T - 3, keys, low), index * keys // T - 5)}
    return {
        "causal": {}, "full": {"causal": False}, "window": {"window": max(1, T // 3)}, "packed": {"cu_seqlens": ends},
        "packed full": {"cu_seqlens": ends, "causal": False},
        "packed window": {"cu_seqlens": ends, "window": max(1, T // 4)},
    }[name]  # fmt: skip


def draw(T, H=2, groups=1, K=64, *, keys=None, V=None, B=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(T + H)
    shapes = {
        "query": (B, T, H, K),
        "key": (B, T if keys is None else keys, groups, K),
        "value": (B, T if keys is None else keys, groups, K if V is None else V),
    }
    return {name: laws.drawn(torch.randn, shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def seen(function):
    """Without the lse of queries that see nothing: it is -inf, and an infinity has no error."""

    def call(**arguments):
        output, lse = function(**arguments)
        sees = lse.detach().isfinite()
        assert bool((lse.detach()[~sees] == -torch.inf).all())
        assert not output.detach().transpose(1, 2)[~sees].any()
        return output, torch.where(sees, lse, 0.0)

    return call
