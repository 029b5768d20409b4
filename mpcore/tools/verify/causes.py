"""Name the likely cause of the first difference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mpcore.tools.verify.layout import Layout
from mpcore.tools.verify.parts import (
    close,
    is_affine_in_rows,
    near,
    one_each,
    parts,
    ratio,
    same,
    same_columns,
    same_shape,
)
from mpcore.tools.verify.run import RankRecord
from mpcore.training.wrong_width import NORMALIZE


def why_parameter(layout: Layout, stage: str, name: str, held: Sequence[RankRecord], got: Tensor, want: Tensor) -> str:
    if stage == "first values":
        if any(name in seen.sharded for seen in held):
            return (
                "its first values depend on the layout: initialization of your own, such as nn.init, drew this rank's "
                "shard, which also changes the random numbers of all parameters that are drawn later. Pass init= to "
                "the layer: mpcore.layers draw the logical tensor, and keep the shard"
            )
        return (
            "its first values depend on the layout, and those of the sharded parameters don't: code of yours drew "
            "other random numbers before it. Build the model on the meta device: mp.materialize draws each parameter "
            "from the seed and its name"
        )
    owner, _, leaf = name.rpartition(".")
    if stage == "update":
        return "its gradient was right: the optimizer steps on something else, or ranks hold unequal replicas"
    for axis, size in axes(layout):
        terms = one_each(held, [seen.gradients.get(name) for seen in held], axis)
        all_terms = len(terms) > 1 and (axis == "pp" or len(terms) == size)  # of pp only the stages that hold it
        if all_terms and not same(terms) and near(torch.stack(terms).sum(0), want):
            if axis == "pp":
                return (
                    "each pipeline stage holds one term of its gradient, and nobody sums them: declare the tied "
                    f"parameter with mp.add_partial(module, {leaf!r}, mesh.ends), under one name on both stages; "
                    "where other stages hold it, over an Axis of their ranks' own group"
                )
            if axis == "tp" and owner in held[0].norms:
                return (
                    "each rank of tp holds one term of its gradient, and nobody sums them: if its input is a shard of "
                    f"the sequence, make it {held[0].norms[owner]}"
                )
            return (
                f"each rank of {axis} holds one term of its gradient, and nobody sums them: the parameter is "
                f"replicated but sees only this rank's part of the work: declare it in its module with "
                f"mp.add_partial(module, {leaf!r}, mesh.{axis})"
            )
    factor = ratio(got, want)
    local = [seen.local.get(name) for seen in held]
    for axis, size in axes(layout):
        if size > 1 and close(factor, size):
            terms = [t for t in local if t is not None]
            whole = (
                "it is declared pending though each rank has all of it"
                if terms and near(terms[0], want)
                else "what feeds it sums a gradient that every rank has whole (all_gather where gather is right?)"
            )
            return f"the gradient is {axis} = {size} times too large: {whole}"
        if size > 1 and close(factor, 1 / size):
            return (
                f"the gradient is {axis} = {size} times too small: it is averaged, or one rank's term of a sum; "
                f"losses are summed here, and divided once"
            )
    also = ""
    if layout.sequence_parallel:
        also = (
            "; or a whole tensor that depends on it, such as a modulation, meets this rank's tokens without "
            "collectives.copy(x, mesh.tp), which sums its gradient"
        )
    return (
        "its values differ in no simple way: look at the module that it belongs to, and at what reads its output" + also
    )


def why_module(
    truth: RankRecord, layout: Layout, name: str, call: int, held: Sequence[RankRecord], want: Tensor
) -> str:
    got = held[0].outputs[name, call]
    part = next(iter(parts(layout, held[0], want, got.shape, held[0].features.get(name, ()))))
    strange = int((~got.isfinite()).sum())
    if strange:
        return (
            f"{strange} of its {got.numel()} elements are NaN or infinite, and none of the unsharded model's: look for "
            f"a division by zero, a logarithm of zero or an overflow under this layout"
        )
    off = got.double() - part
    bias = truth.initial.get(f"{name}.bias")
    fits = bias is not None and bias.shape == off.shape[-1:] and layout.tp > 1
    again = (layout.tp - 1) * bias.expand_as(off) if bias is not None and fits else torch.zeros_like(off)
    if fits and near(off, again):
        return f"the bias is added {layout.tp} times, once on each rank of tp: add it once, after the sum"
    for axis, size in (("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp)):
        terms = one_each(held, [seen.outputs[name, call] for seen in held], axis)
        unequal = axis == "tp" and len(terms) == size > 1 and not same(terms) and same_shape([*terms, part])
        total = torch.stack(terms).double().sum(0) if unequal else part
        if unequal and (near(total, part) or near(total - again, part)):
            return "each rank of tp returns one term of a sum, and nothing adds them: use mp.RowParallelLinear here"
        factor = ratio(got, part)
        if size > 1 and close(factor, size):
            return f"it is {axis} = {size} times too large: what every rank holds whole is summed over {axis}"
        if size > 1 and close(factor, 1 / size):
            return f"it is {axis} = {size} times too small: a sum over {axis} is averaged"
    zero, zero_here = part == 0, got == 0
    both = ~(zero | zero_here)
    if bool((zero != zero_here).any()) and near(got[both], part[both]):
        shards = "; for a shard of the sequence, pass it tp= and sequence_parallel=True" * layout.sequence_parallel
        if got.shape[-1] < want.shape[-1]:
            shards = f"; for a shard of the features, pass it tp= and sharded_features={want.shape[-1]}"
        return (
            "other elements are zero: its dropout mask depends on the layout (mpcore.Dropout with samples draws "
            f"the same one everywhere{shards})"
        )
    if (name, call) in truth.random:
        return (
            "in it, or between the module before and it, the forward draws random numbers from torch's generator, as "
            "nn.Dropout and dropout_p of scaled_dot_product_attention do, and other layouts draw others: pass "
            "dropout_p=0, and use mp.Dropout with samples"
        )
    if got.dim() > 1 and same_columns(got, part):
        return (
            "its features stand in another order: q, k and v, or gate and up, are sharded as one matrix (use "
            "mp.QKVParallelLinear, mp.GateUpParallelLinear)"
        )
    if got.dim() and got.shape[-1] < want.shape[-1] and is_affine_in_rows(got, part):
        return (
            f"each row is off by a factor and a shift of its own: a norm or a softmax over {want.shape[-1]} features "
            f"sees only the {got.shape[-1]} of this rank. {NORMALIZE}"
        )
    forgotten = (
        "it was built without sequence_parallel=True, and other layers with it: pass it to every layer. Otherwise "
        if name in held[0].forgotten
        else ""
    )
    return forgotten + packed_before(truth, layout, name, call, held[0]) + faults_of_module(layout)


def packed_before(truth: RankRecord, layout: Layout, name: str, call: int, seen: RankRecord) -> str:
    """Return a hint if a column-parallel layer may pack several projections.

    It comes before a row-parallel layer that reads fewer features, or right before a module without a weight, such as
    RoPE.
    """
    before = [*itertools.takewhile(lambda key: key != (name, call), truth.outputs)]
    layers = {
        key: truth.initial[f"{key[0]}.weight"] for key in [*before, (name, call)] if f"{key[0]}.weight" in truth.initial
    }
    linear = [key for key, weight in layers.items() if weight.dim() == 2]
    if layout.tp == 1 or name in seen.features or not linear:
        return ""
    one = "make it an mp.QKVParallelLinear or an mp.GateUpParallelLinear. Otherwise "
    if (name, call) not in layers and len(seen.features.get(linear[-1][0], ())) == 1:
        return f"if {linear[-1][0]} before it packs q, k and v, or gate and up, it shards them as one matrix: {one}"
    if linear[-1] != (name, call) or len(linear) < 2:
        return ""
    (other, _), (width, _), reads = linear[-2], layers[linear[-2]].shape, layers[name, call].shape[1]
    if len(seen.features.get(other, ())) != 1 or width <= reads:
        return ""
    return (
        f"{other} returns {width} features, and this one reads {reads}. If {other} packs q, k and v, or gate and up, "
        f"it shards them as one matrix: {one}"
    )


def undeclared(name: str, shape: tuple[int, ...], want: tuple[int, ...]) -> str:
    leaf, pairs = name.rpartition(".")[2], zip(shape, want, strict=False)
    dim = next((i for i, (here, whole) in enumerate(pairs) if here != whole), 0)
    cut = f"mpcore.sharding.cut({want[dim] if want else 1}, tp, {dim})"
    return (
        f"its declared shape is {shape}, and the unsharded model's {want}. If each rank holds a shard, derive the "
        f"module from mpcore.layers.module.ParallelModule, and make the parameter by "
        f'self.declare("{leaf}", {want}, init, shard={cut})'
    )


def axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((axis, getattr(layout, axis)) for axis in ("tp", "dp", "cp", "pp"))


def faults_of_module(layout: Layout) -> str:
    """Return what may be wrong where a module's output is the first that differs, and nothing more is known."""
    sharded = (
        "its weights are sharded otherwise than its forward computes, an attention splits this rank's features into "
        "the model's H heads (a rank has H/tp: use x.unflatten(-1, (-1, head_dim))), its input lacks a sum over tp "
        "(mp.RowParallelLinear sums), it uses another rank's shard, a norm or a softmax before it used only this "
        "rank's features"
    )
    mixed = "it mixes the samples or the tokens of a batch, of which each rank holds a part"
    positions = (
        "it counts positions from 0 on each rank of cp (pass mp.sequence_index(T, mesh.cp, context) to "
        "PositionEmbedding, RotaryEmbedding and Dropout), "
    )
    tokens = (
        "it counts positions from 0 on each rank, which sees T/tp tokens (learned positions: "
        "mp.PositionEmbedding(.., tp=mesh.tp, sequence_parallel=True)), "
    )
    counts = f"{positions if layout.cp > 1 else ''}{tokens if layout.sequence_parallel else ''}"
    return (
        f"all modules before it are right, so the fault is in this module or just before it: "
        f"{counts}{sharded if layout.tp > 1 else mixed}, or the code between the module before and this one is wrong"
    )
