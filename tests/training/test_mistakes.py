"""Common mistakes of a training program: the first step, or the call before it, names each of them."""

from __future__ import annotations

import logging
import math
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from mpcore.collectives import gather
from mpcore.gradients import guard_optimizer
from mpcore.parallel import shard_data_parallel
from mpcore.sharding.local import local_tensor
from mpcore.tools.simulation import DeadlockError, RankError, turns

V, D, B, T = 12, 8, 8, 6


class Net(nn.Module):
    """An MLP between an embedding and a head, with a scalar of its own and one of the mistakes."""

    def __init__(self, mesh: mp.Mesh, wrong: str) -> None:
        super().__init__()
        sp: dict[str, Any] = {"tp": mesh.tp, "sequence_parallel": wrong == "norm"}
        self.wrong, self.tp = wrong, mesh.tp
        self.embedding = mp.VocabParallelEmbedding(V, D, **sp)
        self.norm = nn.LayerNorm(D)
        self.up = mp.ColumnParallelLinear(D, 4 * D, tp={"no tp": mp.Axis(), "tp=mesh.dp": mesh.dp}.get(wrong, mesh.tp),
                                          sequence_parallel=sp["sequence_parallel"])  # fmt: skip
        self.down = mp.RowParallelLinear(4 * D, D, **sp if wrong != "no tp, row" else {})
        if wrong == "swapped":
            self.up, self.down = mp.RowParallelLinear(D, 4 * D, **sp), mp.ColumnParallelLinear(4 * D, D, **sp)
        if wrong == "plain row":
            self.down = nn.Linear(4 * D, D)  # type: ignore[assignment]
        if wrong == "column":
            self.down = mp.ColumnParallelLinear(4 * D, D, **sp)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = mp.ColumnParallelLinear(D, V, bias=False, **sp)
        self.drop = nn.Dropout(0.2) if "nn.Dropout" in wrong else mp.Dropout(0.2 if "samples" in wrong else 0.0)
        if wrong != "add_partial":
            mp.add_partial(self, "scale", mesh.tp)
        if wrong == "moved":
            plain: Any = nn.Linear(D, 4 * D)
            plain.weight, plain.bias, self.up = self.up.weight, self.up.bias, plain

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, tokens: Tensor, samples: Tensor | None = None) -> Tensor:
        x = self.norm(self.embedding(tokens))
        x = self.drop(x) if isinstance(self.drop, nn.Dropout) else self.drop(x, samples)
        logits = self.head(self.down(torch.relu(self.up(x)) * self.scale))
        return gather(logits, self.tp, -1, V) if "gathered" in self.wrong else logits


