"""Adapters in files, in PEFT, in transformers; wrong input; what `add_lora` does to a model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.lora import add_lora, load_lora, merge_lora, merged_state_dict, save_lora
from mpcore.interop.lora.layers import LoRALayer
from tests.equality import close
from tests.lora_models import (
    ALPHA,
    LAYOUTS,
    MODELS,
    RANK,
    STEPS,
    TARGETS,
    batch,
    build,
    dense_losses,
    fill,
    hf,
    same_losses,
    start,
    token_loss,
    train,
)
from tests.pool import mesh, on_ranks


def check_saved(name: str, layout: str, folder: Path) -> None:
    _, sizes, told = LAYOUTS[layout]
    run = start(name, sizes, **told)
    train(run, 3)
    with run.parameters() as model:
        save_lora(model, folder / "adapter", run.mesh)
        mp.save_pretrained(model, folder / "merged", run.mesh)
        merged = merged_state_dict(model)
    train(run, 4)  # the model still has its adapters
    if run.mesh.job.rank == 0:
        again = type(model).from_pretrained(folder / "merged", dtype=torch.float64).state_dict()
        for key, value in merged.items():
            close(again[key], value, key)


@pytest.mark.parametrize(("name", "layout"), [("llama", "tp2 zero3"), ("gpt2", "tp2")])
def test_an_adapter_and_a_merged_folder_open_elsewhere(ranks, tmp_path, name, layout):
    """`load_lora` in one process, and `from_pretrained` of the merged folder, compute the same."""
    ranks(LAYOUTS[layout][0], check_saved, name, layout, tmp_path)
    x, _ = batch(9)
    model = load_lora(build(name), tmp_path / "adapter").eval()
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    with torch.no_grad():
        want = merged(x).logits
        close(model(x).logits, want, "logits of the adapter", 1e-10)
        close(merge_lora(model)(x).logits, want, "logits of merge_lora", 1e-10)
        assert (want - build(name)(x).logits).abs().max() > 1e-3
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["peft_type"], said["fan_in_fan_out"]) == (
        RANK,
        ALPHA,
        "LORA",
        name == "gpt2",
    )
    assert said["target_modules"] == sorted(TARGETS[name])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3 moe"])  # save_lora refuses its experts
def test_peft_opens_an_adapter_trains_it_alike_and_load_lora_opens_its(tmp_path, name):
    """PEFT's losses of twenty steps on the dense model are those that all layouts are compared with."""
    peft = pytest.importorskip("peft")
    model = add_lora(build(name), RANK, ALPHA, targets=TARGETS[name])
    save_lora(model, tmp_path / "ours")
    options = {"autocast_adapter_dtype": False, "is_trainable": True}
    theirs = peft.PeftModel.from_pretrained(build(name), tmp_path / "ours", **options).train()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.02), []
    for step in range(STEPS):
        x, target = batch(step)
        loss = token_loss(theirs(x).logits, target) / (target != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    same_losses(losses, dense_losses(name)[0])
    theirs.save_pretrained(tmp_path / "theirs")
    again, x = load_lora(build(name), tmp_path / "theirs"), batch(9)[0]
    with torch.no_grad():
        close(again(x).logits, theirs(x).logits, f"logits of {name} from peft", 1e-10)


def test_two_calls_of_add_lora_train_and_save_both_ranks(tmp_path):
    base, x = mlp(), torch.randn(5, 4)
    net = add_lora(add_lora(copy.deepcopy(base), 2, 6, "0"), 3, 4, "2")
    for name, p in net.named_parameters():
        assert p.requires_grad == ("lora" in name), name
        nn.init.uniform_(p) if p.requires_grad else None
    assert torch.equal(load_lora(base, save_lora(net, tmp_path / "new"))(x), net(x))


PATTERNS = {"rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"o_proj": 7.0}}
BESIDE = ["embed_tokens", "lm_head", "norm"]


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_and_mpcore_read_each_others_patterns_and_modules_to_save(tmp_path, rslora):
    peft = pytest.importorskip("peft")
    told = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS["llama"]), "use_rslora": rslora}
    config = peft.LoraConfig(**told, **PATTERNS, modules_to_save=BESIDE)
    theirs = peft.get_peft_model(build("llama"), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for i, p in enumerate(p for p in theirs.parameters() if p.requires_grad):
            p.add_(torch.rand(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) - 0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, x = load_lora(build("llama"), tmp_path / "theirs"), batch(9)[0]
    made = add_lora(build("llama"), RANK, ALPHA, TARGETS["llama"], use_rslora=rslora, **PATTERNS)
    layers = dict(made.named_modules())
    for name, layer in ours.named_modules():
        if isinstance(layer, LoRALayer):
            assert (layer.rank, layer.alpha) == (layers[name].rank, layers[name].alpha)
    save_lora(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "ours", autocast_adapter_dtype=False)
    with torch.no_grad():
        want = theirs(x).logits
        close(ours(x).logits, want, "mpcore reads PEFT's", 1e-10)
        close(again(x).logits, want, "PEFT reads mpcore's", 1e-10)
        close(load_lora(build("llama"), tmp_path / "ours")(x).logits, want, "mpcore reads its own", 1e-10)


@pytest.mark.parametrize(
    "told", [{"init_lora_weights": "pissa"}, {"use_dora": True}, {"target_modules": ["lm_head", "embed_tokens"]}]
)
def test_other_folders_of_peft_are_refused(tmp_path, told):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(
        build("llama").float(), peft.LoraConfig(**{"target_modules": ["q_proj"], **told})
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"init_lora_weights|use_dora|is no factor"):
        load_lora(build("llama"), tmp_path)


def check_saved_beside(layout: str, folder: Path) -> None:
    _, sizes, told = LAYOUTS[layout]
    on = mesh(**sizes)
    model = add_lora(mp.parallelize(build("llama"), tp=on.tp, check=False), RANK, ALPHA, TARGETS["llama"], **PATTERNS)
    for module in (model.lm_head, model.model.embed_tokens, model.model.norm):
        module.requires_grad_()
    run = mp.prepare(
        model, on, blocks=model.model.layers, initialize=False,
        loss=lambda out, target: token_loss(out.logits, target),
        optimizer=lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02), **told,
    )  # fmt: skip
    train(run, 3)
    with run.parameters() as model:
        save_lora(model, folder / "adapter", on)
        mp.save_pretrained(model, folder / "merged", on)
        load_lora(model, folder / "adapter", on)


def test_embedding_head_and_norm_that_are_trained_beside_adapters_are_saved(ranks, tmp_path):
    """Logits were off by 0.6 after three steps when they were left out."""
    ranks(LAYOUTS["tp2 zero3"][0], check_saved_beside, "tp2 zero3", tmp_path)
    x, _ = batch(9)
    want = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)(x).logits
    model = load_lora(build("llama"), tmp_path / "adapter")
    close(model(x).logits, want, "logits", 1e-10)
    assert {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    }  # fmt: skip


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    return net


