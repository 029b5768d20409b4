"""Test a sharded sequence before it is used, on a small random copy of the model, as `prove.py` tests plans."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpcore import collectives
from mpcore._torch.values import real_tensors
from mpcore.interop.parallelize.context import TENSORS, WAY_OUT, ContextMask, serve_context
from mpcore.interop.parallelize.model_copy import ModelCopy, as_arguments
from mpcore.interop.parallelize.plan import Style, on_axes
from mpcore.interop.parallelize.prove import (
    CannotCheckError,
    Cut,
    PlanTester,
    Run,
    compare,
    plain_run,
    run,
    run_ranks,
    shapes_of,
    summed,
)  # fmt: skip
from mpcore.layers.attention import shard_sequence
from mpcore.layers.attention.sequence import order_of_runs, sequence_runs
from mpcore.mesh.agreement import gather_objects
from mpcore.mesh.axis import Axis

MASK = ContextMask.__name__
LOCAL = 13  # tokens of a rank in the test: seldom another size of a model


def check_context(model: nn.Module, axis: Axis, kind: str, example: Any, required: bool) -> bool:
    """Test on the CPU of the axis's rank 0 whether cp serves a model. Return whether documents stay apart.

    If cp can't serve the model, and must (`required`), every rank of the axis raises ValueError.
    """
    wrong, documents = None, True
    try:
        if axis.rank == 0:
            prover = PlanTester(shapes_of(model), None if example is None else as_arguments(example))
            wrong = prove_context(prover, kind)
            documents = wrong is None and prove_context(prover, kind, documents=True) is None
    except CannotCheckError as error:
        wrong = (
            f"parallelize can't test cp {axis.size} on this model: {error}. Give arguments of a forward as example=.., "
            f"or compare a small model of the family yourself and say check=False"
        )
    except Exception as error:  # catch all: the other ranks wait for the result
        wrong = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    wrong, documents = gather_objects((wrong, documents), axis.group)[0]
    if wrong is not None and required:
        raise ValueError(wrong)
    return wrong is None and documents


def prove_context(prover: PlanTester, kind: str, size: int = 2, documents: bool = False) -> str | None:
    """Compare a small copy of a model with the same copy on cp. Return what is wrong, and in which module, or None."""
    kind = "zigzag" if kind == "two-level" else kind  # they have the same order
    length = size * LOCAL + 1
    twin, given = tokens_of_example(prover, length)
    if documents:
        given["position_ids"] = torch.arange(length).remainder(length // 2)[None]

    def rank_run(axis: Axis, found: Run) -> None:
        part = _without_cache(twin)
        serve_context(part, axis, kind)
        with LocalPositions(collectives.shard_sizes(length, size)[axis.rank]):
            run(part, ((), dict(shard_sequence(given, axis, kind, dim=1))), found=found)

    joined = partial(_joined, length=length, cp=Axis(size, name="cp"), kind=kind)
    wrong = _compare(prover, twin, given, size, rank_run, joined)
    mixes = f". Where a module mixes tokens itself, {WAY_OUT}"
    return wrong and wrong.replace("on 1 ranks", f"on {size} ranks of cp") + mixes


def prove_sequence(prover: PlanTester, styles: dict[str, Style], size: int, cut: Cut) -> str | None:
    """Compare a small random copy of a model with its sharded copy under sequence parallelism, as `prove_context`."""
    length = size * LOCAL
    twin, given = tokens_of_example(prover, length)
    targets = [(n, m, styles[full]) for n, m in twin.model.named_modules() if (full := twin.names.get(n, n)) in styles]
    targets = on_axes(targets, Axis(role="ep"))  # `PlanTester.verdict` tests experts on ep

    def rank_run(axis: Axis, found: Run) -> None:
        part = _without_cache(twin)
        mine = [(name, part.get_submodule(name), style) for name, _, style in targets]
        part = cut(part, mine, axis)
        serve_context(part, Axis(name="cp"), "ring", tp=axis)
        with LocalPositions(LOCAL):
            run(part, ((), dict(given)), found=found)

    def joined(whole: Run, runs: list[Run]) -> list[Run]:
        calls, error = join_calls(runs, length, Axis(size, name="tp"), "ring"), None
        for x, want in zip(runs[0].outputs, whole.outputs, strict=False):
            if x.shape[1:2] != want.shape[1:2]:
                error = ValueError(f"it returns {tuple(x.shape)} in place of {tuple(want.shape)}")
        return [replace(each, calls=calls, error=error, where="") for each in runs]

    wrong = _compare(prover, twin, given, size, rank_run, joined)
    return wrong and (
        f"with 'sequence_parallel' {wrong}. A module that mixes tokens must own a layer that the plan shards, or leave "
        f"'sequence_parallel' out"
    )


def _without_cache(twin: ModelCopy) -> Any:
    part: Any = copy.deepcopy(twin.model)
    if (config := getattr(part, "config", None)) is not None:
        config.use_cache = False
    return part


def _compare(
    prover: PlanTester, twin: ModelCopy, given: dict[str, Tensor], size: int,
    rank_run: Callable[[Axis, Run], None], joined: Callable[[Run, list[Run]], list[Run]],
) -> str | None:  # fmt: skip
    """Run the unsharded copy and the ranks. Return how they differ, after `joined` has made one sequence of theirs."""
    runs = [Run() for _ in range(size)]
    with real_tensors(), torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole = plain_run(twin, ((), given | {"use_cache": False}))
        except CannotCheckError as error:
            raise CannotCheckError(f"its forward fails with {', '.join(given)} alone: {error}") from error
        run_ranks(lambda mesh: rank_run(mesh.tp, runs[mesh.tp.rank]), runs, tp=size)
        runs = [replace(each, error=_reason(each.error)) for each in runs]
        if not any(each.error for each in runs):
            runs = joined(whole, runs)
        return compare(twin, whole, runs, [], prover.tolerance)


def _reason(error: Exception | None) -> Exception | None:
    """Return the error of a forward on a part of the tokens, with the reason before what torch or Python says."""
    if error is None or isinstance(error, ValueError):
        return error
    why = "it computes with all tokens of a row, and a rank has a part of them"
    why = "it reads the attention mask itself, and not only transformers' attention" if MASK in str(error) else why
    ids = "'NoneType'" in str(error) or "inputs_embeds" in str(error)
    why = "it reads input_ids, in whose place 'sequence_parallel' gives inputs_embeds" if ids else why
    return ValueError(f"{why} ({type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]})")


class LocalPositions(TorchFunctionMode):
    """Refuse models that number the tokens of a rank themselves, by `torch.arange` of their number.

    Such positions may matter beyond the length of the test alone, as in Llama 4's scale of queries from position 8192.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        frame = inspect.currentframe()
        caller = "" if frame is None or frame.f_back is None else frame.f_back.f_globals.get("__name__", "")
        if func is torch.arange and made.numel() == self.tokens and not caller.startswith("mpcore."):
            raise ValueError(f"it numbers the {self.tokens} tokens of a rank itself, by torch.arange")
        return made


