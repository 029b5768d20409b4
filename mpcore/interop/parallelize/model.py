"""Make an existing model tensor parallel in place, by a plan of name patterns.

    plan = {"embed": "vocab", "layers.*.fc1": "colwise", "layers.*.fc2": "rowwise", "head": "colwise_gather_output"}
    model = parallelize(model, plan, tp=mesh.tp)
    model = parallelize(llama, tp=mesh.tp)  # by the plan that a Hugging Face model carries

The parameters keep their names and logical shapes: `full_state_dict` of the result is the state dict of the original.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3, for the cuts.
"""

from __future__ import annotations

from torch import nn

from mpcore.interop.parallelize import checks
from mpcore.interop.parallelize.plan import BASE_PLANS, LocalSizes, Plan, Replicate, is_own, resolve
from mpcore.interop.parallelize.swap import apply_swaps, swaps_of
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.declarations import add_partial

GPT2_PLAN: Plan = {f"transformer.{pattern}": style for pattern, style in BASE_PLANS["gpt2"].items()} | {
    "lm_head": "colwise_gather_output"
}
"""The plan of Hugging Face's `GPT2LMHeadModel`. With "lm_head": "colwise" the logits stay sharded."""


def parallelize(module: nn.Module, plan: Plan | str | None = "auto", tp: Axis = Axis(name="tp")) -> nn.Module:
    """Make an existing model tensor parallel: swap its linear layers and embeddings in place, with their weights.

    Every rank holds the whole model on entry, with the same weights, and keeps its shard. dtype, device, requires_grad,
    training mode and ties stay; the other end of a tied weight follows where the plan doesn't name it, and gives whole
    outputs. On an axis of size 1 the parameters stay the same objects; otherwise make the optimizer afterwards.
    After each backward call `mpcore.reduce_gradients`. A model with dropout needs the same random seed on all ranks of
    tp, and even shards.

    Args:
        module: the model. `nn.Linear`, `nn.Embedding` and transformers' `Conv1D` can be swapped.
        plan: styles (a name of `STYLES`, or `Colwise(...)` and the like) by pattern of module or parameter name. `*`
            matches within one component ("model.layers.*.self_attn.q_proj"), `**` across components. The pattern with
            fewer stars wins. "auto" or None: the plan that a Hugging Face model carries (`model_plan`), whose patterns
            may match nothing.
        tp: the axis.

    Returns:
        The model itself (or its replacement, where it is one layer and the plan names it by "").

    Raises:
        ValueError: on every rank of tp and before anything is changed, if a pattern matches nothing, a style is unknown
            or unsupported or doesn't fit its module, sizes don't fit tp, the plan shards heads whose number it leaves
            undivided, or the ranks hold different models.
    """
    check_axis(tp)
    problem, swaps, styles = None, {}, []
    try:
        styles = resolve(module, plan)
        swaps = swaps_of(module, styles, tp)
        checks.check_local_sizes(styles, tp)
        if tp.size > 1:
            checks.check_shared_parameters(module, styles)
            if not is_own(plan):
                checks.check_head_counts(module, styles, tp)
                checks.check_fused(styles)
    except ValueError as error:
        problem = error
    if tp.size > 1:
        check_same("model and plan given to parallelize", {"error": problem and str(problem)}, tp)
    if problem is not None:
        raise problem
    if tp.size > 1:
        check_same("model and plan given to parallelize", checks.fingerprint(module, plan), tp)
    for _, target, style in styles:
        if isinstance(style, LocalSizes):
            for attribute in style.names:  # the user named these attributes in the plan
                setattr(target, attribute, getattr(target, attribute) // tp.size)
        elif style == Replicate(partial_gradient=True):
            for leaf in dict(target.named_parameters(recurse=False)):
                add_partial(target, leaf, tp)
    return apply_swaps(module, swaps)
