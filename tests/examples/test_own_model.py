"""The short example: its losses are those of one process, whatever the mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from examples import own_model
from tests.quick import some


def losses(tp: int, zero: int) -> list[float]:
    from examples.own_model import train

    torch.set_default_dtype(torch.float64)
    try:
        return train(tp, zero, steps=4)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("size", "tp", "zero"), some((4, 2, 3), (2, 1, 2), of=[(3, 3, 0), (4, 2, 0)]))
def test_every_mesh_has_the_losses_of_one_process(ranks, size, tp, zero):
    (alone,) = ranks(1, losses, 1, 0)
    assert alone[-1] < alone[0] - 1, "a nat in three steps, at this rate"
    for found in ranks(size, losses, tp, zero):
        assert found == pytest.approx(alone, rel=1e-12)


def plain_logits(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The model written out: 2 blocks of 4 heads, attention and MLP side by side."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (64,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    x = p["embedding.weight"][tokens] + p["position.weight"][: tokens.shape[1]]
    hidden = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for i in range(2):
        at = f"blocks.{i}"
        h = norm(x, f"{at}.norm")
        q, k, v = (h @ p[f"{at}.qkv.weight"].T + p[f"{at}.qkv.bias"]).split(64, dim=-1)
        heads = []
        for j in range(4):
            mine = slice(16 * j, 16 * j + 16)
            scores = (q[..., mine] @ k[..., mine].transpose(1, 2) / 4).masked_fill(hidden, -torch.inf)
            heads.append(scores.softmax(-1) @ v[..., mine])
        mixed = torch.cat(heads, -1) @ p[f"{at}.mix.weight"].T + p[f"{at}.mix.bias"]
        up = F.gelu(h @ p[f"{at}.up.weight"].T + p[f"{at}.up.bias"])
        x = x + mixed + up @ p[f"{at}.down.weight"].T + p[f"{at}.down.bias"]
    return norm(x, "norm") @ p["head.weight"].T


def test_samples_are_windows_of_the_text_drawn_by_step():
    text = " ".join(f"{n} times {n} is {n * n}." for n in range(200)).encode()
    assert own_model.TEXT.encode() == text
    for step in (0, 5):
        firsts = torch.randint(len(text) - 64, (8, 1), generator=torch.Generator().manual_seed(step))
        whole = own_model.samples(step, range(8))
        assert whole.tolist() == [list(text[int(first) : int(first) + 65]) for first in firsts]
        assert torch.equal(own_model.samples(step, range(2, 5)), whole[2:5])


def test_training_is_adamw_on_the_mean_loss_with_clipping(capsys):
    begun: dict[str, Any] = {}
    steps = 4

    def prepare(model: nn.Module, mesh: mp.Mesh, **options: Any) -> Any:
        run = mp.prepare(model, mesh, **options)
        begun.update({name: p.detach().clone().requires_grad_() for name, p in run.model.named_parameters()})
        begun["told"] = {name: options[name] for name in ("data", "micro_batches")}
        return run

    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(own_model, "mp", SimpleNamespace(**{**vars_of(mp), "prepare": prepare})):
            found = own_model.train(steps=steps)
        assert begun.pop("told") == {"data": mp.Zero(0), "micro_batches": 2}
        optimizer = torch.optim.AdamW(begun.values(), lr=3e-3)
        want = []
        for step in range(steps):
            batch = own_model.samples(step, range(8))
            loss = F.cross_entropy(plain_logits(begun, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(begun.values(), 1.0)
            optimizer.step()
            want.append(float(loss))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == pytest.approx(want, rel=1e-9)
    assert capsys.readouterr().out == f"loss {found[0]:.5f} -> {found[-1]:.5f}\n"


def vars_of(module: Any) -> dict[str, Any]:
    """What the example takes from a package that loads its names lazily."""
    names = ("Axis", "build_mesh", "LayerNorm", "QKVParallelLinear", "ColumnParallelLinear", "RowParallelLinear",
             "VocabParallelEmbedding", "vocab_parallel_cross_entropy", "Zero")  # fmt: skip
    return {name: getattr(module, name) for name in names}
