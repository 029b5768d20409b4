"""Adapters layer by layer: which layers get one, its initial values, what it computes, and what its files say."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import mpcore as mp
from mpcore.interop.lora import adapters, add_lora, load_lora, merge_lora, merged_state_dict, save_lora
from tests.forked import Forked


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


def test_an_adapter_that_overflows_the_weight_is_not_merged():
    model = add_lora(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half(), targets=("0", "1"))
    with torch.no_grad():
        model[0].lora_B.weight.fill_(0.1)
        model[1].lora_A.weight.fill_(500)
        model[1].lora_B.weight.fill_(500)
    for merge in (merged_state_dict, merge_lora):
        with pytest.raises(ValueError, match=r"1.weight \(4, 4\) with its adapter .* beyond the 65504 of"):
            merge(model)
        merge(add_lora(nn.Sequential(nn.Linear(4, 4, device="meta")), targets="0"))  # without values to check
    assert torch.equal(model[0].weight, model[0].weight.clamp(-0.5, 0.5))  # as it was


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
    assert Forked("import mpcore as mp; mp.interop.lora.add_lora").wait(60) == 0


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
    assert add_lora(net().to("meta"), targets="0")[0].lora_A.weight.is_meta
