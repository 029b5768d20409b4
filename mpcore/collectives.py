"""The collectives on one axis, as dual pairs of autograd functions.

How a tensor is distributed over an axis:
    I     replicated; its gradient is replicated too
    R     replicated; its gradient is partial (each rank has one term of the sum)
    S(d)  sharded along dimension d
    P     partial: each rank has one term of the sum

    function         in -> out     backward is
    copy             I -> R        reduce
    reduce           P -> I        copy (identity)
    split            I -> S(d)     gather
    gather           S(d) -> I     split
    all_gather       S(d) -> R     reduce_scatter
    reduce_scatter   P -> S(d)     all_gather
    all_to_all       S(c) -> S(s)  all_to_all with the dimensions exchanged
    all_to_all_rows  S(0) -> S(0)  all_to_all_rows with the sizes exchanged

Each backward calls the dual function, so second derivatives work too. On an axis of size 1 each function returns its
input. Inputs and incoming gradients are never changed: torch's functional collectives make a new tensor.

Shards may be uneven: `shard_sizes(10, 4) == [3, 3, 2, 2]`. If they are, pass `length`, the length of the full
dimension, to gather, all_gather and all_to_all: a rank can't compute it from its own shard. Without `length` the
functions assume equal shards and do not check it. If shards are uneven then, gloo ends the process with SIGABRT.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), figures 4 and 5: f, its dual, g and its dual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore._torch.autograd import below_autograd
from mpcore._torch.dispatch import OpOverload
from mpcore._torch.dispatch import collective_ops as _ops
from mpcore.mesh.axis import Axis, check_axis


def shard_sizes(length: int, size: int, unit: int = 1) -> list[int]:
    """Return the length of each rank's shard of a dimension. Longer shards come first."""
    if length % unit:
        raise ValueError(f"length {length} is not a multiple of the unit {unit}")
    whole, rest = length // unit // size, length // unit % size  # no divmod: a compiled length may be a symbol
    return [(whole + (rank < rest)) * unit for rank in range(size)]


def shard_range(length: int, axis: Axis, unit: int = 1) -> tuple[int, int]:
    """Return start and end of this rank's shard of a dimension of `length`, sharded as in `shard_sizes`."""
    check_axis(axis)
    sizes = shard_sizes(length, axis.size, unit)
    start = sum(sizes[: axis.rank])
    return start, start + sizes[axis.rank]


# --- on plain tensors: no autograd, always a new tensor, and no tensor that autograd would have to follow ----------


_wait = _ops.wait_tensor.default


def _call(op: OpOverload, x: Tensor, *args, wait: bool = False) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        _refuse_gradient(op)
    # Torch may have given these operators an autograd of its own, in Python: 9 us a collective, and a second graph.
    if torch.compiler.is_compiling():
        return _wait(op(x, *args)) if wait else op(x, *args)
    with below_autograd():
        return _wait(op(x, *args)) if wait else op(x, *args)


def _refuse_gradient(op: OpOverload) -> None:
    raise ValueError(
        f"{op.overloadpacket.__name__} has no gradient, but its input needs one: use reduce (of what is made from "
        f"copy(x, axis), where x is the same on every rank) or another of the dual pairs, or give it x.detach()"
    )


def wait(x: Tensor) -> Tensor:
    """Wait for a collective that a `start_` function started, and return its result."""
    return _call(_wait, x)


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Start to all-reduce `x` over the axis. `wait` returns the result, a new contiguous tensor."""
    return _call(_ops.all_reduce.default, x, op, _group(axis))


def start_sum_in_place(x: Tensor, axis: Axis) -> Tensor:
    """Start to all-reduce contiguous `x` in place. Do not read or write `x` before `wait(x)`."""
    return _call(_ops.all_reduce_.default, x, "sum", _group(axis))


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """All-reduce `x` over the axis without autograd, and return the result; on size 1 return `x`.

    Args:
        op: "sum", "max" or "min".

    Raises:
        ValueError: if `x` requires a gradient, also on size 1. Use `reduce`, which is differentiable.
    """
    if not _alone(axis):
        return _all_reduce(x, axis, op)
    if torch.is_grad_enabled() and x.requires_grad:
        _refuse_gradient(_ops.all_reduce.default)
    return x


def _all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    if axis.sums is not None and op == "sum":
        return axis.sums.all_reduce(x, axis)
    return _call(_ops.all_reduce.default, x, op, _group(axis), wait=True)


def start_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Start to all-gather equal shards along dimension 0. `wait` returns the result."""
    group = _group(axis)  # checks the axis
    return _call(_ops.all_gather_into_tensor.default, x.contiguous(), axis.size, group)