def train(mesh: mp.Mesh, wrong: str) -> None:
    """Train two steps with a mistake."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        reduction = "mean" if wrong == "mean" else "sum"
        if "F.cross_entropy" in wrong:
            total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
        else:
            total = mp.vocab_parallel_cross_entropy(logits, target, tp=mesh.tp, vocab_size=V, reduction=reduction)
        parts = {"/ dp": mesh.dp.size, "/ world": mesh.job.size, "/ micro-batches": 2, "/ tokens": target.numel(),
                 "x dp": 1 / mesh.dp.size}  # fmt: skip
        return total / parts.get(wrong.split(",")[0], 1)

    if wrong == "Axis":
        mp.Axis(2, 0, "tp")  # type: ignore[arg-type]
    torch.manual_seed(mesh.job.rank if wrong == "seeds" else 0)
    seeded = wrong in ("seeds", "nn.init", "moved", "DDP", "hook")
    with torch.device(mesh.device if seeded else "meta"):
        net = Net(mesh, wrong)
    if wrong == "nn.init":
        net.up.weight = nn.Parameter(nn.init.normal_(torch.empty_like(net.up.weight)))
    if wrong == "one rank" and mesh.job.rank == 1:
        return
    if wrong == "loop":
        mp.layers.materialize(net, 0, mesh.device)
        optimizer = torch.optim.AdamW(net.parameters())
        shard_data_parallel(net, mesh, [], zero=1)
        guard_optimizer(optimizer, net)
    made: Any = torch.optim.AdamW(net.parameters()) if wrong == "optimizer" else partial(mp.AdamW, lr=0.1)
    if wrong.startswith("hook") and "prepare" not in wrong:
        net.up.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))
    net = nn.parallel.DistributedDataParallel(net) if wrong == "DDP" else net
    how: dict[str, Any] = {"micro_batches": 1 + (wrong == "/ micro-batches"), "data": mp.Zero(int("hook" not in wrong))}
    run = mp.prepare(net, mesh, blocks=[], loss=loss, initialize=not seeded, optimizer=made, **how)
    if "early" in wrong and mesh.job.rank:
        run.model.up.register_parameter(wrong.split()[0], nn.Parameter(torch.ones(run.model.up.weight.shape)))
    if wrong == "nn.Dropout":
        torch.manual_seed(mesh.job.rank)
    if wrong == "load_state_dict":
        run.model.load_state_dict(mp.full_state_dict(run.model))
    run.model.train(wrong != "eval")
    if wrong == "hook after prepare":
        net.up.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    if wrong == "DDP after prepare":
        nn.parallel.DistributedDataParallel(run.model)
    generator = torch.Generator().manual_seed(1 + (wrong == "sampler") * mesh.job.rank)
    text = torch.randint(V, (B, T + 1), generator=generator)
    mine = text if wrong == "share" else text[run.share(9 if wrong == "share of 9" else B)]
    if wrong == "6 and 8":
        mine = torch.zeros(6 + 2 * mesh.job.rank, T + 1, dtype=torch.int64)
    for _ in range(2):
        if wrong == "no backward":
            run.optimizer_step()
        given: dict[str, Any] = {"samples": torch.arange(len(mine)) + ("dp" in wrong) * run.step * B}
        tokens = {"own tokens": 40 + mesh.job.rank, "negative tokens": -40, "tokens of nan": math.nan,
                  "tokens that are true": True, "tokens of a list": torch.tensor([40])}  # fmt: skip
        given = given if "same" in wrong else {"tokens": tokens[wrong]} if wrong in tokens else {}
        run.forward_backward(mine[:, :-1], mine[:, 1:], **given)
        if "group" in wrong:
            run.optimizer.param_groups[0][wrong.split()[1]] = 0.1 + mesh.job.rank
        if wrong == "clip_grad_norm_" or (run.step and wrong == "clip_grad_norm_ later"):
            nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        for p in run.model.parameters() if wrong == "all_reduce" else ():
            if p.grad is not None:
                torch.distributed.all_reduce(local_tensor(p.grad), group=mesh.world.group)
        if wrong == "backward twice":
            run.forward_backward(mine[:, :-1], mine[:, 1:])
        {"zero_grad": run.optimizer.zero_grad, "step": run.optimizer.step}.get(wrong, bool)()
        run.optimizer_step(lr=LR.get(wrong))
        if wrong == "added":
            run.model.late = nn.Linear(D, D)
            run.optimizer.add_param_group({"params": [*run.model.late.parameters()]})
        if wrong == "replaced" or (wrong == "replaced on rank 1" and mesh.job.rank):
            run.model.scale = nn.Parameter(torch.ones(1))
        calls = {"evaluate": lambda: run.evaluate([(mine[:, :-1], mine[:, 1:])]), "save": lambda: run.save("unused"),
                 "full_state_dict": lambda: mp.full_state_dict(run.model), "load": lambda: run.load("unused"),
                 "set_micro_batches": lambda: run.set_micro_batches(2)}  # fmt: skip
        if wrong == "three lists":
            run.evaluate([(mine[:, :-1], mine[:, 1:])] * 2, samples=[torch.arange(len(mine))] * (2 + mesh.job.rank))
        first, _, second = wrong.partition(" on rank 0, ")  # a call of each rank; a rank without one goes on
        calls.get(second if mesh.job.rank else first, bool)()
    if wrong == "own step":
        run.step += mesh.job.rank
        run.save("unused")


LR = {"infinite lr": math.inf, "negative lr": -0.1, "lr of nan": math.nan}
TP, DP, BOTH = {"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}
MISTAKES: list[tuple[str, dict[str, int], str]] = [
    ("share", DP, "all 2 ranks of dp have the same samples.*run.share"),
    ("sampler", TP, "ranks of tp have different targets.*run.share"),
    ("6 and 8", TP, "ranks of tp have different targets.*run.share"),
    ("sampler", BOTH, "ranks of tp have different targets.*run.share"),
    ("share of 9", DP, "9 samples a step are not a multiple of .* = 2: take 10"),
    ("clip_grad_norm_", TP, "clip_grad_norm_, call run.clip_gradients"),
    *[("clip_grad_norm_ later", sizes, "step 2.*clip_grad_norm_, call run.clip_gradients") for sizes in (TP, BOTH)],
    ("clip_grad_norm_", BOTH, "clip_grad_norm_, call run.clip_gradients"), ("mean", DP, "the loss is a mean"),
    ("/ tokens", TP, "the loss is a mean"), ("/ dp", DP, "0.5 times the cross-entropy.*divided by dp"),
    ("/ world", BOTH, "0.25 times the cross-entropy.*divided by the world size"),
    ("x dp", BOTH, "2 times the cross-entropy.*multiplied by tp or dp"),
    ("/ micro-batches", TP, "0.5 times the cross-entropy.*micro_batches"),
    ("/ dp, gathered, F.cross_entropy", BOTH, "0.5 times the cross-entropy.*divided by tp or dp"),
    ("F.cross_entropy", TP, "vocab_parallel_cross_entropy"),
    ("gathered", TP, "12 columns.*holds 6.*not gathered logits"),
    ("moved", TP, "moved to another module has lost its declared sharding.*up.weight over tp"),
    ("seeds", BOTH, "torch.manual_seed on all ranks.*embedding.weight over data"),
    ("nn.init", TP, "same shard of up.weight.*pass init="),
    ("swapped", TP, "8, but this rank's share of in_features 8 is 4: is it swapped"),
    ("column", TP, "16, but in_features is 32: is it swapped with the RowParallelLinear"),
    ("DDP after prepare", TP, "same weights.*DistributedDataParallel"),
    ("plain row", TP, "nn.Linear down: its input has 16 features, and in_features is 32.*RowParallelLinear"),
    ("no tp", TP, "32, but this rank's share of in_features 32 is 16.* no tp"),
    ("no tp, row", TP, r"\(8, 6, 16\) is 16, but in_features is 32: pass this layer tp=mesh.tp"),
    ("Axis", TP, "name='tp'"), ("tp=mesh.dp", BOTH, r"up \(ColumnParallelLinear\) was built with tp=mesh.dp"),
    ("add_partial", TP, r"scale is replicated.*add_partial\(module, 'scale', mesh.tp\)"),
    ("norm", TP, r"norm.*make it mp.LayerNorm\("), ("nn.Dropout", TP, "Use mpcore.Dropout, or call torch.manual_seed"),
    ("samples", TP, "dropout 0.2 needs samples"), ("same samples", TP, "same samples as step 0.*run.samples"),
    ("all_reduce", TP, "gradients were changed after forward_backward"),
    *[("zero_grad", sizes, "remove it. run.optimizer_step drops") for sizes in ({}, TP, DP)],
    ("load_state_dict", TP, "all of .*, shape .(12, 8|1,).*shard of shape .(6, 8|0,).*load_full_state_dict"),
    ("load_state_dict", DP, "all of .*, shape .(12, 8|1,).*shard of shape .(6, 8|0,).*load_full_state_dict"),
    ("eval", TP, "eval mode.*call model.train"),
    ("optimizer", TP, "a AdamW that exists already.*optimizer=lambda model"),
    ("loop", DP, "make the optimizer after shard_data_parallel"), ("step", DP, "call run.optimizer_step"),
    ("no backward", TP, "forward_backward, clip_gradients"), ("backward twice", TP, "micro_batches="),
    ("DDP", DP, "wrapped in DistributedDataParallel"),
    ("same samples on dp", DP, "all 2 ranks of dp have the same sample indices.*run.samples"),
    ("negative tokens", DP, "tokens is -40"), ("tokens of nan", DP, "tokens is nan"),
    ("tokens that are true", DP, "tokens is True"), ("tokens of a list", TP, r"tokens has shape \(1,\)"),
    *[(f"hook{when}", sizes, f"hook on its gradient.*a rank's {seen} over .* 2") for when in ("", " after prepare")
      for sizes, seen in ((TP, "shard"), (DP, "term of the sum"))],
    ("hook on meta", TP, "up.weight has a hook on its gradient and no memory"),
    *[(how, sizes, "parameters were added or replaced") for how in ("added", "replaced") for sizes in ({}, TP, DP)],
    *[(how, sizes, "^rank 0 .*parameters were added or replaced") for sizes in (TP, DP)
      for how in ("replaced on rank 1", "weight replaced early", "late added early")],
    ("three lists", DP, r"samples has 3 tensors, and evaluate got 2 batches: one each \(on rank 1 of 2"),
    *[("own tokens", sizes, r"tokens: 40.0 and 41.0") for sizes in (TP, DP)],
    *[(f"group {name}", sizes, rf"other options in the optimizer's groups.*: {name} 0.1 and 1.1")
      for name in ("lr", "weight_decay") for sizes in (TP, DP)],
    *[(wrong, DP, f"lr is {lr} in step 0") for wrong, lr in LR.items()],
    ("own step", TP, r"disagree about the step of run.save \(step: 2 and 3\)"),
    *[(f"{call} on rank 0, ", DP, r"rank 0: waits at training/run.py:\d+, called at training/test_mistakes.py")
      for call in ("evaluate", "save", "load", "set_micro_batches")],
    *[(f"{a} on rank 0, {b}", DP, f"call: .*run.{a} and .*run.{b}") for a, b in (
        ("evaluate", "save"), ("save", "load"), ("load", "evaluate"), ("set_micro_batches", "evaluate"))],
    ("full_state_dict on rank 0, ", TP, r"rank 0: waits at sharding/state_dict.py:\d+, called at training/test"),
    ("one rank", TP, "rank 1: is at the end of its function"),
]  # fmt: skip


def told(wrong: str, sizes: dict[str, int], caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING):
        try:
            mp.simulate(partial(train, wrong=wrong), **sizes)  # type: ignore[arg-type]
        except (RankError, DeadlockError) as error:
            return f"{error}\n{caplog.text}"
    return caplog.text


@pytest.mark.parametrize(("wrong", "sizes", "named"), MISTAKES, ids=lambda x: str(x)[:16])
def test_a_mistake_is_named(caplog, monkeypatch, wrong, sizes, named):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.5)  # of ranks that wait for each other
    assert re.search(named, told(wrong, sizes, caplog), re.DOTALL)


@pytest.mark.parametrize("sizes", [TP, DP, BOTH], ids=str)
@pytest.mark.parametrize("right", ["", "gathered, F.cross_entropy"])
def test_a_program_without_a_mistake_trains_in_silence(caplog, right, sizes):
    assert told(right, sizes, caplog) == ""


class Skips(nn.Module):
    """Residual blocks of one size. A rank may leave one out, as layerdrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(3))
        self.without = -1

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i == self.without else x + block(x)
        return x


