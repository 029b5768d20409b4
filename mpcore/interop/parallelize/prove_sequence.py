"""Test sequence parallelism before it is used, on a small random copy of the model, as `prove.py` tests plans."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from mpcore._torch.values import real_tensors
from mpcore.interop.parallelize.context import (
    LOCAL,
    LocalPositions,
    join_calls,
    run_whole,
    serve_context,
    tokens_of_example,
)
from mpcore.interop.parallelize.plan import Style, on_axes
from mpcore.interop.parallelize.prove import Cut, PlanTester, Run, compare, run, run_ranks
from mpcore.mesh.axis import Axis


def prove_sequence(prover: PlanTester, styles: dict[str, Style], size: int, cut: Cut) -> str | None:
    """Compare a small random copy of a model with its sharded copy under sequence parallelism.

    Returns:
        What is wrong, as text that names a module. None: nothing is wrong.
    """
    length = size * LOCAL
    twin, given = tokens_of_example(prover, length)
    found = [(n, m, styles[full]) for n, m in twin.model.named_modules() if (full := twin.names.get(n, n)) in styles]
    found = on_axes(found, Axis(role="ep"))  # `PlanTester.verdict` tests experts on ep
    runs = [Run() for _ in range(size)]

    def rank_run(axis: Axis) -> None:
        part = copy.deepcopy(twin.model)
        mine = [(name, part.get_submodule(name), style) for name, _, style in found]
        part = cut(part, mine, axis)
        serve_context(part, Axis(name="cp"), "ring", tp=axis)
        with LocalPositions(LOCAL):
            run(part, ((), dict(given)), found=runs[axis.rank])

    with real_tensors(), torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        whole = run_whole(twin, given)
        run_ranks(lambda mesh: rank_run(mesh.tp), runs, tp=size)
        if not any(each.error for each in runs):
            calls = join_calls(runs, length, Axis(size, name="tp"), "ring")
            runs = [replace(each, calls=calls) for each in runs]
            for x, want in zip(runs[0].outputs, whole.outputs, strict=False):
                if x.shape[1:2] != want.shape[1:2]:
                    return f"the model returns {tuple(x.shape)} in place of {tuple(want.shape)} on a rank of tp {size}"
        wrong = compare(twin, whole, runs, [], prover.tolerance)
    if wrong is None:
        return None
    return (
        f"with 'sequence_parallel' {wrong}. A module that mixes tokens must own a layer that the plan shards, or leave "
        f"'sequence_parallel' out"
    )
