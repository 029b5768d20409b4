"""Models of Hugging Face in pipeline stages: losses and checkpoints are those of one process, or the cut is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpcore as mp
from mpcore.checkpoint import latest
from mpcore.interop.lora import add_lora
from mpcore.pipeline.schedules import find_schedule
from tests.pool import mesh
from tests.quick import some

hf = pytest.importorskip("transformers")

V, T, B, LAYERS = 40, 9, 8, 4
SMALL = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
WIDE = {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"vocab_size": V, "n_embd": 16, "n_layer": LAYERS, "n_head": 4, "n_positions": 16}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **WIDE)),
    "gpt2, tied": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "gemma2, tied, two kinds of attention":
     lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, **WIDE, sliding_window=6)),
    "bert, tied, with a second name of a bias": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL,
     intermediate_size=24, hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
    "own, adds outside the layers": lambda: Outside("residual"),
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, targets, and a mask of padding at the end."""
    ids = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(step))
    kept = (torch.arange(T) < torch.tensor([T, 5, 7, T, T, 6, 8, T])[:, None]).long()
    return ids[:, :-1], ids[:, 1:].masked_fill(kept == 0, -100), kept


def train(name: str, schedule: str = "1f1b", folder: str = "", resume: bool = False, **layout) -> list[float]:
    """Three steps with a mask; saves after the second, or goes on from there."""
    zero, lora, recompute = (layout.pop(key, value) for key, value in (("zero", 0), ("lora", 0), ("recompute", "none")))
    on = mesh(**layout)
    model = mp.parallelize(build(name), tp=on.tp, check=False) if on.tp.size > 1 else build(name)
    if lora:
        add_lora(model, rank=2)
    each = 4 // on.dp.size
    stages, blocks, plan = mp.pipeline_stages(model, on, micro_batches=each, schedule=schedule)
    del model
    run = mp.prepare(
        stages, on, blocks=blocks, schedule=plan, micro_batches=each, initialize=False, data=mp.Zero(zero),
        recompute=recompute, optimizer=lambda model: mp.AdamW(model, lr=1e-2),
        loss=lambda out, target: F.cross_entropy(out.logits.flatten(0, 1), target.flatten(), reduction="sum"),
    )  # fmt: skip
    if resume:
        run.load(latest(folder, on) or folder)
    losses = []
    for step in range(run.step, 3):
        share = run.share(B)
        ids, target, kept = (x[share.start : share.stop] for x in batch(step))
        run.forward_backward(ids, target, attention_mask=kept)
        run.clip_gradients(1.0)
        losses.append(run.optimizer_step().loss)
        if folder and not resume and run.step == 2:
            run.save(folder)
    return losses


def same(found: list[list[float]], want: list[float]) -> None:
    for losses in found:
        assert losses == pytest.approx(want, rel=1e-11)


@pytest.mark.parametrize("name", some("gpt2, tied", "bert, tied, with a second name of a bias",
                                      "own, adds outside the layers", of=MODELS))  # fmt: skip
