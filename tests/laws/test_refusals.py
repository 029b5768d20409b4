"""The table of refusals: each wrong input, and the numbers or names that its message must hold. One process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpcore as mp
from mpcore import Axis, collectives, from_pretrained
from mpcore.checkpoint import save
from mpcore.experimental import GatedDeltaNet
from mpcore.gradients import grad_norm
from mpcore.interop import cut, stage_check
from mpcore.interop.hugging_face import stored
from mpcore.interop.lora.files import _keys
from mpcore.layers.mlp import _tried
from mpcore.layers.overlap import overlap_stages
from mpcore.pipeline.messages import Message
from mpcore.pipeline.schedules import Action, Schedule
from mpcore.sharding import declare
from mpcore.sharding.cross_replica_hash import cross_replica_hash
from mpcore.tools.analysis.dry_run import pretend
from mpcore.tools.analysis.seconds import resolve
from mpcore.tools.command_line import find_object
from mpcore.tools.invariant import invariant_mesh, prepare
from mpcore.tools.invariant.run import InvariantStep
from mpcore.tools.simulation.replay import replay
from mpcore.tools.verify import run as of_verify
from mpcore.tools.verify import verify


class Quantized(nn.Module):
    """Looks like a quantized model of transformers."""

    config, hf_quantizer, save_pretrained = {}, object(), print


class Gone:
    """A message whose peer is gone."""

    def wait(self) -> None:
        raise RuntimeError("connection closed")


class Two(nn.Module):
    """Stages of it that don't fit each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def replay_without_mesh() -> None:
    folder = Path("run")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"run": {"dp": None, "steps": 3}}))
    replay(folder, 1, "examples.gpt.pretrain")


def unequal_messages(mesh: mp.Mesh) -> None:
    dist.all_to_all_single(torch.empty(4), torch.empty(4), [2, 2], [[1, 3], [2, 2]][mesh.dp.rank], group=mesh.dp.group)


def unequal_shards(mesh: mp.Mesh, *shapes: tuple[int, int], delta: bool = False) -> None:
    model = mp.ParallelAttention(4, 2, cp=mesh.cp, context="ring")
    model = GatedDeltaNet(4, 2, 2, 2, 2, cp=mesh.cp, context="ring") if delta else model
    run = mp.prepare(model, mesh, blocks=[], loss=nn.MSELoss(reduction="sum"), optimizer=mp.AdamW, initialize=False)
    run.forward_backward(*[torch.ones(*shapes[mesh.cp.rank], 4)] * 2)


def without_positions(layer: Callable[[Axis], nn.Module], mesh: mp.Mesh) -> None:
    model = nn.Sequential(mp.ParallelAttention(4, 2, cp=mesh.cp, context="ring"), layer(mesh.cp))
    mp.prepare(model, mesh, blocks=[], initialize=True, loss=nn.MSELoss(), optimizer=mp.AdamW, data=mp.Zero(0))
    start = {5: 4, 8: -4}.get(getattr(model[1], "num_positions", 9), 0) * mesh.cp.rank
    given = [torch.arange(4) + start] if getattr(model[1], "num_positions", 9) < 9 else []
    model[1](torch.ones(1, 4 if given else 3 + mesh.cp.rank, 4), *given)


PLACED = {
    "jitter 0.5 on cp 2 needs": lambda cp: mp.ParallelMoE(4, 4, 2, 1, cp=cp, jitter=0.5),
    "capacity_factor 0.5 on cp 2 needs": lambda cp: mp.ParallelMoE(4, 4, 2, 1, cp=cp, capacity_factor=0.5),
    "tokens is missing, .* cp": lambda cp: mp.Dropout(0.5),
    "positions is missing, .* cp": lambda cp: mp.PositionEmbedding(9, 4),
    "a position of cp is 7: give 0 to 4": lambda cp: mp.PositionEmbedding(5, 4),
    "a position of cp is -4: give 0 to 7": lambda cp: mp.PositionEmbedding(8, 4),
}


def more_micro_batches() -> None:
    mesh = invariant_mesh(mp.build_mesh(), 2)
    model = mp.ColumnParallelLinear(4, 4, tp=mesh.tp, gather_output=True, bias=False)
    run = prepare(model, mesh, blocks=[], loss=lambda y, _: y.sum(), initialize=False, optimizer=mp.AdamW)
    run.set_micro_batches(5)
    run.forward_backward(torch.ones(5, 4), torch.ones(5))


def invariant_sgd() -> None:
    model = nn.Linear(2, 2)
    InvariantStep([model], mp.Mesh(), torch.optim.SGD(model.parameters(), lr=0.1))


