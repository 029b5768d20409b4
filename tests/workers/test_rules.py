"""Outer rules against their algorithms written out in plain torch, and the order of what happens to a run."""

import pytest
import torch

from mpcore.tools.workers import Average, DelayedNesterov, HeLoCo, Nesterov
from mpcore.tools.workers.outer import Options, Outer, digest, like, rounded
from mpcore.tools.workers.rules import describe, read_rule

STALE = [0, 0, 2, 1, 3, 0, 5, 1, 0, 2]


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*size, dtype=torch.float64, generator=g) for name, size in {"a": (3, 4), "b": (5,)}.items()
    }


def averaged(xs, gs):
    return [xs := xs - 0.25 * g for g in gs]


def nesterov(xs, gs):
    p = torch.nn.Parameter(xs.clone())
    sgd, out = torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=True), []
    for g in gs:
        p.grad = g.clone()
        sgd.step()
        out.append(p.detach().clone())
    return out


def stale_nesterov(xs, gs):
    return nesterov(xs, [g / (1 + stale) ** 0.5 for g, stale in zip(gs, STALE, strict=True)])


def delayed(c):
    def run(x, gs, n=3, beta=0.9, epsilon=0.7):
        """Algorithm 3 of arXiv:2401.09135, line by line."""
        m, delta, out = torch.zeros_like(x), torch.zeros_like(x), []
        for t, g in enumerate(gs):
            delta = delta + g
            if (t + 1) % n == 0:
                m = beta * m + delta / n
                x = x - epsilon * ((1 - c * n + c) * beta * m + g / n)
                delta = torch.zeros_like(x)
            else:
                x = x - epsilon * (c * beta * m + g / n)
            out.append(x)
        return out

    return run


def heloco(x, gs, c_ok=0.3, k_s=1.5, b_max=0.6, k_d=0.8, kappa=0.5, mu=0.9, lr=0.7):
    m, out = torch.zeros_like(x), []
    for g in gs:
        if m.norm() > 0:
            u, v = g / g.norm(), m / m.norm()
            c = (u * v).sum()
            trust = g.norm() / (g.norm() + kappa * m.norm())
            if c < 0:
                g = g - torch.clamp(k_s * -c * trust, max=b_max) * c * g.norm() * v
            elif c < c_ok:
                lam = torch.clamp(k_d * (1 - c) * trust, max=1.0)
                w = (1 - lam) * u + lam * v
                g = g.norm() * w / w.norm()
        m = mu * m + (1 - mu) * g
        x = x - lr * (g + mu * m)
        out.append(x)
    return out


RULES = [
    (Average(0.25), averaged),
    (Nesterov(), nesterov),
    (Nesterov(decay=0.5), stale_nesterov),
    (DelayedNesterov(buffer=3), delayed(0.0)),
    (DelayedNesterov(buffer=3, activation=0.2), delayed(0.2)),
    (HeLoCo(0.3, 1.5, 0.6, 0.8, 0.5), heloco),
]


def line_of(outer, worker, base, applied=True, version=None):
    entry = {"worker": worker, "base": base, "applied": applied}
    return {"op": "update", "version": outer.version + 1 if version is None else version, "updates": [entry]}


def started(rule, until=100, anchor=None):
    begin = {"op": "begin", "rule": describe(rule), "first": 0, "until": until}
    outer = Outer(begin, anchor or tensors(0))
    outer.apply({"op": "join", "worker": 0, "address": ""})
    return outer


def lease(outer, worker, most):
    first, last = outer.free_steps(most)
    phase = outer.phases[worker]
    outer.apply({"op": "lease", "worker": worker, "phase": phase, "steps": [first, last], "base": outer.version})
    return first, last


@pytest.mark.parametrize(("rule", "by_hand"), RULES, ids=lambda x: type(x).__name__)
def test_a_rule_is_its_algorithm(rule, by_hand):
    assert read_rule(describe(rule)) == rule
    outer, gs = started(rule), [tensors(1 + i) for i in range(len(STALE))]
    want = {name: by_hand(x, [g[name] for g in gs]) for name, x in outer.anchor.items()}
    for i, (g, stale) in enumerate(zip(gs, STALE, strict=True)):
        lease(outer, 0, 1)
        outer.apply(line_of(outer, 0, outer.version - stale), [g])
        for name, x in outer.anchor.items():
            torch.testing.assert_close(x, want[name][i], rtol=1e-13, atol=1e-13)
    assert outer.done == len(gs)


