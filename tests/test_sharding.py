"""Where local tensors lie in logical ones: every cut is undone exactly, and a model may be cut anew at any time."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from mpcore import (
    AdamW,
    Axis,
    ColumnParallelLinear,
    Dropout,
    GateUpParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    VocabParallelEmbedding,
    full_state_dict,
    load_full_state_dict,
)
from mpcore import collectives as c
from mpcore.checkpoint import load, save
from mpcore.gradients import grad_norm, reduce_gradients
from mpcore.layers import materialize
from mpcore.layers.module import ParallelModule, normal
from mpcore.random import generator
from mpcore.sharding import shardings
from mpcore.sharding.declarations import add_partial, owners, persistent_buffers
from mpcore.sharding.declare import Shard, Sharding, cut, cut_blocks
from tests.layers.test_block import Model
from tests.pool import mesh

SIZES = [1, pytest.param(2, marks=pytest.mark.slow), 3, 4]


def whole(shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def cases(axis):
    """Name, logical shape, shard."""
    yield "plain", (12, 3), cut(12, axis, 0)
    yield "uneven", (10, 3), cut(10, axis, 0)
    yield "columns", (3, 10), cut(10, axis, 1)
    yield "units", (12, 2), cut(12, axis, 0, 3)
    yield "middle", (2, 7, 3), cut(7, axis, 1)
    yield "fewer than ranks", (2, 3), cut(2, axis, 0)
    yield "gate and up", (20, 3), cut_blocks((10, 10), axis, 0, (1, 1))
    if axis.size == 4:
        yield "runs in any order", (11, 2), Shard(axis, 0, (((0, 4), (8, 10)), ((2, 8),), ((9, 11), (3, 4)), ()))
    yield "three blocks", (3, 22), cut_blocks((8, 4, 10), axis, 1, (2, 1, 2))
    for heads, kv_heads in [(8, 8), (8, 2), (8, 1), (6, 2), (6, 3), (4, 4)]:
        layer = QKVParallelLinear(5, heads, kv_heads, 3, tp=axis, device="meta")
        yield (
            f"qkv {heads} {kv_heads}",
            layer.shardings["weight"].shape,
            next(iter(layer.shardings["weight"].shards), cut(len(layer.weight), axis, 0)),
        )


def check_round_trip():
    axis = mesh(tp=torch.distributed.get_world_size()).tp
    for name, shape, shard in cases(axis):
        sharding = Sharding(shape, (shard,))
        full = whole(shape)
        local = sharding.take(full)
        assert tuple(local.shape) == sharding.local_shape, name
        assert torch.equal(sharding.assemble(local), full), name
        strided = local.transpose(0, -1).contiguous().transpose(0, -1)
        assert torch.equal(sharding.assemble(strided), full), name
        assert sharding.assemble(strided).is_contiguous()
        index = torch.arange(shape[shard.dim]).tolist()
        held = [i for start, end in shard.mine for i in index[start:end]]
        assert len(held) == local.shape[shard.dim], name
        everyone = [i for runs in shard.runs for start, end in runs for i in range(start, end)]
        assert set(everyone) == set(index), f"{name}: some index is nowhere"
        assert shard.replicated == tuple(i for i in index if everyone.count(i) > 1), name
        owned = [i for i, mine in zip(held, shard.owned, strict=True) if mine]
        assert [i for start, end in shard.owned_runs for i in held[start:end]] == owned, name
        copied = {slot + i: held[index + i] for index, slot, length in shard.replica_runs for i in range(length)}
        assert copied == {slot: i for slot, i in enumerate(shard.replicated) if i in held}, name
        owners_of = c.all_reduce(torch.bincount(torch.tensor(owned, dtype=torch.int64), minlength=len(index)), axis)
        assert owners_of.eq(1).all(), f"{name}: an index without one owner"


@pytest.mark.parametrize("size", SIZES)
def test_what_is_taken_apart_is_put_together_again(ranks, size):
    ranks(size, check_round_trip)


def check_two_axes():
    m = mesh(tp=2, dp=2)
    for shape, shards in [
        ((6, 5), (cut(6, m.tp, 0), cut(5, m.dp, 1))),
        ((5, 7), (cut(5, m.dp, 0), cut(7, m.tp, 1))),
        ((10, 3, 3), (cut_blocks((5, 5), m.tp, 0, (1, 1)), cut(3, m.dp, 2))),
    ]:
        sharding, full = Sharding(shape, shards), whole(shape)
        local = sharding.take(full)
        assert tuple(local.shape) == sharding.local_shape
        assert torch.equal(sharding.assemble(local), full)


IDS = torch.arange(24).reshape(2, 12) % 21


def reshard(state, kind, tied):
    """Load a logical state, say what the model gives, and give the state back."""
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    model = Model(kind, tied=tied, tp=tp).double()
    load_full_state_dict(model, {name: torch.from_numpy(value) for name, value in state.items()})
    loss = model(IDS, IDS.flip(1), reduction="none")
    return {name: value.numpy() for name, value in full_state_dict(model).items()}, loss.detach().numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pitfall_16_cutting_a_model_anew_changes_nothing(ranks, kind, tied):
    torch.manual_seed(3)
    dense = Model(kind, tied=tied).double()
    first = {name: value.numpy() for name, value in full_state_dict(dense).items()}
    want = dense(IDS, IDS.flip(1), reduction="none").detach()
    assert first.keys() == dense.state_dict().keys(), "tied parameters under both names"
    state = first
    for size in (1, 2, 4, 3, 1):
        state, loss = ranks(size, reshard, state, kind, tied)[-1]
        torch.testing.assert_close(torch.from_numpy(loss), want, rtol=1e-12, atol=1e-12)
        assert state.keys() == first.keys()
        assert all((state[name] == first[name]).all() for name in first), f"a weight changed at tp={size}"


def logical_shapes():
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    table = VocabParallelEmbedding(50257, 2, tp=tp)
    gate_up, qkv = GateUpParallelLinear(4, 10, tp=tp), QKVParallelLinear(4, 6, 2, 2, tp=tp)
    state = full_state_dict(nn.ModuleDict({"table": table, "gate_up": gate_up, "qkv": qkv}))
    return {name: tuple(value.shape) for name, value in state.items()}


def test_pitfall_17_state_dicts_have_logical_shapes_at_every_size(ranks):
    want = {
        "table.weight": (50257, 2), "gate_up.weight": (20, 4), "gate_up.bias": (20,), "qkv.weight": (20, 4),
        "qkv.bias": (20,),
    }  # fmt: skip
    for size in (1, 3, 4):
        assert all(shapes == want for shapes in ranks(size, logical_shapes))


def check_load_errors():
    tp = mesh(tp=2).tp
    model = Model(tp=tp).double()
    state = full_state_dict(model)
    before = [p.detach().clone() for p in model.parameters()]
    lacking = {name: value for name, value in state.items() if name != "norm.weight"}
    with pytest.raises(ValueError, match=rf"the state dict of {len(lacking)} tensors has no 'norm.weight'"):
        load_full_state_dict(model, {name: value + 1 for name, value in lacking.items()})
    padded = {**state, "head.weight": torch.zeros(24, 8)}
    with pytest.raises(ValueError, match=r"head.weight has shape \(24, 8\), the model needs \(21, 8\)"):
        load_full_state_dict(model, {name: value + 1 for name, value in padded.items()})
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)), "half loaded"
    load_full_state_dict(model, {**state, "of another stage": torch.zeros(3)})


class Kept(nn.Module):
    """Ties by parameter, by module and by buffer, running statistics, and a buffer that isn't in the state dict."""

    def __init__(self, tp=Axis()):
        super().__init__()
        self.table, self.head = VocabParallelEmbedding(7, 4, tp=tp), ColumnParallelLinear(4, 7, bias=False, tp=tp)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm
        self.register_buffer("mean", self.norm.running_mean)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.dropout = Dropout(0.5)