@pytest.mark.parametrize("skipped", [(1, 2), (1, 1)])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_ranks_of_data_that_leave_out_other_blocks_are_refused_with_zero(zero, skipped):
    """Each would gather a part of another block's weights."""

    def train() -> list[float]:
        mesh, model = mp.build_mesh(device_type="cpu"), Skips()
        run = mp.prepare(model, mesh, blocks=model.blocks, loss=lambda y, t: (y - t).square().sum(),
                         optimizer=partial(mp.AdamW, lr=0.1), initialize=True, data=mp.Zero(zero))  # fmt: skip
        x, losses = torch.randn(2, 1, D, generator=torch.Generator().manual_seed(1)), []
        for step in range(3):
            model.without = -1 if step == 0 else skipped[mesh.data.rank] if mesh.data.size > 1 else skipped[0]
            run.forward_backward(x[run.share(2)], torch.zeros(2 // mesh.data.size, 1, D), tokens=2)
            losses.append(run.optimizer_step().loss)
        return losses

    if zero and skipped[0] != skipped[1]:
        with pytest.raises(RankError, match=r"ran other blocks in this step.*zero=0"):
            mp.simulate(train, ranks=2)
    else:
        both = mp.simulate(train, ranks=2)
        assert both[0] == both[1]
        assert skipped[0] != skipped[1] or both[0] == pytest.approx(mp.simulate(train, ranks=1)[0])


@pytest.mark.parametrize(("sizes", "fails"), [({"tp": 2}, True), ({"cp": 2}, True), ({"dp": 2, "ep": 2}, True),
                                              ({"dp": 2}, False)])  # fmt: skip
def test_ranks_whose_collectives_meet_are_refused_if_they_leave_out_other_blocks(sizes, fails):
    """A sum over tp would add parts of two blocks, and experts of one block get tokens of another."""

    def train() -> None:
        mesh, model = mp.build_mesh(device_type="cpu", **sizes), Skips()
        model.blocks = nn.ModuleList(
            mp.ParallelMoE(D, 4, 2, 1, tp=mesh.tp, ep=mesh.ep, data=mesh.data) if "ep" in sizes
            else mp.ParallelAttention(D, 2, tp=mesh.tp, cp=mesh.cp, context="ring") for _ in range(3)
        )  # fmt: skip
        run = mp.prepare(model, mesh, blocks=model.blocks, loss=lambda y, t: (y - t).square().sum(),
                         optimizer=partial(mp.AdamW, lr=0.1), initialize=True, data=mp.Zero(0))  # fmt: skip
        x = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(1))[run.share(2)]
        for step in range(3):
            model.without = mesh.job.rank if step == 2 else step
            run.forward_backward(x, torch.zeros_like(x), tokens=2)
            run.optimizer_step()

    words = f"ranks of {[*sizes][-1]} ran other blocks"
    with pytest.raises(RankError, match=words) if fails else nullcontext():
        mp.simulate(train, ranks=2)
