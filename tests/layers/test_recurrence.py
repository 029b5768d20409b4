"""Linear attention and Mamba-2 equal the recurrence token by token on all layouts, and transformers' layers."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import Tensor

import mpcore as mp
from mpcore._torch.fake import fake_tensors
from mpcore.experimental import GatedDeltaNet, KimiDeltaAttention, Mamba2, simulate
from mpcore.gradients import reduce_gradients
from mpcore.tools.analysis.counts import CommunicationCounter
from mpcore.tools.analysis.dry_run import on_mesh
from tests.equality import draw, full_gradients
from tests.laws.cases import K, delta, kimi, mamba

B, D, KEYS, VALUES = 2, 6, 3, 6


def build(kind: str, **options) -> GatedDeltaNet | KimiDeltaAttention | Mamba2:
    torch.manual_seed(0)
    if kind == "kimi":
        return KimiDeltaAttention(D, VALUES, K, dtype=torch.float64, **options)
    if kind == "delta":
        return GatedDeltaNet(D, KEYS, VALUES, K, K, dtype=torch.float64, **options)
    return Mamba2(D, VALUES, K, 3, KEYS, dtype=torch.float64, **options)


def formula(kind: str, x: Tensor, grad: Tensor, ends: list[int]) -> dict[str, Tensor | None]:
    """Outputs and gradients of documents of both rows; `ends` counts the tokens of the rows one after another."""
    params = {name: p.detach().requires_grad_() for name, p in build(kind).named_parameters()}
    x = x.clone().requires_grad_()
    starts = [torch.isin(torch.arange(x.shape[1]) + row * x.shape[1], torch.tensor(ends)) for row in range(B)]
    truth = {"delta": partial(delta, keys=KEYS), "kimi": kimi, "mamba": partial(mamba, groups=KEYS)}[kind]
    y = torch.cat([truth(params, x[row : row + 1], starts=starts[row]) for row in range(B)])
    y.backward(grad)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in params.items()}}


@pytest.mark.parametrize("kind", ["delta", "kimi", "mamba"])
@pytest.mark.parametrize(("tp", "cp", "context", "length", "chunk", "ends"), [
    (1, 1, "ring", 13, 64, [5, 6, 14, 20]), (4, 1, "ring", 8, 3, []), (2, 2, "zigzag", 14, 3, [1, 2, 9, 20]),
    (1, 3, "zigzag", 17, 2, [7, 18]), (1, 3, "ring", 4, 2, []),
    (1, 4, "zigzag", 5, 2, []),  # runs that are shorter than the convolution, and empty ones
    (1, 4, "two-level", 21, 4, [6, 30]), (1, 4, "alltoall", 19, 64, [9]),
])  # fmt: skip
def test_chunks_equal_the_recurrence(kind, tp, cp, context, length, chunk, ends):
    x, grad = draw(1, B, length, D), draw(2, B, length, D)
    want: dict = formula(kind, x, grad, ends)
    cu_seqlens = torch.tensor(sorted({0, length, 2 * length, *ends})) if ends else None

    def rank() -> None:
        mesh = mp.build_mesh(tp=tp, cp=cp, device_type="cpu", **({"cp_inner": 2} if context == "two-level" else {}))
        sharded = tp > 1 and length % (2 * cp * tp) == 0
        layer = build(kind, tp=mesh.tp, cp=mesh.cp, context=context, chunk=chunk, sequence_parallel=sharded)
        local, dy = (mp.shard_sequence(t, mesh.cp, context, dim=1) for t in (x, grad))
        here = slice(*mp.collectives.shard_range(local.shape[1], mesh.tp)) if sharded else slice(None)
        local = local[:, here].clone().requires_grad_()
        y = layer(local, cu_seqlens=cu_seqlens, length=length)
        y.backward(dy[:, here])
        reduce_gradients(layer, mesh)
        got = {"y": y.detach(), "x": local.grad, **full_gradients(layer)}
        for name in ("y", "x"):
            want_here = mp.shard_sequence(want[name], mesh.cp, context, dim=1)[:, here]
            torch.testing.assert_close(got.pop(name), want_here, rtol=1e-10, atol=1e-10)
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-10)

    simulate(rank, ranks=tp * cp)


LONG, RANKS = 65_536, 4


@pytest.mark.parametrize(("context", "runs"), [("ring", 1), ("zigzag", 2)])
def test_context_parallelism_sends_states_and_the_tokens_before_each_run(context, runs):
    """Bytes of an all-gather's result: M and N of each run, and W - 1 tokens; backward scatters sums of as many."""
    for rank in range(RANKS):
        with on_mesh(rank, cp=RANKS) as mesh, fake_tensors(True):
            layer = GatedDeltaNet(D, 1, 2, 16, 8, convolution=4, cp=mesh.cp, context=context)
            x = torch.empty(B, 4096 // RANKS, D, requires_grad=True)
            with CommunicationCounter(mesh) as counter:
                layer(x, length=4096).sum().backward()
        states, tokens = B * 2 * 16 * (16 + 8), B * 3 * (16 + 16 + 2 * 8)
        want = 2, 4 * RANKS * runs * (states + tokens)
        found = {kind: (count.calls, count.bytes) for (_, kind), count in counter.counts.items()}
        assert found == {"all_gather": want, "reduce_scatter": want}


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ring", "zigzag"])
def test_context_parallelism_of_a_long_sequence_costs_a_quarter_on_each_rank(context):
    """Processor time of all ranks at most 1.2 times that of one rank, and a quarter of its saved tensors."""
    torch.manual_seed(0)
    x = torch.randn(1, LONG, 32)

    def measure(mesh: mp.Mesh) -> tuple[float, int]:
        layer = GatedDeltaNet(32, 1, 2, 16, 16, cp=mesh.cp, context=context)
        local = mp.shard_sequence(x, mesh.cp, context, dim=1).clone().requires_grad_()
        held: dict[int, torch.UntypedStorage] = {}

        def keep(saved: Tensor) -> Tensor:
            held[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
            return saved

        seconds = []
        for _ in range(3):
            held.clear()
            start = time.thread_time()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
                y = layer(local, length=LONG)
            y.square().sum().backward()
            seconds.append(time.thread_time() - start)
        return min(seconds), sum(storage.nbytes() for storage in held.values())

    one = measure(mp.Mesh())
    ranks = simulate(lambda: measure(mp.build_mesh(cp=RANKS, device_type="cpu")), ranks=RANKS)
    print(context, one, ranks)
    assert sum(seconds for seconds, _ in ranks) <= 1.2 * one[0]
    assert max(size for _, size in ranks) <= 0.26 * one[1]


@pytest.mark.parametrize("kind", ["delta", "kimi", "mamba"])
def test_cache_continues_the_sequence(kind):
    layer, x = build(kind, chunk=3), draw(1, B, 9, D)
    cache = layer.new_cache(9)
    with torch.no_grad():
        parts = [layer(part, cache=cache) for part in x.split([0, 2, 0, 1, 5, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-10, atol=1e-10)
    assert layer(x[:, :0].requires_grad_()).requires_grad
    with pytest.raises(AttributeError, match="length"):  # the state can't drop tokens
        cache.length = 3


@pytest.mark.parametrize(("keys", "values", "length"), [(2, 4, 13), (3, 3, 130)])
def test_delta_net_is_that_of_qwen3_next(keys, values, length):
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = transformers.Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=keys, linear_num_value_heads=values, linear_key_head_dim=4,
        linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs, ours, group = Qwen3NextGatedDeltaNet(config, 0), GatedDeltaNet(D, keys, values, 4, 8), values // keys
    with torch.no_grad():
        qkvz = theirs.in_proj_qkvz.weight.view(keys, -1, D).split([4, 4, 8 * group, 8 * group], 1)
        ba = theirs.in_proj_ba.weight.view(keys, -1, D).split([group, group], 1)
        ours.in_proj.weight.copy_(torch.cat([part.reshape(-1, D) for part in (*qkvz, *ba)]))
        ours.conv_weight.copy_(theirs.conv1d.weight[:, 0])
        ours.A_log.copy_(theirs.A_log)
        ours.dt_bias.copy_(theirs.dt_bias)
        ours.output.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(2, length, D)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [13, 70])
def test_kimi_delta_is_that_of_transformers(length):
    transformers = pytest.importorskip("transformers")
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = transformers.KimiLinearConfig(
        hidden_size=D, linear_num_heads=3, linear_head_dim=4, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    theirs, ours = KimiLinearDeltaAttention(config, 0), KimiDeltaAttention(D, 3, 4)
    state = theirs.state_dict()
    state["in_proj.weight"] = torch.cat([state.pop(f"{part}_proj.weight") for part in "qkvb"])
    state["conv_weight"] = state.pop("conv1d.weight")[:, 0]
    state["A_log"] = state.pop("forget_gate.A_log").uniform_(0, 2).flatten()
    state["dt_bias"] = state.pop("forget_gate.dt_bias").uniform_(-2, 2)
    names = {"decay_down": "forget_gate.f_a_proj", "decay_up": "forget_gate.f_b_proj", "gate_down": "g_a_proj",
             "gate_up": "g_b_proj", "norm": "o_norm", "output": "o_proj"}  # fmt: skip
    state |= {f"{mine}.weight": state.pop(f"{name}.weight") for mine, name in names.items()}
    ours.load_state_dict(state)
    x = torch.randn(2, length, D)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "groups", "length"), [(4, 2, 13), (3, 1, 70)])
def test_mamba2_is_that_of_transformers(heads, groups, length):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = transformers.Mamba2Config(
        hidden_size=D, num_heads=heads, head_dim=D, expand=heads, state_size=5, n_groups=groups, chunk_size=16,
        num_hidden_layers=1, use_bias=True,
    )  # fmt: skip
    theirs, ours = Mamba2Mixer(config, 0), Mamba2(D, heads, D, 5, groups, bias=True)
    state = theirs.state_dict()
    state |= {"conv_weight": state.pop("conv1d.weight")[:, 0], "conv_bias": state.pop("conv1d.bias")}
    renamed = {"norm.weight": "norm_weight", "out_proj.weight": "output.weight", "out_proj.bias": "output.bias"}
    ours.load_state_dict({renamed.get(name, name): value for name, value in state.items()})
    x = torch.randn(2, length, D)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_a_convolution_of_one_token_needs_none_of_other_ranks():
    def outputs(mesh: mp.Mesh) -> Tensor:
        layer = build("delta", convolution=1, cp=mesh.cp, context="ring")
        return layer(mp.shard_sequence(draw(1, B, 8, D), mesh.cp, "ring", dim=1)).detach()

    torch.testing.assert_close(torch.cat(mp.simulate(outputs, cp=2), 1), mp.simulate(outputs)[0])
    with pytest.raises(ValueError, match=r"convolution is 0 and chunk 64: give at least 1"):
        build("delta", convolution=0)
