"""Models of transformers whose sequence is sharded over cp, and between layers over tp, train as on one process."""

import itertools
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpcore as mp
from mpcore import Axis, Recompute, Zero, parallelize, prepare, shard_sequence
from mpcore.interop.parallelize import model_plan, suggest_plan
from mpcore.interop.parallelize.context import serve_context
from tests import families
from tests.equality import close
from tests.pool import mesh, on_ranks
from tests.quick import some

hf = pytest.importorskip("transformers")

SIZES = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4, "vocab_size": 66}
SIZES |= {"num_hidden_layers": 2, "intermediate_size": 36, "max_position_embeddings": 64, "use_cache": False}
SIZES |= {"pad_token_id": 0}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2,
     moe_intermediate_size=12)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, **MIXED, num_local_experts=4,
     num_experts_per_tok=2)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=0.2,
     attn_implementation="eager")),
}  # fmt: skip
ROWS, T = 4, 16


def build(name, seed=0):
    torch.manual_seed(seed)
    model = MODELS[name]()
    if name in ("gpt_oss", "qwen3_moe"):
        model.set_experts_implementation("eager")
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    model.config.use_cache = False  # transformers keeps packed documents apart only so
    return model.double()


def batch_of(what):
    tokens = torch.randint(1, 66, (ROWS, T + 1), generator=torch.Generator().manual_seed(3))
    batch = {"x": tokens[:, :-1], "target": tokens[:, 1:].clone()}
    if what == "documents":
        batch["position_ids"] = torch.arange(T).remainder(5)[None].repeat(ROWS, 1)
    elif what == "padding":
        batch["attention_mask"] = torch.ones(ROWS, T, dtype=torch.long)
        batch["attention_mask"][0, -3:] = batch["attention_mask"][1, :2] = 0
        batch["target"][batch["attention_mask"] == 0] = -100
        batch["position_ids"] = torch.arange(T).repeat(ROWS, 1)
    return batch


def token_loss(out, target):
    return F.cross_entropy(out.logits.flatten(0, 1), target.flatten(), reduction="sum")


def losses(name, what, sizes, kind="ring", zero=0, recompute="none", split=False, steps=range(4), folder=None):
    """The losses of some steps of a run, which begins and ends with a checkpoint if there is a folder."""
    on, model, batch = mesh(**sizes), build(name), batch_of(what)
    here = slice(on.dp.rank * ROWS // on.dp.size, (on.dp.rank + 1) * ROWS // on.dp.size)
    batch = {key: x[here] for key, x in batch.items()}
    if max(on.tp.size, on.cp.size, on.ep.size) > 1:
        plan = model_plan(model, on.tp.size, on.ep.size) | {"": "sequence_parallel"} if split else "auto"
        model = parallelize(model, plan, on.tp, ep=on.ep, etp=on.etp, cp=on.cp, context=kind)
        batch = shard_sequence(batch, on.cp, kind)
    stages, blocks, schedule = mp.pipeline_stages(model, on, micro_batches=on.pp.size)
    run = prepare(
        stages, on, blocks=blocks, schedule=schedule, micro_batches=on.pp.size, loss=token_loss, initialize=False,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), recompute=Recompute(recompute),
        data=Zero(zero),
    )  # fmt: skip
    if steps.start:
        run.load(folder / f"step-{steps.start:08}")
    found, x, target = [], batch.pop("x"), batch.pop("target")
    for _ in steps:
        run.forward_backward(x, target, **batch)
        found.append(run.optimizer_step().loss)
    if folder is not None:
        run.save(folder)
    return torch.tensor(found)


def wide_losses(*args, **options):
    with families.wide():
        return losses(*args, **options)


