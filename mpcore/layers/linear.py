"""Linear layers whose weight is cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; sequence parallel: Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore import collectives
from mpcore.collectives import start_all_gather, start_all_reduce, start_reduce_scatter, wait
from mpcore.kernels._main_grad import will_accumulate
from mpcore.layers.module import Init, ParallelModule, constant, refuse_second_derivative, uniform
from mpcore.mesh import Axis
from mpcore.sharding import Shard, cut, cut_blocks

_ALONE = Axis()
_unsafe_view = torch.ops.aten._unsafe_view.default


def copy_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, split: bool = False) -> Tensor:
    """`linear(copy(x))`: the sum of the input's gradient runs while the weight's gradient is computed.

    Args:
        x: [..., D], the same on every rank.
        weight: [F/tp, D], this rank's rows.
        bias: [F/tp] or None.
        tp: the axis.
        split: the two gradients are asked for apart, so the product must be torch's own: nothing overlaps.

    Returns:
        [..., F/tp], in the dtype of `torch.autocast` where that is on.
    """
    main, dtype = None if split else _main_gradients(weight, bias), autocast_dtype(x)
    x = cast(x, dtype)
    if split:
        return F.linear(collectives.copy(x, tp), cast(weight, dtype), cast(bias, dtype))
    if tp.size == 1 and main is None and dtype in (None, weight.dtype):
        return F.linear(x, weight, bias)
    return _CopyLinear.apply(x, weight, bias, tp, main, dtype)


def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, regather: bool = False, split: bool = False
) -> Tensor:
    """`linear(all_gather(x, dim))`: in backward the reduce-scatter runs while the weight's gradient is computed.

    Args:
        x: [..., T/tp, ..., D], this rank's equal shard of dimension `dim`.
        weight: [F/tp, D], this rank's rows.
        bias: [F/tp] or None.
        tp: the axis.
        dim: the sequence dimension of `x`.
        regather: keep the shard for backward and gather it again there: a gather more, 1/tp of the memory.
        split: the two gradients are asked for apart, so the product must be torch's own, which keeps the whole input.

    Returns:
        [..., T, ..., F/tp], in the dtype of `torch.autocast` where that is on.
    """
    if tp.size == 1:
        return copy_linear(x, weight, bias, tp, split)
    main, dtype = _main_gradients(weight, bias), autocast_dtype(x)
    x = cast(x, dtype)
    if split:
        return F.linear(collectives.all_gather(x, tp, dim), cast(weight, dtype), cast(bias, dtype))
    return _AllGatherLinear.apply(x, weight, bias, tp, dim, regather, main, dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast has the product computed in; None where it is off."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """A tensor, or None, in `dtype`; None: as it is."""
    return x if x is None or dtype is None else x.to(dtype)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The product in `dtype`. Backward casts the weight again and keeps the parameter itself: copies, one for each
    micro-batch in flight and of what ZeRO-3 and offload have let go, would be the model over again."""
    weight, bias = cast(weight, dtype), cast(bias, dtype)
    if bias is None or x.dim() == 2:
        return F.linear(x, weight, bias)
    flat = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return _unsafe_view(flat, (*x.shape[:-1], weight.shape[0]))  # a view could not be written to in place


Main = tuple[Tensor, Tensor | None]


def _main_gradients(weight: Tensor, bias: Tensor | None) -> Main | None:
    """The parameters themselves, where backward shall add to their main gradients (`mpcore.main_gradients`)."""
    if getattr(weight, "main_grad", None) is None or torch.compiler.is_compiling():
        return None
    return weight, bias


