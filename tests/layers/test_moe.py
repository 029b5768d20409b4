"""The mixture of experts: equal to every expert computed on every token, in values and gradients, for every layout."""

import functools
import itertools
import re
from importlib import import_module

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpcore import Mesh, ParallelMLP, ParallelMoE, full_state_dict, load_full_state_dict, sequence_index
from mpcore import collectives as c
from mpcore.experimental import LatentMoE, record_routing
from mpcore.gradients import drop_gradients, reduce_gradients
from mpcore.interop.upcycle import upcycle
from mpcore.layers import materialize, update_routers
from mpcore.layers.moe import DispatchBounds
from mpcore.layers.moe.router import AUX_LOSSES
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.sync import set_gradient_sync
from mpcore.sharding import shardings
from mpcore.sharding.state_dict import full_tensor
from mpcore.tools.simulation import simulate
from tests.equality import close, draw, full_gradients
from tests.layers.moe_oracle import oracle
from tests.pool import mesh, on_ranks
from tests.quick import some

B, T, D, HIDDEN, E, K = 4, 8, 4, 3, 4, 2
SCALE = 0.37
REAL = 5  # of T tokens, where some are padding
LAYOUTS = [
    {}, {"tp": 2, "etp": 1}, {"tp": 2}, {"dp": 2, "etp": 2}, {"dp": 2, "ep": 2}, {"tp": 2, "etp": 1, "ep": 2},
    {"cp": 2, "ep": 2}, {"tp": 2, "dp": 2, "etp": 1, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2},
    {"dp": 4, "etp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"tp": 2, "cp": 2, "etp": 1, "ep": 4},
]  # fmt: skip
LONG = LAYOUTS[5:9] + LAYOUTS[10:11]
BALANCES = [
    {}, {"aux_loss": "sequence"}, {"aux_loss": "micro_batch", "z_loss": 0.3}, {"aux_loss": "global"},
    {"bias_rate": 0.1, "score": "sigmoid", "routed_scale": 2.5},
    {"bias_rate": 0.1, "aux_loss": "sequence", "score": "sigmoid", "groups": 2, "top_groups": 1, "normalize": False},
]  # fmt: skip
WAYS = list(itertools.product((None, 0.75), ("all_gather", "all_to_all")))
INPUTS = ("plain", "one expert takes all", "an expert is empty", "padded", "a rank has none", "ties")


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


@functools.cache
def truth(kind, shared, **options):
    """Output, its input's and parameters' gradients, and statistics: once in a process for all layouts."""
    p = {name: w.requires_grad_() for name, w in weights(options, kind, shared).items()}
    x, mask = inputs(kind)
    x.requires_grad_()
    y, loss, facts = oracle(p, x, mask, scale=SCALE, **options)
    ((y * draw(9, B, T, D)).sum() + loss).backward()
    return y.detach(), x.grad, {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in p.items()}, facts


def check_moe(sizes, options, kind, sequence_parallel=False, shared=0, sequence_dim=1, bound=None):
    """With a bound, a share of the worst case, dropless all-to-all begins with it. Returns how often it repeats."""
    m = mesh(**sizes)
    options = {"top_k": K, "aux_coefficient": 0.7, **options}
    x, mask = inputs(kind)
    dy, p = draw(9, B, T, D), weights(options, kind, shared)
    y, dx, wanted, facts = truth(kind, shared, **{name: v for name, v in options.items() if name != "dispatch"})
    axes = {name: getattr(m, name) for name in ("tp", "ep", "etp", "cp", "data")}
    sequence = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
    moe = ParallelMoE(D, HIDDEN, E, shared_experts=shared, **sequence, **options, **axes, dtype=torch.float64)
    load_full_state_dict(moe, p)

    def local(full):
        return c._split(c._split(full, m.dp, 0), m.cp, 1)

    mine = local(x).requires_grad_()
    order = (1, 0, 2) if sequence_dim == 0 else (0, 1, 2)  # its own inverse

    def compute():
        mine.grad = None
        given = c.split(mine, m.tp, 1) if sequence_parallel else mine
        places = sequence_index(T, m.cp, "ring")
        got = moe(given.permute(order), mask=local(mask), positions=places, loss_scale=SCALE).permute(order)
        got = c.gather(got, m.tp, 1) if sequence_parallel else got
        (got * local(dy)).sum().backward()
        return got

    bounds = DispatchBounds(moe, m)
    for each in bounds.dispatches if bound else ():
        each.set_bound(each.worst.times(bound), torch.device("cpu"))
    got = bounds.exact(compute, lambda: drop_gradients(moe)) if bound else compute()
    reduce_gradients(moe, m)
    close(got.detach(), local(y), "y")
    close(mine.grad, local(dx), "dx")
    gradients = full_gradients(moe)
    assert gradients.keys() == {name for name in p if name not in ("router.expert_bias", "router.fractions")}
    for name, gradient in gradients.items():
        close(gradient, wanted[name], f"gradient of {name}")
    found = update_routers(moe, m)["router"]
    for name, value in facts.items():
        close(getattr(found, name), value, name)
    return bounds.repeats


def check_layout(sizes, rotation):
    """Every balance, way and input at least once; `make soak` has all combinations."""
    every = [*itertools.product(BALANCES, WAYS, INPUTS)]
    picked = every if rotation is None else every[rotation % 17 :: 17]
    for i, (balance, (capacity, dispatch), kind) in enumerate(picked):
        options = {**balance, "capacity_factor": capacity, "dispatch": dispatch}
        sequence_parallel = sizes.get("tp", 1) > 1 and i % 2 == 0
        try:
            bound = (None, 0.05)[i % 2]  # the first sizes are enough for so few tokens
            check_moe(sizes, options, kind, sequence_parallel, shared=i % 3 == 0, bound=bound)
        except AssertionError as error:
            raise AssertionError(f"{options}, {kind}, sp {sequence_parallel}: {error}") from error


def world(sizes):
    return sizes.get("tp", 1) * sizes.get("dp", 1) * sizes.get("cp", 1)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=pytest.mark.slow if sizes in LONG else []) for sizes in LAYOUTS],
    ids=lambda s: "x".join(f"{k}{v}" for k, v in s.items()) or "one rank",
)
def test_every_layout_equals_a_loop_over_tokens_and_experts(ranks, sizes):
    ranks(world(sizes), check_layout, sizes, LAYOUTS.index(sizes))


