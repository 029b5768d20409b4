"""The mixture of experts: equal to a loop over tokens and experts, in values and gradients, for every layout."""

import itertools

import pytest
import torch

from mpcore import ParallelMoE, load_full_state_dict, reduce_gradients, update_routers
from mpcore import collectives as c
from tests.equality import close, full_gradients
from tests.layers.moe_oracle import oracle
from tests.pool import mesh

B, T, D, HIDDEN, E, K = 4, 8, 4, 3, 4, 2
LAYOUTS = [
    {},
    {"tp": 2, "etp": 1},
    {"tp": 2},
    {"dp": 2, "etp": 2},
    {"dp": 2, "ep": 2},
    {"tp": 2, "etp": 1, "ep": 2},
    {"cp": 2, "ep": 2},
    {"tp": 2, "dp": 2, "etp": 1, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2},
    {"dp": 4, "etp": 2, "ep": 2},
    {"dp": 4, "ep": 4},
    {"tp": 2, "cp": 2, "etp": 1, "ep": 4},
]
BALANCES = [
    {},
    {"aux_loss": "sequence"},
    {"aux_loss": "micro_batch", "z_loss": 0.3},
    {"aux_loss": "global"},
    {"bias_rate": 0.1, "score": "sigmoid"},
    {"bias_rate": 0.1, "aux_loss": "sequence", "score": "sigmoid", "groups": 2, "top_groups": 1, "normalize": False},
]
WAYS = list(itertools.product((None, 0.75), ("all_gather", "all_to_all")))
INPUTS = ("plain", "one expert takes all", "an expert is empty", "padded", "a rank has none", "ties")


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(options, kind, shared=0):
    p = {
        "router.weight": draw(1, E, D),
        "experts.gate_up.weight": draw(2, E, 2 * HIDDEN, D),
        "experts.down.weight": draw(3, E, D, HIDDEN),
    }
    if kind == "one expert takes all":
        p["router.weight"][2, 0] = 9.0  # x[..., 0] is 1
    if kind == "an expert is empty":
        p["router.weight"][1, 0] = -30.0
    if kind == "ties":
        p["router.weight"].zero_()
    if options.get("bias_rate"):
        p["router.expert_bias"] = 0.2 * draw(4, E)
    if options.get("aux_loss") == "global":
        p["router.fractions"] = draw(5, E).abs()
    if shared:
        p |= {"shared.up.weight": draw(6, 2 * shared * HIDDEN, D), "shared.down.weight": draw(7, D, shared * HIDDEN)}
    return p


def inputs(kind):
    x, mask = draw(8, B, T, D), torch.ones(B, T, dtype=torch.bool)
    x[..., 0] = 1.0
    if kind == "padded":
        for b in range(B):
            mask[b, T - b :] = False
    if kind == "a rank has none":
        mask[B // 4 :] = False
    return x, mask


def check_moe(sizes, options, kind, sequence_parallel=False, shared=0):
    m = mesh(**sizes)
    options = {"top_k": K, "aux_coefficient": 0.7, **options}
    p = {name: w.requires_grad_() for name, w in weights(options, kind, shared).items()}
    x, mask = inputs(kind)
    x.requires_grad_()
    scale, dy = 0.37, draw(9, B, T, D)
    y, loss, facts = oracle(p, x, mask, scale=scale, **options)
    ((y * dy).sum() + loss).backward()

    axes = {name: getattr(m, name) for name in ("tp", "ep", "etp", "cp", "data")}
    moe = ParallelMoE(
        D, HIDDEN, E, shared_experts=shared, sequence_parallel=sequence_parallel, **options, **axes, dtype=torch.float64
    )
    load_full_state_dict(moe, {name: w.detach() for name, w in p.items()})

    def local(full):
        return c._split(c._split(full, m.dp, 0), m.cp, 1)

    mine = local(x.detach()).requires_grad_()
    given = c.split(mine, m.tp, 1) if sequence_parallel else mine
    got = moe(given, mask=local(mask), loss_scale=scale)
    got = c.gather(got, m.tp, 1) if sequence_parallel else got
    (got * local(dy)).sum().backward()
    reduce_gradients(moe, m)
    close(got.detach(), local(y.detach()), "y")
    close(mine.grad, local(x.grad), "dx")
    gradients = full_gradients(moe)
    wanted = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in p.items()}
    assert gradients.keys() == {name for name in p if name not in ("router.expert_bias", "router.fractions")}
    for name, gradient in gradients.items():
        close(gradient, wanted[name], f"gradient of {name}")
    found = update_routers(moe, m)["router"]
    for name, value in facts.items():
        close(getattr(found, name), value, name)


def check_layout(sizes, rotation):
    """Every balance, way and input at least once; `make soak` has all combinations."""
    every = [*itertools.product(BALANCES, WAYS, INPUTS)]
    picked = every if rotation is None else every[rotation % 17 :: 17]
    for i, (balance, (capacity, dispatch), kind) in enumerate(picked):
        options = {**balance, "capacity_factor": capacity, "dispatch": dispatch}
        sequence_parallel = sizes.get("tp", 1) > 1 and i % 2 == 0
        try:
            check_moe(sizes, options, kind, sequence_parallel, shared=i % 3 == 0)
        except AssertionError as error:
            raise AssertionError(f"{options}, {kind}, sp {sequence_parallel}: {error}") from error


def world(sizes):
    return sizes.get("tp", 1) * sizes.get("dp", 1) * sizes.get("cp", 1)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda s: "x".join(f"{k}{v}" for k, v in s.items()) or "one rank")
def test_every_layout_equals_a_loop_over_tokens_and_experts(ranks, sizes):
    ranks(world(sizes), check_layout, sizes, LAYOUTS.index(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda s: "x".join(f"{k}{v}" for k, v in s.items()) or "one rank")
def test_every_layout_in_all_combinations(ranks, sizes):
    ranks(world(sizes), check_layout, sizes, None, timeout=600)