def start_reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Start to sum over the axis and keep this rank's equal shard of dimension 0. `wait` returns the result."""
    group = _group(axis)  # first: it says what is no axis
    return _call(_ops.reduce_scatter_tensor.default, x.contiguous(), "sum", axis.size, group)


def start_send(x: Tensor, axis: Axis, to: int | None, receive: Sequence[int]) -> Tensor:
    """Start to send `x` to one rank of the axis. `wait` returns what this rank received, ordered by sender.

    Args:
        to: the receiving rank; None: send nothing.
        receive: the number of rows that each rank sends to this rank.
    """
    sizes = [0] * len(receive)
    if to is None:
        x = x[:0]
    else:
        sizes[to] = len(x)
    return start_rows(x, axis, sizes, list(receive))


def start_rows(x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
    """Start `all_to_all_rows`. `wait` returns the received rows."""
    return _call(_ops.all_to_all_single.default, x.contiguous(), receive, send, _group(axis))


def _alone(axis: Axis) -> bool:
    if not isinstance(axis, Axis):
        check_axis(axis)
    return axis.size == 1


def _group(axis: Axis) -> str:
    if not isinstance(axis, Axis):
        check_axis(axis)
    if axis.group is None:
        raise ValueError(f"the {axis.name} axis of size {axis.size} has no process group: make it with build_mesh")
    return axis.group_name


def shards_in_front(x: Tensor, size: int, dim: int) -> Tensor:
    """Lay `size` equal shards of `dim` one behind the other along dimension 0: what `start_reduce_scatter` takes."""
    dim %= x.dim()
    if dim == 0:
        return x
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).flatten(0, 1)


def shards_along(x: Tensor, size: int, dim: int) -> Tensor:
    """Lay shards that lie one behind the other along dimension 0, as `start_all_gather` returns them, along `dim`."""
    dim %= x.dim()
    if dim == 0:
        return x
    return x.view(size, x.shape[0] // size, *x.shape[1:]).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _gather(x: Tensor, axis: Axis, dim: int, length: int | None) -> Tensor:
    sizes = _checked_sizes(x, axis, dim, length)
    longest = sizes[0]
    if sizes[-1] == longest:
        return shards_along(wait(start_all_gather(x, axis)), axis.size, dim)
    front = x.movedim(dim, 0)
    if front.shape[0] < longest:
        front = torch.cat([front, front.new_zeros(longest - front.shape[0], *front.shape[1:])])
    out = wait(start_all_gather(front, axis))
    parts = [part.narrow(0, 0, n).movedim(0, dim) for part, n in zip(out.split(longest), sizes, strict=True)]
    return torch.cat(parts, dim)


def _reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    if axis.sums is not None:
        return axis.sums.reduce_scatter(x, axis, dim)
    sizes = shard_sizes(x.shape[dim], axis.size)
    longest = sizes[0]
    if sizes[-1] == longest:
        return wait(start_reduce_scatter(shards_in_front(x, axis.size, dim), axis))
    front = torch.cat([F.pad(part.movedim(0, -1), (0, longest - part.shape[0])).movedim(-1, 0)
                       for part in x.movedim(dim, 0).split(sizes)])  # fmt: skip
    out = wait(start_reduce_scatter(front, axis)).narrow(0, 0, sizes[axis.rank])
    return out.movedim(0, dim).contiguous()


def _split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    start, end = shard_range(x.shape[dim], axis)
    return x.narrow(dim, start, end - start).contiguous()


def _all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int, concat_length: int | None) -> Tensor:
    concat_sizes = _checked_sizes(x, axis, concat_dim, concat_length)
    split = shard_sizes(x.shape[split_dim], axis.size)
    send = torch.cat([part.reshape(-1) for part in x.split(split, split_dim)])
    shapes = []
    for n in concat_sizes:  # what each peer sends: its shard of concat_dim, this rank's shard of split_dim
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = split[axis.rank], n
        shapes.append(shape)
    other = x.numel() // max(x.shape[split_dim], 1)
    receive_sizes = [torch.Size(shape).numel() for shape in shapes]
    send_sizes = [n * other for n in split]
    out = wait(_call(_ops.all_to_all_single.default, send, receive_sizes, send_sizes, _group(axis)))
    parts = [part.view(shape) for part, shape in zip(out.split(receive_sizes), shapes, strict=True)]
    return torch.cat(parts, concat_dim)


