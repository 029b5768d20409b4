"""Adapters in files, in PEFT, in transformers; wrong input; what `add_lora` does to a model."""

from __future__ import annotations

import copy
import json
import math
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.lora import add_lora, load_lora, merge_lora, merged_state_dict, save_lora
from mpcore.interop.lora.layers import LoRALayer
from mpcore.layers.linear import replicated_linear
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

PATTERNS = {"rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"o_proj": 7.0}}
BESIDE = ["embed_tokens", "lm_head", "norm"]


def check_saved(name: str, layout: str, beside: tuple[str, ...], folder: Path) -> None:
    _, sizes, told = LAYOUTS[layout]
    run = start(name, sizes, beside, PATTERNS if beside else {}, **told)
    train(run, 3)
    with run.parameters() as model:
        save_lora(model, folder / "adapter", run.mesh)
        mp.save_pretrained(model, folder / "merged", run.mesh)
        merged = merged_state_dict(model)
        load_lora(model, folder / "adapter", run.mesh)
    train(run, 4)  # the model still has its adapters
    if run.mesh.job.rank == 0:
        again = type(model).from_pretrained(folder / "merged", dtype=torch.float64).state_dict()
        for key, value in merged.items():
            close(again[key], value, key)


@pytest.mark.parametrize(("name", "layout", "beside"), [
    ("llama", "tp2 zero3", ("model.embed_tokens", "model.norm", "lm_head")), ("gpt2", "tp2", ()),
])  # fmt: skip
def test_an_adapter_and_a_merged_folder_open_elsewhere(ranks, tmp_path, name, layout, beside):
    """`load_lora` in one process and `from_pretrained` of the merged folder compute the same.

    So they do with modules trained beside: logits were off by 0.6 after three steps when those were left out.
    """
    ranks(LAYOUTS[layout][0], check_saved, name, layout, beside, tmp_path)
    x, _ = batch(9)
    model = load_lora(build(name), tmp_path / "adapter").eval()
    assert {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n} == {
        f"{module}.weight" for module in beside
    }
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    with torch.no_grad():
        want = merged(x).logits
        close(model(x).logits, want, "logits of the adapter", 1e-10)
        close(merge_lora(model)(x).logits, want, "logits of merge_lora", 1e-10)
        assert (want - build(name)(x).logits).abs().max() > 1e-3
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    about = {"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA", "fan_in_fan_out": name == "gpt2"}
    assert said.items() >= about.items()
    assert said["target_modules"] == sorted(TARGETS[name])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3 moe"])  # save_lora refuses its experts
def test_peft_opens_an_adapter_trains_it_alike_and_load_lora_opens_its(tmp_path, name):
    """PEFT's losses on the dense model are those that all layouts are compared with."""
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
    "told", [{"init_lora_weights": "pissa"}, {"use_dora": True}, {"bias": "all"},
             {"target_modules": ["lm_head", "embed_tokens"]}]
)  # fmt: skip
def test_other_folders_of_peft_are_refused(tmp_path, told):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(
        build("llama").float(), peft.LoraConfig(**{"target_modules": ["q_proj"], **told})
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"init_lora_weights|use_dora|bias|is no factor"):
        load_lora(build("llama"), tmp_path)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def spoiled() -> nn.Sequential:
    net = add_lora(mlp(), targets="0")
    nn.init.constant_(net[0].lora_A.weight, torch.nan)
    return net


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


def factors_of(name: str, n_in: int, n_out: int) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(8, n_in), f"{name}.lora_B.weight": torch.ones(n_out, 8)}


NONE = dict.fromkeys([*factors_of("0", 1, 1), *factors_of("2", 1, 1)])
TWO = {**factors_of("2", 5, 4), "1.bias": torch.ones(5), "0.weight": torch.zeros(5, 4), "1.weight": torch.ones(5, 4)}


def changed(folder: Path, tensors: dict, **fields) -> Path:
    """An adapter's folder with other tensors in its file; None: without that one."""
    path = altered(folder, **fields) / "adapter_model.safetensors"
    state = safetensors.torch.load_file(path) | {f"base_model.model.{name}": x for name, x in tensors.items()}
    safetensors.torch.save_file({name: x for name, x in state.items() if x is not None}, path)
    return folder


