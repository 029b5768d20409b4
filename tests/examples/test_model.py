"""What the example makes of a configuration and of flags: its layers, stages, policies and optimizer."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from examples.gpt import model as gpt
from examples.gpt import model as stages
from examples.gpt import model as variants
from examples.gpt import policies, setup
from examples.gpt import policies as optimizer
from examples.gpt.arguments import parse
from examples.gpt.config import GPTConfig, LatentConfig, Layout, MoEConfig
from examples.gpt.hf import describe, shapes
from examples.gpt.model import GPT, count_active_parameters, count_parameters, flops_of_token, parameter_shares
from examples.gpt.samples import permute
from examples.gpt.train import reorder
from mpcore import Axis, Compile, Mesh, Offload, Precision, Zero
from mpcore.experimental import LocalUpdates
from mpcore.random import generator
from mpcore.tools.analysis import curves as twins

SMALL = GPTConfig(vocab_size=11, seq_len=8, layers=3, d_model=16, heads=4, d_ff=24)
CONFIG = GPTConfig(
    vocab_size=50, seq_len=8, layers=8, d_model=32, heads=4, kv_heads=2, head_dim=12, d_ff=40, activation="geglu",
    norm_eps=0.5, qk_norm=True, window=3, qkv_bias=True, output_bias=False, mlp_bias=True, dropout=0.25, init_std=0.4,
)  # fmt: skip
MESH = Mesh(tp=Axis(2, 0, None, "tp"), cp=Axis(2, 0, None, "cp"), ep=Axis(2, 0, None, "ep"), etp=Axis(3, 0, None, "e"),
            data=Axis(4, 0, None, "data"))  # fmt: skip
LAYOUT = Layout(MESH, "ring", sequence_parallel=True, device="meta", dtype=torch.float64)
PLACED = {"sequence_parallel": True, "device": "meta", "dtype": torch.float64}
DRAWN = {"init": ("normal", 0.4), "output_init": ("normal", 0.4 / 4)}  # of 8 layers: divided by sqrt(16)


def told(module: Any, name: str, build: Any, *of: Any) -> tuple[tuple, dict]:
    """How a layer is made."""
    with mock.patch.object(module, name) as layer, mock.patch.object(module, "normal", lambda std: ("normal", std)):
        assert build(*of) is layer.return_value
    return layer.call_args


# --- layers -----------------------------------------------------------------------------------------------------------


def test_layers_have_what_the_configuration_and_the_layout_say():
    attention = told(gpt, "ParallelAttention", gpt.build_attention, CONFIG, LAYOUT, "rope")
    assert attention == (
        (32, 4, 2, 12),
        {"bias": True, "output_bias": False, "rope": "rope", "qk_norm": True, "norm_eps": 0.5, "window": 3,
         "tp": MESH.tp, "cp": MESH.cp, "context": "ring", **DRAWN, **PLACED},
    )  # fmt: skip
    mlp = told(gpt, "ParallelMLP", gpt.build_mlp, CONFIG, 0, LAYOUT)
    assert mlp == ((32, 40, "geglu"), {"bias": True, "tp": MESH.tp, **DRAWN, **PLACED})
    for kind, name in (("rms", "RMSNorm"), ("layer", "LayerNorm")):
        norm = told(gpt, name, gpt.build_norm, dataclasses.replace(CONFIG, norm=kind), LAYOUT)
        assert norm == ((32, 0.5), {"tp": MESH.tp, **PLACED})
    latent = dataclasses.replace(CONFIG, kv_heads=None, head_dim=None, qk_norm=False, output_bias=True,
                                 latent=LatentConfig(1, 2, 3, 4, 5))  # fmt: skip
    found = told(variants, "MultiLatentAttention", gpt.build_attention, latent, LAYOUT, "rope")
    assert found == (
        (32, 4),
        {"kv_lora_rank": 1, "q_lora_rank": 2, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5,
         "bias": True, "rope": "rope", "norm_eps": 0.5, "window": 3, "tp": MESH.tp, "context": "ring", "cp": MESH.cp,
         **DRAWN, **PLACED},
    )  # fmt: skip


def test_a_mixture_has_the_routers_options_and_every_axis():
    own = MoEConfig(experts=6, top_k=3, d_ff=20, every=2, dense=1, z_loss=0.5)
    config = dataclasses.replace(CONFIG, mlp_bias=False, moe=own)
    routing = {"top_k": 3, "shared_experts": 0, "score": "softmax", "normalize": None, "routed_scale": 1.0, "groups": 1,
               "top_groups": None, "aux_loss": "sequence", "aux_coefficient": 0.01, "z_loss": 0.5, "bias_rate": 0.0,
               "bias": None, "jitter": 0.0, "capacity_factor": None, "dispatch": None}  # fmt: skip
    axes = {"tp": MESH.tp, "ep": MESH.ep, "etp": MESH.etp, "cp": MESH.cp, "data": MESH.data}
    found = told(variants, "ParallelMoE", gpt.build_mlp, config, 1, LAYOUT)
    assert found == ((32, 20, 6), {"activation": "geglu", **routing, **axes, **DRAWN, **PLACED})
    wide = dataclasses.replace(config, moe=dataclasses.replace(own, d_ff=None))
    assert told(variants, "ParallelMoE", gpt.build_mlp, wide, 1, LAYOUT)[0] == (32, 40, 6)
    assert told(gpt, "ParallelMLP", gpt.build_mlp, config, 0, LAYOUT)[0] == (32, 40, "geglu"), "block 0 is dense"


def test_a_block_has_norms_dropout_and_its_parts():
    block = gpt.build_block(CONFIG, 0, Layout(device="meta"), None)
    assert (block.attention_dropout.p, block.mlp_dropout.p) == (0.25, 0.25)
    assert type(block.attention_norm).__name__ == type(block.mlp_norm).__name__ == "RMSNorm"
    assert block.attention_norm is not block.mlp_norm
    with (
        mock.patch.object(gpt, "TransformerBlock") as made,
        mock.patch.object(gpt, "build_norm", side_effect=["n1", "n2"]),
        mock.patch.object(gpt, "build_attention", return_value="a"),
        mock.patch.object(gpt, "build_mlp", return_value="m"),
    ):
        gpt.build_block(CONFIG, 0, LAYOUT, None)  # fmt: skip
    made.assert_called_once_with("a", "m", "n1", "n2", dropout=0.25, tp=MESH.tp, sequence_parallel=True)


@pytest.mark.parametrize(
    ("blocks", "changes", "parts"),
    [
        (range(3), {}, {"embedding", "dropout", "rope", "blocks", "norm", "head"}),
        (range(3), {"positions": "learned"}, {"embedding", "position", "dropout", "blocks", "norm", "head"}),
        (range(1), {}, {"embedding", "dropout", "rope", "blocks"}),
        (range(1, 2), {}, {"rope", "blocks"}),
        (range(1, 2), {"positions": "learned", "tie_embeddings": True}, {"blocks"}),
        (range(2, 3), {}, {"rope", "blocks", "norm", "head"}),
        (range(2, 3), {"tie_embeddings": True}, {"embedding", "rope", "blocks", "norm", "head"}),
    ],
)
def test_a_stage_has_its_part_of_the_model(blocks, changes, parts):
    stage = GPT(dataclasses.replace(SMALL, **changes), blocks=blocks, device="meta")
    assert {name for name, _ in stage.named_children()} == parts
    assert list(stage.blocks) == [str(i) for i in blocks]
    assert (stage.first, stage.last) == (blocks.start == 0, blocks.stop == 3)
    if stage.last:
        tied = changes.get("tie_embeddings", False)
        assert (stage.head.weight is getattr(stage, "embedding", stage.head).weight) == (tied or not stage.first)
        assert stage.head.bias is None


def test_a_model_has_the_shapes_of_its_configuration():
    learned = dataclasses.replace(CONFIG, positions="learned", layers=1)
    assert shapes(learned) == {
        "embedding.weight": (50, 32), "position.weight": (8, 32), "blocks.0.attention_norm.weight": (32,),
        "blocks.0.attention.qkv.weight": ((4 + 2 + 2) * 12, 32), "blocks.0.attention.qkv.bias": (96,),
        "blocks.0.attention.q_norm.weight": (12,), "blocks.0.attention.k_norm.weight": (12,),
        "blocks.0.attention.output.weight": (32, 48), "blocks.0.mlp_norm.weight": (32,),
        "blocks.0.mlp.up.weight": (80, 32), "blocks.0.mlp.up.bias": (80,), "blocks.0.mlp.down.weight": (32, 40),
        "blocks.0.mlp.down.bias": (32,), "norm.weight": (32,), "head.weight": (50, 32),
    }  # fmt: skip


def test_rope_turns_a_heads_width_or_the_latents_own():
    scaled = {"rope_type": "linear", "factor": 2.0}
    config = dataclasses.replace(CONFIG, rope_base=123.0, rope_scaling=scaled)
    with mock.patch.object(gpt, "RotaryEmbedding", wraps=gpt.RotaryEmbedding) as rope:
        GPT(config, device="meta")
        GPT(dataclasses.replace(SMALL, latent=LatentConfig(qk_rope_head_dim=6)), device="meta")
    (one, how), (two, latent) = rope.call_args_list
    assert (one, how) == ((12, 123.0), {"fraction": 1.0, "scaling": scaled, "interleaved": False})
    assert (two, latent) == ((6, 10000.0), {"fraction": 1.0, "scaling": None, "interleaved": True})
    assert GPT(dataclasses.replace(SMALL, positions="learned"), device="meta").rope is None


def test_a_stage_is_this_ranks_share_where_no_blocks_are_named():
    config = dataclasses.replace(SMALL, layers=5)
    shares = [list(GPT(config, Mesh(pp=Axis(2, i)), device="meta").blocks) for i in (0, 1)]
    assert shares == [["0", "1", "2"], ["3", "4"]]
    with pytest.raises(ValueError, match=r"^3 layers are fewer than the pp size 4$"):
        GPT(SMALL, Mesh(pp=Axis(4)), device="meta")
    GPT(SMALL, Mesh(pp=Axis(3)), device="meta")
    both = GPT(SMALL, Mesh(), sequence_parallel=True, device="meta", residual_dtype=torch.float64, context="ring")
    assert (both.sequence_parallel, both.residual_dtype, both.context) == (False, torch.float64, "ring")
    assert GPT(SMALL, Mesh(tp=Axis(2)), sequence_parallel=True, device="meta").sequence_parallel
    assert not GPT(SMALL, Mesh(tp=Axis(2)), device="meta").sequence_parallel
    assert GPT(SMALL, device="meta").context == "zigzag"


def test_the_model_refuses_longer_samples_and_knows_its_positions():
    model = GPT(SMALL)
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 11)
    with pytest.raises(ValueError, match=r"^sequence length 9 is longer than the model's 8$"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    device = torch.device("cpu")
    assert model.positions(8, device) is None
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    assert model.positions(8, device, documents).tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    model.cp, model.context = Axis(2, 1), "alltoall"
    assert model.positions(8, device).tolist() == [4, 5, 6, 7]
    assert model.positions(8, device, documents).tolist() == [[1, 2, 3, 0]]
    (_, told), *_ = list(
        model.calls(8, torch.arange(4, 8), torch.bfloat16, device, samples="s", loss_factor="f", mask="m")
    )
    assert told["rotary"][0].dtype == torch.float32
    assert (told["samples"], told["cu_seqlens"], told["mlp_arguments"]) == ("s", None, None)
    assert told["tokens"].tolist() == [4, 5, 6, 7]
    mixed = GPT(dataclasses.replace(SMALL, moe=MoEConfig(every=3, d_ff=8)), device="meta")
    calls = [how["mlp_arguments"] for _, how in mixed.calls(8, None, torch.float64, device, "s", "f", "m")]
    assert calls == [None, None, {"samples": "s", "loss_scale": "f", "mask": "m", "positions": None}]


# --- stages -----------------------------------------------------------------------------------------------------------


def test_a_rank_builds_its_stages_lowest_first():
    config = dataclasses.replace(SMALL, layers=4)
    blocks = [range(i, i + 1) for i in range(4)]
    mine = stages.build_stages(config, Mesh(pp=Axis(2, 1)), blocks, [0, 1, 0, 1], device="meta", context="ring")
    assert [list(stage.blocks) for stage in mine] == [["1"], ["3"]]
    assert [stage.context for stage in mine] == ["ring", "ring"]
    assert not hasattr(mine[0], "embedding")


def test_tied_tables_are_shared_on_one_rank_and_summed_between_the_first_and_the_last():
    tied = dataclasses.replace(SMALL, layers=4, tie_embeddings=True)
    blocks, mesh = [range(i, i + 1) for i in range(4)], Mesh(pp=Axis(2), ends=Axis(2, role="ends"))
    first, last = stages.build_stages(tied, mesh, blocks, [0, 1, 1, 0], device="meta")
    assert first.embedding is last.embedding
    assert last.head.weight is first.embedding.weight
    with mock.patch.object(
        stages, "GPT", side_effect=lambda config, mesh, **_: SimpleNamespace(mesh=mesh, first=False, last=False)
    ):
        here = stages.build_stages(tied, mesh, blocks, [0, 1, 1, 0])
        apart = stages.build_stages(tied, mesh, blocks, [0, 1, 0, 1])
        loose = stages.build_stages(SMALL, mesh, blocks, [1, 0, 1, 0])
    assert {stage.mesh.ends.size for stage in here} == {1}
    assert {stage.mesh.ends.size for stage in apart} == {2}
    assert len(loose) == 2
    for ranks, message in (([1, 0, 1, 0], "1 and 0: only 0 and 1"), ([0, 1, 2, 1], "0 and 1: only 0 and 2")):
        size = max(ranks) + 1
        with pytest.raises(ValueError, match=f"^tied embeddings on the pipeline ranks {message} sum them$"):
            stages.build_stages(tied, Mesh(pp=Axis(size)), blocks, ranks, device="meta")


# --- policies and the optimizer ---------------------------------------------------------------------------------------


def asked(flags: str, models: Any = ()) -> dict[str, Any]:
    return policies.policies(parse(flags.split()), models)


def test_flags_are_policies():
    found = asked("")
    assert (found["data"], found["precision"], found["compile"], found["observers"]) == (
        Zero(1, 1), Precision("float32"), None, []
    )  # fmt: skip
    assert found["offload"] == Offload(optimizer=False, activations=False, parameters=False)
    assert (found["recompute"].kind, found["recompute"].budget, found["recompute"].preserve_rng_state) == (
        "none",
        None,
        False,
    )
    found = asked("--zero 3 --set replicate=2 --dtype bfloat16 --fp8 --set autocast=true --recompute full "
                  "--offload optimizer "
                  "activations --compile eager --workers 2 --local-steps 7 --set outer_lr=0.5")  # fmt: skip
    assert found["data"] == Zero(3, 2)
    assert found["precision"] == Precision("bfloat16", fp8=True, autocast=True)
    assert found["recompute"].kind == "full"
    assert found["offload"] == Offload(optimizer=True, activations=True, parameters=False)
    assert asked("--offload parameters")["offload"] == Offload(parameters=True)
    assert found["compile"] == Compile("eager")
    assert found["observers"] == [LocalUpdates(every=7, lr=0.5, momentum=0.9, fragments=1)]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("", torch.float32),
        ("--dtype float64", torch.float64),
        ("--dtype float64 --set residual_dtype=float32", torch.float64),
        ("--dtype bfloat16", torch.bfloat16),
        ("--dtype bfloat16 --set residual_dtype=float32", torch.float32),
        ("--dtype bfloat16 --set autocast=true", torch.float32),
        ("--dtype float16", torch.float32),
    ],
)
def test_the_residual_stream_has_the_dtype_of_weights_or_its_own(flags, dtype):
    assert policies.residual_dtype(parse(flags.split())) == dtype


def test_a_budget_is_measured_on_the_blocks_own_arguments():
    args = parse(
        ["--recompute", "budget=0.5", "--micro-batch", "3", "--set", "document_masking=true", "--dtype", "bfloat16"]
    )
    config = dataclasses.replace(SMALL, moe=MoEConfig(every=3, d_ff=8))
    stage = GPT(config, device="meta")
    found = policies.policies(args, [stage])["recompute"]
    assert (found.budget, found.preserve_rng_state) == (0.5, False)
    (x,), more = found.example(stage.blocks["2"])
    assert (x.shape, x.dtype, x.device.type, x.requires_grad) == ((3, 8, 16), torch.bfloat16, "meta", True)
    assert (more["samples"].shape, more["samples"].dtype, more["samples"].device.type) == ((3,), torch.int64, "meta")
    assert more["mlp_arguments"]["loss_scale"].dtype == torch.float64
    given = policies.keywords(stage, args)
    assert {name: (tuple(v.shape), v.dtype, v.device.type) for name, v in given.items()} == {
        "samples": ((3,), torch.int64, "cpu"), "loss_factor": ((3,), torch.float64, "cpu"),
        "documents": ((3, 8), torch.int32, "cpu"),
    }  # fmt: skip
    assert set(policies.keywords(GPT(SMALL, device="meta"), parse([]))) == {"samples"}
    cut = GPT(SMALL, Mesh(tp=Axis(2), cp=Axis(2)), sequence_parallel=True, device="meta")
    assert policies.hidden(cut, args).shape == (3, 2, 16)
    whole = GPT(SMALL, Mesh(tp=Axis(2)), device="meta")
    assert (policies.hidden(whole, args).shape, policies.hidden(whole, args).device.type) == ((3, 8, 16), "cpu")


def test_the_optimizer_is_that_of_the_flags():
    model = nn.Linear(4, 4)
    flags = "--lr 0.5 --set betas=0.7,0.8 --set weight_decay=0.25 --seed 3"
    common = {"lr": 0.5, "betas": (0.7, 0.8), "weight_decay": 0.25, "seed": 3}
    for more, name, options in (
        ("", "AdamW", {"state_dtype": None}),
        ("--optimizer adamw-bf16", "AdamW", {"state_dtype": torch.bfloat16}),
        ("--optimizer muon", "Muon", {"mesh": "mesh", "exclude": ["head"], "ns_dtype": None}),
        (
            "--optimizer muon --dtype bfloat16",
            "Muon",
            {"mesh": "mesh", "exclude": ["head"], "ns_dtype": torch.bfloat16},
        ),
    ):
        with mock.patch.object(optimizer, name) as made:
            optimizer.build_optimizer(parse([*flags.split(), *more.split()]), model, "mesh", ["head"])  # type: ignore[arg-type]
        made.assert_called_once_with(model, **common, **options)


def test_the_learning_rate_ends_at_a_tenth_or_at_the_floor():
    def rate(flags: str, step: int) -> float:
        args = parse(["--steps", "10", "--warmup", "2", *flags.split()])
        return optimizer.learning_rate(optimizer.lr_schedule(args), step)

    assert [rate("--lr 0.5", step) for step in (0, 1)] == [0.25, 0.5]
    for schedule in ("cosine", "linear"):
        assert rate(f"--lr 0.5 --set lr_schedule={schedule}", 10) == pytest.approx(0.05)
        assert rate(f"--lr 0.5 --set min_lr=0.25 --set lr_schedule={schedule}", 10) == pytest.approx(0.25)
        assert rate(f"--lr 0.5 --set min_lr=0 --set lr_schedule={schedule}", 10) == pytest.approx(0.0)
    assert rate("--lr 0.5 --set min_lr=0.25", 6) == pytest.approx(0.375)
    assert rate("--lr 0 --set min_lr=0", 5) == 0
    assert rate("--lr 0.5 --set lr_schedule=wsd", 7) == 0.5
    assert rate("--lr 0.5 --lr-decay-steps 5", 5) == rate("--lr 0.5 --lr-decay-steps 5", 9) == pytest.approx(0.05)


# --- twins ------------------------------------------------------------------------------------------------------------


def test_a_twin_deals_each_workers_samples_out_in_another_order():
    step = range(100, 112)
    assert list(reorder(range(2, 5), 3, step, 0)) == [102, 103, 104]
    for workers in (1, 3):
        each = 12 // workers
        for twin in (1, 2):
            found = [i for first in range(0, 12, 2) for i in reorder(range(first, first + 2), 3, step, twin, workers)]
            assert found == [100 + i // each * each + permute(i % each, each, seed=twin, epoch=3) for i in range(12)]
            assert sorted(found) == list(step)


def test_a_twin_begins_with_weights_rounded_another_way():
    model = nn.Linear(4, 3, dtype=torch.float64)
    model.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run: Any = SimpleNamespace(parameters=lambda: nullcontext(model))
    for dtype, eps in ((torch.bfloat16, 2.0**-7), (torch.float32, 2.0**-23)):
        model.load_state_dict(before)
        twins.round_anew(run, 2, dtype)
        draws = torch.rand(3, 4, generator=generator(2, "weight")).double()
        assert torch.allclose(model.weight, before["weight"] * (1 + (draws - 0.5) * eps), rtol=1e-12, atol=0)
        assert torch.equal(model.bias, before["bias"])


def test_norms_of_tensors_are_written_every_so_many_steps(tmp_path):
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    model.weight.grad = torch.tensor([[0.0, 6.0], [8.0, 0.0]])
    for every, written in ((2, [0, 2, 4]), (0, []), (5, [0])):
        out = tmp_path / str(every)
        out.mkdir()
        run: Any = SimpleNamespace(parameters=lambda: nullcontext(model), mesh=Mesh(), step=0)
        curves = twins.TensorCurves(run, every, out)
        for run.step in range(5):
            curves.after_backward()
        lines = (out / "tensors.jsonl").read_text().splitlines() if written else []
        assert [json.loads(line) for line in lines] == [
            {"step": step, "gradient": {"weight": 10.0}, "weight": {"weight": 5.0}} for step in written
        ]
    run.mesh, run.step = Mesh(world=Axis(2, 1)), 0
    curves = twins.TensorCurves(run, 1, tmp_path)
    with mock.patch.object(curves, "measure", return_value={}):
        curves.after_backward()
    assert not (tmp_path / "tensors.jsonl").exists()


# --- counts -----------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_blocks_experts_and_ends():
    dense = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert parameter_shares(SMALL) == (3 * dense, 0, 2 * 11 * 16 + 16, 1.0)
    assert count_parameters(SMALL) == count_active_parameters(SMALL) == 3 * dense + 2 * 11 * 16 + 16
    mixed = dataclasses.replace(SMALL, moe=MoEConfig(experts=8, top_k=2, d_ff=10, every=3))
    experts, router = 8 * 3 * 16 * 10, 8 * 16
    blocks = 3 * dense - 3 * 16 * 24 + router
    assert parameter_shares(mixed) == (blocks, experts, 2 * 11 * 16 + 16, 0.25)
    assert count_active_parameters(mixed) == blocks + experts // 4 + 2 * 11 * 16 + 16


@pytest.mark.parametrize(
    ("changes", "products", "attention"),
    [
        ({}, 0, 2 * 4 * 8),
        ({"tie_embeddings": True}, 0, 2 * 4 * 8),
        ({"positions": "learned"}, 0, 2 * 4 * 8),
        ({"window": 3}, 0, 2 * 4 * 3),
        ({"window": 99}, 0, 2 * 4 * 8),
        ({"head_dim": 6}, 3 * 4 * 2 * 4 * 16, 2 * 6 * 8),
        ({"latent": LatentConfig(4, 6, 5, 2, 3)}, None, (5 + 2 + 3) * 8),
    ],
)
def test_the_flops_of_a_token_are_six_for_each_weight_of_a_product_and_attentions(changes, products, attention):
    config = dataclasses.replace(SMALL, **changes)
    matrices = 3 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 11 * 16 + 16  # blocks with norms, the head, the last norm
    if products is None:
        matrices = count_parameters(config) - 11 * 16
    else:
        matrices += products
    assert flops_of_token(config) == 6 * (matrices + 3 * 4 * attention)


# --- a description for converters -------------------------------------------------------------------------------------


def test_a_description_spells_every_default_out():
    found = describe(GPTConfig(bias=True))
    assert "bias" not in found
    spelled = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "norm_eps": 1e-6, "d_ff": 384, "kv_heads": 4,
               "head_dim": 32}  # fmt: skip
    plain = dataclasses.asdict(GPTConfig())
    plain.pop("bias")
    assert found == {**plain, **spelled}
    assert describe(GPTConfig(kv_heads=2, head_dim=5, d_ff=7, norm_eps=0.5))["kv_heads"] == 2
    for moe, spelled in (
        (MoEConfig(), {"d_ff": 384, "top_groups": 1, "normalize": True, "aux_coefficient": 0.01, "bias": False}),
        (MoEConfig(top_k=1, d_ff=5, groups=4), {"d_ff": 5, "top_groups": 4, "normalize": False, "bias": False}),
        (MoEConfig(top_k=1, normalize=True, groups=4, top_groups=2), {"normalize": True, "top_groups": 2}),
        (MoEConfig(normalize=False), {"normalize": False}),
        (MoEConfig(aux_loss=None), {"aux_coefficient": 0.0}),
        (MoEConfig(bias_rate=0.5), {"bias": True}),
        (MoEConfig(bias_rate=0.5, bias=False), {"bias": False}),
        (MoEConfig(bias=True), {"bias": True}),
    ):
        wanted = {**dataclasses.asdict(moe), "top_groups": moe.top_groups or moe.groups, "d_ff": moe.d_ff or 384}
        found = describe(GPTConfig(moe=moe))["moe"]
        assert {name: found[name] for name in spelled} == spelled
        assert {name: found[name] for name in found if name not in ("normalize", "aux_coefficient", "bias")} == {
            name: wanted[name] for name in found if name not in ("normalize", "aux_coefficient", "bias")
        }


# --- before the model -------------------------------------------------------------------------------------------------


def test_what_depends_on_no_data_is_read_first():
    args = parse(["--global-batch", "8", "--schedule", "interleaved", "--layers", "8"])
    found = setup.read_model(args, Mesh(pp=Axis(2)))
    assert (found["micro_batches"], found["plan"].name, found["plan"].stages) == (4, "interleaved", 4)
    assert found["config"] == dataclasses.replace(GPTConfig(), layers=8)
    assert (found["ramp"].sizes, found["tokenizer"].fingerprint) == ([8], "byte")
    assert found["blocks"] == [range(i, i + 2) for i in (0, 2, 4, 6)]
    own = dataclasses.replace(GPTConfig(), layers=4, d_model=64)
    assert setup.read_model(args, Mesh(), own)["config"] is own
    ramped = parse(
        [
            "--global-batch",
            "8",
            "--micro-batch",
            "1",
            "--schedule",
            "interleaved",
            "--set",
            "rampup_batch_size=1,1,9",
            "--layers",
            "8",
        ]
    )
    with pytest.raises(ValueError, match="5 micro-batches on pp size 2"):
        setup.read_model(ramped, Mesh(pp=Axis(2)))
    with pytest.raises(ValueError, match="log_to"), mock.patch("importlib.util.find_spec", return_value=None):
        setup.read_model(parse(["--set", "log_to=wandb"]), Mesh())


def test_a_run_is_about_its_model_data_optimizer_and_tokenizer():
    made: Any = SimpleNamespace(config=SMALL, corpus={"tokens": 5}, tokenizer=SimpleNamespace(fingerprint="f"))
    assert setup.about(made, "muon") == {
        "model": dataclasses.asdict(SMALL), "corpus": {"tokens": 5}, "optimizer": "muon", "tokenizer": "f"
    }  # fmt: skip