@on_ranks(1, 2)
def test_sequence_dim_0_exchanges_the_first_two_dimensions():
    sizes = {"tp": 2, "etp": 1, "ep": 2} if torch.distributed.get_world_size() > 1 else {}
    for sequence_parallel, shared in ((False, 1), (True, 0), (True, 1)):
        check_moe(sizes, {"aux_loss": "sequence"}, "padded", sequence_parallel, shared, sequence_dim=0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda s: "x".join(f"{k}{v}" for k, v in s.items()) or "one rank")
def test_every_layout_in_all_combinations(ranks, sizes):
    ranks(world(sizes), check_layout, sizes, None, timeout=600)


@pytest.mark.parametrize("axes", [("tp",), ("tp", "cp"), ("ep", "data")], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recorded_experts_are_those_of_one_process_and_are_used_again(axes, sequence_parallel):
    """On each layout, also with padding; other experts than the router's are used as they are given."""
    (x, mask), sizes = inputs("padded"), {"dp" if name == "data" else name: 2 for name in axes}
    dense = ParallelMoE(D, HIDDEN, E, K, dtype=torch.float64)
    load_full_state_dict(dense, weights({}, "plain"))
    with record_routing(dense) as experts:
        y = dense(x, mask=mask)
    (chosen,) = experts[""]
    other = (chosen + 1) % E
    want = dense(x, mask=mask, experts=other)
    assert not torch.allclose(y, want)

    def part(m):
        on = {name: getattr(m, name) for name in ("tp", "ep", "etp", "cp", "data")}
        moe = ParallelMoE(D, HIDDEN, E, K, dtype=torch.float64, sequence_parallel=sequence_parallel, **on)
        load_full_state_dict(moe, weights({}, "plain"))
        here = [c._split(c._split(full, m.dp, 0), m.cp, 1) for full in (x, mask, chosen, other, want)]
        given = c.split(here[0], m.tp, 1) if sequence_parallel else here[0]
        with record_routing(moe) as experts:
            moe(given, mask=here[1])
        assert torch.equal(experts[""][0], here[2])
        got = moe(given, mask=here[1], experts=here[3])
        close(c.gather(got, m.tp, 1) if sequence_parallel else got, here[4], "y")
        with pytest.raises(ValueError, match=r"\d, 1\)"):
            moe(given, mask=here[1], experts=here[3][..., :1])

    simulate(part, **sizes)


@on_ranks(4)
def test_any_number_of_tokens():
    """Token counts that tp doesn't divide, one token, none at all: the dense layer's values and gradients."""
    m = mesh(tp=4, etp=2, ep=2)
    axes = {name: getattr(m, name) for name in ("tp", "ep", "etp", "cp", "data")}
    for shape, (capacity, dispatch) in itertools.product(((1, 3), (3, 7), (1, 1), (0, 5)), WAYS):
        options = {"top_k": K, "dispatch": dispatch, "capacity_factor": capacity, "dtype": torch.float64}
        dense, sharded = ParallelMoE(D, HIDDEN, E, **options), ParallelMoE(D, HIDDEN, E, **options, **axes)
        p = weights({}, "plain")
        load_full_state_dict(dense, p)
        load_full_state_dict(sharded, p)
        results = []
        for moe in (dense, sharded):
            x = draw(8, *shape, D).requires_grad_()
            y = moe(x)
            (y * draw(9, *shape, D)).sum().backward()
            results.append((y.detach(), x.grad))
        reduce_gradients(sharded, m)
        for got, want, what in zip(results[1], results[0], ("y", "dx"), strict=True):
            close(got, want, what)
        want, got = full_gradients(dense), full_gradients(sharded)
        for name, gradient in want.items():
            close(got[name], gradient, name)


def build(sizes=None, **options):
    axes = {} if sizes is None else {name: getattr(mesh(**sizes), name) for name in ("tp", "ep", "etp", "cp", "data")}
    moe = ParallelMoE(D, HIDDEN, E, **{"top_k": K, "dtype": torch.float64, **options}, **axes)
    load_full_state_dict(moe, weights(options, "plain", options.get("shared_experts", 0)))
    return moe


def check_balance(sizes):
    """The balance losses alone, of tokens in one micro-batch and two, with padding and without: one gradient."""
    m = mesh(**sizes)
    for aux_loss, (length, cuts) in itertools.product(AUX_LOSSES, ((T, 1), (T, 2), (2 * T, 1), (2 * T, 2))):
        if aux_loss == "micro_batch" and cuts == 2:
            continue  # of two micro-batches it is another loss by definition
        dx, wanted, facts = balance_truth(aux_loss)
        moe = build(sizes, aux_loss=aux_loss, aux_coefficient=0.5, z_loss=0.1, sequence_parallel=cuts == 2)
        x = torch.cat([draw(8, B, T, D), 7 * draw(10, B, length - T, D)], 1)
        mask = torch.arange(length).expand(B, length) < T
        x, mask, dx = (c._split(part, m.dp, 0) for part in (x, mask, F.pad(dx, (0, 0, 0, length - T))))
        x, mask, dx = (c._split(part, m.cp, 1) for part in (x, mask, dx))
        x = x.requires_grad_()
        for part, real in zip(x.chunk(cuts), mask.chunk(cuts), strict=True):
            given = c.split(part, m.tp, 1) if moe.sequence_parallel else part
            (moe(given, mask=real, loss_scale=SCALE) * 0).sum().backward()
        reduce_gradients(moe, m)
        what = f"{aux_loss}, {cuts} micro-batches of {length} tokens: "
        close(full_gradients(moe)["router.weight"], wanted, what + "gradient")
        close(x.grad, dx, what + "dx")
        found = update_routers(moe, m)["router"]
        for name in ("aux_loss", "z_loss", "entropy", "tokens_per_expert"):
            close(getattr(found, name), facts[name], what + name)


@functools.cache
def balance_truth(aux_loss):
    p = weights({"aux_loss": aux_loss}, "plain")
    weight, x = p["router.weight"].requires_grad_(), draw(8, B, T, D).requires_grad_()
    options = {"top_k": K, "aux_loss": aux_loss, "aux_coefficient": 0.5, "z_loss": 0.1, "scale": SCALE}
    _, loss, facts = oracle(p, x, torch.ones(B, T, dtype=torch.bool), **options)
    loss.backward()
    return x.grad, weight.grad, facts


@pytest.mark.parametrize("sizes", [
    {}, {"tp": 2, "etp": 1}, {"cp": 2}, {"tp": 2, "dp": 2, "etp": 1, "ep": 4},
], ids=lambda s: "x".join(f"{k}{v}" for k, v in s.items()) or "one rank")  # fmt: skip
def test_pitfall_27_no_layout_micro_batch_or_padding_changes_a_balance_loss(ranks, sizes):
    ranks(world(sizes), check_balance, sizes)


def test_pitfall_27_the_scale_of_the_main_loss_is_that_of_the_balance_losses():
    """Loss scales and accumulation multiply both by the same: twice the scale is twice the router's gradient."""
    gradients = []
    for scale in (0.1, 0.2):
        moe = build(aux_loss="sequence", aux_coefficient=0.5, z_loss=0.1)
        (moe(draw(8, B, T, D), loss_scale=torch.full((B,), scale)).sum() * 0).backward()
        gradients.append(moe.router.weight.grad)
    assert gradients[0].abs().max() > 1e-3
    close(2 * gradients[0], gradients[1], "gradient")


@pytest.mark.parametrize("balance", [{"bias_rate": 0.1}, {"aux_loss": "global"}])
def test_pitfall_22_a_router_that_counted_nothing_is_named(balance):
    moe = build(**balance)
    x = draw(8, B, T, D).requires_grad_()
    checkpoint(lambda x: moe(x, loss_scale=0.1), x, use_reentrant=True).sum().backward()
    model = torch.nn.ModuleDict({"mlp": moe})
    with pytest.raises(
        ValueError, match=r"^mlp.router counted no token .*use_reentrant=True.*mpcore.parallel.recompute"
    ):
        update_routers(model, Mesh())
    moe(x, mask=torch.zeros(B, T, dtype=torch.bool), loss_scale=0.1)
    assert update_routers(model, Mesh())["mlp.router"].tokens_per_expert.sum() == 0, "padding alone is no mistake"
    for change in (model.eval, lambda: model.train().requires_grad_(False)):
        change()
        with torch.no_grad():
            moe(x)
        update_routers(model, Mesh())


@pytest.mark.parametrize("change", [
    lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16().to("cpu"), torch.nn.Module.half, torch.nn.Module.double,
], ids=["to", "bfloat16", "half", "double"])  # fmt: skip
def test_what_moves_by_small_steps_stays_wide(change):
    """In bfloat16 a bias of 0.5 takes no step of 0.001 any more, and fractions of a step have three digits."""
    options = {"aux_loss": "global", "bias_rate": 1e-3}
    moe = change(ParallelMoE(D, HIDDEN, E, K, dtype=torch.bfloat16, **options))
    assert {p.dtype for p in (moe.router.expert_bias, moe.router.fractions)} <= {torch.float32, torch.float64}
    counts = torch.tensor([41.0, 3, 17, 19], dtype=torch.float64)
    for _ in range(600):
        moe.router.tally = torch.cat([counts, torch.tensor([40.0, 0, 0, 0, 0], dtype=torch.float64)])
        update_routers(moe, Mesh())
        change(moe)
    close(moe.router.expert_bias.double(), 0.6 * (20 - counts).sign(), "bias", 1e-5)
    close(moe.router.fractions.double(), counts / 20, "fractions", 1e-6)


def test_pitfall_27_evaluation_moves_no_bias_and_counts_nothing():
    moe = build(bias_rate=0.1, aux_loss="global").eval()
    before = {name: p.detach().clone() for name, p in moe.named_parameters()}
    moe(draw(8, B, T, D))
    assert moe.router.tally is None
    with torch.no_grad():
        moe.train()(draw(8, B, T, D))
    assert moe.router.tally is None
    statistics = update_routers(build(bias_rate=0.0).eval(), Mesh())["router"]
    assert statistics.tokens_per_expert.dtype == torch.float64
    assert statistics.tokens_per_expert.count_nonzero() == 0
    for name, p in moe.named_parameters():
        assert torch.equal(p, before[name]), name


def test_the_bias_moves_towards_even_loads_and_the_fractions_are_those_of_the_step():
    moe = build(bias_rate=0.1, aux_loss="global")
    bias = moe.router.expert_bias.clone()
    moe(draw(8, B, T, D), loss_scale=0.0)
    statistics = update_routers(moe, Mesh())["router"]
    counts = statistics.tokens_per_expert
    close(moe.router.expert_bias - bias, 0.1 * (counts.mean() - counts).sign(), "change of the bias")
    close(moe.router.fractions.detach(), counts / counts.mean(), "fractions")
    assert statistics.max_violation == counts.max() / counts.mean() - 1
    for _ in range(300):
        moe(draw(8, B, T, D), loss_scale=0.0)
        statistics = update_routers(moe, Mesh())["router"]
        moe.router.bias_rate *= 0.98
    assert statistics.max_violation < 0.1


def test_pitfall_29_ties_go_to_the_lower_expert_and_earlier_tokens_have_room():
    moe = build(capacity_factor=1.0)
    with torch.no_grad():
        moe.router.weight.zero_()
    x = draw(8, 1, T, D)
    places = moe._places(x, None, None)
    routing = moe.router(x[0], places)
    room = T * K // E
    assert routing.experts[:room].tolist() == [[0, 1]] * room
    assert routing.experts[room:].tolist() == [[E, E]] * (T - room)
    order = torch.tensor([5, 2, 7, 0, 1, 3, 6, 4])  # the order in memory is not the order of the sequence
    turned = moe.router(x[0, order], moe._places(x[:, order], None, order))
    assert torch.equal(turned.experts, routing.experts[order])


def test_pitfall_20_experts_begin_different():
    moe = materialize(ParallelMoE(8, 8, 16, 2, device="meta"), 0)
    first = moe.experts.gate_up.weight
    assert len({tuple(w.flatten().tolist()) for w in first}) == 16


def check_nan(sizes):
    """The scores of one token, then of one expert: those alone are lost, and no rank waits for another."""
    m = mesh(**sizes)
    for balance, (capacity, dispatch) in itertools.product(BALANCES, WAYS):
        moe = build(sizes, **balance, capacity_factor=None if capacity is None else 4.0, dispatch=dispatch)
        x = draw(8, B, T, D)
        want = moe(c._split(x, m.dp, 0), loss_scale=0.1)
        x[1, 2, 0] = float("nan")
        got = moe(c._split(x, m.dp, 0), loss_scale=0.1)
        lost = c._split(x.isnan().any(-1), m.dp, 0)
        assert torch.equal(got.isnan().all(-1), lost)
        close(got[~lost].detach(), want[~lost].detach(), "the others")
        with torch.no_grad():
            moe.router.weight[0] = float("nan")
        y = moe(c._split(x, m.dp, 0), loss_scale=0.1)
        y.sum().backward()
        assert y.isnan().any()
        assert update_routers(moe, m)["router"].tokens_per_expert.sum() == 3 * B * T * K


@pytest.mark.parametrize("sizes", [{}, {"dp": 2, "ep": 2}], ids=["one rank", "dp2xep2"])
def test_nan_stays_with_its_token(ranks, sizes):
    ranks(world(sizes), check_nan, sizes)


@on_ranks(4)
def test_pitfall_33_experts_that_nobody_chose_hold_up_no_sum():
    """An expert that no token of a micro-batch chose still gets its zeros, and no rank waits for another."""
    m, moe = mesh(dp=4, ep=2), build({"dp": 4, "ep": 2})
    shard_data_parallel(moe, m, zero=1)
    x, mask = inputs("a rank has none")
    for i in range(2):
        set_gradient_sync(moe, i == 1)
        y = moe(c._split(x, m.dp, 0), mask=c._split(mask, m.dp, 0))
        y.sum().backward()
    reduce_gradients(moe)
    dense = build()
    for _ in range(2):
        dense(x, mask=mask).sum().backward()
    declared = shardings(moe)
    for name, p in dense.named_parameters():
        mine = dict(moe.named_parameters())[name]
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        close(full_tensor(mine.grad, declared[name]), grad, name)


def test_upcycling_begins_with_the_dense_models_output():
    dense = torch.nn.ModuleDict({"blocks": torch.nn.ModuleDict({
        str(i): torch.nn.ModuleDict({"mlp": ParallelMLP(D, HIDDEN, bias=False, dtype=torch.float64)}) for i in range(2)
    })})  # fmt: skip
    moe = ParallelMoE(D, HIDDEN, E, top_k=K, dtype=torch.float64)
    mixture = torch.nn.ModuleDict({"blocks": torch.nn.ModuleDict({"1": torch.nn.ModuleDict({"mlp": moe})})})
    state = upcycle(full_state_dict(dense), mixture)
    assert sorted(state) == ["blocks.0.mlp.down.weight", "blocks.0.mlp.up.weight",
                             "blocks.1.mlp.experts.down.weight", "blocks.1.mlp.experts.gate_up.weight"]  # fmt: skip
    own = full_state_dict(moe)
    load_full_state_dict(moe, own | {n.removeprefix("blocks.1.mlp."): w for n, w in state.items() if "blocks.1" in n})
    x = draw(8, B, T, D)
    close(moe(x).detach(), dense["blocks"]["1"]["mlp"](x).detach(), "the first output")
    with pytest.raises(ValueError, match="the ModuleDict has no ParallelMoE: give the mixture"):
        upcycle(state, dense)
    for home in ("mpcore", "mpcore.layers", "mpcore.layers.moe"):
        with pytest.raises(AttributeError, match=f"{home}.upcycle is mpcore.interop.upcycle.upcycle since 0.3"):
            import_module(home).upcycle  # noqa: B018
    with pytest.raises(ValueError, match=r"the dense model's 4 tensors have no blocks.1.mlp.up.weight"):
        upcycle(state, mixture)
    latent = torch.nn.ModuleDict({"layer": LatentMoE(D, HIDDEN, E, top_k=K, latent_dim=D)})
    with pytest.raises(ValueError, match=r"layer.latent_(down|up) of LatentMoE changes what the experts get"):
        upcycle(full_state_dict(torch.nn.ModuleDict({"layer": ParallelMLP(D, HIDDEN, bias=False)})), latent)
    with pytest.raises(ValueError, match=r"layer.up.bias: experts have no biases"):
        upcycle(
            full_state_dict(torch.nn.ModuleDict({"layer": ParallelMLP(D, HIDDEN)})), torch.nn.ModuleDict({"layer": moe})
        )


@pytest.mark.parametrize(
    "options", [{}, {"score": "sigmoid", "bias_rate": 0.1}, {"groups": 2, "top_groups": 1}], ids=str
)
def test_the_router_of_one_expert_a_token_learns_from_the_loss(options):
    """A weight divided by itself would have no gradient: it is the score over all experts, as in Switch."""
    x, mask = inputs("plain")
    p = {name: w.requires_grad_() for name, w in weights(options, "plain").items()}
    want, _, _ = oracle(p, x, mask, top_k=1, normalize=False, **options)
    (want * draw(9, B, T, D)).sum().backward()
    moe = build(top_k=1, **options)
    got = moe(x)
    (got * draw(9, B, T, D)).sum().backward()
    close(got.detach(), want.detach(), "y")
    close(moe.router.weight.grad, p["router.weight"].grad, "gradient of the router")
    assert moe.router.weight.grad.abs().max() > 1


def check_given(sizes):
    """Whatever of the axes a user passes, and however gradients are summed: they are right, or refused."""
    m, passed = mesh(**sizes), []
    _, _, wanted, _ = truth("plain", 0, top_k=K, aux_coefficient=0.7)
    for given in itertools.chain.from_iterable(itertools.combinations(("tp", "ep", "etp"), n) for n in range(4)):
        for how in ("shard", "mesh", "alone"):
            if how == "alone" and (m.data.size > 1 or "tp" not in given):
                continue  # nobody tells the layer that others bring the same tokens
            axes = {name: getattr(m, name) for name in given}
            moe = ParallelMoE(D, HIDDEN, E, top_k=K, cp=m.cp, data=m.data, dtype=torch.float64, **axes)
            load_full_state_dict(moe, weights({}, "plain"))
            x, dy = (c._split(c._split(full, m.dp, 0), m.cp, 1) for full in (inputs("plain")[0], draw(9, B, T, D)))
            try:
                if how == "shard":
                    shard_data_parallel(moe, m, zero=0)
                (moe(x) * dy).sum().backward()
                reduce_gradients(moe, *([m] if how == "mesh" else []))
            except ValueError as error:
                if re.search(
                    r"built with .*etp of size \d|has replicas over tp \(2 ranks|lies on the axis etp", str(error)
                ):
                    continue
                raise
            for name, gradient in full_gradients(moe).items():
                close(gradient, wanted[name], f"gradient of {name}, given {given}, {how}")
            passed.append((given, how))
    return passed


@pytest.mark.parametrize("sizes", [
    {"tp": 2}, {"dp": 2, "etp": 2}, {"cp": 2, "ep": 2}, {"tp": 2, "dp": 2, "etp": 1, "ep": 4},
], ids=lambda s: "x".join(f"{k}{v}" for k, v in s.items()))  # fmt: skip
def test_axes_that_a_user_leaves_out_change_no_gradient_or_are_refused(ranks, sizes):
    for passed in ranks(world(sizes), check_given, sizes):
        assert (("tp", "ep", "etp"), "shard") in passed
        assert (("tp", "ep", "etp"), "mesh") in passed
        if "etp" not in sizes:
            assert (("tp", "ep"), "shard") in passed, "etp is tp where it isn't given"


@pytest.mark.parametrize("scope", some("global", of=AUX_LOSSES))
def test_a_compiled_mixture_trains_by_its_balance_loss(scope):
    """AOTAutograd makes an output that is a view again from its base: a loss that hung on the view was lost."""
    moe = materialize(ParallelMoE(D, HIDDEN, E, K, aux_loss=scope, aux_coefficient=1.0, dtype=torch.float64), 0, "cpu")
    if scope == "global":
        moe.router.fractions.data.copy_(torch.arange(1.0, E + 1))
    x, found = draw(0, B, T, D), []
    torch.compiler.reset()
    for call in (moe, torch.compile(moe, backend="aot_eager")):
        moe.zero_grad()
        call(x, loss_scale=SCALE).sum().backward()
        found.append(moe.router.weight.grad.clone())
    close(found[1], found[0], "the router's gradient")
    moe.zero_grad()
    moe(x, loss_scale=0.0).sum().backward()
    assert not torch.allclose(moe.router.weight.grad, found[0]), "the balance loss has no part in it"
