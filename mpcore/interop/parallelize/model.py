"""Make an existing model tensor parallel in place, by a plan of name patterns.

    plan = {"embed": "vocab", "layers.*.fc1": "colwise", "layers.*.fc2": "rowwise", "head": "colwise_gather_output"}
    model = parallelize(model, plan, tp=mesh.tp)
    model = parallelize(llama, tp=mesh.tp)  # by the plan that a Hugging Face model carries

The parameters keep their names and logical shapes: `full_state_dict` of the result is the state dict of the original.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3, for how layers are sharded.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from mpcore._torch.distributed import ranks_are_threads
from mpcore._torch.fake import is_fake
from mpcore._torch.pytree import leaves
from mpcore.interop.parallelize import checks
from mpcore.interop.parallelize.balance import BalanceLoss
from mpcore.interop.parallelize.context import check_decoder, serve_context
from mpcore.interop.parallelize.generation import guard_generate, guard_save
from mpcore.interop.parallelize.model_copy import Arguments, as_arguments
from mpcore.interop.parallelize.plan import (
    Experts,
    Plan,
    SequenceParallel,
    Style,
    Target,
    is_own,
    on_axes,
    resolve,
)  # fmt: skip
from mpcore.interop.parallelize.prove import CannotCheckError, PlanTester, shapes_of
from mpcore.interop.parallelize.prove_sequence import check_context, prove_sequence
from mpcore.interop.parallelize.sequence import shards_tokens
from mpcore.interop.parallelize.swap import Swap, cut_model, sharded_parameters, swaps_of
from mpcore.layers.attention.sequence import check_kind
from mpcore.layers.module import ParallelModule, refuse_wrapper, running_modules
from mpcore.mesh.agreement import check_same, gather_objects
from mpcore.mesh.axis import Axis, check_axis

FLOOR = 0.5  # warn if a plan shards less than this part of the parameters' bytes


def parallelize(
    module: nn.Module, plan: Plan | str | None = "auto", tp: Axis = Axis(name="tp"), *, ep: Axis = Axis(role="ep"),
    etp: Axis | None = None, data: Axis | None = None, cp: Axis = Axis(name="cp"), context: str = "zigzag",
    check: bool = True, example: Any = None, skip: tuple[str, ...] = (), strict: bool = False,
) -> nn.Module:  # fmt: skip
    """Make an existing model tensor and expert parallel: replace its layers by sharded ones, in place.

    Every rank holds the full model with the same weights, and keeps its shard. Create the optimizer afterwards, because
    parameters are replaced. After each backward call `mpcore.gradients.reduce_gradients`. With dropout, all ranks of tp
    need the same random seed. tp must divide the sharded sizes.

    First the plan is tested: rank 0 of tp runs a small copy of the model (on its CPU, in float64, with random weights
    and fewer layers) once unsharded and once sharded. Outputs and gradients must agree to rounding.

    Args:
        module: the model. `nn.Linear`, `nn.Embedding` and transformers' `Conv1D` can be sharded.
        plan: a style for each pattern of module or parameter names. A style is a string, such as "colwise", or an
            object, such as `Colwise(...)`; the page docs/parallelize.md lists both. `*` matches within one component
            ("model.layers.*.self_attn.q_proj"), `**` across components. The pattern with fewer stars wins. "auto" or
            None: the plan that a Hugging Face model carries.
        tp: the tensor-parallel axis, `mesh.tp`. Call `parallelize` on each of its ranks. Size 1 shards nothing.
        ep: the axis over which the experts of `Experts` modules are sharded, `mesh.ep`. Tokens travel to their experts
            by an all-to-all, so all ranks of ep must run the same forwards. With tp 1 the plan that a model carries
            then names nothing but experts.
        etp: the axis over which each expert is sharded, `mesh.etp`. None, or with ep 1 an axis above 1: tp.
        data: the axis whose ranks have different tokens, `mesh.data`, for a model that returns a balance loss
            (`output_router_logits=True` in its config, on all ranks of data): `aux_loss` is then this rank's share of
            the balance loss of all tokens, a sum over data. All ranks of data must call `parallelize`, and run the same
            number of forwards, except within `generate`. None: with ep, a model that returns a balance loss raises.
        cp: the context-parallel axis, `mesh.cp`, for a model of transformers: its attention then exchanges keys over cp
            (docs/parallelize.md). Call `parallelize` on each of its ranks.
        context: the kind of context parallelism: "zigzag", "ring", "alltoall", "allgather" or "two-level". Shard each
            batch with `shard_sequence(batch, mesh.cp, context)`.
        check: whether to test the plan.
        example: arguments of a forward for the test: a tensor, a tuple of arguments, or a dict of arguments by name.
            None: guess them from the model's forward; if that fails, the first forward tests the plan with its
            arguments.
        skip: patterns of modules that stay replicated although the plan names them.
        strict: raise instead of warning, if less than half of the parameters' bytes is sharded or the plan can't be
            tested.

    Returns:
        The model itself. If the model is one layer, which the pattern "" names, the new layer.

    Raises:
        ValueError: on every rank of tp, cp and ep and before anything changes, if a pattern matches nothing, the plan
            shards nothing, a style is unknown or unsupported or doesn't fit its module, tp doesn't divide a size, ep
            doesn't divide the number of experts, the plan shards heads that a module counts in an attribute and no
            `LocalSizes` divides it, the ranks hold different models, the attention can't exchange keys over cp, or the
            sharded copy differs from the unsharded one. The message names the first module that differs. If the first
            forward tests the plan, that forward raises.

    Note:
        - dtype, device, requires_grad and training mode stay. Tied weights stay tied: if the plan names one of two tied
          layers, the other is sharded too, and its outputs are gathered on every rank.
        - On an axis of size 1 the parameters stay the same objects. With tp and ep of size 1 a model whose own plan
          doesn't fit stays as it is.
        - If a parameter of your own meets sharded heads or features, call `mpcore.add_partial` for it before this call.
        - If the last layer is "colwise", the model returns this rank's shard of the logits: compute the loss with
          `mpcore.vocab_parallel_cross_entropy`. With "colwise_gather_output" it returns all logits.
        - Don't wrap the model in `DistributedDataParallel` or `fully_shard` over ranks of tp, as `Trainer` and
          `accelerate` do: the forward raises. Without ep, wrapping over ranks of dp is right.
        - Call transformers' `generate` on every rank of tp and ep. It raises if ranks could choose different tokens.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> tp = mpcore.Axis(size=2, rank=0, name="tp")
        >>> mpcore.parallelize(model, {"0": "colwise", "2": "colwise"}, tp)  # wrong: "2" gets a shard of its input
        Traceback (most recent call last):
        ValueError: 2 fails on 2 ranks: the last dimension of x (2, 7, 4) is 4, but in_features is 8...
        >>> mpcore.parallelize(model, {"0": "colwise", "2": "rowwise"}, tp)[0].weight.shape
        torch.Size([4, 4])
    """
    for axis in (tp, ep, cp, etp or tp, data or tp):
        check_axis(axis)
    axes = [axis for axis in (tp, ep, cp) if axis.size > 1]
    problem, swaps, styles, split = None, {}, [], False
    check_kind(context, cp)
    asked = bool(getattr(getattr(module, "config", None), "output_router_logits", False))
    try:
        if axes:
            checks.check_not_sharded_over_data(module)
            _check_owner(module)
        found = [] if tp.size == ep.size == 1 < cp.size and is_own(plan) else resolve(module, plan, tp.size, ep.size)
        styles = on_axes(_without(module, found, skip), ep, etp)
        swaps = swaps_of(module, styles, tp)
        checks.check_plan(module, styles, tp, own=is_own(plan))
        split = tp.size > 1 and shards_tokens(styles)
        if cp.size > 1 or split:
            check_decoder(module, f"cp {cp.size}" if cp.size > 1 else f"sequence parallelism over tp {tp.size}")
        if tp.size > 1:
            _check_share(module, swaps, styles, tp, strict)
        if ep.size > 1 and not any(isinstance(style, Experts) for _, _, style in styles):
            raise ValueError(
                f"the plan names no experts, so the {ep.size} ranks of ep would compute the same: write "
                f"'ep_dispatch_experts' for the module that holds them, or build the mesh with ep 1"
            )
    except ValueError as error:
        if not axes and is_own(plan) and not skip:
            swaps, styles = {}, []  # nothing is sharded, so a plan that doesn't fit is not needed
        else:
            problem = error
    others = [data] if data is not None and data.size > 1 else []
    _agree({"error": problem and str(problem), "output_router_logits": asked}, axes + others)
    if problem is not None:
        raise problem
    if axes:
        _agree(checks.fingerprint(module, plan) | {"context": context}, axes)
    documents = True
    if check and (cp.size > 1 or split):
        documents = check_context(module, cp if cp.size > 1 else tp, context, example, required=cp.size > 1)
    later = _try_plan(module, styles, tp, ep, example, strict) if check and max(tp.size, ep.size) > 1 else None
    model = cut_model(module, styles, tp, swaps)
    if later is not None:
        later.watch(model)
    if cp.size > 1 or split:
        serve_context(model, cp, context, documents, tp if split else None)
    sharding = [axis for axis in (tp, ep) if axis.size > 1]
    shares_loss = bool(others) or ep.size * (etp or tp).size > tp.size  # other tokens elsewhere
    if sharding or shares_loss:
        guard_generate(model, *sharding)
    guard_save(model)
    if sharding:
        model.register_forward_pre_hook(_RefuseWrappers())
    if shares_loss:
        BalanceLoss(model, ep, data, asked)
    return model


def _agree(value: dict[str, Any], axes: list[Axis]) -> None:
    problem = None
    for axis in axes:
        try:
            more = {} if axis is axes[0] else {"problem": str(problem)}
            check_same("model and plan given to parallelize", value | more, axis)
        except ValueError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _check_owner(module: nn.Module) -> None:
    rank = torch.distributed.get_rank() if ranks_are_threads() else None
    owner = rank if rank is None else vars(module).setdefault("sharded_by_rank", rank)
    if owner != rank:
        raise ValueError(
            f"simulated ranks {owner} and {rank} shard one {type(module).__name__}: build the model inside "
            f"the function that `simulate` calls, so that each rank has its own"
        )


class _RefuseWrappers:
    """A forward pre-hook: if other modules call the model than before, such as DDP, the layers look for wrappers."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = [id(module) for module in running_modules()]
        if calls != self.calls:
            for layer in model.modules():
                if isinstance(layer, ParallelModule):
                    layer.register_forward_pre_hook(refuse_wrapper)
        self.calls = calls