def test_rules_refuse_numbers_out_of_range():
    for make in (lambda: Nesterov(momentum=1.0), lambda: DelayedNesterov(activation=0.3), lambda: Average(-1),
                 lambda: DelayedNesterov(buffer=2.5)):  # fmt: skip
        with pytest.raises(ValueError, match=r"from 0"):
            make()
    for options in ({"staleness": -1}, {"every": 0}, {"timeout": float("nan")}):
        with pytest.raises(ValueError, match="out of range"):
            Options(**options)
    with pytest.raises(ValueError, match="Nesterow"):
        read_rule({"name": "Nesterow"})


def test_several_updates_of_one_outer_step_are_averaged():
    outer, gs = started(Nesterov()), [tensors(i) for i in (1, 2, 3)]
    for worker in (1, 2):
        outer.apply({"op": "join", "worker": worker, "address": ""})
    for worker in range(3):
        lease(outer, worker, 5)
    entries = [{"worker": worker, "base": 0, "applied": True} for worker in range(3)]
    want = {name: nesterov(x, [sum(g[name] for g in gs) / 3])[0] for name, x in outer.anchor.items()}
    outer.apply({"op": "update", "version": 1, "updates": entries}, gs)
    for name, x in outer.anchor.items():
        torch.testing.assert_close(x, want[name], rtol=1e-13, atol=1e-13)
    assert (outer.version, outer.done) == (1, 15)
    start, g = tensors(0), tensors(4)
    outer = started(Average(), anchor=start)
    lease(outer, 0, 5)
    outer.apply({**line_of(outer, 0, 0), "workers": 4}, [g])  # one update of four workers
    for name, x in outer.anchor.items():
        torch.testing.assert_close(x, start[name] - g[name] / 4, rtol=1e-13, atol=1e-13)


def test_what_is_not_trained_is_averaged_whatever_the_rule():
    start, gs = tensors(0), [tensors(i) for i in (1, 2)]
    (first, *_), outer = start, started(Nesterov(), anchor=start)
    outer.averaged = frozenset([first])
    outer.apply({"op": "join", "worker": 1, "address": ""})
    for given, workers in ((gs, 2), (gs[:1], 1)):  # one update of two workers: its share
        for worker in range(workers):
            lease(outer, worker, 5)
        before = outer.anchor[first].clone()
        entries = [{"worker": worker, "base": 0, "applied": True} for worker in range(workers)]
        outer.apply({"op": "update", "version": 1, "updates": entries, "workers": workers}, given)
        torch.testing.assert_close(outer.anchor[first], before - sum(g[first] for g in given) / 2)
    assert not outer.slots["momentum"][first].any()


def test_the_hash_sees_a_bit_a_name_and_a_shape():
    a = {"a": torch.zeros(4)}
    others = [{"b": a["a"]}, {"a": torch.zeros(2, 2)}, {"a": torch.tensor([0.0, 0.0, 0.0, -0.0])}, {}]
    assert len({digest(x) for x in (a, *others)}) == 5


def test_a_rounded_update_keeps_what_is_not_finite_and_refuses_wrong_scales():
    x = {"a": torch.randn(3, 200), "b": torch.zeros(4), "c": torch.empty(0, 2), "d": torch.randn(())}
    x["a"][0, 1], x["a"][2, 199] = float("nan"), float("inf")
    sent = rounded(x, "int8")
    found = like(sent, x)
    assert [found["a"].flatten()[i : i + 256].isfinite().any().item() for i in (0, 256, 512)] == [False, True, False]
    assert all(torch.allclose(found[name], x[name], rtol=0.01) for name in ("b", "c", "d"))
    with pytest.raises(ValueError, match="doesn't fit"):
        like({**sent, "a|scale": torch.ones(2)}, x)