def _checked_sizes(x: Tensor, axis: Axis, dim: int, length: int | None) -> list[int]:
    if length is None:
        return [x.shape[dim]] * axis.size
    sizes = shard_sizes(length, axis.size)
    if x.shape[dim] != sizes[axis.rank]:
        raise ValueError(
            f"dimension {dim} of this shard has length {x.shape[dim]}, but rank {axis.rank} of the {axis.name} axis "
            f"of size {axis.size} holds {sizes[axis.rank]} of {length}"
        )
    return sizes


# --- with autograd: the dual pairs --------------------------------------------------------------------------------


class _Copy(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return reduce(dy, ctx.axis), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_reduce(x, axis)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _Copy.apply(dy, ctx.axis) if torch.is_grad_enabled() else dy, None


class _Split(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, x.shape[dim]
        return _split(x, axis, dim)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _Gather.apply(dy, ctx.axis, ctx.dim, ctx.length), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int, length: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(x, axis, dim, length)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _Split.apply(dy, ctx.axis, ctx.dim), None, None, None


class _AllGather(_Gather):
    @staticmethod
    def backward(ctx, dy: Tensor):
        return _ReduceScatter.apply(dy, ctx.axis, ctx.dim), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, x.shape[dim]
        return _reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _AllGather.apply(dy, ctx.axis, ctx.dim, ctx.length), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, split_dim: int, concat_dim: int, concat_length: int | None) -> Tensor:
        ctx.axis, ctx.split_dim, ctx.concat_dim, ctx.split_length = (axis, split_dim, concat_dim, x.shape[split_dim])
        return _all_to_all(x, axis, split_dim, concat_dim, concat_length)

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx = _AllToAll.apply(dy, ctx.axis, ctx.concat_dim, ctx.split_dim, ctx.split_length)
        return dx, None, None, None, None


class _AllToAllRows(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return wait(start_rows(x, axis, send, receive))

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _AllToAllRows.apply(dy, ctx.axis, ctx.receive, ctx.send), None, None, None


class Flying:
    """A collective between `start` and `finish`. The gradient flows through `token`, the input, to `start`."""

    def __init__(self, kind: str, axis: Axis, send: Sequence[int] = (), receive: Sequence[int] = ()) -> None:
        self.kind = kind
        self.axis = axis
        self.send: list[int] = list(send)
        self.receive: list[int] = list(receive)
        self.token: Tensor = torch.Tensor()
        self.pending: Tensor | None = None  # None: `token` is the result
        self.waits = False  # for the dual, which is the gradient of `token`

    def run(self, x: Tensor) -> Tensor:
        """Run the collective at once, with autograd."""
        if self.kind == "all_to_all_rows":
            return all_to_all_rows(x, self.axis, self.send, self.receive)
        return (all_gather if self.kind == "all_gather" else reduce_scatter)(x, self.axis, 0)

    def begin(self, x: Tensor) -> Tensor:
        """Start it without autograd, and return the pending result."""
        if self.kind == "all_to_all_rows":
            return start_rows(x, self.axis, self.send, self.receive)
        return (start_all_gather if self.kind == "all_gather" else start_reduce_scatter)(x, self.axis)

    def dual(self) -> Flying:
        """Return the collective of backward."""
        other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(self.kind, self.kind)
        return Flying(other, self.axis, self.receive, self.send)


class _Start(Function):
    @staticmethod
    def forward(ctx, x: Tensor, flying: Flying) -> Tensor:
        ctx.flying, flying.pending = flying, flying.begin(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return wait(dy) if ctx.flying.waits else dy, None


class _Finish(Function):
    @staticmethod
    def forward(ctx, token: Tensor, flying: Flying) -> Tensor:
        ctx.flying, pending, flying.pending = flying, flying.pending, None
        assert pending is not None
        return wait(pending)

    @staticmethod
    def backward(ctx, dy: Tensor):
        ctx.flying.waits = not torch.is_grad_enabled()  # a second derivative needs the graph of the dual
        dual = ctx.flying.dual()
        return dual.begin(dy) if ctx.flying.waits else dual.run(dy), None


def start(kind: str, x: Tensor, axis: Axis, send: Sequence[int] = (), receive: Sequence[int] = ()) -> Flying:
    """Start a collective, so that other work runs beside it. In backward, its dual runs beside that work's backward.

    `kind` is "all_gather" or "reduce_scatter", of equal shards of dimension 0, or "all_to_all_rows" with its sizes. In
    compiled code, with sums in a fixed order, and on a CPU except for rows, it has ended when this returns.
    """
    flying = Flying(kind, axis, send, receive)
    at_once = _alone(axis) or torch.compiler.is_compiling() or axis.sums is not None
    at_once |= kind != "all_to_all_rows" and not x.is_cuda  # gloo's gathers corrupt the heap: docs/decisions.md
    flying.token = flying.run(x) if at_once else _Start.apply(x, flying)
    return flying


def finish(flying: Flying) -> Tensor:
    """Return the result of a collective that `start` started."""
    token, flying.token = flying.token, torch.Tensor()  # the graph holds `flying`, which must not hold the graph
    return token if flying.pending is None else _Finish.apply(token, flying)


def copy(x: Tensor, axis: Axis) -> Tensor:
    """I -> R. Return the input; backward all-reduces the gradient. Megatron's f."""
    return x if _alone(axis) or not torch.is_grad_enabled() else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """P -> I. All-reduce the input; backward is the identity. Megatron's g."""
    if _alone(axis):
        return x
    return _Reduce.apply(x, axis) if torch.is_grad_enabled() else all_reduce(x, axis)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """I -> S(dim). Return this rank's shard of `x`; backward all-gathers the gradient."""
    return x if _alone(axis) else _Split.apply(x, axis, dim)


def gather(x: Tensor, axis: Axis, dim: int, length: int | None = None) -> Tensor:
    """S(dim) -> I. Return the full tensor, for a consumer that does the same on every rank; backward keeps this shard.

    Args:
        x: this rank's shard.
        axis: the axis.
        dim: the sharded dimension.
        length: length of the full dimension. Required if shards are uneven: without it gloo ends the process.
    """
    return x if _alone(axis) else _Gather.apply(x, axis, dim, length)


def all_gather(x: Tensor, axis: Axis, dim: int, length: int | None = None) -> Tensor:
    """S(dim) -> R. Return the full tensor, for a consumer that differs between ranks; backward is reduce_scatter.

    Args:
        x, axis, dim, length: see `gather`.
    """
    return x if _alone(axis) else _AllGather.apply(x, axis, dim, length)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """P -> S(dim). Sum over the axis and return this rank's shard; backward is all_gather."""
    return x if _alone(axis) else _ReduceScatter.apply(x, axis, dim)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int, concat_length: int | None = None) -> Tensor:
    """S(concat_dim) -> S(split_dim). `x` is sharded along `concat_dim`; the result along `split_dim`.

    Args:
        concat_length: length of the full `concat_dim`. Required if its shards are uneven.
    """
    return x if _alone(axis) else _AllToAll.apply(x, axis, split_dim, concat_dim, concat_length)


def all_to_all_rows(x: Tensor, axis: Axis, send: list[int] | None = None, receive: list[int] | None = None) -> Tensor:
    """S(0) -> S(0). Each rank sends some of its rows to each other rank; received rows are ordered by sender.

    Args:
        x: [N, ...], the rows for rank 0 first.
        send, receive: the number of rows sent to, and received from, each rank; None: N / size each.

    Returns:
        [sum(receive), ...].
    """
    if (send is None) != (receive is None):
        raise ValueError(f"send is {send} and receive {receive}: give both, or none for equal parts")
    alone = _alone(axis)
    if send is None or receive is None:
        if len(x) % axis.size:
            raise ValueError(f"{len(x)} rows are not a multiple of the {axis.name} size {axis.size}")
        send = receive = [len(x) // axis.size] * axis.size
    if sum(send) != len(x):
        raise ValueError(f"x has {len(x)} rows, but {sum(send)} are to be sent to the {axis.name} axis")
    return x if alone else _AllToAllRows.apply(x, axis, send, receive)