@pytest.mark.parametrize(("size", "name", "what", "sizes", "options"), some(
    (4, "llama", "padding", {"tp": 2, "cp": 2}, {"kind": "alltoall", "split": True}),
    (2, "gpt_oss", "", {"cp": 2}, {"kind": "allgather"}), (2, "gemma2", "documents", {"cp": 2}, {"kind": "ring"}),
    (2, "gpt_oss", "padding", {"cp": 2, "ep": 2}, {"kind": "zigzag", "zero": 3}),
    (4, "gemma2", "documents", {"cp": 2, "pp": 2}, {"kind": "zigzag", "recompute": "full"}),
    (4, "qwen3_moe", "padding", {"tp": 2, "pp": 2}, {"split": True, "zero": 1}),
    of=[(2, "llama", "documents", {"cp": 2}, {"kind": "zigzag", "zero": 3, "recompute": "full"}),
        (4, "gpt_oss", "padding", {"cp": 2, "dp": 2}, {"kind": "alltoall", "zero": 2}),
        (4, "gpt_oss", "", {"tp": 2, "ep": 2, "dp": 2, "etp": 1}, {"split": True, "zero": 2}),
        (2, "gemma2", "", {"tp": 2}, {"split": True, "recompute": "full"})],
))  # fmt: skip
def test_every_layout_trains_as_one_process_does(ranks, size, name, what, sizes, options):
    (want,) = ranks(1, wide_losses, name, what, {})
    for got in ranks(size, wide_losses, name, what, sizes, **options):
        close(got, want, "losses", 1e-10)


@pytest.mark.parametrize(("name", "resumed"), some(("qwen3_moe", {"ep": 2, "dp": 4}), of=[("llama", {"dp": 4})]))
def test_a_run_resumes_on_other_axes(tmp_path, name, resumed):
    eight, options = {"tp": 2, "cp": 2, "pp": 2}, {"kind": "zigzag", "folder": tmp_path / "saved"}
    with families.wide():
        want = losses(name, "documents", {}, steps=range(4))
        first = mp.simulate(partial(losses, name, "documents", eight, steps=range(2), **options), ranks=8)
        last = mp.simulate(partial(losses, name, "documents", resumed, steps=range(2, 4), **options), ranks=4)
    for got in (torch.cat(halves) for halves in itertools.product(first, last)):
        close(got, want, "losses", 1e-9)


@pytest.mark.parametrize(("family", "cp", "sp"), some(
    ("qwen3_moe", "equal", "equal"),  # a router and experts, and norms of heads
    ("gpt_oss", "equal, one document a row", "equal"),  # transformers lets its documents see each other
    ("bloom", "refused: BloomForCausalLM", "refused: BloomForCausalLM"),  # attention in its own code
    ("mamba2", "refused: layer 0 of Mamba2ForCausalLM", "equal"),  # under sp its mixers get all tokens
    ("doge", "refused: model.layers.0.self_attn", "refused: with"),
    of=[("roc_bert", "equal", "refused: with"),
        ("llama4_text", "equal", "equal"),  # chunks of tokens, and rows of all samples behind experts
        ("gemma3n_text", "equal", "refused: with"),  # it reads ids beside their embeddings
        ("deepseek_v4", "refused: layer", "refused: layer")],  # keys of compressed blocks of tokens
))  # fmt: skip
def test_a_family_is_equal_or_refused_by_what_mixes_its_tokens(family, cp, sp):
    found = families.row(family, [2], families.sequence).results
    assert found["cp 2"].startswith(cp)
    assert found["sp 2"].startswith(sp)
    for said in found.values():  # the reason comes first, and what Python says in brackets
        assert not re.match(r"[^(]*(has no attribute|match the existing)", said), said


@pytest.mark.parametrize("what", ["documents", "padding"])
def test_linear_attention_refuses_several_documents_in_a_row(what):
    model, batch = families.build("olmo_hybrid"), batch_of(what)
    serve_context(model, Axis(name="cp"), "ring")  # as sequence parallelism does
    with pytest.raises(ValueError, match="linear_attention"):
        model(batch.pop("x"), **{name: x for name, x in batch.items() if name != "target"})