def check_strict():
    torch.manual_seed(0)
    dense, sharded = Kept(), Kept(mesh(tp=2).tp)
    with torch.no_grad():
        for x in (*dense.parameters(), dense.norm.running_mean, dense.norm.running_var):
            x.normal_()
    load_full_state_dict(sharded, dense.state_dict())
    state = full_state_dict(sharded)
    other = Kept()
    other.load_state_dict(state)  # strict
    for name, value in dense.state_dict().items():
        assert torch.equal(state[name], value), name
        assert torch.equal(other.state_dict()[name], value), name
    state["norm.running_var"].add_(1)
    assert torch.equal(sharded.norm.running_var, dense.norm.running_var), "a copy"
    once = {name: value for name, value in dense.state_dict().items() if name not in ("table.weight", "mean")}
    load_full_state_dict(sharded, {name: value + 1 for name, value in once.items()})
    assert torch.equal(full_state_dict(sharded)["table.weight"], dense.table.weight + 1)
    with pytest.raises(ValueError, match=r"table.weight and head.weight differ"):
        load_full_state_dict(sharded, {**once, "table.weight": dense.table.weight + 2})
    del once["norm.running_var"], once["again.running_var"]
    with pytest.raises(ValueError, match=r"has no 'norm.running_var'"):
        load_full_state_dict(sharded, once)


