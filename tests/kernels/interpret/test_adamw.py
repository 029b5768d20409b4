"""Numerics of adamw_foreach."""

import functools

import laws
import pytest
import torch

from mpcore.kernels.adamw import AdamWState, adamw_foreach, adamw_now

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BETAS, KEY = (0.9, 0.95), 2**40 + 12345


def inputs(n, param, moments, master):
    g = torch.Generator().manual_seed(n)
    made = {name: laws.drawn(torch.randn, n, generator=g).to(param) for name in ("param", "grad")}
    made["exp_avg"] = laws.drawn(torch.randn, n, generator=g).to(moments)
    made["exp_avg_sq"] = laws.drawn(torch.rand, n, generator=g).to(moments)
    if master:
        made["master"] = made["param"].float() + 1e-3 * laws.drawn(torch.randn, n, generator=g)
    return made


def updated(function, made, steps=3.0, **options):
    """What a step leaves, from copies in a sea of NaN."""
    placed = {name: laws.place(x, "contiguous", 0) for name, x in made.items()}
    now = adamw_now(torch.tensor([steps]), 0.01, BETAS)[0]
    function(**placed, now=now, betas=BETAS, eps=1e-8, weight_decay=0.1, **options)
    for name, x in placed.items():
        base = x._base if x._base is not None else x
        assert base[: laws.GUARD].isnan().all(), name
        assert base[laws.GUARD + x.numel() :].isnan().all(), name
    return {name: x for name, x in placed.items() if name != "grad"}


kernel, adamw_reference = (functools.partial(laws.adamw, impl=impl) for impl in ("triton", "reference"))
KINDS = [(F32, F32, False), (BF16, F32, True), (F16, F32, True), (BF16, BF16, True), (BF16, BF16, False),
         (F32, BF16, False), (BF16, F32, False)]  # fmt: skip


@pytest.mark.parametrize(("param", "moments", "master"), KINDS, ids=str)
@pytest.mark.parametrize("n", [1, 1000, 2500])
def test_errs_at_most_twice_as_much_as_the_reference(n, param, moments, master):
    made = inputs(n, param, moments, master)
    truth = updated(adamw_reference, {name: x.double() for name, x in made.items()})
    plain, found = updated(adamw_reference, made), updated(kernel, made, scale=torch.ones(()))
    for name, exact in truth.items():
        assert found[name].dtype == made[name].dtype
        rounding = torch.finfo(made[name].dtype).eps * exact.abs().max()
        error, granted = ((x[name].double() - exact).abs().max() for x in (found, plain))
        assert error <= 2 * max(granted, rounding), name


@pytest.mark.parametrize(("moments", "master"), [(F32, False), (BF16, False), (BF16, True)], ids=str)
def test_random_rounding_is_the_references_bit_for_bit(moments, master):
    """Where the float32 value is the same; it is in all but a few last bits, of which one in 65536 shows."""
    made = inputs(6 * 200, BF16, moments, master)
    place = (torch.arange(6) * 977 + 2**33, torch.arange(200) * 3 + 5)
    for options in ({"key": KEY}, {"key": 7, "place": place}):
        plain, found = updated(adamw_reference, made, **options), updated(kernel, made, **options)
        for name in plain:
            if plain[name].dtype == BF16:
                assert (plain[name] != found[name]).sum() <= 2, name
    nearest = updated(kernel, made)
    assert (nearest["param" if not master else "exp_avg"] != found["param" if not master else "exp_avg"]).sum() > 100


def test_places_may_have_any_strides():
    made = inputs(6 * 20, BF16, BF16, False)
    rows, columns = torch.arange(12)[::2] * 977, torch.tensor(5).expand(20)
    dense = updated(kernel, made, key=KEY, place=(rows.contiguous(), columns.contiguous()))
    for name, x in updated(kernel, made, key=KEY, place=(rows, columns)).items():
        assert torch.equal(x, dense[name]), name


