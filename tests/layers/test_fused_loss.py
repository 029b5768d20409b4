"""The losses by the kernels' path, on which a CPU takes their references: against dense torch in float64."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpcore import Axis, VocabParallelEmbedding, linear_cross_entropy, vocab_parallel_cross_entropy
from mpcore import collectives as c
from mpcore.layers import linear_log_prob, vocab_parallel_log_prob
from mpcore.layers import loss as module
from tests.equality import close, tp_axis
from tests.pool import on_ranks

B, T, D, V = 2, 6, 4, 11
SIZES = [1, pytest.param(2, marks=pytest.mark.slow), 3]


def draw(seed, *shape):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_target():
    target = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))
    target[0, :2] = -100
    return target


def dense(
    logits, target, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0, token_weight=None,
    reduction="mean",
):  # fmt: skip
    """torch's cross-entropy plus the z-loss, with a weight of each token."""
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    flat, ids = z.flatten(0, -2), target.flatten()
    counts = ids != ignore_index
    loss = F.cross_entropy(flat, ids, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    loss = loss + z_loss * flat.logsumexp(-1).square() * counts
    weight = torch.ones_like(loss) if token_weight is None else token_weight.flatten().where(counts, 0)
    loss = loss * weight
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / ((weight * counts).sum() if reduction == "mean" else 1)


def dense_log_prob(logits, target, softcap):
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    entropy = torch.distributions.Categorical(logits=z).entropy() * (target != -100)
    return -dense(logits, target, softcap=softcap, reduction="none"), entropy


@on_ranks(*SIZES)
def test_log_probability_and_entropy_equal_dense():
    tp, target = tp_axis(), draw_target()
    for softcap in (0.0, 2.0):
        ours, theirs = (draw(1, B, T, V).requires_grad_() for _ in range(2))
        found = vocab_parallel_log_prob(c.split(ours, tp, -1), target, tp=tp, vocab_size=V, softcap=softcap)
        wanted = dense_log_prob(theirs, target, softcap)
        for name, ours_y, theirs_y in zip(("log_prob", "entropy"), found, wanted, strict=True):
            close(ours_y.detach(), theirs_y.detach(), name, 1e-12)
        for used in ((0,), (1,), (0, 1)):
            grads = [
                torch.autograd.grad(sum((y[i] * draw(i, B, T)).sum() for i in used), leaf, retain_graph=True)[0]
                for y, leaf in ((found, ours), (wanted, theirs))
            ]
            close(*grads, f"gradient of outputs {used}", 1e-12)


@pytest.mark.parametrize("name", ["fused", "parts"])
@on_ranks(2)
def test_the_fused_losses_compile_to_one_graph(name):
    """One graph of a fused loss, on the values and gradients of eager."""
    tp, target = tp_axis(), draw_target()
    x, head = draw(1, B, T, D).requires_grad_(), c.split(draw(2, V, D), tp, 0).requires_grad_()
    options = {"tp": tp, "vocab_size": V, "label_smoothing": 0.1, "softcap": 2.0}

    def fused(x, head):
        log_prob, entropy = linear_log_prob(x, head, target, tp=tp, vocab_size=V, softcap=2.0, chunk_rows=8)
        loss = linear_cross_entropy(x, head, target, chunk_rows=8, reduction="none", **options)
        mean = linear_cross_entropy(x, head, target, chunk_rows=8, **options)
        return (loss * log_prob + entropy.square()).sum() + mean

    layer = VocabParallelEmbedding(V, D, tp=tp).double()

    def parts(x, head):
        logits = c.copy(torch.tanh(layer(target.clamp(min=0)) * x), tp) @ head.t()
        log_prob, entropy = vocab_parallel_log_prob(logits, target, tp=tp, vocab_size=V)
        return vocab_parallel_cross_entropy(logits, target, z_loss=0.01, **options) + (log_prob * entropy).sum()

    chosen = module.runs_triton
    module.runs_triton = lambda *_: name == "fused"
    try:
        loss = {"fused": fused, "parts": parts}[name]
        torch.compiler.reset()
        results = []
        for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            value = run(x, head)
            leaves = (x, head, layer.weight) if name == "parts" else (x, head)
            results.append((value.detach(), *torch.autograd.grad(value, leaves)))
        for got, want in zip(*results, strict=True):
            close(got, want, name)
    finally:
        module.runs_triton = chosen


@pytest.mark.parametrize(("sequence_dim", "frozen"), [(None, ""), (0, ""), (1, ""), (None, "x"), (None, "weight")])
@on_ranks(*SIZES)
def test_linear_cross_entropy_equals_dense(sequence_dim, frozen):
    tp, order = tp_axis(), (0, 1) if sequence_dim != 0 else (1, 0)
    target = draw_target().permute(order)
    weight = draw(6, B, T).abs().permute(order).where(target != -100, torch.nan)
    for options in (
        {},
        {"reduction": "sum", "chunk_rows": 5},
        {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0, "token_weight": weight, "chunk_rows": 1},
        {"label_smoothing": 0.1, "chunk_rows": 100},
        {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0, "chunk_rows": 5},
        {"reduction": "none", "token_weight": weight},
    ):
        x = draw(1, *target.shape, D).requires_grad_(frozen != "x")
        head = draw(2, V, D).requires_grad_(frozen != "weight")
        inputs = [t for t in (x, head) if t.requires_grad]
        plain = {name: value for name, value in options.items() if name != "chunk_rows"}
        wanted = dense(x @ head.t(), target, **plain)
        dy = draw(3, *wanted.shape)
        wanted_grads = torch.autograd.grad(wanted, inputs, dy)
        mine = x if sequence_dim is None else c.split(x, tp, sequence_dim)
        sp = {} if sequence_dim is None else {"sequence_parallel": True, "sequence_dim": sequence_dim}
        found = linear_cross_entropy(mine, c.split(head, tp, 0), target, tp=tp, vocab_size=V, **sp, **options)
        close(found.detach(), wanted.detach(), f"loss {options.keys()}", 1e-12)
        grads = torch.autograd.grad(found, inputs, dy)
        for got, want in zip(grads, wanted_grads, strict=True):
            close(got, want, f"gradient {options.keys()}", 1e-12)
    for softcap in (0.0, 2.0):
        wanted = dense_log_prob(x @ head.t(), target, softcap)
        found = linear_log_prob(
            mine, c.split(head, tp, 0), target, tp=tp, vocab_size=V, softcap=softcap, chunk_rows=5, **sp
        )
        for used in ((0,), (1,), (0, 1)):
            given = [draw(i, *target.shape) for i in used]
            grads = [torch.autograd.grad([y[i] for i in used], inputs, given, True) for y in (found, wanted)]
            for got, want in zip(*grads, strict=True):
                close(got, want, f"gradient of outputs {used}", 1e-12)
        for name, got, want in zip(("log_prob", "entropy"), found, wanted, strict=True):
            close(got.detach(), want.detach(), name, 1e-12)


def test_the_mean_of_linear_cross_entropy_is_over_targets_that_are_not_the_ignored_id():
    x, head, target = draw(1, 5, 3), draw(2, 7, 3), torch.tensor([0, 3, 6, 3, 1])
    found = linear_cross_entropy(x, head, target, ignore_index=3)
    torch.testing.assert_close(found, F.cross_entropy(x @ head.T, target, ignore_index=3))


def test_token_weights_of_each_loss_have_a_gradient():
    x, head, target, weight = draw(1, B, T, D), draw(2, V, D), draw_target(), draw(6, B, T).requires_grad_()
    found = linear_cross_entropy(x, head, target, reduction="none", token_weight=weight)
    (grad,) = torch.autograd.grad(found.sum(), weight)
    close(grad, dense(x @ head.t(), target, reduction="none"), "gradient of the weights")


class Logits(TorchDispatchMode):
    """Elements of the largest new tensor, the most tensors of `size` or more elements alive at once, and products."""

    def __init__(self, size):
        super().__init__()
        self.size, self.held = size, []
        self.largest, self.alive, self.products = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.numel())
                self.held += [StorageWeakRef(t.untyped_storage())] if t.numel() >= self.size else []
        self.held = [held for held in self.held if not held.expired()]
        self.alive = max(self.alive, len(self.held))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.out)
        return out