def test_two_stages_train_as_one_process_and_each_resumes_the_others_checkpoint(ranks, tmp_path, name):
    (want,) = ranks(1, train, name, folder=f"{tmp_path}/one")
    assert len(set(want)) == 3
    same(ranks(2, train, name, pp=2, folder=f"{tmp_path}/two"), want)
    same(ranks(2, train, name, pp=2, folder=f"{tmp_path}/one", resume=True), want[2:])
    same(ranks(1, train, name, folder=f"{tmp_path}/two", resume=True), want[2:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2, tied", "gemma2, tied, two kinds of attention"])
def test_every_layout_trains_as_one_process(ranks, name):
    (want,) = ranks(1, train, name)
    for size, layout in (
        (4, {"pp": 2, "tp": 2}), (4, {"pp": 2, "dp": 2, "zero": 1}), (4, {"pp": 4, "recompute": "full"}),
        (2, {"pp": 2, "schedule": "interleaved"}), (2, {"pp": 2, "schedule": "zbv"}),
    ):  # fmt: skip
        same(ranks(size, train, name, **layout), want)


@pytest.mark.slow
def test_an_adapter_trains_in_stages(ranks):
    (want,) = ranks(1, train, "llama", lora=True)
    same(ranks(4, train, "llama", pp=2, tp=2, lora=True), want)


def alone(model: nn.Module, pp: int = 2, **options) -> list[nn.Module]:
    """All stages, cut in this process."""
    on = [dataclasses.replace(mp.Mesh(), pp=mp.Axis(pp, rank, name="pp", role="pp")) for rank in range(pp)]
    return [stage for at in on for stage in mp.pipeline_stages(model, at, micro_batches=8, **options)[0]]


def test_a_stage_has_its_layers_alone_under_the_models_names():
    model = build("llama")
    first, last = alone(model)
    names = {name for name, _ in model.named_parameters()}
    held = [dict(stage.named_parameters()) for stage in (first, last)]
    assert held[0].keys() | held[1].keys() == names
    assert not held[0].keys() & held[1].keys()
    assert all(dict(model.named_parameters())[name] is p for part in held for name, p in part.items())
    assert {n.split(".")[2] for n in held[0] if "layers" in n} == {"0", "1"}
    assert type(model) is hf.LlamaForCausalLM
    first, last = alone(model, example=torch.ones(7, 7, dtype=torch.long))  # as many samples as tokens
    ids = torch.arange(9)[None]
    assert torch.equal(last(first(ids)).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"example has the shape \(7,\): give ids \[B, T\]"):
        alone(Words(), example=torch.arange(7))
    assert len(find_schedule("1f1b", 2, 4).ranks) == 2


STEPS = {  # by the change of `Words`: what forward makes of a layer and its input, the table's output, and the ids
    "a gate of 0": lambda model, layer, x, first, ids: layer(x) + 0 * first,
    "at most six tokens": lambda model, layer, x, first, ids: layer(x) + torch.zeros(6, 8),
    "attention": lambda model, layer, x, *_: F.scaled_dot_product_attention(
        *[layer(x)] * 3, None, 0.5 * model.training
    ),
    "between in words": lambda model, layer, x, first, ids: layer(x) * 2,
    "compares ids": lambda model, layer, x, first, ids: layer(x) * (ids != 1)[..., None],
    "counts in place": lambda model, layer, x, first, ids: layer(x) * model.calls,
    "counts layers": lambda model, layer, x, first, ids: layer(x) + 0 * model.calls.add_(1),
    "in place": lambda model, layer, x, first, ids: F.dropout(layer(x), 0.5, model.training, inplace=True),
    "long residual": lambda model, layer, x, first, ids: layer(x) + first,
    "long residual in training": lambda model, layer, x, first, ids: layer(x) + (first if model.training else 0),
    "reentrant": lambda model, layer, x, first, ids: checkpoint(layer, x, use_reentrant=True),
    "residual": lambda model, layer, x, first, ids: x + layer(x),
    "residual of a norm": lambda model, layer, x, first, ids: x + layer(F.layer_norm(x, (8,))),
    "residual, recomputed": lambda model, layer, x, first, ids: x + checkpoint(layer, x, use_reentrant=False),
}


class Words(nn.Module):
    """A table, layers, and a head, which `change` spoils."""

    def __init__(self, change: str = "", layer: type = nn.Linear):
        super().__init__()
        self.change = change
        self.table, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.position = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(layer(8, 8) for _ in range(4))
        if change == "shared":
            self.layers[3] = self.layers[0]
        if change == "both tied":
            self.head, self.layers[3].bias = nn.Linear(8, V, bias=False), self.layers[0].bias
            self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(1)) if change == "raw" else None
        self.layers[1] = self.layers[1] if change != "a hole" else None
        self.register_buffer("ones", torch.ones(1).expand(2))  # can't be written to
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", None if change == "lazy" else torch.zeros(1), persistent=False)
        self.between = nn.Linear(8, 8)

    def forward(self, ids):
        self.calls = self.calls + 1 if self.change == "counts" else self.calls
        self.calls.add_(self.change == "counts in place")
        if self.change == "lazy" and self.cache is None:
            self.cache = torch.arange(ids.shape[1]).float()[:, None]
        if self.change == "mean of a table":  # which the next step may read
            self.cache.copy_(self.table(ids).detach().mean())
        x = first = self.table(ids) + (self.position.weight[: ids.shape[1]] if self.change == "reads a table" else 0)
        for i, layer in enumerate(self.layers if self.change != "backwards" else list(self.layers)[::-1]):
            assert layer.in_features == 8  # a plain attribute, which stands on every stage
            if self.change != f"skips {i}":
                x = STEPS.get(self.change, lambda *_: layer(x))(self, layer, x, first, ids)  # noqa: B023
            x = self.between(x) if i == 1 and self.change == "between" else x
        x = self.head(x)
        if self.change == "infinite":
            return torch.cat([x, torch.full_like(x[..., :1], torch.nan), x[..., :1] / 0], -1)
        return x.argmax(-1) if self.change == "indices" else x


class Outside(Words):
    def forward(self, ids, attention_mask=None):
        return hf.modeling_outputs.CausalLMOutput(logits=super().forward(ids))


class Attends(nn.MultiheadAttention):  # draws numbers within a function of torch
    def __init__(self, in_features, _):
        super().__init__(in_features, 2, dropout=0.5, batch_first=True)
        self.in_features = in_features

    def forward(self, x):
        return super().forward(x, x, x)[0]


class Within(nn.Linear):  # it recomputes itself, as layers of transformers 4.57 do
    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=True)