REFUSED = {  # words of the error, and the call
    "alpha is -1: give a number above 0, such as 16 for rank 8": lambda _: add_lora(mlp(), alpha=-1, targets="0"),
    "alpha is inf: give": lambda _: add_lora(mlp(), alpha=math.inf, targets="0"),
    "rank is True: give": lambda _: add_lora(mlp(), rank=True, targets="0"),
    r"dropout 1.0 is not in \[0, 1\)": lambda _: add_lora(mlp(), targets="0", dropout=1.0),
    "0 sees a part of its input on each rank of tp 2, .* dropout 0.5 .*: pass dropout=0": lambda _: add_lora(
        nn.Sequential(replicated_linear(4, 4, tp=mp.Axis(2, name="tp"), sequence_parallel=True)), 2, 4, "0", 0.5),
    "dropout 0.0 and 0.5, and PEFT's file has one": lambda folder: save_lora(
        add_lora(add_lora(mlp(), targets="0", dropout=0.5), targets="2"), folder),
    "target 'k' matches no module; the linear layers are": lambda _: add_lora(mlp(), targets="k"),
    "target '1' matches a .* and no linear layer": lambda _: add_lora(mlp(), targets="1"),
    r"targets \(\) names 0 layers: give names": lambda _: add_lora(mlp(), targets=()),
    "0 has an adapter already": lambda _: add_lora(add_lora(mlp(), targets="0"), targets=("2", "0")),
    "0 has no plain weight: add adapters before": lambda _: add_lora(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), targets="0"),
    "leaves out the head, and a Sequential doesn't say which": lambda _: add_lora(mlp()),
    "1 shares its weight with another module": lambda _: add_lora(tied(), targets="1"),
    "out_proj is read past the layer": lambda _: add_lora(nn.MultiheadAttention(4, 2), targets="out_proj"),
    "pattern 'q' matches none of the 1 layers": lambda _: add_lora(mlp(), targets="0", rank_pattern={"q": 4}),
    "rank is -1: give": lambda _: add_lora(mlp(), targets="0", rank_pattern={"0": -1}),
    "isn't written.*lora_A.weight .* holds NaN": lambda folder: save_lora(spoiled(), folder),
    "0.lora_A.weight .* holds NaN": lambda folder: load_lora(
        mlp(), changed(folder, {"0.lora_A.weight": torch.full((8, 4), torch.nan)})),
    "2.weight .* holds NaN or infinity": lambda folder: load_lora(  # a float32 weight beside, as float16
        nn.Sequential(*mlp(), nn.Linear(4, 1)).half(),
        changed(folder, {**NONE, **factors_of("0", 4, 6), "2.weight": torch.full((4, 6), 1e6), "2.bias": torch.ones(4)},
                modules_to_save=["2"])),
    "two values of 0.weight and 1.weight": lambda folder: load_lora(
        nn.Sequential(*tied(), nn.Linear(5, 4)), changed(folder, {**NONE, **TWO}, modules_to_save=["0", "1"])),
    "0.weight without 1.weight": lambda folder: load_lora(
        nn.Sequential(*tied(), nn.Linear(5, 4)),
        changed(folder, {**NONE, **TWO, "1.weight": None, "1.bias": None}, modules_to_save=["0"])),
    "adapter_config.json is damaged": lambda folder: load_lora(mlp(), altered(folder, r="many")),
    "adapter_config.json is missing: give the folder": lambda folder: load_lora(mlp(), folder),
    "peft_type IA3|'IA3'": lambda folder: load_lora(mlp(), altered(folder, peft_type="IA3")),
    "bias 'all': only 'LORA' with 'none'": lambda folder: load_lora(mlp(), altered(folder, bias="all")),
    "odd is no factor of a linear": lambda folder: load_lora(mlp(), changed(folder, {"odd": torch.ones(1)})),
    "0 has a lora_B alone": lambda folder: load_lora(mlp(), changed(folder, {"0.lora_A.weight": None})),
    r"lora_A.weight has shape \[3, 4\], 0 needs": lambda folder: load_lora(
        mlp(), changed(folder, {"0.lora_A.weight": torch.ones(3, 4)})),
    "a_new_field is 1": lambda folder: load_lora(mlp(), altered(folder, a_new_field=1)),
    "2 adapters and 0 other tensors, and 1 fit no layer or tensor of this Sequential, such as 2":
        lambda folder: load_lora(mlp()[:2], altered(folder)),
    "2 trained tensors, such as 1.bias, of modules that are frozen in": lambda folder: load_lora(
        add_lora(nn.Sequential(nn.Linear(4, 6), nn.Linear(5, 5)), targets="0"), changed(
            folder, {**NONE, **factors_of("0", 4, 6), "1.bias": torch.ones(5), "1.weight": torch.ones(5, 5)},
            modules_to_save=["1"])),
    "rank 8 and alpha 32.0 in 0, and the model's adapter of 8 and 16":
        lambda folder: load_lora(add_lora(mlp(), targets=("0", "2")), altered(folder, lora_alpha=32)),
}  # fmt: skip


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm, self.lin = nn.Parameter(torch.ones(4)), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.norm(x) * self.scale)


