"""Adapters layer by layer: which layers get one, its initial values, what it computes, and what its files say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import mpcore as mp
from mpcore.interop.lora import adapters, add_lora, files, load_lora, merge_lora, merged_state_dict, save_lora


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def filled(model):
    """With factors that are not zero."""
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "lora_" in name:
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) * (1 + i))
    return model


class Blocks(nn.Module):
    """Layers whose names end alike, and a head."""

    def __init__(self, head=True):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"q_proj": nn.Linear(4, 4), "out": nn.Linear(4, 4)}) for _ in range(2)]
        )
        self.xq_proj, self.norm, self.table = nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5) if head else None

    def get_output_embeddings(self):
        return self.head


def chosen(targets, model=None):
    return list(adapters._chosen(Blocks() if model is None else model, targets))


def test_targets_are_the_last_parts_of_names():
    every = ["blocks.0.q_proj", "blocks.0.out", "blocks.1.q_proj", "blocks.1.out", "xq_proj", "head"]
    assert chosen("q_proj") == chosen(("q_proj",)) == ["blocks.0.q_proj", "blocks.1.q_proj"]
    assert chosen("1.q_proj") == chosen("blocks.1.q_proj") == ["blocks.1.q_proj"]
    assert chosen(("out", "q_proj")) == [*every[:4]]  # in the model's order
    assert chosen(("head", "xq_proj")) == ["xq_proj", "head"]
    assert chosen("all-linear") == every[:-1]
    assert chosen("all-linear", Blocks(False)) == every[:-1]
    tied = Blocks()
    tied.xq_proj.weight = tied.blocks[0]["out"].weight
    assert chosen("all-linear", tied) == ["blocks.0.q_proj", "blocks.1.q_proj", "blocks.1.out"]
    with pytest.raises(ValueError, match=r"^xq_proj shares its weight|^blocks.0.out shares its weight"):
        add_lora(tied, targets=("out", "xq_proj"))
    mixed = nn.Sequential(Conv1D(4, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    assert [name for name, _ in adapters.linear_layers(mixed)] == ["0", "2"]
    assert [name for name, _ in adapters.linear_layers(nn.Linear(2, 2))] == [""]


def test_initial_values_are_pefts_and_depend_on_seed_and_name():
    """A is uniform within in_features^-1/2, as by Kaiming with a = sqrt 5; B is zero."""
    wide = add_lora(nn.Sequential(nn.Linear(400, 8), nn.Linear(400, 8)), 50, targets=("0", "1"))
    for layer in wide:
        a = layer.lora_A.weight
        assert a.shape == (50, 400)
        assert 0.98 * 400**-0.5 < a.abs().max().item() <= 400**-0.5
        assert a.std().item() == pytest.approx(400**-0.5 / 3**0.5, rel=0.02)
        assert not layer.lora_B.weight.any()
        assert layer.lora_B.weight.shape == (8, 50)
    assert not torch.equal(wide[0].lora_A.weight, wide[1].lora_A.weight)
    again = add_lora(nn.Sequential(nn.Linear(400, 8)), 50, targets="0")
    assert torch.equal(again[0].lora_A.weight, wide[0].lora_A.weight)
    one, other = (add_lora(net(), targets="0", seed=seed)[0].lora_A.weight for seed in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32),
     (torch.float64, torch.float64)],
)  # fmt: skip
def test_factors_of_narrow_weights_are_float32(dtype, factor):
    layer = add_lora(net().to(dtype), targets="0")[0]
    assert {p.dtype for p in (layer.lora_A.weight, layer.lora_B.weight)} == {factor}
    assert layer(torch.ones(2, 4, dtype=dtype)).dtype == dtype


def test_only_factors_are_trained_and_the_mode_stays():
    model = add_lora(net().eval(), targets="0")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"0.lora_A.weight", "0.lora_B.weight"}
    assert not model[0].lora_A.training
    assert repr(model[0].lora_A) == "Factor(8 x 4)"
    meta = add_lora(net().to("meta"), targets="0")
    assert meta[0].lora_A.weight.is_meta


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 6), lambda: Conv1D(6, 4)])
def test_the_formula_and_its_merged_weight(make):
    torch.manual_seed(0)
    plain = nn.Sequential(make())
    model = nn.Sequential(make())
    model.load_state_dict(plain.state_dict())
    filled(add_lora(model, 2, 6, "0"))
    x, layer = torch.randn(5, 4), model[0]
    with torch.no_grad():
        want = plain(x) + 3 * x @ layer.lora_A.weight.t() @ layer.lora_B.weight.t()
        torch.testing.assert_close(model(x), want)
        product = 3 * layer.lora_B.weight @ layer.lora_A.weight
        weight = plain[0].weight + (product.t() if isinstance(plain[0], Conv1D) else product)
        torch.testing.assert_close(merged_state_dict(model)["0.weight"], weight)
        assert adapters.factor_names(model) == {"0.lora_A.weight", "0.lora_B.weight"}
        assert adapters.adapters_of(model) == {"0.weight": layer}
        kind, held = type(plain[0]), set(vars(plain[0]))
        merged = merge_lora(model)
        torch.testing.assert_close(merged[0].weight, weight)
        torch.testing.assert_close(merged(x), want)
    assert type(merged[0]) is kind
    assert set(vars(merged[0])) == held
    assert merged.state_dict().keys() == plain.state_dict().keys()
    with pytest.raises(ValueError, match=r"^this Sequential has 0 layers with an adapter: call add_lora or load_lora"):
        merge_lora(merged)
    lone = nn.Sequential(nn.Linear(2, 2))[0]
    assert list(adapters.adapters_of(lone)) == []


def test_a_layer_under_two_names_has_its_adapter_under_both():
    layer = nn.Linear(4, 4)
    model = add_lora(nn.ModuleDict({"a": layer, "b": layer}), targets="a")
    assert adapters.factor_names(model) == {f"{n}.lora_{f}.weight" for n in "ab" for f in "AB"}
    assert adapters.adapters_of(model).keys() == {"a.weight", "b.weight"}
    assert list(adapters.lora_layers(model)) == ["a"]


def test_dropout_is_of_the_adapters_input_in_training():
    model = filled(add_lora(nn.Sequential(nn.Linear(4, 6)), 2, 6, "0", 0.5))
    layer, x = model[0], torch.randn(8, 4)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    a, b = layer.lora_A.weight, layer.lora_B.weight
    torch.manual_seed(3)
    found = layer(x)
    torch.manual_seed(3)
    mask = nn.functional.dropout(torch.ones(8, 4), 0.5)
    assert set(mask.flatten().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(found, plain + 3 * (x * mask) @ a.t() @ b.t())
    torch.testing.assert_close(model.eval()(x), plain + 3 * x @ a.t() @ b.t())


def test_what_the_files_say(tmp_path):
    model = filled(add_lora(net(), 2, 6, ("0", "2"), 0.25))
    assert save_lora(model, tmp_path / "a") == tmp_path / "a"
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{i}.lora_{f}.weight" for i in (0, 2) for f in "AB"}
    assert torch.equal(tensors["base_model.model.2.lora_B.weight"], model[2].lora_B.weight)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "inference_mode": True, "r": 2,
        "lora_alpha": 6, "lora_dropout": 0.25, "target_modules": ["0", "2"], "fan_in_fan_out": False, "bias": "none",
        "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    }  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    again = load_lora(net(), tmp_path / "a")
    assert (again[2].rank, again[2].alpha, again[2].dropout, again[2].scaling) == (2, 6.0, 0.25, 3.0)
    for name, p in model.named_parameters():
        assert torch.equal(again.get_parameter(name), p)
    save_lora(filled(add_lora(net(), 3, targets="0")), tmp_path / "a")  # replaces it
    assert load_file(tmp_path / "a" / "adapter_model.safetensors")["base_model.model.0.lora_A.weight"].shape == (3, 4)
    assert load_lora(add_lora(net(), 3, 16, "0"), tmp_path / "a")[0].rank == 3


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"r": 4}, (4, 8.0, 0.0)), ({"r": 4, "lora_alpha": 2, "lora_dropout": 0.5}, (4, 2.0, 0.5)),
        ({"r": 4, "lora_alpha": 6, "use_rslora": True}, (4, 12.0, 0.0)), ({"r": 4, "use_dora": False, "bias": "none"},
                                                                         (4, 8.0, 0.0)),
    ],
)  # fmt: skip
def test_a_configuration_is_read_as_peft_does(said, found, tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **said}))
    read = files._read_config(path)
    assert (*files._size("q", read), read["lora_dropout"]) == found


def changed(folder, change):
    """An adapter's folder with other tensors."""
    save_lora(add_lora(net(), 2, 6, ("0", "2")), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


KEY = "base_model.model.0.lora_A.weight"


def test_values_are_loaded_into_the_same_adapters_alone(tmp_path):
    folder = changed(tmp_path / "a", lambda t: t.update({KEY.replace(".weight", ".default.weight"): t.pop(KEY) + 1}))
    loaded = load_lora(add_lora(net(), 2, 6, ("0", "2")), folder)
    assert torch.equal(loaded[0].lora_A.weight, add_lora(net(), 2, 6, "0")[0].lora_A.weight + 1)
    for model in (add_lora(net(), 2, 7, ("0", "2")), add_lora(net(), 2, 6, "0")):
        with pytest.raises(ValueError, match=r"load it into the model without adapters|in one of them alone"):
            load_lora(model, folder)


def test_what_adapters_of_experts_refuse(tmp_path):
    model = nn.ModuleDict({"up": mp.layers.moe.Experts(2, dim=4, hidden_dim=6)})
    with pytest.raises(ValueError, match=r"dropout 0.1 .* up.down "):
        add_lora(model, 2, targets=("down",), dropout=0.1)
    add_lora(model, 2, targets=("down",))
    for call in (save_lora, load_lora):
        with pytest.raises(ValueError, match=r"1 of 1 adapters .* up.down.weight"):
            call(model, tmp_path)
    assert merge_lora(model)["up"].down.extra_repr() == "2 experts, 6, 4"


def test_modules_of_interop_are_imported_when_they_are_used():
    subprocess.run([sys.executable, "-c", "import mpcore as mp; mp.interop.lora.add_lora"], check=True)