HEADS = {
    "sum": lambda *given, **how: linear_cross_entropy(*given, **how),
    "none": lambda *given, **how: linear_cross_entropy(*given, reduction="none", **how).square().sum(),
    "log_prob": lambda *given, **how: sum(y.square().sum() for y in linear_log_prob(*given, **how)),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("what", HEADS)
def test_no_more_than_a_chunk_of_logits_is_ever_alive(what, gradients):
    seen = []
    for chunks in (1, 4):
        x, head = draw(1, 16 * chunks, 4).requires_grad_(), draw(2, 100, 4).requires_grad_()
        target = torch.arange(16 * chunks)
        with Logits(16 * 100) as logits, torch.set_grad_enabled(gradients):
            loss = HEADS[what](x, head, target, chunk_rows=16)
            if gradients:
                loss.backward()
        assert logits.largest == 16 * 100
        products = (3 if what == "sum" or chunks == 1 else 4) if gradients else 1  # rows keep a single chunk
        assert logits.products == products * chunks
        seen.append(logits.alive)
    assert seen[0] == seen[1]  # with what the reference makes of a chunk


def test_chunks_are_of_one_size_on_all_ranks_of_an_uneven_cut(monkeypatch):
    seen = []
    monkeypatch.setattr(module.fused, "CHUNK_BYTES", 8 * 4 * 7)
    monkeypatch.setattr(module.fused, "linear_cross_entropy", lambda *args, chunk_rows, **kw: seen.append(chunk_rows))
    for rank, shard in enumerate((4, 4, 3)):
        linear_cross_entropy(
            torch.ones(15, 2, dtype=torch.float64), torch.ones(shard, 2), torch.zeros(15, dtype=torch.int64),
            tp=Axis(3, rank), vocab_size=11, reduction="sum",
        )  # fmt: skip
    assert seen == [5, 5, 5]  # of at most 7, in three chunks


@pytest.mark.parametrize(("arguments", "message"), [
    ({"reduction": "average"}, "reduction 'average' is not"),
    *(({"label_smoothing": a}, rf"label_smoothing {a} is not in \[0, 1\)") for a in (1.0, -0.1)),
    ({"softcap": -1.0}, "softcap -1.0 is not a positive number"),
    ({"token_weight": torch.ones(3)}, r"token_weight \(3,\) and target \(4,\) differ in shape"),
    ({"token_weight": torch.ones(4).requires_grad_()}, "reduction 'mean' gives token_weight no gradient"),
    *(({"target": torch.arange(4).to(dtype)}, rf"target \(4,\) is of {dtype}, but ids of classes are integers")
      for dtype in (torch.int16, torch.uint8, torch.bool)),
    ({"target": torch.tensor([1, 2])}, r"logits \(4, 5\) and target \(2,\) don't have the same tokens"),
    ({"target": torch.tensor([1, 2, 5, 0])}, "token id 5 is outside the vocabulary of 5"),
    ({"vocab_size": 6}, "logits have 5 columns, but rank 0 of the tp axis of size 1 holds 6"),
    ({"weight": torch.ones(5, 3)}, r"x \(4, 2\), weight \(5, 3\), .* are not"),
    *(({"chunk_rows": n}, f"chunk_rows {n} is not positive") for n in (0, -1)),
])  # fmt: skip
def test_bad_input(arguments, message):
    given = {"x": torch.ones(4, 2), "weight": torch.ones(5, 2), "target": torch.tensor([0, 1, 2, 4])}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**given | arguments)
    if not {"reduction", "label_smoothing", "token_weight"} & arguments.keys():
        with pytest.raises(ValueError, match=message):
            linear_log_prob(**given | arguments)
    shared = {"label_smoothing", "softcap", "token_weight", "target", "vocab_size"} & arguments.keys()
    if (shared or arguments == {"reduction": "average"}) and "no gradient" not in message:
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(**{"logits": torch.ones(4, 5), "target": given["target"]} | arguments)