def tokens_of_example(prover: PlanTester, length: int) -> tuple[ModelCopy, dict[str, Tensor]]:
    """Return the copy of a model, and `length` tokens among the arguments that its forward accepts, by name."""
    twin, (args, kwargs), _ = prover.whole
    names = list(inspect.signature(type(twin.model).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: x for name, x in given.items() if name in TENSORS and isinstance(x, Tensor)}
    if not given.keys() & {"input_ids", "inputs_embeds"}:
        raise CannotCheckError("no input_ids of its forward are known")
    given.pop("position_ids", None)
    return twin, {name: x[:, torch.arange(length) % x.shape[1]] for name, x in given.items()}


def _joined(whole: Run, runs: list[Run], length: int, cp: Axis, kind: str) -> list[Run]:
    """Return one run: the tensors of all ranks joined to those of the full sequence, the gradients summed."""

    def of_all(parts: list[Tensor]) -> Tensor:
        return join_tokens(parts, length, cp, kind)

    gradients = summed([{name: each.gradients.get(name) for name in whole.gradients} for each in runs])
    for name in whole.gradients.keys() - gradients.keys():  # of inputs
        parts = [x for each in runs if (x := each.gradients.get(name)) is not None]
        gradients[name] = of_all(parts) if len(parts) == cp.size else whole.gradients[name]
    outputs = [of_all(list(parts)) for parts in zip(*(each.outputs for each in runs), strict=False)]
    calls = join_calls(runs, length, cp, kind)
    return [replace(runs[0], outputs=outputs, calls=calls, gradients=gradients, shardings={})]


def join_tokens(parts: list[Tensor], length: int, axis: Axis, kind: str) -> Tensor:
    """Return the tensor [B, T, ..] of the full sequence, or the first rank's tensor if it is no shard of one."""
    sizes = collectives.shard_sizes(length, axis.size)
    if any(x.dim() < 2 or x.shape[1] != n for x, n in zip(parts, sizes, strict=True)):
        return parts[0]
    return torch.cat(parts, 1).index_select(1, order_of_runs(sequence_runs(length, axis, kind), None).argsort())


def join_calls(runs: list[Run], length: int, axis: Axis, kind: str) -> list[tuple[str, list[Tensor]]]:
    """Return `Run.calls` of the full sequence; empty if the ranks called other modules."""
    if any([name for name, _ in each.calls] != [name for name, _ in runs[0].calls] for each in runs):
        return []
    joined = []
    for same in zip(*(each.calls for each in runs), strict=True):
        outputs = zip(*(x for _, x in same), strict=False)
        joined.append((same[0][0], [join_tokens(list(parts), length, axis, kind) for parts in outputs]))
    return joined
