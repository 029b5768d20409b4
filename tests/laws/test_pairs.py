"""The law of pairs: each layer under each pair of features equals its formula in plain torch, or is refused.

Two steps of AdamW in float64 are compared: losses, gradient norms, and the logical parameters afterwards. A refusal is
a ValueError before the first step. There is no third outcome.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mpcore as mp
from mpcore.experimental import QKClip
from mpcore.layers.linear import ParallelLinear
from mpcore.mesh.agreement import gather_objects
from tests.laws.cases import CASES, DOCUMENTS, MOVES, B, Block, Case, D, H, K, T, _attention
from tests.laws.features import FEATURES, REFUSED, Feature

pytestmark = pytest.mark.timeout(900)  # they run beside others, at the lowest priority
STEPS = 2
EQUAL, IS_REFUSED = "equal", "refused"
REASONS: list[str] = []  # of refusals, for the text of a failure
RULE = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}  # a large eps: the gradient's scale matters


def pairs(of: Sequence[str] = tuple(FEATURES)) -> list[tuple[str, ...]]:
    """No feature, each one, and each two that don't exclude each other by nature."""
    both = itertools.combinations(of, 2)
    kinds = [(pair, [FEATURES[name].kind for name in pair]) for pair in both]
    return [(), *((name,) for name in of), *(pair for pair, (a, b) in kinds if not a or a != b)]


def draw(name: str, *shape: int) -> Tensor:
    """Values that depend on a name and a shape alone."""
    generator = torch.Generator().manual_seed(sum(ord(letter) * at for at, letter in enumerate(name, 1)))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 2 + name.endswith(("norm.weight", "scale"))


def squares(y: Tensor, target: Tensor) -> Tensor:
    """The loss, a sum."""
    return (y - target).square().sum()


def groups(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups: vectors don't decay."""
    vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
    return [{"params": [p for p in parameters if p.dim() > 1]}, vectors]


Clip = Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]