def _without(model: nn.Module, styles: list[Target], skip: tuple[str, ...]) -> list[Target]:
    left_out = {id(module) for _, module, _ in resolve(model, dict.fromkeys(skip, "replicate"))} if skip else set()
    return [target for target in styles if id(target[1]) not in left_out]


def _check_share(model: nn.Module, swaps: dict[int, Swap], styles: list[Target], tp: Axis, strict: bool) -> None:
    nbytes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    cut = sharded_parameters(swaps, styles, tp)
    whole, total = sum(size for key, size in nbytes.items() if key not in cut), sum(nbytes.values())
    if whole == total:
        raise ValueError(
            f"the plan shards no parameter, so the {tp.size} ranks of {tp.name} would compute the same: name layers to "
            f"shard, or build the mesh with tp 1"
        )
    if whole > (1 - FLOOR) * total:
        largest = max((p.numel() * p.element_size(), name) for name, p in model.named_parameters() if id(p) not in cut)
        said = (
            f"the plan leaves {whole / total:.0%} of the model's {total} bytes whole on each of {tp.size} ranks, most "
            f"of all {largest[1]} ({largest[0]} bytes): name its module, or see "
            f"mpcore.interop.parallelize.parallelize_summary(model)"
        )
        if strict:
            raise ValueError(said)
        if tp.rank == 0:
            warnings.warn(said, stacklevel=3)


