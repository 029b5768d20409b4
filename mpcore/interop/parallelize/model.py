"""Make an existing model tensor parallel in place, by a plan of name patterns.

    plan = {"embed": "vocab", "layers.*.fc1": "colwise", "layers.*.fc2": "rowwise", "head": "colwise_gather_output"}
    model = parallelize(model, plan, tp=mesh.tp)
    model = parallelize(llama, tp=mesh.tp)  # by the plan that a Hugging Face model carries

The parameters keep their names and logical shapes: `full_state_dict` of the result is the state dict of the original.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3, for the cuts.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mpcore._torch.distributed import ranks_of_running_ddp
from mpcore._torch.fake import is_fake
from mpcore._torch.pytree import leaves
from mpcore._torch.simulated import simulated_rank
from mpcore.interop.parallelize import checks
from mpcore.interop.parallelize.generation import guard_generate
from mpcore.interop.parallelize.plan import BASE_PLANS, Plan, Style, Target, is_own, resolve
from mpcore.interop.parallelize.prove import CannotCheckError, Prover, shapes_of
from mpcore.interop.parallelize.swap import Swap, cut_model, sharded_parameters, swaps_of
from mpcore.interop.parallelize.twin import Arguments, as_arguments
from mpcore.mesh.agreement import check_same, gather_objects
from mpcore.mesh.axis import Axis, check_axis

GPT2_PLAN: Plan = {f"transformer.{pattern}": style for pattern, style in BASE_PLANS["gpt2"].items()} | {
    "lm_head": "colwise_gather_output"
}
"""The plan of Hugging Face's `GPT2LMHeadModel`. With "lm_head": "colwise" the logits stay sharded."""


FLOOR = 0.5  # of the parameters' bytes: a plan that shards less leaves most of the model on every rank


def parallelize(
    module: nn.Module,
    plan: Plan | str | None = "auto",
    tp: Axis = Axis(name="tp"),
    *,
    check: bool = True,
    example: Any = None,
    skip: tuple[str, ...] = (),
    strict: bool = False,
) -> nn.Module:
    """Make an existing model tensor parallel: swap its linear layers and embeddings in place, with their weights.

    Every rank holds the whole model on entry, with the same weights, and keeps its shard. Create the optimizer
    afterwards: sharding replaces parameters. After each backward call `mpcore.reduce_gradients`. A model with dropout
    needs the same random seed on all ranks of tp, and sizes that tp divides.

    Before any weight is sharded, the plan is checked: rank 0 of tp runs a small copy of the model (on its CPU, in
    float64, with random weights and fewer layers) once unsharded and once sharded. Outputs and gradients must agree to
    rounding.

    Args:
        module: the model. `nn.Linear`, `nn.Embedding` and transformers' `Conv1D` can be swapped.
        plan: a style for each pattern of module or parameter names. A style is a string, such as "colwise", or an
            object, such as `Colwise(...)`; the page docs/parallelize.md lists both. `*` matches within one component
            ("model.layers.*.self_attn.q_proj"), `**` across components. The pattern with fewer stars wins. "auto" or
            None: the plan that a Hugging Face model carries.
        tp: the tensor-parallel axis, `mesh.tp`. Call `parallelize` on each of its ranks. Size 1 shards nothing.
        check: check the plan as above. False: trust it.
        example: arguments of a forward for the check: a tensor, a tuple of arguments, or a dict of them by name. None:
            guess them from the model's forward; if that fails, the first forward checks the plan on its arguments.
        skip: patterns of modules that stay replicated, though the plan names them.
        strict: raise instead of warning, if less than half of the parameters' bytes is sharded or the plan can't be
            checked.

    Returns:
        The model itself. If the model is one layer, which the pattern "" names, the new layer.

    Raises:
        ValueError: on every rank of tp and before anything is changed, if a pattern matches nothing, a style is unknown
            or unsupported or doesn't fit its module, sizes don't fit tp, a module stores a number of heads that the
            plan shards and no `LocalSizes` divides, the ranks hold different models, or the sharded copy differs from
            the unsharded one: the message names the first module that differs. If the first forward checks the plan,
            it raises then.

    Note:
        - dtype, device, requires_grad and training mode stay; tied weights stay tied. Where the plan names one end of
          a tied weight, the other end is sharded too, and its outputs are gathered on every rank.
        - On an axis of size 1 the parameters stay the same objects.
        - A last layer that is "colwise" makes the model return this rank's shard of the logits: compute the loss with
          `mpcore.vocab_parallel_cross_entropy`. Write "colwise_gather_output" for all logits.
        - Don't wrap it in `DistributedDataParallel` over ranks of tp, as `Trainer` and `accelerate` do: it gives all of
          them rank 0's shards. The forward then raises. Over ranks of dp alone it is right.
        - Call transformers' `generate` on every rank of tp. It raises if ranks could choose different tokens.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> tp = mpcore.Axis(size=2, rank=0, name="tp")
        >>> mpcore.parallelize(model, {"0": "colwise", "2": "colwise"}, tp)  # wrong: "2" gets a shard of its input
        Traceback (most recent call last):
        ValueError: 2 fails on 2 ranks: the last dimension of x (2, 7, 4) is 4, but in_features is 8...
        >>> mpcore.parallelize(model, {"0": "colwise", "2": "rowwise"}, tp)[0].weight.shape
        torch.Size([4, 4])
    """
    check_axis(tp)
    problem, swaps, styles = None, {}, []
    try:
        if tp.size > 1:
            _check_owner(module)
        styles = _without(module, resolve(module, plan), skip)
        swaps = swaps_of(module, styles, tp)
        checks.check_plan(module, styles, tp, own=is_own(plan))
        if tp.size > 1:
            _check_share(module, swaps, styles, tp, strict)
    except ValueError as error:
        problem = error
    if tp.size > 1:
        check_same("model and plan given to parallelize", {"error": problem and str(problem)}, tp)
    if problem is not None:
        raise problem
    if tp.size > 1:
        check_same("model and plan given to parallelize", checks.fingerprint(module, plan), tp)
    later = _try_plan(module, styles, tp, example, strict) if check and tp.size > 1 else None
    model = cut_model(module, styles, tp, swaps)
    if later is not None:
        later.watch(model)
    if tp.size > 1:
        guard_generate(model, tp)
        model.register_forward_pre_hook(partial(_refuse_ddp, tp))
    return model