def _weight_gradients(ctx, dy: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dy = dy.reshape(-1, dy.shape[-1])
    weight, bias = ctx.main or (None, None)
    dweight = _give(weight, _weight_product, dy, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
    dbias = _give(bias, _column_sum, dy) if ctx.needs_input_grad[2] else None
    return None if dweight is None else dweight.to(ctx.dtype), None if dbias is None else dbias.to(ctx.dtype)


def _give(parameter: Tensor | None, gradient: Callable[..., Tensor], *of: Tensor) -> Tensor | None:
    """The gradient, for autograd; or added to the parameter's main gradient, and nothing left to give."""
    main = getattr(parameter, "main_grad", None)
    if parameter is None or main is None:
        return gradient(None, *of)
    wanted = will_accumulate(parameter)
    if wanted is None:
        return gradient(None, *of)
    if wanted:  # in this backward: one in two passes, as zero-bubble pipelines run it, comes here twice
        gradient(main, *of)
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None


def _weight_product(main: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
    if main is None:
        return dy.t() @ x
    if dy.dtype == main.dtype:
        return main.addmm_(dy.t(), x)
    if dy.is_cuda:
        return main.add_(torch.mm(dy.t(), x, out_dtype=main.dtype))
    return main.addmm_(dy.t().to(main.dtype), x.to(main.dtype))


def _column_sum(main: Tensor | None, dy: Tensor) -> Tensor:
    return dy.sum(0) if main is None else main.add_(dy.sum(0, dtype=main.dtype))


_NO_SECOND = "a column-parallel linear on tp > 1 or with main gradients (but with its split_backward = True)"


class _CopyLinear(Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, main: Main | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.tp, ctx.main, ctx.dtype = tp, main, weight.dtype
        return _forward(x, weight, bias, dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        if ctx.tp.size > 1 or ctx.main is not None:
            refuse_second_derivative(_NO_SECOND)
        x, weight = ctx.saved_tensors
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        summed = None if dx is None or ctx.tp.size == 1 else start_all_reduce(dx, ctx.tp)
        dweight, dbias = _weight_gradients(ctx, dy, x)
        return dx if summed is None else wait(summed), dweight, dbias, None, None, None


class _AllGatherLinear(Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, regather: bool, main: Main | None,
        dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        whole = _unmove(wait(start_all_gather(x.movedim(dim, 0), tp)), dim)
        ctx.save_for_backward((x if regather else whole) if ctx.needs_input_grad[1] else None, weight)
        ctx.tp, ctx.dim, ctx.regather, ctx.main, ctx.dtype = tp, dim, regather, main, weight.dtype
        return _forward(whole, weight, bias, dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative(_NO_SECOND)
        x, weight = ctx.saved_tensors
        tp, dim = ctx.tp, ctx.dim
        gathering = start_all_gather(x.movedim(dim, 0), tp) if ctx.regather and ctx.needs_input_grad[1] else None
        dx = start_reduce_scatter((dy @ weight.to(dy.dtype)).movedim(dim, 0), tp) if ctx.needs_input_grad[0] else None
        if gathering is not None:
            x = _unmove(wait(gathering), dim)
        dweight, dbias = _weight_gradients(ctx, dy, x)
        return None if dx is None else _unmove(wait(dx), dim), dweight, dbias, None, None, None, None, None


def _unmove(x: Tensor, dim: int) -> Tensor:
    return x.movedim(0, dim).contiguous()


class ColumnParallelLinear(ParallelModule):
    """`y = x W^T + b` with the rows of W (the output features) cut over tp: x is I, y is S(-1).

    Args:
        in_features, out_features: logical sizes, as of `torch.nn.Linear`. Shards may be uneven.
        bias: whether there is one; cut as the rows are.
        tp: the axis.
        gather_output: return the whole output on every rank.
        sequence_parallel: the input is this rank's equal shard of the sequence, gathered here.
        sequence_dim: the dimension of `x` that is the sequence.
        regather: with sequence parallel, gather again in backward instead of keeping the whole input.
        unit: output features that may not be torn apart, such as `head_dim`.
        init: fills the logical weight; None: as `torch.nn.Linear`.
        device, dtype: of the parameters.

    Attributes:
        split_backward: the gradients of the input and of the weight are asked for apart, as zero-bubble pipelines do
            (`Pipeline` sets it). Then the product is torch's own, which autograd can split; it keeps its whole input.

    Raises:
        ValueError: if there are fewer units of output features than ranks.
    """

    weight: Tensor
    bias: Tensor | None
    split_backward = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tp: Axis = Axis(name="tp"),
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        regather: bool = False,
        unit: int = 1,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        self.gather_output, self.regather = gather_output, regather
        self.sequence_parallel, self.sequence_dim = sequence_parallel and tp.size > 1, sequence_dim
        check_size("out_features", out_features, tp, unit)
        shard = self.output_shard(unit)
        if gather_output and (unit > 1 or len(shard.mine) > 1):
            raise ValueError(
                f"gather_output can't put {len(shard.mine)} blocks of unit {unit} in order: split them first"
            )
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        like = {"device": device, "dtype": dtype}
        blocks = {"shard": shard, "blocks": self.output_blocks()}
        self.declare("weight", (out_features, in_features), init or uniform(bound), **blocks, **like)
        if bias:
            self.declare("bias", (out_features,), constant(0.0) if init else uniform(bound), **blocks, **like)
        else:
            self.register_parameter("bias", None)

    def output_shard(self, unit: int) -> Shard:
        """How the output features are cut; fused projections cut each of their blocks."""
        return cut(self.out_features, self.tp, 0, unit)

    def output_blocks(self) -> tuple[int, ...]:
        """The output features of each projection, where there are several in one."""
        return ()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features/tp], or [..., out_features] with `gather_output`."""
        check_last(x, self.in_features, "in_features")
        held, split = (self.weight, self.bias, self.tp), self.split_backward
        if self.sequence_parallel:
            y = all_gather_linear(x, *held, self.sequence_dim, self.regather, split)
        else:
            y = copy_linear(x, *held, split)
        return collectives.gather(y, self.tp, -1, self.out_features) if self.gather_output else y

    def extra_repr(self) -> str:
        """Global sizes, as users wrote them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tp={self.tp.size}"


class RowParallelLinear(ParallelModule):
    """`y = x W^T + b` with the columns of W (the input features) cut over tp: x is S(-1), y is I.

    The bias is added once, after the sum over ranks.

    Args:
        in_features, out_features: logical sizes, as of `torch.nn.Linear`. Shards may be uneven.
        bias: whether there is one; the same on every rank.
        tp: the axis.
        input_is_parallel: `x` is this rank's shard; otherwise it is whole, and cut here.
        sequence_parallel: return this rank's equal shard of the sequence instead of the whole.
        sequence_dim: the dimension of `x` that is the sequence.
        unit: input features that may not be torn apart, such as `head_dim`.
        init: fills the logical weight; None: as `torch.nn.Linear`.
        device, dtype: of the parameters.

    Attributes:
        split_backward: as of `ColumnParallelLinear`.

    Raises:
        ValueError: if there are fewer units of input features than ranks.
    """

    weight: Tensor
    bias: Tensor | None
    split_backward = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tp: Axis = Axis(name="tp"),
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        unit: int = 1,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel, self.sequence_dim = sequence_parallel and tp.size > 1, sequence_dim
        check_size("in_features", in_features, tp, unit)
        shard = cut(in_features, tp, 1, unit)
        self.local_in_features = shard.size(tp.rank)
        self.local_in_features_name = f"this rank's share of in_features {in_features}"
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        like = {"device": device, "dtype": dtype}
        self.declare("weight", (out_features, in_features), init or uniform(bound), shard=shard, **like)
        if bias:
            partial = (tp,) if self.sequence_parallel else ()
            self.declare("bias", (out_features,), constant(0.0) if init else uniform(bound), partial=partial, **like)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features/tp] -> [..., out_features], or the sequence's shard of it."""
        if self.sequence_parallel:
            check_sequence(x, self.sequence_dim, self.tp)
        if not self.input_is_parallel:
            check_last(x, self.in_features, "in_features")
            x = collectives.split(x, self.tp, -1)
        check_last(x, self.local_in_features, self.local_in_features_name)
        if self.tp.size == 1:  # with the bias inside the product: bitwise what torch.nn.Linear gives
            return copy_linear(x, self.weight, self.bias, _ALONE, self.split_backward)
        y = copy_linear(x, self.weight, None, _ALONE, self.split_backward)
        if self.sequence_parallel:
            y = collectives.reduce_scatter(y, self.tp, self.sequence_dim)
        else:
            y = collectives.reduce(y, self.tp)
        bias = self.bias
        return y if bias is None else y + bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Global sizes, as users wrote them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tp={self.tp.size}"


class GateUpParallelLinear(ColumnParallelLinear):
    """The gate and the up projection of a gated MLP in one product; each rank's output is [its gate | its up].

    The logical weight is [2F, D], gate above up, whatever the tp size.

    Args:
        in_features: D.
        hidden_features: F, the width of the gate and of the up projection. Shards may be uneven.
        others: as of `ColumnParallelLinear`.
    """

    def __init__(self, in_features: int, hidden_features: int, bias: bool = True, **others) -> None:
        self.hidden_features = hidden_features
        tp = others.get("tp", Axis())
        check_size("hidden_features", hidden_features, tp)
        super().__init__(in_features, 2 * hidden_features, bias, **others)

    def output_shard(self, unit: int) -> Shard:
        """Gate and up are cut each for itself."""
        return cut_blocks((self.hidden_features,) * 2, self.tp, 0, (unit,) * 2)

    def output_blocks(self) -> tuple[int, ...]:
        """Gate and up."""
        return (self.hidden_features,) * 2


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections in one product; each rank's output is [its q heads | k heads | v heads].

    The logical weight is [(H + 2 H_kv) K, D], Q above K above V, whatever the tp size. Query heads are cut over tp.
    Where tp divides the number of KV heads they are cut too; otherwise each rank holds the KV heads that its query
    heads read, and the gradients of replicas are summed by `mpcore.reduce_gradients`, as declared.

    Args:
        in_features: D.
        num_heads, num_kv_heads: H and H_kv, logical.
        head_dim: K.
        others: as of `ColumnParallelLinear`.

    Attributes:
        local_heads, local_kv_heads: of this rank.
        kv_head_of: for each local query head the local KV head it reads.

    Raises:
        ValueError: if H_kv does not divide H, or H is smaller than the tp size.
    """

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = True, **others
    ) -> None:
        tp = others.get("tp", Axis())
        check_size("num_heads", num_heads, tp)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        group = num_heads // num_kv_heads
        self.q_heads = cut(num_heads, tp, 0).runs
        if num_kv_heads % tp.size == 0:
            self.kv_heads = cut(num_kv_heads, tp, 0).runs
        else:
            self.kv_heads = tuple(((a // group, (b - 1) // group + 1),) for ((a, b),) in self.q_heads)
        (q_start, q_end), (kv_start, kv_end) = self.q_heads[tp.rank][0], self.kv_heads[tp.rank][0]
        self.local_heads, self.local_kv_heads = q_end - q_start, kv_end - kv_start
        self.kv_head_of = [head // group - kv_start for head in range(q_start, q_end)]
        super().__init__(in_features, (num_heads + 2 * num_kv_heads) * head_dim, bias, unit=head_dim, **others)

    def output_shard(self, unit: int) -> Shard:
        """Q, K and V are cut each for itself, whole heads at a time."""
        k, v = self.num_heads, self.num_heads + self.num_kv_heads

        def run(start: int, end: int, block: int) -> tuple[int, int]:
            return (start + block) * self.head_dim, (end + block) * self.head_dim

        return Shard(
            self.tp,
            0,
            tuple(
                (run(*q, 0), run(*kv, k), run(*kv, v)) for (q,), (kv,) in zip(self.q_heads, self.kv_heads, strict=True)
            ),
        )

    def output_blocks(self) -> tuple[int, ...]:
        """Q, K and V."""
        return tuple(heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads))


def check_size(name: str, size: int, tp: Axis, unit: int = 1) -> None:
    """Refuse a dimension that isn't made of whole units, or leaves a rank of the axis with nothing; and no axis."""
    if not isinstance(tp, Axis):
        raise TypeError(f"an axis is wanted, such as mesh.tp of build_mesh(tp=2), not {type(tp).__name__} {tp!r}")
    if size % unit:
        raise ValueError(f"{name} {size} is not a multiple of the unit {unit}")
    units = f"{size}" if unit == 1 else f"{size} / {unit} = {size // unit}"
    if size // unit < tp.size:
        raise ValueError(f"{name} {units} is smaller than the {tp.name} size {tp.size}: some ranks would hold nothing")


def check_last(x: Tensor, size: int, what: str) -> None:
    """Refuse an input whose last dimension isn't `size`."""
    if x.shape[-1] != size:
        raise ValueError(f"the last dimension of x {tuple(x.shape)} is {x.shape[-1]}, but {what} is {size}")


def check_sequence(x: Tensor, dim: int, tp: Axis) -> None:
    """Refuse a sequence that the axis can't cut into equal shards."""
    if x.shape[dim] % tp.size:
        raise ValueError(
            f"sequence length {x.shape[dim]} is not a multiple of the {tp.name} size {tp.size}, as sequence_parallel "
            f"needs: pad it to {-(-x.shape[dim] // tp.size) * tp.size} with ignored targets"
        )