def altered(folder: Path, **fields) -> Path:
    """An adapter's folder with other fields in its configuration."""
    save_lora(add_lora(mlp(), targets=("0", "2")), folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


REFUSED = {
    "rank is 0: give a whole number of at least 1": lambda _: add_lora(mlp(), 0, targets="0"),
    "alpha is -1: give a number above 0, such as 16 for rank 8": lambda _: add_lora(mlp(), alpha=-1, targets="0"),
    "dropout 1.0 is not in": lambda _: add_lora(mlp(), targets="0", dropout=1.0),
    "leaves out the head, and a Sequential doesn't say which": lambda _: add_lora(mlp()),
    "target 'q_proj' matches no module; the linear layers are 0, 2": lambda _: add_lora(mlp(), targets="q_proj"),
    "target '1' matches a Tanh and no linear layer": lambda _: add_lora(mlp(), targets=("0", "1")),
    "names 0 layers": lambda _: add_lora(mlp(), targets=()),
    "0 has an adapter already": lambda _: add_lora(add_lora(mlp(), targets="0"), targets="0"),
    "1 shares its weight with another module": lambda _: add_lora(tied(), targets="1"),
    "out_proj is read past the layer": lambda _: add_lora(nn.MultiheadAttention(4, 2), targets="out_proj"),
    "has 0 layers with an adapter": lambda _: merge_lora(mlp()),
    "adapter_config.json is missing": lambda folder: load_lora(mlp(), folder),
    "pattern 'up_proj' matches none of the 1 layers": lambda _: add_lora(
        mlp(), targets="0", rank_pattern={"up_proj": 4}
    ),
    "rank is -1: give": lambda _: add_lora(mlp(), targets="0", rank_pattern={"0": -1}),
    "a_new_field is 1": lambda folder: load_lora(mlp(), altered(folder, a_new_field=1)),
    "use_dora is True": lambda folder: load_lora(mlp(), altered(folder, use_dora=True)),
    "bias 'all'": lambda folder: load_lora(mlp(), altered(folder, bias="all")),
    "has shape .8, 4., 0 needs .9, 4.": lambda folder: load_lora(mlp(), altered(folder, r=9)),
    "2 layers and 0 more tensors, and 1 are no linear layers or tensors of this Sequential, such as 2": lambda folder: (
        load_lora(mlp()[:2], altered(folder))
    ),
    "rank 8 and alpha 32.0 in 0, and the model's adapter of 8 and 16": lambda folder: load_lora(
        add_lora(mlp(), targets=("0", "2")), altered(folder, lora_alpha=32)
    ),
    "adapters of 1 layers and .* of 2": lambda folder: load_lora(add_lora(mlp(), targets="0"), altered(folder)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_input_is_refused_and_changes_nothing(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](tmp_path / "adapter")


def test_pitfall_57_weights_trained_beside_adapters_are_not_left_out_in_silence(tmp_path):
    net = add_lora(mlp(), targets="0")
    net[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 trained weights, 0\.bias, are in a layer that has an adapter"):
        save_lora(net, tmp_path / "new")
    assert not list(tmp_path.iterdir())
    net[0].bias.requires_grad_(False)
    net[2].bias.requires_grad_(True)  # in a module of its own
    with torch.no_grad():
        net[2].bias.fill_(3.0)
    folder = save_lora(net, tmp_path / "new")
    assert torch.equal(load_lora(mlp(), folder)[2].bias, net[2].bias)
    state = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    state["base_model.model.0.lora_A.weight"][1] = torch.nan
    safetensors.torch.save_file(state, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"0\.lora_A\.weight .* holds NaN"):
        load_lora(mlp(), folder)


@on_ranks(2)
def test_a_model_that_is_sharded_over_data_is_refused() -> None:
    on = mesh()
    run = start("llama", {}, data=mp.Zero(3))
    with pytest.raises(ValueError, match=r"is sharded over data: take mpcore.interop.lora.merged_state_dict"):
        merge_lora(run.model)
    model = mp.parallel.shard_data_parallel(mlp(), on, (), zero=3)
    with pytest.raises(ValueError, match="is sharded over data already: add adapters before prepare"):
        add_lora(model, targets="0")


def test_all_linear_leaves_the_head_out_and_what_is_added_is_all_that_is_trained():
    model = add_lora(build("llama"))
    layers = {name for name, module in model.named_modules() if isinstance(module, LoRALayer)}
    assert layers == {name for name, m in build("llama").named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{f}.weight" for name in layers for f in "AB"}
    half = add_lora(build("llama").bfloat16(), targets="q_proj")
    assert half.model.layers[0].self_attn.q_proj.lora_A.weight.dtype == torch.float32
    x, _ = batch(0)
    assert torch.equal(half(x).logits, build("llama").bfloat16()(x).logits)


def test_torch_encoders_call_adapters_in_evaluation():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0), 2).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        before = model(x)
        add_lora(model, targets=("linear1", "linear2"))
        close(model(x), before, "B is zero", 1e-6)
        fill(model)
        want = merge_lora(copy.deepcopy(model)).train()(x)
        close(model(x), want, "in evaluation", 1e-5)