def planned_on_ranks() -> None:
    with pretend(4):
        pass


def cut_beside_a_parameter() -> None:
    body = nn.Module()
    body.layers, body.scale = nn.ModuleList([nn.Linear(2, 2)]), nn.Parameter(torch.ones(1))
    list(cut._units(nn.Sequential(body), body.layers))


def two_contexts() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(2)))
    for module, kind in zip(model, ("ring", "zigzag"), strict=True):
        module.context = kind
    of_verify._cut_sequence({"x": torch.ones(1, 4)}, model, mp.Mesh(), of_verify.RankRecord(0, 0, 0, 0))


def saved(change: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    """Save a linear layer after a change of it or of its optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    change(model, optimizer)
    save("step", model, optimizer, mesh=mp.Mesh(), step=1)


def note(value: object) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """Have the optimizer's state of the weight hold a value."""
    return lambda model, optimizer: optimizer.state.update({model.weight: {"nothing": None, "note": value}})


def declared_otherwise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.bias.data, model.shardings = torch.ones(7), {"bias": declare.Sharding((2,))}


def wide(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))


DEADLOCK = Schedule("mine", ((Action("B", 0, 0), Action("F", 0, 0)),), 1, 1)


def overlapped_and_fp8(overlaps_first: bool) -> None:
    mlp = mp.ParallelMLP(128, 128)
    steps = [mp.layers.overlap_communication, lambda model: mp.parallel.convert_to_fp8([model])]
    for step in steps if overlaps_first else reversed(steps):
        step(mlp)