def test_the_scale_multiplies_the_gradient():
    made = inputs(300, F32, F32, False)
    half = updated(kernel, made, scale=torch.tensor(0.5, dtype=torch.float64))
    made["grad"] /= 2
    for name, x in updated(kernel, made, scale=torch.tensor(1.0, dtype=torch.float64)).items():
        assert torch.equal(x, half[name])


def test_float32_is_within_two_ulps_of_torchs_fused_step():
    made = inputs(3000, F32, F32, False)
    p = torch.nn.Parameter(made["param"].clone())
    theirs = torch.optim.AdamW([p], 0.01, BETAS, weight_decay=0.1, fused=True)
    slots = ("exp_avg", "exp_avg_sq")
    for t in range(1, 5):
        p.grad = made["grad"] / t
        before = {n: theirs.state[p][n].clone() if t > 1 else torch.zeros(3000) for n in slots}
        before |= {"param": p.detach().clone(), "grad": p.grad}
        ours = updated(kernel, before, float(t))
        theirs.step()
        for name, want in [("param", p.detach()), *((n, theirs.state[p][n]) for n in slots)]:
            largest = torch.maximum(before[name].abs(), want.abs())  # whose last place a difference is rounded to
            if name == "exp_avg":  # a mean of two numbers: each term may be larger than the sum
                largest = torch.maximum(largest, (1 - BETAS[0]) * p.grad.abs())
            assert ((ours[name] - want).abs() <= 2 * torch.finfo(F32).eps * largest).all(), name


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("master", [False, True])
def test_what_is_written_has_a_new_version_and_no_graph(impl, master):
    made = inputs(6, F32, BF16, master)
    for name in ("param", "grad"):
        made[name].requires_grad_()
    x = torch.ones(6, requires_grad=True)
    y = (x * made["param"]).sum()
    before = {name: t._version for name, t in made.items()}
    laws.adamw(
        **made, now=adamw_now(torch.tensor([1.0]), 0.1, BETAS)[0], betas=BETAS, eps=1e-8, weight_decay=0.1, impl=impl
    )
    for name, t in made.items():
        assert (t._version > before[name]) == (name != "grad"), name
        assert t.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize(("moments", "master"), [(F32, True), (BF16, False)], ids=str)
def test_a_list_in_one_launch_has_the_bits_of_each_parameter_alone(moments, master):
    sizes = (1, 1000, 1024, 2500)
    alone = [inputs(n, BF16, moments, master) for n in sizes]
    now = adamw_now(torch.arange(1.0, 5.0), 0.01, BETAS)
    listed = [
        AdamWState(**{k: x.clone() for k, x in made.items()}, now=row) for made, row in zip(alone, now, strict=True)
    ]
    random = [{"key": key, "place": (torch.arange(n) * 3, torch.tensor([key]))} for key, n in enumerate(sizes)]
    random = [{}] * 4 if master else random
    listed = [state._replace(**how) for state, how in zip(listed, random, strict=True)]
    options = {"betas": BETAS, "eps": 1e-8, "weight_decay": 0.1, "scale": torch.tensor(0.5), "impl": "triton"}
    adamw_foreach(listed, **options)
    for made, row, state, how in zip(alone, now, listed, random, strict=True):
        laws.adamw(**made, now=row, **how, **options)
        for name, x in state.tensors.items():
            assert torch.equal(x, made[name]), name


def test_operators():
    made = inputs(40, BF16, BF16, True)
    now = adamw_now(torch.tensor([1.0]), 0.1, BETAS)[0]
    places = [torch.arange(4)], [torch.arange(10)]
    tensors = [[made[name]] for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
    for optional in (([now], [made["master"]], *places, torch.ones(())), ([now], [], [], [], None)):
        laws.check_operator(torch.ops.mpcore.adamw, *tensors, *optional, *BETAS, 1e-8, 0.1, [KEY])
