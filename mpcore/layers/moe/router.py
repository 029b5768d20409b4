"""Choose the experts of each token, and balance the experts' loads.

Everything is computed in fp32 (fp64 for fp64), and no result depends on the layout: ties go to the expert with the
lower index, jitter depends on the token's global position, capacity is counted per sequence, and every balance loss is
a sum over tokens.

Balance losses. Let p be the router's probabilities, and f_i = E / (K |S|) x (choices of expert i in a scope S). Each
token of S has the loss sum_i f_i p_i; its mean over S is the usual E sum_i f_i P_i. The loss is summed over tokens and
divided by the step's token count like the main loss (`loss_scale`), so it does not depend on tp, cp, dp, ep, pp or
padding. Counts have no gradient. The scope is one of

    "sequence"     the token's sequence. Exact for any layout and any micro-batches (as in Switch, one group per
                   sequence).
    "micro_batch"  the tokens of one micro-batch on all ranks. Other micro-batches give another loss, by definition.
    "global"       all tokens of the previous step, so that f is known at the first micro-batch. Exact for any layout
                   and any micro-batches, one step late. In the first step f is 1, which has no gradient.

Sources: Shazeer et al. 2017 (arXiv:1701.06538); Fedus et al. 2021 (arXiv:2101.03961), equations 4 to 6; z-loss: Zoph et
al. 2022 (arXiv:2202.08906), equation 5; bias: Wang et al. 2024 (arXiv:2408.15664), algorithm 1; groups and the scale of
weights: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; counts of the whole batch: Qiu et al. 2025 (arXiv:2501.11873).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpcore.collectives import all_gather, all_reduce
from mpcore.kernels.router import route
from mpcore.layers.module import Init, ParallelModule, RandomModule, constant, input_error, recomputing, uniform
from mpcore.mesh.axis import Axis, check_axis
from mpcore.random import random_words

AUX_LOSSES = ("sequence", "micro_batch", "global")
_REST = 5  # numbers of a tally after the counts: tokens, dropped choices, sums of entropy, balance loss and z-loss


class Places(NamedTuple):
    """Which row and position each token of a rank comes from.

    Attributes:
        sequence: int64 [N], the row of the batch.
        position: int64 [N], the position in the full sequence.
        real: bool [N], False for padding.
        sequences: the number of rows of the batch.
        length: the number of tokens of the full sequence, including padding.
        experts: int64 [N, K], the experts of each token; None: the router chooses them.
    """

    sequence: Tensor
    position: Tensor
    real: Tensor
    sequences: int
    length: int
    experts: Tensor | None = None


class Routing(NamedTuple):
    """The decisions of a router.

    Attributes:
        experts: int64 [N, K], the chosen experts; E if the choice is dropped or the token is padding.
        weights: [N, K], the factors on the experts' outputs.
        loss: this rank's share of the step's balance losses; None if there are none.
    """

    experts: Tensor
    weights: Tensor
    loss: Tensor | None


@dataclass(frozen=True)
class RouterOptions:
    """How a router chooses experts and balances their loads.

    Attributes:
        score: "softmax" or "sigmoid", the function of the logits.
        normalize: divide a token's weights by their sum. None: True if K > 1. With K = 1 a normalized weight would
            always be 1, and the router would get no gradient from the loss; there the weight is the score, as in the
            Switch Transformer.
        routed_scale: factor on the weights. With normalized weights the output is a mean over K experts; a scale of K
            makes it as large as that of a dense layer with their joint width, from the first step on.
        groups, top_groups: split the experts into `groups` equal groups, and choose only among experts of the best
            `top_groups` groups; None: all groups. A group's score is the sum of its ceil(K / top_groups) best experts.
            Megatron-LM sums floor(K / top_groups) experts, which differs if top_groups does not divide K.
        aux_loss: scope of the balance loss, one of `AUX_LOSSES`; None: no balance loss.
        aux_coefficient: factor of the balance loss.
        z_loss: factor of the squared log-sum-exp of the logits.
        bias_rate: the amount by which `update_routers` changes each expert's selection bias.
        bias: whether experts have a selection bias; None: True if `bias_rate` is not 0. With a rate of 0, a loaded bias
            stays unchanged.
        jitter: in training, multiply the input by uniform values in [1 - jitter, 1 + jitter].
        capacity_factor: each expert accepts at most ceil(factor x tokens x K / E) choices per sequence. First choices
            go before second choices, and earlier tokens before later ones; other choices are dropped. None: no limit.

    Raises:
        ValueError: if a factor is out of range or a name is unknown.
    """

    score: str = "softmax"
    normalize: bool | None = None
    routed_scale: float = 1.0
    groups: int = 1
    top_groups: int | None = None
    aux_loss: str | None = None
    aux_coefficient: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0
    bias: bool | None = None
    jitter: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score {self.score!r} is neither 'softmax' nor 'sigmoid'")
        if self.aux_loss not in (None, *AUX_LOSSES):
            raise ValueError(f"aux_loss {self.aux_loss!r} is none of {AUX_LOSSES} and None")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor {self.capacity_factor} is not positive; None drops nothing")
        if not self.routed_scale > 0:
            raise ValueError(f"routed_scale {self.routed_scale} is not positive")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter {self.jitter} is not in [0, 1)")
        for name in ("aux_coefficient", "z_loss", "bias_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")

    def best_groups(self, num_experts: int, top_k: int) -> int:
        """Return how many groups a token may choose from; raise ValueError if groups or K don't fit E."""
        E, K, groups = num_experts, top_k, self.groups
        if not 1 <= K <= E:
            raise ValueError(f"top_k {K} is not between 1 and the number of experts {E}")
        if groups < 1 or E % groups:
            raise ValueError(f"{E} experts are not a multiple of {groups} groups")
        top_groups = groups if self.top_groups is None else self.top_groups
        if not 1 <= top_groups <= groups:
            raise ValueError(f"top_groups {top_groups} is not between 1 and the number of groups {groups}")
        open_ = top_groups * (E // groups)
        if open_ < K:
            raise ValueError(f"top_k {K} is more than the {open_} experts of {top_groups} groups of {E // groups}")
        return top_groups

    def normalizes(self, top_k: int) -> bool:
        """Return whether the weights of a token's K experts are divided by their sum.

        Raises:
            ValueError: if `normalize` is True and K is 1.
        """
        if self.normalize and top_k == 1:
            raise ValueError(
                "normalize=True with top_k 1: one weight divided by itself is always 1, and the router learns nothing "
                "from the loss; leave normalize out, or take a top_k of 2 or more"
            )
        return top_k > 1 if self.normalize is None else self.normalize


class Router(ParallelModule, RandomModule):
    """Score the experts for each token, choose the best K, and return their weights and the balance losses.

    Args:
        dim: D, the number of features of a token.
        num_experts, top_k: E, the number of experts, and K, the number of experts per token.
        tp, cp, data: the axes over which tokens are sharded: every rank holds different tokens.
        init, device, dtype: see `LayerOptions`.
        options: the fields of `RouterOptions` as keyword arguments, for example `score="sigmoid"`.

    Attributes:
        options: the `RouterOptions`.
        bias_rate: the step size of the experts' biases in `update_routers`. You can change it between steps.
        tally: statistics summed over this rank's tokens of the step, for `update_routers`; None before a forward.
        key: seeds the jitter; None until `materialize` or `seed_dropout` sets it.

    Raises:
        ValueError: if K or the groups don't fit E, or an option is invalid (see `RouterOptions`). Forward raises it for
            jitter without `samples` or seed, and for a balance loss without `loss_scale`.

    Example:
        >>> moe = mpcore.ParallelMoE(4, 8, num_experts=4, top_k=2, score="sigmoid", bias_rate=0.001)
        >>> moe.router
        Router(4 experts, top_k=2, score=sigmoid, aux_loss=None)
    """

    weight: Tensor
    expert_bias: Tensor | None
    fractions: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        tp: Axis = Axis(name="tp"),
        cp: Axis = Axis(name="cp"),
        data: Axis = Axis(name="data"),
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tp=tp, init=init, device=device, dtype=dtype)
        for axis in (cp, data):
            check_axis(axis)
        self.num_experts = num_experts
        self.top_k = top_k
        self.cp = cp
        self.data = data
        rule = RouterOptions(**options)
        self.options: RouterOptions = rule
        self.normalizes: bool = rule.normalizes(top_k)
        self.top_groups: int = rule.best_groups(num_experts, top_k)
        self.bias_rate: float = rule.bias_rate
        self.tally: Tensor | None = None
        self.declare("weight", (num_experts, dim), init or uniform(1 / math.sqrt(dim)), partial=(tp,))
        # Not trained, but declared as parameters, so that they are initialized and saved with the others.
        biased = rule.bias_rate > 0 if rule.bias is None else rule.bias
        for name, value, there in (("expert_bias", 0.0, biased), ("fractions", 1.0, rule.aux_loss == "global")):
            if there:
                wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
                self.declare(name, (num_experts,), constant(value), dtype=wide)
                getattr(self, name).requires_grad_(False)
            else:
                self.register_parameter(name, None)

    @property
    def statistics(self) -> list[nn.Parameter]:
        """The parameters that `update_routers` changes in small steps: replicated, always in fp32 or fp64."""
        found = (self._parameters[name] for name in ("expert_bias", "fractions"))
        return [parameter for parameter in found if parameter is not None]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """Convert the module like torch, but keep `statistics` in fp32: bfloat16 would lose their small steps."""
        kept = [parameter.data for parameter in self.statistics]
        super()._apply(fn, recurse)
        for parameter, data in zip(self.statistics, kept, strict=True):
            if parameter.dtype != torch.promote_types(parameter.dtype, torch.float32):
                parameter.data = data.to(parameter.device)
        return self

    def capacity(self, length: int) -> int | None:
        """Return how many tokens an expert accepts from a sequence of `length` tokens; None: no limit."""
        factor = self.options.capacity_factor
        if factor is None:
            return None
        return min(math.ceil(factor * length * self.top_k / self.num_experts), length)

    def forward(
        self, x: Tensor, places: Places, samples: Tensor | None = None, loss_scale: Tensor | float | None = None
    ) -> Routing:
        """Choose experts for tokens x [N, D]. No other rank of tp, cp and data may hold the same tokens.

        Args:
            x: [N, D], this rank's tokens.
            places: the row and position of each token.
            samples, loss_scale: see `ParallelMoE.forward`.
        """
        rule = self.options
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits, scores, chosen, weights = route(
                self._jittered(x, places, samples), self.weight, self.top_k, self.expert_bias, score=rule.score,
                normalize=self.normalizes, scale=rule.routed_scale, groups=(rule.groups, self.top_groups),
                experts=places.experts,
            )  # fmt: skip
            wanted = torch.where(places.real[:, None], chosen, self.num_experts)
            taken = self._within_capacity(wanted, places)
            loss = self._balance(logits, scores, wanted, taken, places, loss_scale)
        return Routing(taken, weights, loss)

    def _jittered(self, x: Tensor, places: Places, samples: Tensor | None) -> Tensor:
        jitter = self.options.jitter
        if not self.training or jitter == 0:
            return x
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.key is None:
            raise input_error(
                "jitter has no seed: call mpcore.layers.seed_dropout(model, seed) or mpcore.layers.materialize"
            )
        if samples is None or samples.shape != (places.sequences,):
            raise input_error(f"jitter {jitter} needs samples, the global index of each of {places.sequences} rows")
        words = random_words(self.key, samples[places.sequence], places.position[:, None], range(x.shape[1]))
        uniform = (words.view(x.shape).to(x.dtype) + 0.5) / 2**31 - 1
        return x * (1 + jitter * uniform)

    @torch.no_grad()
    def _within_capacity(self, experts: Tensor, places: Places) -> Tensor:
        """Drop the choices of a full expert. Every rank of a sequence sees all its choices."""
        if self.options.capacity_factor is None:
            return experts
        E, K, n = self.num_experts, self.top_k, len(experts)
        known = torch.cat([experts, places.sequence[:, None], places.position[:, None], places.real[:, None]], 1)
        known = all_gather(all_gather(known, self.tp, 0), self.cp, 0)
        everyone, sequence, position, real = known[:, :K], known[:, K], known[:, K + 1], known[:, K + 2]
        tokens = real.new_zeros(places.sequences).index_add_(0, sequence, real)
        room = (self.options.capacity_factor * tokens.double() * K / E).ceil().long()
        group = sequence[:, None] * (E + 1) + everyone
        order = torch.arange(K, device=experts.device)
        key = (group * K + order) * places.length + position[:, None]
        ordered, by = key.flatten().sort(stable=True)
        first = torch.searchsorted(ordered, group.flatten() * K * places.length)
        place = torch.empty_like(by).scatter_(0, by, torch.arange(len(by), device=by.device)) - first
        full = place.view_as(everyone) >= room[sequence][:, None]
        start = (self.cp.rank * self.tp.size + self.tp.rank) * n
        return torch.where(full[start : start + n], E, experts)

    def _balance(
        self, logits: Tensor, scores: Tensor, wanted: Tensor, taken: Tensor, places: Places,
        loss_scale: Tensor | float | None,
    ) -> Tensor | None:  # fmt: skip
        """Return this rank's share of the balance losses, and add to the step's `tally`."""
        if not (self.training and torch.is_grad_enabled()):
            return None
        E, real, rule = self.num_experts, places.real, self.options
        p = scores if rule.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        z = logits.logsumexp(-1).square()
        chosen = (wanted[..., None] == torch.arange(E, device=wanted.device)).sum(1)  # [N, E], all zero for padding
        counts = chosen.new_zeros(places.sequences, E).index_add_(0, places.sequence, chosen)
        aux = None
        if rule.aux_loss is not None:
            aux = (self._fractions(counts, p.dtype)[places.sequence] * p).sum(-1)
        with torch.no_grad():
            if torch.compiler.is_compiling() or not recomputing():
                entropy = -torch.special.xlogy(p, p).sum(-1)
                sums = [entropy, torch.zeros_like(z) if aux is None else aux, z]
                rest = torch.stack([s.double().masked_fill(~real, 0).sum() for s in sums])
                dropped = (wanted != taken).sum()
                tally = torch.cat([counts.sum(0).double(), torch.stack([real.sum(), dropped]).double(), rest])
                self.tally = tally if self.tally is None else self.tally + tally
        if aux is None and rule.z_loss == 0:
            return None
        if loss_scale is None:
            raise input_error(
                "balance losses need loss_scale, the main loss's factor, which is 1 / (tokens of the step): "
                "pass run.loss_factor(run.count_tokens(target)) through the model (docs/moe.md), or take aux_loss=None"
            )
        loss = z * rule.z_loss if aux is None else aux * rule.aux_coefficient + z * rule.z_loss
        scale = torch.as_tensor(loss_scale, dtype=loss.dtype, device=loss.device).expand(places.sequences)
        return (loss * scale[places.sequence]).masked_fill(~real, 0).sum()

    @torch.no_grad()
    def _fractions(self, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Map this rank's choice counts [B, E] to [B, E], the fractions f for the tokens of each sequence."""
        if self.fractions is not None:
            return self.fractions.to(dtype).expand(len(counts), -1)
        if self.options.aux_loss == "sequence":
            counts = all_reduce(all_reduce(counts, self.tp), self.cp)
        else:
            counts = all_reduce(all_reduce(counts.sum(0), self.tp), self.data).expand(len(counts), -1)
        return _as_fractions(counts).to(dtype)

    def extra_repr(self) -> str:
        """Return the sizes and the main options."""
        rule = self.options
        return f"{self.num_experts} experts, top_k={self.top_k}, score={rule.score}, aux_loss={rule.aux_loss}"


def _as_fractions(counts: Tensor) -> Tensor:
    mean = counts.double().mean(-1, keepdim=True)
    return torch.where(mean > 0, counts / mean, 1.0)
