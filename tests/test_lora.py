"""LoRA on sharded layers: every layout computes, trains and merges what the unsharded model does."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.checkpoint import latest
from mpcore.interop.hugging_face import hf_tensors
from mpcore.interop.lora import add_lora, merge_lora, merged_state_dict
from mpcore.interop.lora.layers import LoRALayer
from tests.equality import close
from tests.lora_models import ALPHA, LAYOUTS, RANK, V, build, dense_losses, fill, same_losses, start, train
from tests.pool import mesh, on_ranks
from tests.quick import some

IN, OUT = 10, 9


def check_training(name: str, layout: str, wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    _, sizes, told = LAYOUTS[layout]
    run, (losses, merged) = start(name, sizes, **told), wanted
    same_losses(train(run), losses)
    with run.parameters() as model:
        got = merged_state_dict(model)
        assert got.keys() == merged.keys()
        for key, value in merged.items():
            close(got[key], value, f"merged {key}", 1e-9)
        dense = build(name)
        dense.load_state_dict(merged)
        exported, want = dict(hf_tensors(model, run.mesh, every_rank=True)), dict(hf_tensors(dense))
        assert exported.keys() == want.keys()
        for key, value in want.items():
            close(exported[key], value, f"exported {key}", 1e-9)
        if run.mesh.data.size == 1 or told["data"].stage == 0:
            merge_lora(model)
            assert not any(isinstance(module, LoRALayer) for module in model.modules())
            for key, value in mp.full_state_dict(model).items():
                close(value, merged[key], f"{key} after merge_lora", 1e-9)


@pytest.fixture(scope="module")
def dense():
    return functools.cache(dense_losses)


CASES = [("llama", layout) for layout in LAYOUTS if "ep" not in layout] + [("phi3", "tp2"), ("gpt2", "zero3")]
EXPERTS = ("tp2", "zero2", "ep2", "tp2 ep2", "tp2 ep2 etp1", "ep2 zero3")
CASES += [("qwen3 moe", layout) for layout in EXPERTS]


@pytest.mark.parametrize(("name", "layout"), some(("qwen3 moe", "tp2 ep2"), of=CASES))
def test_training_and_the_merged_weights_equal_the_formula_in_plain_torch(ranks, dense, name, layout):
    _, merged = wanted = dense(name)
    moved = max((merged[key] - x).abs().max() for key, x in build(name).state_dict().items())
    assert moved > 0.01, "the adapters must learn, or any two runs agree"
    ranks(LAYOUTS[layout][0], check_training, name, layout, wanted)


def half(zero: int) -> mp.Run:
    on = mesh(tp=2)
    with torch.device("meta"):
        model = nn.Sequential(
            mp.VocabParallelEmbedding(V, 8, tp=on.tp), mp.ColumnParallelLinear(8, 12, tp=on.tp),
            mp.RowParallelLinear(12, 8, tp=on.tp), mp.ColumnParallelLinear(8, V, bias=False, tp=on.tp),
        )  # fmt: skip
        add_lora(model, RANK, ALPHA, targets=("1", "2"))

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return mp.vocab_parallel_cross_entropy(logits, target, tp=on.tp, vocab_size=V, reduction="sum")

    return mp.prepare(
        model, on, loss=loss, initialize=True, optimizer=lambda model: mp.AdamW(model, lr=0.02), seed=4,
        blocks=[model[1], model[2]], precision="bfloat16", data=mp.Zero(zero),
    )  # fmt: skip


def check_bfloat16(zero: int, folder: Path) -> None:
    """Frozen parameters have no master and no state, and a checkpoint resumes the run bit for bit."""
    run = half(zero)
    train(run, 3)
    assert run.optimizer.state.keys() == {p for p in run.model.parameters() if p.requires_grad}
    run.save(folder)
    again = half(zero)
    again.load(latest(folder, again.mesh))
    assert train(again, 6) == train(run, 6)
    assert all(p.grad is None for p in run.model.parameters())
    assert run.model[1].weight.dtype == torch.bfloat16
    assert run.model[1].lora_A.weight.dtype == (torch.float32 if zero else torch.bfloat16)


@pytest.mark.parametrize("zero", some(3, of=range(4)))
def test_in_bfloat16_a_run_resumes_and_what_is_frozen_has_no_state(ranks, tmp_path, zero):
    ranks(4 if zero else 2, check_bfloat16, zero, tmp_path / "checkpoints")


@on_ranks(2)
def test_dropout_draws_the_masks_of_the_unsharded_model() -> None:
    """Under one seed the masks are those of the unsharded model."""
    for sequence in (False, True):
        check_masks(sequence)


def check_masks(sequence: bool) -> None:
    tp = mesh(tp=2).tp
    x = torch.rand(2, 6, IN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    results = []
    for on in (mp.Axis(name="tp"), tp):
        like = {"tp": on, "sequence_parallel": sequence, "dtype": torch.float64}
        net = nn.Sequential(mp.ColumnParallelLinear(IN, 14, **like), nn.Tanh(), mp.RowParallelLinear(14, OUT, **like))
        add_lora(net, RANK, ALPHA, targets=("0", "2"), dropout=0.4)
        fill(net)
        part = slice(on.rank * 3, on.rank * 3 + 3) if sequence and on.size > 1 else slice(None)
        torch.manual_seed(7)
        y = net(x[:, part])
        results.append(y.detach())
        whole = results[0][:, part]
        assert not torch.equal(net.eval()(x[:, part]), y)
    close(results[1], whole, "output")


def test_pitfall_65_a_product_that_leaves_the_adapter_out_is_refused():
    layer = add_lora(nn.Sequential(mp.ColumnParallelLinear(4, 6)).double(), rank=2, targets="0")[0]
    nn.init.ones_(layer.lora_B.weight)
    x = torch.randn(3, 4, dtype=torch.float64)
    y, plain = layer(x), mp.ColumnParallelLinear(4, 6).product
    with pytest.raises(ValueError, match="leaves the adapter out"):
        layer.product = plain
    layer.product = layer.product.change(lambda base: plain)
    close(layer(x), y, "the same product, made from the layer's")
