"""Multi-head latent attention: the paper's equations one head at a time, on every layout; and Hugging Face's layer."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from mpcore import (
    Axis,
    MultiLatentAttention,
    RotaryEmbedding,
    full_state_dict,
    load_full_state_dict,
    shard_sequence,
    unshard_sequence,
)
from mpcore import checkpoint as ckpt
from mpcore import collectives as c
from mpcore.gradients import reduce_gradients
from mpcore.layers import materialize
from mpcore.sharding import shardings
from mpcore.tools.analysis.counts import CommunicationCounter
from tests.equality import FEWER_SIZES, close, draw, full_gradients
from tests.layers.test_attention import DOCUMENTS, nudge
from tests.oracles.attention import sees
from tests.pool import mesh, on_ranks

B, T, D, H = 2, 12, 6, 5
NOPE, TURN, V, LATENT, Q = 3, 4, 2, 7, 5  # per head, the widths that turn or not, values; the latents
SIZES = {"kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": TURN, "v_head_dim": V}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 0.9}
FACTOR = 1.7  # of the scores, as YaRN has one


def build_latent(q_lora_rank=Q, heads=H, interleaved=True, scaling=None, factor=None, **options):
    rope = RotaryEmbedding(TURN, 100.0, interleaved=interleaved, scaling=scaling)
    rope.score_factor = factor or rope.score_factor
    options = {"rope": rope, "q_lora_rank": q_lora_rank, **SIZES, **options}
    return nudge(MultiLatentAttention(D, heads, **options)).double()


def turned(x, places, interleaved):
    """Each pair of dimensions, a complex number, times e^(i place frequency)."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    frequencies = torch.tensor([100.0 ** (-2 * i / TURN) for i in range(TURN // 2)]).double()
    y = torch.complex(a, b) * torch.exp(1j * places[:, None] * frequencies)
    return torch.stack([y.real, y.imag], -1).flatten(-2)  # in another order, of queries and keys alike