@pytest.mark.parametrize(("model", "message"), [
    (lambda: Words("shared"), r"the layers of Words are called in the order \[.*\], not once each"),
    (lambda: Words("backwards"), r"in the order \[3, 2, 1, 0\]"), (lambda: nn.Linear(4, 4), "has no nn.ModuleList"),
    (lambda: Words("between"), "between is called between"), (lambda: Words().to("meta"), "weight has no values"),
    (lambda: Words("both tied"), "is used in stages .*: only table and head may be tied"),
    (lambda: Words("at most six tokens"), r"Words fails on ids \(2, 7\): The size of .* as example="),
    *((lambda change=change: Words(change), "in a row they return other values than the model")
      for change in ("long residual", "long residual in training", "a gate of 0", "compares ids")),
    *((lambda given=given: Words(*given), "in a row they return other values than the model")
      for given in (("residual of a norm",), ("long residual in training", Attends))),
    (lambda: Words("counts layers"), "forward gives the buffer calls a value that some stages can't compute"),
    (lambda: Words("mean of a table"), "forward gives the buffer cache a value that some stages can't compute"),
    (lambda: Words("residual, recomputed"), "calls a layer in torch.utils.checkpoint, .*: pass recompute= to prepare"),
    (lambda: Words("a hole"), r"layers holds \['0', '1', '2', '3'\]: name 4 layers from 0 on, none of them None"),
    (lambda: Words("reentrant"), "pass recompute= to prepare"), (lambda: Words("raw"), "scale is a parameter"),
    (lambda: Words("indices"), "in a row they return"),
])  # fmt: skip
def test_what_would_be_another_model_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        alone(model())


def test_what_the_forward_does_between_layers_is_done_on_the_layers_stage(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)  # no other device's random state changes
    with pytest.raises(ValueError, match="4 blocks are fewer than the 5 stages"):
        alone(Words(), pp=5)
    assert len(alone(Words(), pp=4)) == 4
    assert [len(alone(Words(name), pp)) for name, pp in (("infinite", 2), ("attention", 2), ("a hole", 1))] == [2, 2, 1]
    ids = torch.arange(7).view(1, 7)
    for change in ("residual", "in place", "between in words"):
        first, second = alone(model := Words(change))
        second(first(ids).detach().requires_grad_()).sum().backward()
        assert torch.equal(second.eval()(first.eval()(ids)), model.eval()(ids))
    for stage, where in ((first, "layers.2"), (second, "before layers.3")):
        stage.change = "skips 2"
        with pytest.raises(ValueError, match=f"skipped the layer {where}, whose output"):
            stage(ids if stage is first else torch.ones(1, 7, 8))
    assert alone(Words("", Within))[0](ids).grad_fn is not None
    first, second = alone(Words("reads a table"))
    assert ["position.weight" in dict(stage.named_parameters()) for stage in (first, second)] == [True, False]
    first, second = alone(model := Words("lazy"))
    assert model.cache is first.cache is second.cache is None
    assert len(alone(Words("counts in place"))) == 2  # each rank has its own buffer
    assert len(alone(Words("at most six tokens"), example=torch.zeros(1, 6, dtype=torch.long))) == 2
    (model := Words("counts")).layers[1].eval()
    modes = [module.training for module in model.modules()]
    first, _ = alone(model)
    assert ([module.training for module in model.modules()], model.calls, first.calls) == (modes, 0, 0)
    assert not first.layers[1].training


