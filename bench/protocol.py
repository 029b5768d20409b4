"""What a row of the table of kernels says (`bench/cases.py`): inputs, functions, peers, costs and sizes."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FORWARD, BOTH = "forward", "forward+backward"
OURS = "mpcore"
Shape = Mapping[str, int]
Inputs = dict[str, Any]
Function = Callable[..., Any]
Draw = Callable[[Shape, Mapping[str, Any]], Any]
Peer = Callable[[Shape], Function]


class NotHereError(Exception):
    """A peer can't run; the message says why."""


class WrongError(Exception):
    """A function's results are not the reference's; it gets no number."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and its peers.

    Args:
        name: as its file in `kernels/`.
        tensors: the inputs by name, each the names of its sizes (`"M 2F"`: random numbers of the case's dtype), or what
            makes it of the shape and of `{"dtype": .., "device": ..}`; options that are no tensors, too.
        ours, reference: take the inputs by name, and return a tensor or a tuple.
        peers: by name, what returns such a function for a shape, or raises `ImportError` or `NotHereError`.
        cost: bytes or floating point operations of `(forward, forward+backward)`, by shape and bytes of an element.
        shapes: what is measured; toy: what is checked without CUDA.
        unit: "GB/s", beside a copy, or "TFLOP/s", beside a matrix product.
        passes: which to measure.
        check: sizes to shrink where the check in float64 would not fit.
        constants: inputs without a gradient though they are floating.
        in_float64: the reference takes float64; otherwise its own dtype is the truth.
        slack: times the reference's error that ours may have.
        random: a peer draws random numbers, or chooses scales, of its own; only its shapes and finiteness are checked.
    """

    name: str
    tensors: Mapping[str, str | Draw]
    ours: Function
    reference: Function
    peers: Mapping[str, Peer]
    cost: Callable[[Shape, int], tuple[float, float]]
    shapes: Sequence[Shape]
    toy: Shape
    unit: str = "GB/s"
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
    passes: Sequence[str] = (FORWARD, BOTH)
    check: Shape = field(default_factory=dict)
    constants: Sequence[str] = ()
    in_float64: bool = True
    slack: int = 2
    random: bool = False

    def inputs(self, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> Inputs:
        """Make the inputs by name."""
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        return {
            name: torch.randn([_size(word, shape) for word in made.split()], **like)
            if isinstance(made, str)
            else made(shape, like)
            for name, made in self.tensors.items()
        }

    def differentiable(self, inputs: Inputs) -> list[Tensor]:
        """Return the inputs that have a gradient."""
        given = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and name not in self.constants}
        return [x for x in given.values() if x.is_floating_point()]

    def providers(self) -> dict[str, Peer]:
        """Return ours and all peers by name."""
        return {OURS: always(self.ours), **self.peers}

    def checked(self, shape: Shape) -> Shape:
        """Return the sizes at which the check in float64 fits."""
        return {name: min(size, self.check.get(name, size)) for name, size in shape.items()}

    def cases(self) -> list[tuple[Kernel, Shape, torch.dtype, str]]:
        """Return kernel, shape, dtype and pass of each measurement; those of the toy size without CUDA."""
        cuda = torch.cuda.is_available()
        shapes, dtypes = (self.shapes, self.dtypes) if cuda else ([self.toy], [torch.float32])
        return [(self, shape, dtype, which) for shape in shapes for dtype in dtypes for which in self.passes]


def _size(word: str, shape: Shape) -> int:
    """Return the size `M`, twice the size of `2F`, or the number itself."""
    name = word.lstrip("0123456789")
    return int(word.removesuffix(name) or 1) * (shape[name] if name else 1)


def label(shape: Shape) -> str:
    """`M 8192, D 4096`."""
    return ", ".join(f"{name} {size}" for name, size in shape.items())


def short(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def always(function: Function) -> Peer:
    """A peer that is there everywhere."""
    return lambda shape: function


def needs_cuda(make: Peer, why: str = "runs on CUDA only") -> Peer:
    """A peer that is not there without CUDA."""

    def checked(shape: Shape) -> Function:
        if not torch.cuda.is_available():
            raise NotHereError(why)
        return make(shape)

    return checked


def compiled(function: Function) -> Peer:
    """`torch.compile` of a plain function, for static shapes."""
    return needs_cuda(lambda shape: torch.compile(function, dynamic=False, fullgraph=True), "compiled for CUDA only")


def imported(path: str, call: Function) -> Peer:
    """`call(f, **inputs)`, where f, of the path `module:name`, can be imported and CUDA is there."""

    def make(shape: Shape) -> Function:
        module, _, name = path.partition(":")
        found = functools.partial(call, getattr(importlib.import_module(module), name))
        return needs_cuda(always(found))(shape)

    return make


def plain(eager: Function) -> dict[str, Peer]:
    """A function of plain torch, as it is and compiled."""
    return {"eager": always(eager), "torch.compile": compiled(eager)}


def rates(forward: str, both: str) -> Callable[[Shape, int], tuple[float, float]]:
    """Bytes of elements that move in `(forward, forward+backward)`, each a factor and names of sizes: `"5 M D"`."""

    def cost(s: Shape, b: int) -> tuple[float, float]:
        first, second = (b * int(f.split()[0]) * math.prod(s[n] for n in f.split()[1:]) for f in (forward, both))
        return first, second

    return cost


def ids(end: str, *sizes: str) -> Draw:
    """Draw whole numbers below a size."""
    return lambda s, like: torch.randint(s[end], [s[n] for n in sizes], device=like["device"])


def in_float32(draw: Callable[..., Tensor], *sizes: str) -> Draw:
    """Draw in float32, whatever the case's dtype."""
    return lambda s, like: draw([s[n] for n in sizes], device=like["device"])


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