def test_a_plan_is_found_that_splits_the_tokens_where_it_is_right():
    assert suggest_plan(build("llama"), sequence_parallel=True).plan[""] == "sequence_parallel"
    left = suggest_plan(families.build("codegen"), sequence_parallel=True).left
    assert "CodeGenForCausalLM" in left[""]


@on_ranks(2)
def test_what_a_part_of_the_tokens_cannot_give_is_refused():
    """What a rank's tokens can't give is refused on every rank."""
    on = mesh(cp=2)
    ids = torch.arange(1, 9).repeat(2, 1)
    mine = shard_sequence({"input_ids": ids, "position_ids": torch.arange(8).repeat(2, 1)}, on.cp, "ring")
    model = parallelize(build("gpt_oss"), cp=on.cp, context="ring")
    holes = shard_sequence(torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2), on.cp, "ring")
    uneven, other = ids[:, : 4 + 2 * on.cp.rank], shard_sequence(torch.arange(8).repeat(2, 1), on.cp, "zigzag")
    wrong = {
        "labels=": {"labels": mine["input_ids"]}, "use_cache": {"use_cache": True},
        "logits_to_keep": {"logits_to_keep": 1}, "between others": {"attention_mask": holes},
        "output_router_logits": {"output_router_logits": True}, "4, 6 tokens": {"input_ids": uneven},
        "some ranks only": {"attention_mask": torch.ones(2, 4)} if on.cp.rank else {},
        "first tokens": {"attention_mask": torch.full((2, 4), on.cp.rank)},
        "token_type_ids": {"token_type_ids": mine["input_ids"]},
        "same 4 tokens": {"input_ids": ids[:, :4]},
        "order of context 'ring' on cp 2": {"position_ids": other},
        "restart": {"position_ids": mine["position_ids"] % 4 % 3},
        r"\[B, T/cp\]": {"attention_mask": torch.ones(2, 8)} if on.cp.rank else {"attention_mask": torch.ones(2, 4)},
    }  # fmt: skip
    for what, arguments in wrong.items():
        with pytest.raises(ValueError, match=what):
            model(**{"input_ids": mine["input_ids"]} | arguments)
    caching, packed = build("llama"), {"position_ids": mine["position_ids"] % 4 % 3}
    caching.config.use_cache = True  # the unsharded model then lets documents see each other
    stages = mp.pipeline_stages(caching, mp.build_mesh(pp=2, device_type="cpu"), micro_batches=2)[0]
    with pytest.raises(ValueError, match="save_pretrained"):
        stages[0].save_pretrained("unused")
    for sharded in (*stages, parallelize(caching, cp=on.cp, context="ring")):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM .*use_cache = False"):
            sharded(mine["input_ids"], **packed)
    with pytest.raises(ValueError, match=r"'none' is none of .*'zigzag'"):
        parallelize(build("llama"), context="none")
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        model.train()(mine["input_ids"])


def at_most_20(module, given):
    if given[0].shape[1] > 20:
        raise IndexError("more than 20 tokens")


def test_a_model_that_cannot_be_served_is_refused_before_it_changes():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for model, what in (
        (nn.Sequential(nn.Embedding(4, 4)), "Sequential"),
        (hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SIZES, no_rope_layers=[1, 0])), "attn_temperature_tuning"),
        (hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rope_parameters=rope)), "rope_type 'dynamic'"),
    ):
        with pytest.raises(ValueError, match=what):
            serve_context(model, Axis(2, 0, name="cp"), "ring")
    with pytest.raises(ValueError, match=r"'model\.norm'"):
        parallelize(build("llama"), {"model.norm": "sequence_parallel"}, Axis(2, 0, name="tp"), check=False)
    model = build("llama")
    plan = model_plan(model, 2) | {"": "sequence_parallel"}
    model.model.norm.register_forward_pre_hook(at_most_20)  # the test has 26 tokens, and 13 on a rank
    with pytest.raises(ValueError, match="more than 20 tokens"):
        parallelize(model, plan, Axis(2, 0, name="tp"), strict=True)
