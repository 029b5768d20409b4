"""Refuse a mesh with an axis above 1 that the model doesn't use: its ranks would compute the same, or something else.

A parameter that is sharded over an axis declares it, and a module of your own that holds an axis is taken to use it.
Nothing declares whether a module mixes tokens: under cp a module of an unknown class is refused unless a module of the
model knows cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mpcore.collectives import all_reduce
from mpcore.kernels._checks import can_read
from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.dropout import Dropout
from mpcore.layers.embedding import ColumnParallelEmbedding, PositionEmbedding, VocabParallelEmbedding
from mpcore.layers.linear import ParallelLinear
from mpcore.layers.module import ParallelLayer, input_error
from mpcore.mesh.agreement import gather_objects, raising_together
from mpcore.mesh.axis import Axis, Mesh
from mpcore.sharding.declarations import declarations, named_modules

MIXES_TOKENS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.ConvTranspose1d, nn.Flatten)
MOVES_SEQUENCE = (ParallelLinear, ColumnParallelEmbedding, VocabParallelEmbedding)


def check_axes(stages: Sequence[nn.Module], mesh: Mesh) -> None:
    """Raise ValueError on every rank if tp, cp, ep or etp is above 1 and the model doesn't use it.

    The ranks of pp decide together: one stage may use no axis. Under cp, layers that need positions raise without them.
    """
    modules = [each for stage in stages for each in named_modules(stage)]
    with raising_together():
        for name, module in modules:
            tp = module.tp if isinstance(module, ParallelLayer) else mesh.tp
            if tp.size > 1 and tp.role in ("pp", "dp", "data", "cp"):
                raise ValueError(f"{_named(name, module)} was built with tp=mesh.{tp.role}: pass tp=mesh.tp")
            for axis in (mesh.cp, mesh.ep):
                built = vars(module).get(axis.role)
                sees_all = isinstance(module, HeadAttention) and module.memory_dim is not None  # of a full memory
                if isinstance(built, Axis) and built.size != axis.size and not sees_all:
                    raise ValueError(
                        f"{_named(name, module)} was built with {axis.role} {built.size}, and the mesh has {axis.role} "
                        f"{axis.size}: pass {axis.role}=mesh.{axis.role}"
                    )
            if mesh.cp.size > 1 and isinstance(module, Dropout | PositionEmbedding):
                module.register_forward_pre_hook(partial(_check_positions, mesh.cp), with_kwargs=True)
    shards = [shard for stage in stages for _, _, each in declarations(stage) for shard in each.shards]
    sharded = {shard.axis.key for shard in shards if shard.axis.size > 1}
    ours = {module: type(module).__module__.partition(".")[0] in ("torch", "mpcore") for _, module in modules}
    knows = [getattr(m, "exchanges_tokens", False) or (not ours[m] and _holds(m, mesh.cp)) for _, m in modules]
    inside = {each for (_, m), known in zip(modules, knows, strict=True) if known for each in m.modules()}
    mixing = [_named(name, m) for name, m in modules if isinstance(m, MIXES_TOKENS) and m not in inside]
    unknown = [] if any(knows) else [_named(name, m) for name, m in modules if not ours[m]]
    follows = [(name, m) for name, m in modules if isinstance(m, ParallelLayer) and m.sequence_parallel]
    own = {axis.role: any(not ours[m] and _holds(m, axis) for _, m in modules) for axis in (mesh.tp, mesh.ep, mesh.etp)}
    mine = {
        "cut": bool(sharded) or own["tp"], "ep": mesh.ep.key in sharded or own["ep"],
        "etp": mesh.etp.key in sharded or own["etp"], "cp": any(knows),
        "moves": any(isinstance(m, MOVES_SEQUENCE) for _, m in follows) or own["tp"],
        "mixing": mixing, "unknown": unknown, "follows": [_named(*each) for each in follows],
    }  # fmt: skip
    found = gather_objects(mine, mesh.pp.group)  # ranks of tp, cp and dp hold the same modules
    used = {key for each in found for key, value in each.items() if value}
    first = {key: next((each[key][0] for each in found if each[key]), "") for key in ("mixing", "unknown", "follows")}
    alone = first["mixing"] or ("" if "cp" in used else first["unknown"])
    if mesh.tp.size > 1 and "cut" not in used:
        raise ValueError(
            f"no parameter is sharded, so the {mesh.tp.size} ranks of tp compute the same: build layers with "
            f"tp=mesh.tp, call parallelize(model, tp=mesh.tp), or build the mesh with tp 1"
        )
    if mesh.ep.size > 1 and "ep" not in used:
        raise ValueError(
            f"no parameter is sharded over ep, so each of its {mesh.ep.size} ranks holds all experts: build "
            f"mpcore.ParallelMoE(.., ep=mesh.ep), call parallelize(model, tp=mesh.tp, ep=mesh.ep, etp=mesh.etp), or "
            f"build the mesh with ep 1"
        )
    if mesh.etp.size not in (1, mesh.tp.size) and "etp" not in used:
        raise ValueError(
            f"no parameter is sharded over etp, so its {mesh.etp.size} ranks compute the same: build "
            f"mpcore.ParallelMoE(.., etp=mesh.etp), or build the mesh without etp"
        )
    if mesh.cp.size > 1 and alone:
        raise ValueError(
            f"{alone} may mix tokens and knows no cp, so it would see only its own tokens on each of the "
            f"{mesh.cp.size} ranks of cp: use mpcore.ParallelAttention(.., context='ring', cp=mesh.cp), for a model "
            f"of transformers parallelize(model, cp=mesh.cp), or build the mesh with cp 1. If it mixes no tokens, or "
            f"exchanges them over cp itself, say so: module.cp = mesh.cp"
        )
    if first["follows"] and "moves" not in used:
        raise ValueError(
            f"{first['follows']} has sequence_parallel=True, and no layer shards the sequence over the {mesh.tp.size} "
            f"ranks of tp: build the embedding and the linear layers with sequence_parallel=True, or no layer"
        )


def _check_positions(cp: Axis, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name, place = ("tokens", 2) if isinstance(module, Dropout) else ("positions", 1)
    given = args[place] if len(args) > place else kwargs.get(name)
    if isinstance(module, PositionEmbedding) and given is not None and can_read(given):  # a rank must not raise alone
        low, high = all_reduce(torch.stack([-given.min(), given.max()]).to(module.weight.device), cp, "max").tolist()
        if low > 0 or high >= module.num_positions:
            raise input_error(f"a position of cp is {-low if low > 0 else high}: give 0 to {module.num_positions - 1}")
    if given is None and (isinstance(module, PositionEmbedding) or (module.training and module.p)):
        raise input_error(
            f"{name} is missing, and the ranks of cp have tokens of different positions: pass "
            f"{name}=mpcore.sequence_index(T, mesh.cp, context), or torch.arange(T) if x has all tokens"
        )


def _holds(module: nn.Module, axis: Axis) -> bool:
    held = vars(module).values()
    return any((isinstance(x, Axis) and x.key == axis.key) or (isinstance(x, Mesh) and axis in vars(x).values())
               for x in held)  # fmt: skip


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else f"the model, a {type(module).__name__},"