_OWNERS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # the simulated rank that sharded a model


def _check_owner(module: nn.Module) -> None:
    rank = simulated_rank()
    if rank is not None and _OWNERS.setdefault(module, rank) != rank:
        raise ValueError(
            f"simulated ranks {_OWNERS[module]} and {rank} shard one {type(module).__name__}: build the model inside "
            f"the function that `simulate` calls, so that each rank has its own"
        )


def _refuse_ddp(tp: Axis, *_: Any) -> None:
    """Raise inside of a `DistributedDataParallel` that copied one rank's shards to others of tp: a hook of forwards."""
    if torch.compiler.is_compiling() or tp.group is None:
        return
    ranks = ranks_of_running_ddp()
    if ranks and len({*ranks} & {*torch.distributed.get_process_group_ranks(tp.group)}) > 1:
        raise ValueError(
            f"DistributedDataParallel over ranks {ranks} has given all ranks of tp {tp.size} the shards of rank "
            f"{ranks[0]}: parallelize a new model, and give it to mpcore.prepare, or wrap it with "
            f"process_group=mesh.dp.group. Trainer and accelerate wrap it over all ranks"
        )


def _without(model: nn.Module, styles: list[Target], skip: tuple[str, ...]) -> list[Target]:
    """Return the targets of the plan, without the modules that `skip` names."""
    left_out = {id(module) for _, module, _ in resolve(model, dict.fromkeys(skip, "replicate"))} if skip else set()
    return [target for target in styles if id(target[1]) not in left_out]


def _check_share(model: nn.Module, swaps: dict[int, Swap], styles: list[Target], tp: Axis, strict: bool) -> None:
    """Warn of, or refuse, a plan that leaves most of the model on every rank."""
    nbytes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    cut = sharded_parameters(swaps, styles, tp)
    whole, total = sum(size for key, size in nbytes.items() if key not in cut), sum(nbytes.values())
    if total and whole > (1 - FLOOR) * total:
        largest = max((p.numel() * p.element_size(), name) for name, p in model.named_parameters() if id(p) not in cut)
        said = (
            f"the plan leaves {whole / total:.0%} of the model's {total} bytes whole on each of {tp.size} ranks, most "
            f"of all {largest[1]} ({largest[0]} bytes): name its module, or see mpcore.parallelize_summary(model)"
        )
        if strict:
            raise ValueError(said)
        if tp.rank == 0:
            warnings.warn(said, stacklevel=3)


class _Trial:
    """A plan to be tried, at once or with the arguments of the first forward."""

    def __init__(self, shapes: nn.Module, styles: list[Target], tp: Axis) -> None:
        self.shapes, self.tp, self.done = shapes, tp, False
        self.styles: dict[str, Style] = {name: style for name, _, style in styles}

    def run(self, example: Arguments | None) -> str | None:
        """Try the plan on rank 0, and raise its verdict on every rank. Returns why it can't be tried."""
        wrong = unknown = None
        if self.tp.rank == 0 or self.tp.group is None:
            try:
                wrong = Prover(self.shapes, example).verdict(self.styles, self.tp.size, cut_model)
            except CannotCheckError as error:
                unknown = str(error)
            except ValueError as error:
                wrong = str(error)
            except Exception as error:  # the other ranks wait for a verdict
                unknown = f"{type(error).__name__}: {error}"
        wrong, unknown = gather_objects((wrong, unknown), self.tp.group)[0]
        if wrong is not None:
            raise ValueError(wrong)
        return unknown

    def watch(self, model: nn.Module) -> None:
        """Have the first forward try the plan, on its own arguments."""

        def first(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if self.done or torch.compiler.is_compiling() or any(x.is_meta or is_fake(x) for x in tensors):
                return
            self.done = True
            handle.remove()
            unknown = self.run((args, kwargs))
            if unknown is not None:
                _cannot_try(unknown)

        handle = model.register_forward_pre_hook(first, with_kwargs=True)


def _cannot_try(why: str, strict: bool = False) -> None:
    said = (
        f"parallelize can't try the plan on this model: {why}. Give arguments of a forward as example=.., or compare a "
        f"small model of the family yourself and say check=False"
    )
    if strict:
        raise ValueError(said)
    warnings.warn(said, stacklevel=4)


def _try_plan(model: nn.Module, styles: list[Target], tp: Axis, example: Any, strict: bool) -> _Trial | None:
    """Try the plan now. Returns what the first forward has to try, where no arguments are known yet."""
    try:
        trial = _Trial(shapes_of(model), styles, tp)
    except CannotCheckError as error:
        _cannot_try(str(error), strict)
        return None
    unknown = trial.run(None if example is None else as_arguments(example))
    if unknown is None:
        return None
    if strict or example is not None:
        _cannot_try(unknown, strict)
        return None
    return trial