def plain(case: Case, features: Sequence[Feature], clip: Clip = lambda p, x: {}) -> dict[str, Any]:
    """Train the formula in plain torch. `clip` returns factors on rows of parameters, for after the step."""
    model = Block(case)
    for feature in features:
        model = feature.change(model)
    params = {name: draw(name, *p.shape).requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    names = {p: name for name, p in model.named_parameters()}
    tied = {name: params[names[p]] for name, p in model.named_parameters(remove_duplicate=False)}
    tied = {name: p for name, p in tied.items() if name not in params}
    trained = {name: p for name, p in params.items() if p.requires_grad}
    most = sum(each.max_norm for each in features) or math.inf
    make = next((each.optimizer for each in features if each.optimizer), partial(torch.optim.AdamW, **RULE))
    optimizer = make(groups([*trained.values()]))
    x, steps = draw("x", B, T, D), []
    for step in range(STEPS):
        read = params | tied
        for feature in features:
            read = feature.truth(read)
        read = {name.removeprefix("layer."): p for name, p in read.items()}
        scale = params["scale"] * (params["scale"] if "again" in tied else 1)
        if any(feature.evaluates for feature in features):
            with torch.no_grad():
                y = case.truth(read, 3 * x * scale)
            steps += [squares(y, draw("target", *y.shape)).item() / y.numel()]
        scaled = (x @ params["sometimes"] if "sometimes" in params and step == 0 else x) * scale
        y = case.truth(read, scaled, *[torch.arange(B) + step * B] * case.draws)
        loss = squares(y, draw("target", *y.shape)) / y.numel()
        loss.backward()
        norms = [p.grad.norm() for p in trained.values() if p.grad is not None]
        steps += [loss.item(), math.hypot(*norms)]
        for p in trained.values():
            p.grad = p.grad if p.grad is None else p.grad * min(1.0, most / steps[-1])
        with torch.no_grad():
            factors = clip({name.removeprefix("layer."): p for name, p in params.items()}, scaled)
            optimizer.step()
            for name, rows in factors.items():
                params[f"layer.{name}"].mul_(rows.view(-1, *[1] * (params[f"layer.{name}"].dim() - 1)))
        optimizer.zero_grad()
    params |= tied
    return {"steps": torch.tensor(steps, dtype=torch.float64), **{name: p.detach() for name, p in params.items()}}


def moved(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a mesh with all ranks of a stage on dp, or on tp where all were on dp."""
    ranks = mesh.get("tp", 1) * mesh.get("cp", 1) * mesh.get("dp", 1)
    return {"pp": mesh.get("pp", 1), "tp" if {*mesh} <= {"dp", "pp"} else "dp": ranks}


def sharded(mesh: mp.Mesh, case: Case, features: Sequence[Feature], width: int, folder: str) -> dict[str, Any]:
    """Train the layer on a mesh with these features."""
    on = {name: value for feature in features for name, value in feature.on.items()}
    own = [each.optimizer for each in features if each.optimizer]
    of_run, prepare, most = {"data": mp.Zero(0)}, mp.prepare, sum(each.max_norm for each in features)
    for feature in features:
        mesh, of_run = feature.of_mesh(mesh), of_run | feature.of_run
        prepare = prepare if feature.prepare is mp.prepare else feature.prepare

    def start(values: str = "") -> mp.Run:
        model = Block(case, mesh, on.get("sequence_parallel", False))
        for feature in features:
            model = feature.change(model)
        first = {p: name for name, p in model.named_parameters()}
        same = {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}
        shapes = {name: p.shape for name, p in mp.full_state_dict(model).items()}
        mp.load_full_state_dict(model, {name: draw(values + same[name], *shape) for name, shape in shapes.items()})
        return prepare(
            model, mesh, blocks=[model.layer], initialize=False, loss=squares,
            optimizer=lambda m: own[0](groups([*m.parameters()])) if own else mp.AdamW(m, **RULE),
            **{"micro_batches": case.stages} | of_run,
        )  # fmt: skip

    run, steps = start(), []
    for step in range(STEPS):
        if step == 1 and any(feature.resumes for feature in features):
            path = run.save(folder)
            if any(feature.moves for feature in features):
                mesh = mp.build_mesh(device_type="cpu", **moved(case.mesh))
                for feature in features:
                    mesh = feature.of_mesh(mesh)
            run = start("other ")
            run.load(path)
        share, x, target = run.share(B), draw("x", B, T, D), draw("target", B, T, width)
        if case.context:
            x, target = (mp.shard_sequence(each, mesh.cp, case.context, dim=1) for each in (x, target))
        if step == 1 and any(feature.grows for feature in features):
            run.set_micro_batches(2 * case.stages)
        numbers = {"samples": run.samples(B)} if case.draws else {}
        run.model.step = 1  # without the parameter of one step
        if any(feature.evaluates for feature in features):
            steps += [run.evaluate([(3 * x[share], target[share])])]
        if any(feature.abandons for feature in features):
            run.forward_backward(3 * x[share], target[share], **numbers)
            run.drop_gradients()
        run.model.step = step
        run.forward_backward(x[share], target[share], **numbers)
        if most:
            run.clip_gradients(most)
        if any(feature.evaluates for feature in features):
            run.finish_gradients()
            run.model.eval()(
                x[share, : None if run.model.first else run.model.layer.input_shape[1]]
            )  # with a graph, and no backward follows
            run.model.train()
        result = run.optimizer_step()
        steps += [result.loss, result.grad_norm]
    with run.parameters():
        own = mp.full_state_dict(run.model)
    listed = gather_objects({name: value.tolist() for name, value in own.items()}, mesh.pp.group)
    of_stages = {name: value for stage in listed for name, value in stage.items()}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in {"steps": steps, **of_stages}.items()}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> str:
    """Return `EQUAL`, or what differs."""
    if got.keys() != want.keys():
        return f"names differ: {sorted(got.keys() ^ want.keys())}"
    errors = {name: ((got[name] - want[name]).abs().max() / want[name].abs().max().clamp(1)).item() for name in want}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return EQUAL if errors[worst] <= tolerance else f"{worst} is off by {errors[worst]:.2g}"


def outcome(names: Sequence[str], case: Case, *more: Feature, **how: Any) -> str:
    """Return `EQUAL`, `IS_REFUSED`, or what happened instead: the same on all ranks of the case's mesh."""
    features = [*(FEATURES[name] for name in FEATURES if name in names), *more]
    try:
        want = plain(case, features, **how)
    except ValueError as error:  # what the model alone refuses
        REASONS.append(str(error))
        return IS_REFUSED

    def rank() -> str:
        try:
            mesh = mp.build_mesh(device_type="cpu", **case.mesh)
            return compare(sharded(mesh, case, features, width, folder), want, case.tolerance)
        except ValueError as error:
            REASONS.append(str(error))
            return IS_REFUSED

    if "compile" in names:
        torch.compiler.reset()  # ranks are threads of this process, and share its limit of graphs
    width = case.truth(want | {n.removeprefix("layer."): p for n, p in want.items()}, draw("x", 1, T, D)).shape[-1]
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = mp.simulate(rank, ranks=math.prod(size for name, size in case.mesh.items() if name != "ep"))
    except RuntimeError as error:
        return f"raised {error}"
    return found[0] if len(set(found)) == 1 else f"ranks differ: {found}"


COMPILED = ("column", "swiglu", "attention", "documents", "latent attention", "gated DeltaNet", "Mamba-2", "layer norm",
            "embedding", "cross entropy")  # fmt: skip
"""The layers that are compiled here too; `make soak` compiles all."""


def expected(names: Sequence[str], case: Case) -> str:
    """Whether these features are equal or refused on the mesh of a case."""
    about = not {"LoRA", "overlapped communication"}.isdisjoint(names)
    if about and not any(isinstance(module, ParallelLinear) for module in Block(case).modules()):
        names = [name for name in names if name != "LoRA"]  # no layer for it
        case = replace(case, mesh={**case.mesh, "tp": 1})
    if not {"sequence parallel", "LoRA"}.isdisjoint(names):  # then a linear layer has something to recompute
        names = [name for name in names if name != "recompute budget"]
    if "overlapped communication" in names and (case.mesh.get("tp", 1) == 1 or MOVES in names):
        return IS_REFUSED  # no layer has it, or none on the other axes
    if case.stages > 1 and "dp" in case.mesh and {"invariant", "more micro-batches"} <= {*names}:
        return IS_REFUSED  # more leaves of the batch than the first step had
    on_one_rank = {"invariant", "split backward"}  # refused there too
    pair = set(names) in REFUSED and not (case.mesh.keys().isdisjoint(("dp", "cp")) and on_one_rank.isdisjoint(names))
    return IS_REFUSED if pair or not set(names).isdisjoint(case.refuses) else EQUAL


def check(case: str, under: Sequence[tuple[str, ...]]) -> None:
    """Fail with the list of all sets of features whose outcome is another than expected."""
    wrong = []
    for names in under:
        found = outcome(names, CASES[case])
        if found != expected(names, CASES[case]):
            why = f" ({REASONS[-1]})" if found == IS_REFUSED else ""
            if len(names) > 2:
                fail = [two for two in itertools.combinations(names, 2) if outcome(two, CASES[case]) != EQUAL]
                why += f"; of its pairs {', '.join(map(' x '.join, fail)) or 'none'}"
            wrong.append(f"{' x '.join(names) or 'alone'}: {found}{why}")
    assert not wrong, f"{case}, {len(wrong)} of {len(under)} sets of features:\n" + "\n".join(wrong)


Pair = frozenset[str]
PAIRS = {Pair(names) for names in pairs() if len(names) == 2 and "compile" not in names}  # it takes a second


def grow(group: tuple[str, ...], of: Sequence[str], size: int, equal: set[Pair], left: set[Pair]) -> tuple[str, ...]:
    """Add features to a group of which each two are equal, first that with the most pairs that are left."""
    for _ in range(size - len(group)):
        fit = [name for name in of if name not in group and all(Pair((name, each)) in equal for each in group)]
        group += tuple(sorted(fit, key=lambda name: -sum(Pair((name, each)) in left for each in group))[:1])
    return group


def combinable(name: str) -> tuple[list[str], set[Pair]]:
    """Return the features that a case has in groups, shuffled, and those pairs of them that are equal."""
    names = [each for each in FEATURES if each not in (*CASES[name].refuses, "compile")]
    equal = {pair for pair in PAIRS if pair <= {*names} and expected([*pair], CASES[name]) == EQUAL}
    random.Random(name).shuffle(names)
    return names, equal


@cache
def cover() -> dict[str, list[tuple[str, ...]]]:
    """Return groups of four for each case: each case has each feature, and all together have each pair."""
    left, found = set(PAIRS), {}
    for name in CASES:
        rest, equal = combinable(name)
        found[name] = [(), *((each,) for each in CASES[name].refuses), *([("compile",)] if name in COMPILED else [])]
        while rest:
            found[name].append(group := grow((rest[0],), rest, 4, equal, left))  # four take the least time a feature
            left -= {Pair(pair) for pair in itertools.combinations(group, 2)}
            rest = [each for each in rest if each not in group]
    for at, pair in enumerate(sorted(map(sorted, left))):
        found[("row", "block")[at % 2]].append(tuple(pair))
    return found


def cover_all(name: str) -> list[tuple[str, ...]]:
    """Return groups of eight that hold all pairs of a case that are equal, and the pairs that it refuses."""
    left, found = set(PAIRS), [(), ("compile",), *((each,) for each in CASES[name].refuses)]
    names, equal = combinable(name)
    while left & equal:
        begin = tuple(min(map(sorted, left & equal)))
        found.append(group := grow(begin, names, 8, equal, left))  # eight take the least time a pair
        left -= {Pair(pair) for pair in itertools.combinations(group, 2)}
    compiled = [names for names in pairs() if len(names) == 2 and "compile" in names]
    return [*found, *map(tuple, sorted(map(sorted, left))), *(compiled if name in ("row", "block") else [])]


@pytest.mark.parametrize("case", CASES)
def test_every_layer_under_pairs_of_features_equals_plain_torch_or_is_refused(case):
    check(case, cover()[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_pairs_of_every_layer_equal_plain_torch_or_are_refused(case):
    check(case, cover_all(case))


@pytest.mark.parametrize("zero", ["ZeRO-1", "ZeRO-3"])
def test_a_step_without_a_gradient_is_refused(zero):
    """Of adapters of a head whose weight the loss reads by itself; ZeRO makes the output require a gradient."""
    assert outcome(["LoRA", zero], CASES["fused cross entropy"]) == IS_REFUSED


THRESHOLD = 2.2  # some heads are above it, some below
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def _gamma(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """The factor of each head of q and k [B, H, T, K]."""
    largest = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf).amax((0, 2, 3))
    return (THRESHOLD / largest).clamp(max=1)


def clip(kv: int, seen: Tensor, p: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Kimi K2's algorithm 1 with one key for each head; where heads share keys, the query takes all of the factor."""
    parts = torch.nn.functional.linear(x, p["qkv.weight"], p["qkv.bias"]).split([H * K, kv * K, kv * K], -1)
    q, k = (part.unflatten(-1, (-1, K)).transpose(1, 2) for part in parts[:2])
    gamma, one = _gamma(q, k.repeat_interleave(H // kv, 1), seen), torch.ones(kv, dtype=torch.float64)
    both = [gamma.sqrt(), gamma.sqrt()] if kv == H else [gamma, one]
    return dict.fromkeys(("qkv.weight", "qkv.bias"), torch.cat([*both, one]).repeat_interleave(K))


def clip_latent(p: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The same with latents: the heads share the rotary part of their keys."""
    low, k_rope = (x @ p["kv_down.weight"].T).split([6, 2], -1)
    q = (x @ p["q_up.weight"].T).unflatten(-1, (H, 4)).transpose(1, 2)
    low = torch.nn.functional.rms_norm(low, (6,), p["kv_norm.weight"], 1e-6)
    k = (low @ p["kv_up.weight"].T).unflatten(-1, (H, 2 + K)).transpose(1, 2)[..., :2]
    gamma = _gamma(q, torch.cat([k, k_rope.unsqueeze(1).expand(-1, H, -1, -1)], -1), CAUSAL)
    root, one = gamma.sqrt(), torch.ones_like(gamma)
    return {"q_up.weight": torch.stack([root, root, gamma, gamma], 1).flatten(),
            "kv_up.weight": torch.stack([root] * 2 + [one] * K, 1).flatten()}  # fmt: skip


@pytest.mark.parametrize(("case", "names", "how"), [
    ("attention", ["ZeRO-3", "full recompute"], partial(clip, H, CAUSAL)),
    ("documents, zigzag", ["sequence parallel"], partial(clip, H, CAUSAL & (DOCUMENTS[:, None] == DOCUMENTS))),
    ("documents, allgather", ["ZeRO-1"], partial(clip, H, CAUSAL & (DOCUMENTS[:, None] == DOCUMENTS))),
    ("uneven heads", [], partial(clip, 2, CAUSAL & CAUSAL.triu(-2))),
    ("own token", [], partial(clip, H, CAUSAL & CAUSAL.T)), ("attention", ["resume"], partial(clip, H, CAUSAL)),
    ("not causal", ["LoRA"], None), ("swiglu", [], None), ("one KV head", ["ZeRO-2"], partial(clip, 1, CAUSAL)),
    ("context, alltoall", ["2 micro-batches", "evaluation"], partial(clip, 2, CAUSAL)),
    ("latent attention", ["ZeRO-3", "evaluation"], clip_latent),
    ("latent attention, ring", ["sequence parallel"], clip_latent),
])  # fmt: skip
def test_clipped_logits_equal_plain_torch(case, names, how):
    def prepare(*model: Any, **options: Any) -> mp.Run:
        return mp.prepare(*model, observers=[QKClip(THRESHOLD)], **options)

    own = Case(lambda **on: mp.ParallelAttention(D, H, head_dim=K, window=1, **on), _attention(window=1))
    of, feature = CASES.get(case, own), Feature(prepare=prepare)
    if how is None:  # frozen projections, and a model without attention
        assert outcome(names, of, feature) == IS_REFUSED
        return
    assert outcome(names, of, feature, clip=how) == EQUAL
    assert outcome(names, of, clip=how) != EQUAL, "nothing was clipped"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_whose_products_overflow_16_bits_are_clipped_to_the_threshold(dtype):
    """Their infinity made the weights of queries and keys 0."""
    layer, clip = mp.ParallelAttention(64, 1, bias=False, dtype=dtype), QKClip(100.0)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.nn.init.normal_(layer.qkv.weight, 0.0, 12.0, generator=torch.Generator().manual_seed(2))
    run = mp.prepare(
        layer, mp.Mesh(), blocks=[layer], loss=lambda y, _: y.float().sum(), initialize=False, observers=[clip],
        optimizer=lambda model: mp.AdamW(model, lr=0.0),
    )  # fmt: skip
    for most in (pytest.approx(16000, rel=0.5), pytest.approx(100, rel=0.01)):
        run.forward_backward(x, x, tokens=5)
        run.optimizer_step()
        assert clip.logits[""].item() == most
