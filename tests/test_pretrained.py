"""Folders of transformers' models: what a parallel model saves is what the unsharded one saves, byte for byte."""

import itertools
import json
import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import mpcore as mp
from mpcore import from_pretrained, full_state_dict, parallelize, suggest_plan
from mpcore.interop.hugging_face import hf_tensors, pretrained, save_pretrained
from mpcore.interop.lora import add_lora
from mpcore.parallel import shard_data_parallel
from tests.pool import RankError, mesh
from tests.quick import some

hf = pytest.importorskip("transformers", minversion="5")
from safetensors.torch import load_file, save_file  # noqa: E402

from tests import families, pretrained_memory  # noqa: E402
from tests.families import build, shrunk  # noqa: E402
from tests.families_training import wide  # noqa: E402

OWN = ["apertus", "arcee", "cohere", "deepseek_v3", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma2", "gemma3_text"]
OWN += ["glm4_moe", "gpt2", "gpt_neox", "granitemoe", "hunyuan_v1_moe", "llama", "minimax", "mixtral", "olmo2", "phi3"]
OWN += ["qwen2_moe", "qwen3", "qwen3_moe", "smollm3"]
FOUND = ["bert", "bloom", "gpt_oss", "jamba", "opt"]  # their plans are found


def quiet_build(family):
    """The same model on every rank, in the dtype of its weights."""
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    torch.manual_seed(3)
    model = build(family)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
            p.data = p.data.bfloat16() if family == "phi3" else p.data
    return model


def files_of(folder):
    """All tensors of a folder, by name."""
    return {key: x for path in Path(folder).glob("*.safetensors") for key, x in load_file(path).items()}


def all_equal(got, want):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    assert all(got[key].dtype == want[key].dtype and torch.equal(got[key], want[key]) for key in want), [
        key for key in want if not torch.equal(got[key], want[key])
    ]


def check_saved(family, folder, plan="auto", zero=False, **sizes):
    """A sharded model's folder beside the one that transformers writes of the whole model."""
    layout = mesh(**sizes or {"tp": 3 if torch.distributed.get_world_size() == 3 else 2})
    model = quiet_build(family)
    if layout.world.rank == 0:
        model.save_pretrained(f"{folder}/dense")
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model = parallelize(model, plan, layout.tp, ep=layout.ep, etp=layout.etp, check=False)
    assert sum(p.numel() for p in model.parameters()) < sum(x.numel() for x in state.values())
    if zero:
        shard_data_parallel(model, layout, blocks=model.model.layers, zero=3)
    with mock.patch.object(pretrained, "PIECE", 512):  # several pieces of each tensor
        save_pretrained(model, f"{folder}/sharded", layout)
        for name, _ in hf_tensors(model, layout):
            assert layout.world.rank == 0, name
            break  # the rest is sent all the same
        pairs = list(hf_tensors(model, layout, every_rank=True))
        all_equal(dict(pairs), files_of(f"{folder}/dense"))
        assert len(pairs) == len(dict(pairs))
    if layout.world.rank == 0:
        dense, sharded = Path(folder, "dense"), Path(folder, "sharded")
        assert sorted(os.listdir(dense)) == sorted(os.listdir(sharded))
        for path in dense.glob("*.json"):
            assert json.loads(path.read_text()) == json.loads((sharded / path.name).read_text())
        all_equal(files_of(sharded), files_of(dense))
        kind = getattr(hf, json.loads((sharded / "config.json").read_text())["architectures"][0])
        all_equal(kind.from_pretrained(sharded).state_dict(), state)
    again = from_pretrained(f"{folder}/sharded", layout, plan, check=False)
    assert type(again).__name__ == type(model).__name__.removeprefix("FSDP")
    assert not again.training
    if not zero:
        assert [(n, p.shape, p.dtype) for n, p in again.named_parameters()] == [
            (n, p.shape, p.dtype) for n, p in model.named_parameters()
        ]
    all_equal(full_state_dict(again), state)
    all_equal(dict(again.named_buffers()), dict(model.named_buffers()))


KINDS = [("gpt2", 2), ("phi3", 2), ("deepseek_v3", 2), ("mixtral", 2), ("bert", 2), ("qwen2_moe", 3)]


@pytest.mark.parametrize(("family", "tp"), some(*KINDS, of=[(family, tp) for family in OWN + FOUND for tp in (2, 3)]))
def test_a_sharded_model_saves_the_folder_of_the_whole_one(ranks, tmp_path, family, tp):
    plan = suggest_plan(quiet_build(family), tp).plan if family in FOUND else "auto"
    ranks(tp, check_saved, family, str(tmp_path), plan)


@pytest.mark.parametrize(("family", "size", "zero", "sizes"), some(
    ("qwen3_moe", 2, False, {"ep": 2}), ("gpt_oss", 4, True, {"tp": 2, "ep": 2}), of=[("llama", 4, True, {}),
     ("deepseek_v3", 4, True, {"ep": 2}), ("aria_text", 4, False, {"tp": 2, "ep": 2, "etp": 1})],
))  # fmt: skip
def test_a_model_with_sharded_experts_saves_the_folder_of_the_whole_one(ranks, tmp_path, family, size, zero, sizes):
    ranks(size, partial(check_saved, zero=zero, **sizes), family, str(tmp_path))


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
KIMI = HYBRID | {"linear_head_dim": 4, "linear_num_heads": 4}
SHOWN = {"qwen3_next": ("auto", HYBRID), "gpt_oss": ("found", {}), "deepseek_v3": ("auto", {}),
         "kimi_linear": ("found", KIMI)}  # fmt: skip


def check_shown(family, folder, **sizes):
    """Logits, loss, gradients and files of a folder of transformers, in float64, beside transformers' own."""
    layout, (kind, fields), tp = mesh(**sizes), SHOWN[family], sizes["tp"]
    hf.logging.set_verbosity_error()
    if layout.world.rank == 0:
        torch.manual_seed(3)
        config = type(build(family).config)(**shrunk(build(family).config, family) | fields)
        config.num_nextn_predict_layers = 1
        hf.AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)
        state, name = files_of(folder), "mtp.fc.weight" if family == "qwen3_next" else "model.layers.2.eh_proj.weight"
        save_file({**state, name: torch.randn(3, 4)}, Path(folder, "model.safetensors"), {"format": "pt"})
    torch.distributed.barrier()
    ids = torch.randint(60, (4, 9), generator=torch.Generator().manual_seed(1))
    with wide():
        dense = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        plan = "auto" if kind == "auto" else suggest_plan(dense, tp, ep=sizes.get("ep", 1)).plan
        model = from_pretrained(folder, layout, plan, dtype=torch.float64, check=False)
        model.set_experts_implementation("eager")
        assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in dense.parameters())
        logits = dense.eval()(ids[:, :-1], use_cache=False).logits
        found = model(ids[:, :-1], use_cache=False).logits
        assert (found - logits).abs().max() <= 1e-10 * logits.abs().max()
        save_pretrained(model, f"{folder}/again", layout)
        if layout.world.rank == 0:
            all_equal(files_of(f"{folder}/again"), files_of(folder))
        stages, blocks, schedule = mp.pipeline_stages(model.train(), layout, micro_batches=2)
        run = mp.prepare(
            stages, layout, blocks=blocks, schedule=schedule, micro_batches=2, initialize=False,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            loss=lambda out, target: F.cross_entropy(out.logits.flatten(0, 1), target.flatten(), reduction="sum"),
        )  # fmt: skip
        loss = F.cross_entropy(dense.train()(ids[:, :-1], use_cache=False).logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        mine = ids[run.share(len(ids))]
        assert abs(run.forward_backward(mine[:, :-1], mine[:, 1:]) / loss.item() - 1) <= 1e-12
        run.optimizer_step()
    with run.parameters() as model:
        for name, p in full_state_dict(model).items():
            before = dense.get_parameter_or_buffer(name)
            grad = torch.zeros_like(before) if before.grad is None else before.grad
            assert (before - grad - p).abs().max() <= 1e-10 * max(grad.abs().max(), 1e-3), name


@pytest.mark.parametrize(("family", "sizes"), some(
    ("qwen3_next", {"tp": 2}),
    of=[("gpt_oss", {"tp": 2, "ep": 2}), ("kimi_linear", {"tp": 2}), ("qwen3_next", {"tp": 2, "ep": 2}),
        ("qwen3_next", {"tp": 2, "pp": 2}), ("deepseek_v3", {"tp": 2, "ep": 2})],
))  # fmt: skip
def test_this_years_families_equal_transformers_in_float64(ranks, tmp_path, family, sizes):
    ranks(2 if len(sizes) == 1 else 4, check_shown, family, str(tmp_path), **sizes)


def changed(**tensors):
    """Put tensors into the folder's file, or take those that are None away."""

    def damage(folder):
        files = {**files_of(folder), **tensors}
        files = {name: x for name, x in files.items() if x is not None}
        save_file(files, folder / "model.safetensors", {"format": "pt"})

    return damage


NORM = "model.norm.weight"


def check_several_files(folder):
    """Small files, which a group of tensors may span, and their index."""
    layout, model = mesh(tp=2), quiet_build("mixtral")
    state = {name: x.clone() for name, x in model.state_dict().items()}
    save_pretrained(parallelize(model, tp=layout.tp, check=False), folder, layout, shard_bytes=5000)
    if layout.world.rank == 0:
        index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 5
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
        all_equal(hf.MixtralForCausalLM.from_pretrained(folder).state_dict(), state)


def check_full_disk(folder):
    """Rank 0 can't write: all ranks raise, nothing is left, and the model can be saved elsewhere."""
    layout = mesh(tp=2)
    model = parallelize(quiet_build("llama"), tp=layout.tp, check=False)
    real, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return real(*args)

    if layout.world.rank == 0:
        os.pwrite = full
    try:
        with pytest.raises(ValueError, match="No space left on device"):
            save_pretrained(model, f"{folder}/full", layout)
    finally:
        os.pwrite = real
    assert not os.listdir(folder)
    save_pretrained(model, f"{folder}/elsewhere", layout)


def grown():
    model = quiet_build("llama")
    model.extra = torch.nn.Linear(2, 2)
    return model


def resized():
    model = quiet_build("llama")
    model.lm_head = torch.nn.Linear(48, 70, bias=False)
    return model


def stage():
    model = quiet_build("llama")
    del model.model.layers[1]
    return model


def untied():
    model = quiet_build("gpt2")
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    return model


def half_nan(model):
    with torch.no_grad():
        model.transformer.wte.weight[0] = torch.nan
    return model


def two_values(mesh, folder, own):
    """A tied table that differs between the stages: of a cut model, or of one that was cut by hand."""
    model = quiet_build("gpt2")
    (model,) = [model] if own else mp.pipeline_stages(model, mesh, micro_batches=2).stages
    with torch.no_grad():
        if own and mesh.pp.rank:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
            del model.transformer.wte, model.transformer.wpe, model.transformer.h[0]
            model.transformer.h = torch.nn.ModuleDict({"1": model.transformer.h[0]})
        elif own:
            del model.lm_head, model.transformer.ln_f, model.transformer.h[1]
        elif mesh.pp.rank:
            model.lm_head.weight.add_(1)
    save_pretrained(model, folder, mesh)


def overflows(mesh, folder):
    """An adapter whose product is beyond float16; the ranks go on together after each error."""
    model = add_lora(parallelize(quiet_build("llama").half(), tp=mesh.tp, check=False), targets="1.self_attn.q_proj")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.lora_A.weight.fill_(500)
        model.model.layers[1].self_attn.q_proj.lora_B.weight.fill_(500)
    for call in (lambda: save_pretrained(model, folder, mesh), lambda: [*hf_tensors(model, mesh, every_rank=True)]):
        with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.weight .* beyond the 65504 of torch.float16"):
            call()


def test_an_adapter_that_overflows_is_not_written(tmp_path):
    mp.simulate(overflows, tmp_path / "new", tp=2)
    assert not os.listdir(tmp_path)


def sharded_differently(mesh, folder):
    """Tied weights of two values, of which one is sharded: no part of one is a part of the other."""
    model = quiet_build("gpt2")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    parallelize(model, {"transformer.wte": "embedding_rowwise"}, mesh.tp, check=False)
    save_pretrained(model, folder, mesh)


def test_tied_weights_that_are_sharded_differently_are_not_written(tmp_path):
    with pytest.raises(RankError, match=r"lm_head.weight and transformer.wte.weight, .* are sharded differently"):
        mp.simulate(sharded_differently, tmp_path, tp=2)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("own", [False, True], ids=["cut", "own stages"])
def test_two_values_of_a_tied_weight_on_two_stages_are_not_written(tmp_path, own):
    with pytest.raises(RankError, match=r"lm_head.weight isn't transformer.wte.weight \(ranks 0 and 1\)"):
        mp.simulate(two_values, tmp_path, own, pp=2)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("make", "match"), [
    (lambda: half_nan(untied()), r"transformer.wte.weight \(66, 48\) holds NaN"),
    (untied, r"lm_head.weight isn't transformer.wte.weight: set tie_word_embeddings=False"),
    (lambda: torch.nn.Linear(2, 2), "Linear is no model of transformers: save a model of your own with"),
    (grown, r"config has no \['extra.bias', 'extra.weight'\]"),
    (resized, r"lm_head.weight is with shape \(70, 48\), but has shape \(66, 48\) by its config"),
    (stage, r"model.layers.1.\S+ is not there, but has shape .*: save it unsharded"),
])  # fmt: skip
def test_what_from_pretrained_would_not_read_is_refused(tmp_path, make, match):
    with pytest.raises(ValueError, match=match):
        save_pretrained(make(), tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("layout", some("ep 2 x edp 2, ZeRO-3", of=pretrained_memory.LAYOUTS))
@pytest.mark.parametrize(("layers", "width"), some((2, 256), of=[(2, 256), (8, 1024)]))
def test_a_host_reads_a_checkpoint_once_and_a_rank_holds_its_shards(ranks, tmp_path, layout, layers, width):
    """Bytes of 4 ranks of one host, for 36 MB; of 370 MB also the memory beyond a rank's shards."""
    names = [str(tmp_path / name) for name in ("small", "in", "small out", "out")]
    experts = "ep" in pretrained_memory.LAYOUTS[layout][0]
    pretrained_memory.make(names[0], 2, 64, experts)
    total, largest = pretrained_memory.make(names[1], layers, width, experts)
    ranks(4, pretrained_memory.measure, names[0], names[2], *pretrained_memory.LAYOUTS[layout])  # loads the code
    found = ranks(4, pretrained_memory.measure, names[1], names[3], *pretrained_memory.LAYOUTS[layout])
    assert 1.0 <= sum(each["copied"] for each in found) / total <= 1.2
    assert max(each["read"] for each in found) < 150e6
    if layers > 2:
        assert max(each["read"] for each in found) < 1.5 * largest
        assert found[0]["written"] < 1.5 * largest
        assert max(each["written"] for each in found[1:]) < 0.5 * largest
    all_equal(files_of(names[3]), files_of(names[1]))


def check_half(folder):
    """In bfloat16, with a parameter's wide values; and from a base model's folder, whose names lack the prefix."""
    layout = mesh(tp=2)
    model = quiet_build("llama")
    if layout.world.rank == 0:
        model.model.save_pretrained(f"{folder}/base")
    torch.distributed.barrier()
    got = full_state_dict(from_pretrained(f"{folder}/base", layout, model_class=hf.LlamaModel, dtype=torch.bfloat16))
    all_equal(got, {name: x.bfloat16() for name, x in model.model.state_dict().items()})


def named(**fields):
    """Put fields into config.json, with a module beside it that they may name."""

    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        (folder / "evil.py").write_text("raise SystemExit('code of the folder ran')")

    return damage


@pytest.mark.parametrize(("damage", "match"), [
    (changed(**{NORM: None}), r"has no tensor 'model.norm.weight', which model.norm.weight needs"),
    (changed(**{NORM: torch.zeros(47)}), r"norm.weight has shape \(47,\) of torch.float32, in config.json \(48,\)"),
    (changed(**{NORM: torch.ones(48) * 1j}), r"of torch.complex64, in config.json \(48,\) of torch.float32"),
    (changed(**{NORM: torch.full((48,), torch.nan)}), r"model.norm.weight \(48,\) holds NaN"),
    (named(quantization_config={"quant_method": "fp8"}), "holds quantized weights"),
    (named(architectures=["Mine"]), r"names the architectures \['Mine'\], no model class of transformers"),
    (named(architectures=["AutoTokenizer"]), r"names the architectures \['AutoTokenizer'\], no model class"),
    (named(model_type="evil", auto_map={"AutoConfig": "evil.Config"}), "trust_remote_code"),
    (named(attn_implementation="org/kernel"), "attn_implementation is 'org/kernel', code on the Hub"),
    (named(_experts_implementation={"": "org/kernel"}), "_experts_implementation is .*org/kernel.*, code on the Hub"),
    (named(num_hidden_layers=10**9), "has num_hidden_layers 1000000000, but the files beside it hold"),
    (named(dtype="int64"), "config.json can't be read: .*floating-point"),
    (named(tie_word_embeddings=[]), "config.json can't be read: .*tie_word_embeddings"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
])  # fmt: skip
def test_pitfall_66_a_folder_that_holds_no_such_model_is_refused(tmp_path, damage, match):
    save_pretrained(quiet_build("llama"), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=match), mock.patch("builtins.input", return_value="y"):  # to run code
        from_pretrained(tmp_path)
    assert not torch.nn.Linear(1, 1).weight.is_meta  # nothing is left as it was while the model was created


def test_options_are_fields_of_the_config(tmp_path):
    save_pretrained(quiet_build("mixtral"), tmp_path)
    assert from_pretrained(tmp_path, output_router_logits=True)(torch.tensor([[1, 2]])).aux_loss is not None
    hub = {"subfolder": "a", "revision": "main", "trust_remote_code": True, "gguf_file": "a", "local_files_only": False}
    for name, value in {"num_expert": 2, "torch_dtype": torch.bfloat16, **hub}.items():
        with pytest.raises(ValueError, match=f"'{name}' is neither an option .* nor a field.* leave {name} out"):
            from_pretrained(tmp_path, **{name: value})
    for name, value in {"dtype": "bfloat16", "model_class": "MixtralForCausalLM"}.items():
        with pytest.raises(ValueError, match=f"^{name} .*'{value}'"):
            from_pretrained(tmp_path, **{name: value})


def test_pitfall_60_a_model_with_nan_is_not_written(tmp_path):
    model = quiet_build("llama")
    model.lm_head.weight.data[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"lm_head.weight .* holds NaN or infinity .* to inf"):
        save_pretrained(model, tmp_path / "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="exists: it is not overwritten"):
        save_pretrained(quiet_build("llama"), tmp_path)
    assert os.listdir(tmp_path) == ["notes"]


@pytest.mark.parametrize("held", ["both", "equal", "head", "table"])
def test_pitfall_55_weights_are_tied_as_transformers_ties_them(tmp_path, held):
    """The folder's tensors decide whether a config ties: one tensor, two equal tensors, or two different ones."""
    hf.logging.set_verbosity_error()
    model = quiet_build("llama")
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    save_pretrained(model, tmp_path / "a")
    files = files_of(tmp_path / "a")
    files |= {head: files[table].clone()} if held == "equal" else {}
    for key in {"head": [table], "table": [head]}.get(held, []):
        del files[key]
    save_file(files, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    named(tie_word_embeddings=True)(tmp_path / "a")
    want, got = hf.LlamaForCausalLM.from_pretrained(tmp_path / "a"), from_pretrained(tmp_path / "a")
    all_equal(got.state_dict(), want.state_dict())
    assert (got.lm_head.weight is got.model.embed_tokens.weight) is (held != "both")
    again = from_pretrained(save_pretrained(got, tmp_path / "b"))
    ids = torch.arange(6)[None]
    assert torch.equal(again(ids).logits, want(ids).logits)


BUFFERS = ["deepseek_v3", "hy_v3", "gptj", "glm4_moe", "ernie4_5_moe", "gpt_oss", "hrm_text"]  # the last interleaves


COMPOSITE = ["gemma3", "got_ocr2", "fuyu"]  # with a config of each part


@pytest.mark.parametrize(("family", "dtype"), some(
    *zip(BUFFERS + COMPOSITE, [torch.bfloat16, torch.float16] * 5, strict=True),
    of=itertools.product(sorted({*BUFFERS, *COMPOSITE, *OWN, *FOUND}), (torch.bfloat16, torch.float16)),
))  # fmt: skip
def test_pitfall_56_each_tensor_has_the_dtype_of_transformers(tmp_path, family, dtype):
    """Parameters and buffers have transformers' dtypes and values, and are saved so."""
    model = quiet_build(family)
    with torch.no_grad():
        for x in (x for name, x in model.named_buffers() if name in model.state_dict() and x.is_floating_point()):
            x.normal_()
    if family in COMPOSITE:
        model.generation_config.update(do_sample=True, temperature=0.3, eos_token_id=[1, 2])
    save_pretrained(model, tmp_path / "a")
    if family == "got_ocr2":  # as old folders have it, with the flags of generation in config.json
        (tmp_path / "a" / "generation_config.json").unlink()
        named(num_beams=3, no_repeat_ngram_size=2)(tmp_path / "a")
    want, got = (
        type(model).from_pretrained(tmp_path / "a", dtype=dtype),
        from_pretrained(tmp_path / "a", plan={"*": "replicate"}, dtype=dtype),
    )
    all_equal(got.state_dict(), want.state_dict())
    all_equal(dict(got.named_buffers()), dict(want.named_buffers()))
    save_pretrained(got, tmp_path / "b")
    want.save_pretrained(tmp_path / "c")
    all_equal(files_of(tmp_path / "b"), files_of(tmp_path / "c"))
    for path in (tmp_path / "c").glob("*.json"):
        assert json.loads(path.read_text()) == json.loads((tmp_path / "b" / path.name).read_text()), path.name


def test_a_weight_that_is_changed_before_it_is_read_is_refused(tmp_path):
    quiet_build("llama").save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, defer=True, check=False)
    with pytest.raises(ValueError, match=r"from_pretrained\(defer=True\) .* defer=False"):
        model(torch.ones(1, 2, dtype=torch.long))
    around = torch.nn.Sequential(torch.nn.Identity(), model)
    with pytest.raises(ValueError, match=r"1\.model\.embed_tokens\.weight .* not a module around it"):
        mp.prepare(around, mp.Mesh(), blocks=(), loss=F.mse_loss, optimizer=mp.AdamW, initialize=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    with pytest.raises(ValueError, match=r"lm_head\.weight was changed before its values were read"):
        mp.prepare(model, mp.Mesh(), blocks=(), loss=F.mse_loss, optimizer=mp.AdamW, initialize=False)


def prepared(folder, layout, defer, zero, micro_batches=1, lora=False, schedule="1f1b", **policies):
    """A run whose model is read before it is sharded, or after."""
    model = from_pretrained(folder, layout, defer=defer, check=False)
    assert any(p.is_meta for p in model.parameters()) is defer
    model.set_experts_implementation("eager")  # torch's grouped product takes no rows of these few bytes
    if lora:
        add_lora(model, rank=2)
    stages, blocks, plan = mp.pipeline_stages(model, layout, micro_batches=micro_batches, schedule=schedule)
    return mp.prepare(
        stages, layout, blocks=blocks, schedule=plan, micro_batches=micro_batches, initialize=False,
        data=zero, optimizer=lambda model: mp.AdamW(model, lr=1e-2), **policies,
        loss=lambda out, target: F.cross_entropy(out.logits.flatten(0, 1).float(), target.flatten(), reduction="sum"),
    )  # fmt: skip


def check_deferred(folder, axes, zero, **how):
    """Values, files and a step of a model that is read box by box are bitwise those of one that is read first."""
    layout, ids = mesh(**axes), torch.arange(32).view(4, 8) % 60
    runs = [prepared(folder, layout, defer, zero, **how) for defer in (False, True)]
    with runs[1].parameters():
        save_pretrained(runs[1].stages, f"{folder}/again", layout)
    all_equal(files_of(f"{folder}/again"), files_of(folder))
    for _ in range(2):
        with runs[0].parameters() as want, runs[1].parameters() as got:
            all_equal(full_state_dict(got), full_state_dict(want))
            all_equal(dict(got.named_buffers()), dict(want.named_buffers()))
        share = runs[0].share(4)
        mine = mp.shard_sequence(ids[share.start : share.stop], layout.cp, "zigzag")
        losses = [run.forward_backward(mine, mine) for run in runs]
        assert losses[0] == losses[1]
        assert [run.optimizer_step().taken for run in runs] == [True, True]


DEFERRED = some(
    ("qwen2_moe", {"dp": 2, "tp": 2}, mp.Zero(1), {"lora": True}),
    ("gpt2", {"dp": 2, "pp": 2}, mp.Zero(3), {"micro_batches": 2}),  # a tied table
    of=[("mixtral", {"dp": 2, "tp": 2}, mp.Zero(3), {"precision": "bfloat16"}),
        ("llama", {"cp": 2, "pp": 2}, mp.Zero(3), {"micro_batches": 2, "schedule": "interleaved"}),  # two stages a rank
        ("gemma2", {"pp": 2, "tp": 2}, mp.Zero(0), {"micro_batches": 4, "lora": True}),
        ("llama", {"dp": 4}, mp.Zero(3, replicate=2), {})],
)  # fmt: skip


@pytest.mark.parametrize("check", [check_several_files, check_full_disk, check_half])
def test_folders_on_ranks(ranks, tmp_path, check):
    ranks(2, check, str(tmp_path))


@pytest.mark.parametrize(("family", "axes", "zero", "how"), DEFERRED)
def test_values_are_read_after_the_model_is_sharded(ranks, tmp_path, monkeypatch, family, axes, zero, how):
    monkeypatch.setitem(families.SIZES, "num_hidden_layers", 4 if "pp" in axes else 2)
    quiet_build(family).save_pretrained(tmp_path)
    ranks(4, check_deferred, str(tmp_path), axes, zero, **how)