def rms(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def paper(p, x, see, places, *, heads=H, interleaved=True, softcap=None, factor=1.0):
    """Equations 37 to 47 of DeepSeek-V2, with its norms of both latents."""
    c_q = x
    if "q_down.weight" in p:
        c_q = rms(F.linear(x, p["q_down.weight"], p.get("q_down.bias")), p["q_norm.weight"])
    c_kv, k_r = F.linear(x, p["kv_down.weight"], p.get("kv_down.bias")).split([LATENT, TURN], -1)
    c_kv, k_r = rms(c_kv, p["kv_norm.weight"]), turned(k_r, places, interleaved)
    outputs = []
    for w_q, w_kv in zip(p["q_up.weight"].chunk(heads), p["kv_up.weight"].chunk(heads), strict=True):
        w_uq, w_qr = w_q.split([NOPE, TURN])
        w_uk, w_uv = w_kv.tensor_split([NOPE])
        scores = (c_q @ w_uq.T) @ (c_kv @ w_uk.T).mT + turned(c_q @ w_qr.T, places, interleaved) @ k_r.mT
        scores = factor * scores / (NOPE + TURN) ** 0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        outputs.append(scores.masked_fill(~see, -torch.inf).softmax(-1) @ (c_kv @ w_uv.T))
    return F.linear(torch.cat(outputs, -1), p["output.weight"], p.get("output.bias"))


MASKS = {
    "causal": {}, "full": {"causal": False}, "documents": {"documents": DOCUMENTS},
    "window": {"window": 3, "documents": DOCUMENTS}, "any": {"mask": sees(T, True, 5, None)},
    "keys": {"mask": torch.arange(T) < torch.tensor([[[5]], [[T]]])},
}  # fmt: skip


def check(options, mask, axes, length=T, rows=B, frozen=()):
    """One layer on these axes against the paper: output, gradients of the input and of all parameters."""
    options = {"context": "ring", "factor": FACTOR, **options}
    mask = {"causal": True, "window": None, "documents": None, **MASKS[mask]}
    ends, given = mask.pop("documents"), mask.pop("mask", None)
    sharing = {name: options.pop(name) for name in ("sequence_parallel", "sequence_dim", "context") if name in options}
    kind, dim = sharing["context"], sharing.get("sequence_dim", 1)
    torch.manual_seed(1)
    dense = build_latent(**options, **mask)
    p = {name: q.detach().clone().requires_grad_(name not in frozen) for name, q in dense.named_parameters()}
    sharded = build_latent(**options, **mask, **sharing, **axes)
    load_full_state_dict(sharded, full_state_dict(dense))
    for name in frozen:
        sharded.get_parameter(name).requires_grad_(False)
    rows = 1 if ends is not None else rows
    x, x_paper = (draw(1, rows, length, D).requires_grad_() for _ in range(2))
    places = torch.arange(length)
    if ends is not None:
        ends = ends.clamp(max=length)
        places = places - torch.stack([ends[ends <= t].max() for t in range(length)])
    see = sees(length, mask["causal"], mask["window"], ends)
    see = see if given is None else see & given
    looks = {name: options[name] for name in ("heads", "interleaved", "softcap", "factor") if name in options}
    want = paper(p, x_paper, see, places, **looks)
    want.backward(draw(2, *want.shape))
    tp, cp = axes.get("tp", Axis()), axes.get("cp", Axis())
    part = shard_sequence(x, cp, kind, 1)
    part = part if dim == 1 else part.transpose(0, 1)
    sp = sharing.get("sequence_parallel", False)
    part = c.split(part, tp, dim) if sp else part
    y = sharded(part, cu_seqlens=ends, length=length if given is None else None, mask=given)
    y = c.gather(y, tp, dim) if sp else y
    y = unshard_sequence(y if dim == 1 else y.transpose(0, 1), cp, kind, 1, length)
    y.backward(draw(2, *y.shape))
    reduce_gradients(sharded, *([cp] if cp.size > 1 else []))
    where = f"{options} {sharing} {mask} on {tp.size} x {cp.size}"
    close(y.detach(), want.detach(), f"y of {where}")
    close(x.grad, x_paper.grad, f"dx of {where}")
    got = full_gradients(sharded)
    assert got.keys() == p.keys() - set(frozen)
    for name, grad in got.items():
        close(grad, p[name].grad, f"gradient of {name} of {where}")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("q_lora_rank", [None, Q])
@pytest.mark.parametrize(
    "options", [{}, {"interleaved": False, "bias": True}, {"impl": "reference"}, {"v_head_dim": 9}], ids=str
)
def test_one_rank_is_the_paper(options, q_lora_rank, mask):
    if not (mask in ("any", "keys") and "impl" in options):
        check({"q_lora_rank": q_lora_rank, **options}, mask, {})


def tp_axis():
    return {"tp": mesh(tp=torch.distributed.get_world_size()).tp}


@on_ranks(*FEWER_SIZES)
def test_heads_cut_over_tp_are_the_paper():
    """Of five heads, so that shards are uneven, on each size."""
    for q, mask, sp in itertools.product((None, Q), ("causal", "full", "window"), (False, True)):
        check({"q_lora_rank": q, "sequence_parallel": sp}, mask, tp_axis())
    for q, sp in itertools.product((None, Q), (False, True)):
        check({"q_lora_rank": q, "sequence_parallel": sp, "sequence_dim": 0, "bias": True}, "causal", tp_axis())
    check({"heads": 8, "interleaved": False, "softcap": 0.3}, "documents", tp_axis())
    check({"sequence_parallel": True}, "any", tp_axis())
    check({}, "causal", tp_axis(), length=1)
    for sp in (False, True):
        check({"sequence_parallel": sp}, "causal", tp_axis(), rows=0)


@on_ranks(2)
def test_any_mask_meets_the_keys_of_other_ranks():
    for kind, mask in itertools.product(("alltoall", "allgather"), ("any", "keys")):
        check({"context": kind}, mask, {"cp": mesh(cp=2).cp})


@pytest.mark.parametrize("q_lora_rank", [None, Q])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@on_ranks(2)
def test_latents_are_what_is_sent(q_lora_rank, sp):
    """Three messages each way and the output's, and no sum of gradients afterwards but of whole weights under sp."""
    on = mesh(tp=2)
    layer = build_latent(q_lora_rank, sequence_parallel=sp, tp=on.tp)
    x = draw(1, B, T // 2 if sp else T, D).requires_grad_()
    with CommunicationCounter(on) as forward:
        y = layer(x)
    with CommunicationCounter(on) as backward:
        y.sum().backward()
    with CommunicationCounter(on) as after:
        reduce_gradients(layer)
    of_latents = (3, B * T * ((q_lora_rank or D) + LATENT + TURN) * 8)
    of_output = (1, B * T * D * 8)
    found = [{kind: (n.calls, n.bytes) for (_, kind), n in ledger.counts.items()} for ledger in (forward, backward)]
    if sp:
        assert found[0] == {"all_gather": of_latents, "reduce_scatter": of_output}
        assert found[1] == {"reduce_scatter": of_latents, "all_gather": of_output}
        assert after.volume("tp") > 0
    else:
        assert found == [{"all_reduce": of_output}, {"all_reduce": of_latents}]
        assert after.volume() == 0
        for name, sharding in shardings(layer).items():
            if not sharding.shards:
                grad = layer.get_parameter(name).grad
                assert not sharding.partial
                assert torch.equal(*c.all_gather(grad[None], on.tp, 0)), f"{name} is summed differently on each rank"


def first(tp, **options):
    rope = RotaryEmbedding(TURN)
    layer = MultiLatentAttention(D, H, **SIZES, q_lora_rank=Q, rope=rope, tp=tp, device="meta", **options)
    return materialize(layer, 3)


def check_save(path):
    on = mesh(tp=torch.distributed.get_world_size())
    ckpt.save(path, first(on.tp, sequence_parallel=True), mesh=on, step=1)


def check_load(path):
    on = mesh(tp=torch.distributed.get_world_size())
    layer = build_latent(tp=on.tp).float()
    ckpt.load(path, layer, mesh=on)
    want, got = first(Axis()).state_dict(), full_state_dict(layer)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_pitfall_21_first_weights_and_checkpoints_are_those_of_any_size(ranks, tmp_path):
    """From the meta device on three ranks, saved, and read by two and by four: bitwise what one rank begins with."""
    ranks(3, check_save, str(tmp_path))
    for size in (2, 4):
        ranks(size, check_load, str(tmp_path))


def test_views_copies_and_places_of_ones_own():
    layer = build_latent()
    x = draw(1, B, T, D)
    y = layer(x)
    assert torch.equal(layer(x.transpose(1, 2).contiguous().transpose(1, 2)), y)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    index = torch.arange(T)
    close(layer(x, positions=index.expand(B, T) + 1000), y, "shifted positions", 1e-10)
    assert not torch.allclose(layer(x, positions=2 * index), y)
    assert not torch.allclose(build_latent(scaling=YARN)(x), y)
    assert layer(x[:, :0]).shape == (B, 0, D)