class _Trial:
    """A test of a plan, run at once or with the arguments of the first forward."""

    def __init__(self, shapes: nn.Module, styles: list[Target], tp: Axis, ep: Axis = Axis(role="ep")) -> None:
        self.shapes, self.tp, self.axes, self.done = shapes, tp, (tp, ep), False
        self.styles: dict[str, Style] = {name: style for name, _, style in styles}

    def run(self, example: Arguments | None) -> str | None:
        """Test the plan on rank 0, and raise on every rank if it is wrong. Return why it can't be tested, or None."""
        wrong = unknown = None
        if self.tp.rank == 0 or self.tp.group is None:
            try:
                prover, plain = PlanTester(self.shapes, example), {n: s for n, s in self.styles.items() if n}
                split = any(isinstance(style, SequenceParallel) for style in self.styles.values())
                wrong = prover.verdict(plain if split else self.styles, self.tp.size, cut_model, self.tp)
                if split and wrong is None:
                    wrong = prove_sequence(prover, self.styles, self.tp.size, cut_model)
            except CannotCheckError as error:
                unknown = str(error)
            except ValueError as error:
                wrong = str(error)
            except Exception as error:  # catch all: the other ranks wait for the result
                unknown = f"{type(error).__name__}: {error}"
        for axis in self.axes:
            wrong, unknown = next(filter(any, gather_objects((wrong, unknown), axis.group)), (None, None))
        if wrong is not None:
            raise ValueError(wrong)
        return unknown

    def watch(self, model: nn.Module) -> None:
        """Make the first forward of `model` test the plan with its arguments."""

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


def _try_plan(model: nn.Module, styles: list[Target], tp: Axis, ep: Axis, example: Any, strict: bool) -> _Trial | None:
    """Test the plan now. If no arguments are known yet, return the test that the first forward must run."""
    try:
        trial = _Trial(shapes_of(model), styles, tp, ep)
    except CannotCheckError as error:
        _cannot_try(str(error), strict)
        return None
    unknown = trial.run(None if example is None else as_arguments(example))
    if unknown is not None and not strict and example is None:
        return trial
    if unknown is not None:
        _cannot_try(unknown, strict)
    return None