REFUSED: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    r"note of weight is 'seen': only tensors can be saved": (ValueError, lambda: saved(note("seen"))),
    r"note/weight has shape \(3,\), its parameter \(2, 3\)": (ValueError, lambda: saved(note(torch.ones(3)))),
    r"model/bias has shape \(7,\), declared is \(2,\)": (ValueError, lambda: saved(declared_otherwise)),
    r"safetensors has no dtype for torch\.complex128": (ValueError, lambda: saved(wide)),
    r"run has no checkpoint, and config.json doesn't tell dp: set run.dp": (ValueError, replay_without_mesh),
    r"all_to_all: rank 0 sends \[1\] to rank 0, which receives \[2\]: let both know one size": (
        Exception, lambda: mp.simulate(unequal_messages, dp=2)
    ),
    r"Quantized is quantized or holds adapters": (ValueError, lambda: stored.dense_shape(Quantized())),
    r"No module named 'transformers.nothing': install transformers 5": (
        ValueError, lambda: stored.transformers_module("nothing")
    ),
    r"a: up has a lora_A alone, of lora_A and lora_B": (
        ValueError, lambda: _keys(SimpleNamespace(path="a", header=["base_model.model.up.lora_A.weight"]), [])  # type: ignore[arg-type]
    ),
    r"activation .* fails on a tensor \(2, 64\) on the CPU: .* argument": (ValueError, lambda: _tried(torch.cat)),  # type: ignore[arg-type]
    r"unexpected keyword arguments \['biass'\]: AttentionOptions has \['causal', ": (
        TypeError, lambda: mp.ParallelAttention(4, 2, biass=True)  # type: ignore[call-arg]
    ),
    r"virtual degrees don't go with cp 2: take cp 1": (
        Exception, lambda: mp.simulate(partial(invariant_mesh, degree=2), cp=2)
    ),
    r"Two can't be cut into 2 stages: one uses more of another .*mat1 and mat2": (
        ValueError, lambda: stage_check.compare(Two(), [nn.Linear(2, 3), nn.Linear(2, 3)], torch.ones(1, 2), [([], [])])
    ),
    r"the schedule deadlocks: 0B0, action 0 of rank 0, waits for 0F0": (ValueError, lambda: resolve(DEADLOCK)),
    r"0F0, to or from rank 3 of the pipeline, failed: connection closed": (
        RuntimeError, lambda: Message([], [Gone()], Action("F", 0, 0), 3).wait()  # type: ignore[list-item]
    ),
    r"invariant numerics have no form of torch\'s SGD: take optimizer=mpcore.AdamW": (ValueError, invariant_sgd),
    r"5 micro-batches: an invariant run has 2 leaves in every step": (ValueError, more_micro_batches),
    r"torch.distributed is running: plan in a process of its own": (
        Exception, lambda: mp.simulate(planned_on_ranks, ranks=2)
    ),
    r"0.scale is a parameter beside the layers, and no stage is known": (ValueError, cut_beside_a_parameter),
    r"Linear has no table of ids: give ids \[B, T\]": (ValueError, lambda: stage_check.random_ids(nn.Linear(2, 2))),
    r"the blocks have 1 nn.Linear, such as 'blocks\[0\]', and no parallel": (
        ValueError, lambda: mp.parallel.convert_to_fp8([nn.Linear(2, 2)])
    ),
    r"the blocks have 2 grouped linear layers of experts, such as 'blocks\[0\] ": (
        ValueError, lambda: mp.parallel.convert_to_fp8([mp.ParallelMoE(4, 4, 4, 2)])
    ),
    r"blocks is a ColumnParallelLinear: give a list of the model's submodules": (
        ValueError, lambda: mp.parallel.convert_to_fp8(mp.ColumnParallelLinear(8, 12))
    ),
    r"up computes with Fp8Product.*, whose communication can't be overlapped: leave out overlap_comm": (
        ValueError, lambda: overlapped_and_fp8(overlaps_first=False)
    ),
    r"up computes with OverlapProduct.*, which has no FP8: don't convert this": (
        ValueError, lambda: overlapped_and_fp8(overlaps_first=True)
    ),
    r"tp 1, and the model has 2 such layers, all built with tp 1, such as up: pass": (
        ValueError, lambda: overlap_stages([mp.ParallelMLP(4, 8)], mp.Mesh(), True)
    ),
    r"smallest is 0 elements": (ValueError, lambda: mp.layers.overlap_communication(mp.ParallelMLP(128, 128), 0)),
    r"has the slope 0, and its gradients say .*: a backward is not that of its": (
        ValueError, lambda: of_verify.check_slope({"w": torch.ones(3)}, 3**0.5, 1.0, 1.0)
    ),
    r"layers have the contexts \['ring', 'zigzag'\]: give all layers": (ValueError, two_contexts),
    r"virtual degree 2 with torch.bfloat16: take float32 or float64": (
        ValueError, lambda: verify(nn.Linear, {"x": torch.ones(1)}, [], dtype=torch.bfloat16, virtual=2)
    ),
    r"ranks of cp have \[4, 2\] tokens of x, and \[3, 3\]": (
        Exception, lambda: mp.simulate(unequal_shards, (1, 4), (1, 2), cp=2)
    ),
    r"sizes \[2, 1\] in dimension 0 on the ranks of cp: give": (
        Exception, lambda: mp.simulate(unequal_shards, (2, 4), (1, 4), cp=2)
    ),
    r"sizes \[1, 0\] in dimension 1 .* the same rows, of at least 2 tokens": (
        Exception, lambda: mp.simulate(unequal_shards, (1, 1), (1, 0), cp=2)
    ),
    r"ranks of cp have \[3, 2\] tokens, .* pass length=5 to": (
        Exception, lambda: mp.simulate(unequal_shards, (1, 3), (1, 2), cp=2)
    ),
    r"ranks of cp have \[3, 2\] tokens, .*: pass length=5 to the layer": (
        Exception, lambda: mp.simulate(partial(unequal_shards, delta=True), (1, 3), (1, 2), cp=2)
    ),
    **{words: (Exception, partial(mp.simulate, partial(without_positions, of), cp=2)) for words, of in PLACED.items()},
    r"length 10 is not a multiple of the unit 4": (ValueError, lambda: collectives.shard_sizes(10, 2, 4)),
    r"tp axis of size 2 has no process group": (
        ValueError, lambda: collectives.reduce(torch.zeros(2), Axis(2, 0, None, "tp"))
    ),
    r"nowhere.at can't be imported: No module named 'nowhere'": (ValueError, lambda: find_object("nowhere.at:x")),
    r"can't be imported: .*; run the command in the folder of the clone": (
        ValueError, lambda: find_object("examples.nowhere:x")
    ),
    r"^'' can't be imported": (ValueError, lambda: find_object("")),
    r"x is torch\.sparse_coo; only dense bits can be hashed": (
        ValueError, lambda: cross_replica_hash(torch.eye(3).to_sparse())
    ),
    r"expected the mesh that the model lies on, found Axis": (TypeError, lambda: grad_norm(nn.Linear(2, 2), Axis())),
    r"is no folder: download the model first": (ValueError, lambda: from_pretrained("somebody/model")),
    r"length 10 is not a multiple of the unit 4$": (ValueError, lambda: declare.cut(10, Axis(), 0, 4)),
    r"a tensor of shape \(3,\) is not the logical shape \(4,\)": (
        ValueError, lambda: declare.Sharding((4,)).take(torch.zeros(3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_a_wrong_input_is_refused_with_a_reason(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, call = REFUSED[said]
    with pytest.raises(kind, match=said):
        call()