@pytest.mark.parametrize(("target", "trained", "saved"), [
    ("0.lin", "1.scale", ["1", "11"]), ("0.lin", "1.norm.bias", ["1.norm", "11.norm"]), ("11.lin", "1.scale", None),
    ("0.lin", "0.scale", None),
])  # fmt: skip
def test_modules_to_save_are_ends_of_names_and_hold_all_of_a_module(tmp_path, target, trained, saved):
    """The rule of peft 0.21: it saves module 11 for the name "1", and can't wrap a module that has an adapter."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base, x = nn.Sequential(*(Block() for _ in range(12))), torch.randn(3, 4)
    net = add_lora(copy.deepcopy(base), targets=target)
    net.get_parameter(trained).requires_grad_()
    [nn.init.uniform_(p) for p in net.parameters() if p.requires_grad]
    if saved is None:
        with pytest.raises(ValueError, match=f"1 trained weights, {trained}, .*that is or holds"):
            save_lora(net, tmp_path)
        return
    save_lora(net, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == saved
    close(load_lora(copy.deepcopy(base), tmp_path)(x), net(x), "mpcore", 1e-6)
    close(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)(x), net(x), "PEFT", 1e-6)


@on_ranks(2)
def test_names_that_end_alike_on_two_stages_are_those_of_one_model(tmp_path) -> None:
    """PEFT sees the whole model: a module to save and a target may end names of another stage."""
    on = mesh(pp=2)
    torch.manual_seed(0)
    parts = {"0": Block(), "1": nn.LayerNorm(4), "6": Block(), "7": nn.Linear(4, 4), "11": nn.LayerNorm(4)}
    halves = [{"0", "1"}, {"6", "7", "11"}]
    own = OrderedDict((name, part) for name, part in parts.items() if name in halves[on.pp.rank])
    stage = add_lora(copy.deepcopy(nn.Sequential(own)), targets=("0.lin", "7")[on.pp.rank])
    if on.pp.rank == 0:
        stage.get_parameter("1.weight").requires_grad_()
    [nn.init.uniform_(p) for p in stage.parameters() if p.requires_grad]
    folder, x = save_lora(stage, tmp_path / "new", on), torch.randn(3, 4)
    said = json.loads((folder / "adapter_config.json").read_text())
    assert said["modules_to_save"] == ["1", "11"]
    assert said["target_modules"] == ["0.lin", "7"], "6.lin has no adapter"
    close(load_lora(nn.Sequential(own), folder, on)(x), stage(x), "a stage", 1e-6)
    if on.pp.rank:
        stage = add_lora(nn.Sequential(OrderedDict({"11": nn.Linear(4, 4)})), targets="11")
    with pytest.raises(ValueError, match=r"1 trained weights, 1\.weight, .*that is or holds"):
        save_lora(stage, tmp_path / "other", on)


@on_ranks(2)
def test_a_pipeline_stage_may_have_no_adapter(tmp_path) -> None:
    on, model = mesh(pp=2), add_lora(build("llama"), targets="layers.1.mlp.up_proj")
    fill(model)
    (stage,), *_ = mp.pipeline_stages(model, on, micro_batches=2)
    loaded, wanted = load_lora(build("llama"), save_lora(stage, tmp_path, on)), merged_state_dict(model)
    assert all(torch.equal(x, wanted[name]) for name, x in merged_state_dict(stage).items())
    close(loaded(batch(0)[0]).logits, model(batch(0)[0]).logits, "of the file", 1e-10)
    with pytest.raises(ValueError, match="has 0 layers with an adapter: call add_lora"):
        save_lora(nn.Linear(2, 2), tmp_path, on)
    assert merged_state_dict(merge_lora(nn.Linear(2, 2).requires_grad_(False)))  # a stage of one's own without adapters


@pytest.mark.parametrize("fails", [1, 2])
def test_a_save_that_stops_between_its_files_loads_as_no_mixture(tmp_path, monkeypatch, fails):
    nets = [add_lora(mlp(), alpha=alpha, targets="0") for alpha in (4, 32)]
    folder, calls, replace = save_lora(nets[0], tmp_path / "new"), [], os.replace
    again = save_lora(nets[0], tmp_path / "again")

    def stop(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == fails:
            raise OSError(5, "the disk is gone")
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(ValueError, match="the disk is gone"):
        save_lora(nets[1], folder)
    with pytest.raises(ValueError, match=r"adapter_config.json is missing"):
        load_lora(mlp(), folder)
    monkeypatch.undo()
    save_lora(nets[1], again)
    assert dict(load_lora(mlp(), again).named_modules())["0"].alpha == 32


@on_ranks(2)
def test_a_model_that_is_sharded_over_data_is_refused() -> None:
    on = mesh()
    run = start("llama", {}, data=mp.Zero(3))
    with pytest.raises(ValueError, match=r"is sharded over data: take mpcore.interop.lora.merged_state_dict"):
        merge_lora(run.model)
    model = mp.parallel.shard_data_parallel(mlp(), on, (), zero=3)
    with pytest.raises(ValueError, match="is sharded over data already: add adapters before prepare"):
        add_lora(model, targets="0")


@on_ranks(2)
def test_a_layer_of_one_stage_that_can_have_no_adapter_is_refused_on_every_rank(tmp_path) -> None:
    on = mesh(pp=2)
    stage = nn.Sequential(OrderedDict({"1": nn.MultiheadAttention(4, 2)})) if on.pp.rank else mlp()[:1]
    tensors = {**NONE, **factors_of("0", 4, 6), **factors_of("1.out_proj", 4, 4)}
    with pytest.raises(ValueError, match=r"1\.out_proj is read past the layer"):
        load_lora(stage, changed(tmp_path / str(on.pp.rank), tensors), on)


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