class Several(nn.Module):
    """Returns a tensor, or a tuple."""

    def __init__(self, returned: int) -> None:
        super().__init__()
        self.returned, self.linear = returned, nn.Linear(8, 8)

    def forward(self, x, mask=None):
        y = self.linear(x if mask is None else x * mask[..., None])
        return (y, *["more"] * (self.returned - 1)) if self.returned else y


class Tuples(Words):
    """Its layers return several things. A unit before them is called twice, and one never."""

    def __init__(self, returned: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Several(returned) for _ in range(3))
        self.never, self.silent = nn.Linear(2, 2), nn.ReLU()
        self.top, self.out = self.layers[0], self.head  # second names
        del self.between, self.position

    def forward(self, ids, attention_mask=None, use_cache=True):
        assert not use_cache, "a cache would be filled"
        x, seen = self.table(ids) + self.table(ids.flip(1)), []
        for layer in self.layers:
            out = layer(x) if attention_mask is None else layer(x, attention_mask)
            x = out[0] if layer.returned else out
            seen.append(layer.returned and len(out))
        assert seen == [self.layers[0].returned] * 3
        return {"logits": self.head(self.silent(x)), "ids": ids}


@pytest.mark.parametrize("returned", [0, 1, 3])
def test_stages_have_their_units_and_a_layer_of_another_stage_returns_as_many_things(returned):
    torch.manual_seed(0)
    model = Tuples(returned)
    stages = alone(model, pp=3)
    names = [{n.partition(".")[0] for n, _ in stage.named_parameters()} for stage in stages]
    assert names == [{"table", "layers", "never"}, {"layers"}, {"layers", "head"}]
    assert {type(stage).__name__ for stage in stages} == {"PipelineStageTuples"}
    assert isinstance(stages[0], Tuples)
    ids, mask = torch.randint(V, (2, 5)), torch.ones(2, 5)
    mask[0, 3:] = 0
    want = model(ids, attention_mask=mask, use_cache=False)["logits"]
    for _ in range(2):
        between = stages[1](stages[0](ids, attention_mask=mask), attention_mask=mask)
        assert torch.equal(stages[2](between, attention_mask=mask)["logits"], want)
        assert stages[2].boundary.received is None, "nothing is kept of a forward"
    with pytest.raises(ValueError, match="never is called now, was not called when the model was cut"):
        stages[2].never(ids)
    with pytest.raises(TypeError):
        stages[2](between, other=1)
    assert stages[2].boundary.received is None, "also after one that failed"
    passed = stages[1].layers[0]
    assert (passed.returned, passed.training, stages[0].layers[2].place) == (returned, True, "")
    assert (passed.place, stages[1].layers[2].place) == ("before", "after")
    assert not list(passed.parameters())


class Tied(Words):
    """The head's weight is the table's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, V, bias=False)
        self.head.weight = self.table.weight
        del self.between


def test_a_table_may_be_tied_between_the_outer_ranks_or_on_one():
    first, last = alone(Tied())
    assert first.table.weight is last.table.weight is last.head.weight
    assert mp.sharding.shardings(first)["table.weight"].partial == ()  # this process has no ends
    assert [len(alone(Tied(), schedule=name)) for name in ("zbv", "interleaved")] == [4, 4]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    config = hf.LlamaConfig(**SMALL, **WIDE, rope_scaling=rope, max_position_embeddings=32)
    assert len(alone(hf.LlamaForCausalLM(config), schedule="zbv")) == 4  # forward assigns a buffer the value it had
    with pytest.raises(
        ValueError, match="changes the buffer calls beside the layers, and each of the 4 stages on 2 ranks"
    ):
        alone(Words("counts"), schedule="zbv")