@pytest.mark.parametrize("wrap", ["compiled model", "compiled block", "checkpointed block"])
def test_wrappers_change_no_name_and_so_no_first_value_no_mask_and_no_state(wrap):
    def build(wrap):
        model = nn.Sequential(Kept(), ColumnParallelLinear(4, 6))
        if wrap == "compiled model":
            return torch.compile(model, backend="eager")
        for i in range(2) if wrap else ():
            model[i] = checkpoint_wrapper(model[i]) if "check" in wrap else torch.compile(model[i], backend="eager")
        return materialize(model, 3)

    bare, wrapped = build(None), materialize(build(wrap), 3)
    want, got = full_state_dict(bare), full_state_dict(wrapped)
    assert got.keys() == want.keys() == bare.state_dict().keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert {m.key for m in wrapped.modules() if isinstance(m, Dropout)} == {bare[0].dropout.key}
    assert shardings(wrapped) == shardings(bare)
    load_full_state_dict(wrapped, bare.state_dict())
    assert [name for name, *_ in persistent_buffers(wrapped)] == [name for name, *_ in persistent_buffers(bare)]


def test_an_axis_of_size_1_is_no_difference_and_is_not_added():
    model = nn.ModuleList(RMSNorm(2, tp=Axis(role="tp"), sequence_parallel=i == 0) for i in range(2))
    model[1].weight = model[0].weight
    add_partial(model[1], "weight", Axis())
    assert shardings(model) == {"0.weight": Sharding((2,))}
    for name in ("tp", "cp"):
        add_partial(model[1], "weight", Axis(2, 0, role=name))
    assert [axis.role for axis in shardings(model)["0.weight"].partial] == ["tp", "cp"]


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize(
    "how", [parametrizations.weight_norm, lambda m: register_parametrization(m, "weight", Scaled())]
)
def test_a_parameter_that_was_parametrized_is_refused_by_name(how):
    tp = Axis(2, 1, None, "tp")
    model = nn.Sequential(nn.Linear(3, 4), ColumnParallelLinear(4, 6, tp=tp))
    how(model[0])
    list(owners(model))
    how(model[1])
    for use in (full_state_dict, reduce_gradients, shardings, lambda model: load_full_state_dict(model, {})):
        with pytest.raises(ValueError, match=r"^1\.weight is no parameter any more, and Parametrized.*remove_param"):
            use(model)
    with pytest.raises(ValueError, match=r"^weight is no parameter any more"):
        shardings(model[1])
    remove_parametrizations(model[1], "weight")
    assert shardings(model)["1.weight"].local_shape == (3, 4)


@pytest.mark.parametrize(("size", "check"), [(4, check_two_axes), (2, check_load_errors), (2, check_strict)])
def test_states_on_ranks(ranks, size, check):
    ranks(size, check)


class OnFirst(ParallelModule):
    """A matrix that the first rank of tp holds, and the others hold nothing of."""

    def __init__(self, tp: Axis) -> None:
        super().__init__(tp=tp)
        runs = (((0, 4),), *((),) * (tp.size - 1))
        self.declare("weight", (4, 3), normal(1.0), shard=Shard(tp, 0, runs))


def check_empty_runs(folder):
    on = mesh(tp=2)
    model = materialize(nn.ModuleDict({"a": OnFirst(on.tp)}), seed=1)
    assert model["a"].weight.shape == ((4, 3) if on.tp.rank == 0 else (0, 3))
    want = normal(1.0)(torch.empty(4, 3), generator=generator(1, "a.weight"))
    torch.testing.assert_close(full_state_dict(model)["a.weight"], want)
    optimizer = AdamW(model, lr=0.1, state_dtype=torch.bfloat16)
    model["a"].weight.grad = torch.full_like(model["a"].weight, 2.0)
    reduce_gradients(model, on)
    assert float(grad_norm(model, on)) == pytest.approx(2 * 12**0.5)
    optimizer.step()
    moved = full_state_dict(model)["a.weight"]
    assert float((moved - want).abs().min()) > 0.05
    save(f"{folder}/step-1", model, optimizer, mesh=on, step=1)
    again = materialize(nn.ModuleDict({"a": OnFirst(on.tp)}), seed=2)
    load(f"{folder}/step-1", again, mesh=on)
    assert torch.equal(full_state_dict(again)["a.weight"], moved)


def test_a_rank_may_hold_nothing(ranks, tmp_path):
    ranks(2, check_empty_runs, str(tmp_path), timeout=60)
