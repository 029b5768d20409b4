"""Recompute activations in backward instead of keeping them.

    kind        kept for each block                              recomputed, once per backward
    full        its input                                        the block up to the last tensor that backward needs
    selective   its input, results of linear layers              norms, activations, rotations, the attention core
                and of collectives                               (its two products too)

Losses, gradients and buffers are bitwise equal to those without recomputation. Dropout masks and routing are functions
of their inputs. Each call of a block keeps copies of the block's buffers, and the numbers in attributes: the
recomputation starts from these values, and what it writes to them is discarded.

Full recomputation repeats the collectives of the block's forward except the last all-reduce over tp: 1 more all-reduce
per block, in addition to 2 in forward and 2 in backward. Selective recomputation repeats none. With a split backward,
the pipeline recomputes twice.

Source: Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mpcore.kernels.fp8_matmul  # both define operators
import mpcore.kernels.grouped_linear  # noqa: F401
from mpcore._torch.autograd import running_node, saved_tensor_hooks
from mpcore._torch.dispatch import TorchDispatchMode, written_arguments
from mpcore._torch.fake import fake_tensors
from mpcore._torch.pytree import map_tensors
from mpcore._torch.storage import StorageWeakRef, address
from mpcore.collectives import all_reduce
from mpcore.layers.module import as_module_list
from mpcore.memory_footprint import StorageTracker, tensors_in
from mpcore.mesh.axis import Axis

KINDS = ("none", "selective", "full")
Example = tuple[Sequence[Any], Mapping[str, Any]]
_aten = torch.ops.aten
_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # at values, as saving and sending do
# Batched products are left out: they are the attention core where none is fused.
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.linear, _aten._grouped_mm, _aten._scaled_mm}
_PRODUCTS |= {torch.ops.mpcore.grouped_linear_forward, torch.ops.mpcore.fp8_matmul}


def recompute(
    blocks: Iterable[nn.Module],
    kind: str = "full",
    *,
    every: int = 1,
    budget: float | None = None,
    example: Example | Callable[[nn.Module], Example] | None = None,
    axes: Sequence[Axis] = (),
    preserve_rng_state: bool = True,
) -> list[str]:
    """Recompute activations of the blocks in backward instead of storing them (activation checkpointing).

    Return the kind of each block. The blocks change in place: names, parameters, outputs, gradients and buffers stay
    the same. Call it again to change the kind, or after you replaced submodules of a block. It works before and after
    `shard_data_parallel`, under any pipeline schedule, autocast and torch.compile. If you assigned a function to
    `block.forward`, that function is recomputed, and the kind "none" restores it.

    Note:
        - State other than buffers and the numbers in modules' attributes, such as a list, is updated twice.
        - Use `nn.RReLU`: the backward refuses `torch.rrelu` and `torch.nn.functional.rrelu` at the end of a block.

    Args:
        blocks: the blocks of this pipeline rank, in the order of their calls.
        kind: "full" keeps only a block's input; "selective" also keeps the results of linear layers and collectives;
            "none" keeps everything.
        every: recompute each n-th block, from the first; the others keep everything.
        budget: replaces `kind` and `every`: the fraction of the activation bytes that may be kept, in (0, 1]. Blocks
            become selective in order, then full in order, until the counted bytes fit.
        example: with `budget`, `(args, kwargs)` of a block's call, or a function of the block that returns them. Only
            shapes and dtypes matter: tensors may be on "meta".
        axes: with `budget`, the axes over which the blocks communicate, such as `(mesh.tp, mesh.data)`. The byte count
            is the maximum over their ranks, a collective, so that all ranks choose the same kinds.
        preserve_rng_state: save and restore the state of torch's generators. Only blocks that draw from them need it;
            mpcore's layers don't.

    Raises:
        ValueError: if the kind is unknown, `every` is below 1, `budget` is outside (0, 1] or has no `example`, or
            "full" for all blocks exceeds the budget; the message gives the smallest possible one.

    Example:
        >>> blocks = [mpcore.ParallelMLP(4, 16), mpcore.ParallelMLP(4, 16)]
        >>> mpcore.parallel.recompute(blocks, "selective", every=2)
        ['selective', 'none']
    """
    blocks = as_module_list(blocks)
    check_recompute(kind, every, budget, example)
    if budget is None or example is None:
        kinds = [kind if i % every == 0 else "none" for i in range(len(blocks))]
    else:
        kinds = _within(budget, blocks, example, axes)
    for block, kind in zip(blocks, kinds, strict=True):
        _apply(block, kind, preserve_rng_state)
    return kinds


def check_recompute(kind: str, every: int, budget: float | None, example: object) -> None:
    if kind not in KINDS:
        raise ValueError(f"recompute kind {kind!r} is unknown: it is one of {', '.join(map(repr, KINDS))}")
    if every < 1:
        raise ValueError(f"every {every} is smaller than 1: 1 recomputes each block, 2 every second")
    if budget is not None and not 0 < budget <= 1:
        raise ValueError(f"recompute budget {budget} is not above 0 and at most 1")
    if budget is not None and example is None:
        raise ValueError(f"recompute budget {budget} needs example=, which returns a block's arguments")


@dataclass(frozen=True)
class _Setting:
    """Say how a block recomputes. `_apply` stores it in the block's `__dict__`, so that copies of the block have it."""

    kind: str
    preserve_rng_state: bool
    modules: tuple[nn.Module, ...]  # the block and its submodules


_SETTING = "_mpcore_recompute"


def _apply(block: nn.Module, kind: str, preserve_rng_state: bool = True) -> None:
    block.__dict__[_SETTING] = _Setting(kind, preserve_rng_state, tuple(block.modules()))
    own = assigned_forward(block)
    block.__dict__.pop("forward", None)
    if kind != "none":
        # A partial: a deep copy of the block calls its own forward, and a pickled block finds it.
        block.__dict__["forward"] = partial(_forward, block, own)
    elif own is not None:
        block.__dict__["forward"] = own


def assigned_forward(module: nn.Module) -> Any:
    """Return the forward that was assigned to this module, without its recomputation; None: it has its class's."""
    held = module.__dict__.get("forward")
    return held.args[1] if isinstance(held, partial) and held.func is _forward else held


def _forward(block: nn.Module, own: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward with recomputation: `own`, a forward assigned to this block, or its class's forward."""
    forward = partial(type(block).forward, block, **kwargs) if own is None else partial(own, **kwargs)
    setting: _Setting = block.__dict__[_SETTING]
    if setting.kind == "none" or not torch.is_grad_enabled():  # "none": a forward that was set over this one calls it
        return forward(*args)
    options: dict[str, Any] = {}
    if torch.compiler.is_compiling():  # the graph has the modes, and returns what it writes to buffers
        if setting.kind == "selective":
            # torch's own contexts: the compiler reads the tags that these put on operators, and supports no others
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    else:
        to_the_end = any(isinstance(module, nn.RReLU) and module.training for module in setting.modules)
        options["early_stop"] = not to_the_end  # torch stops when autograd saves the noise, before RReLU fills it
        options["context_fn"] = partial(_contexts, setting, to_the_end)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=setting.preserve_rng_state, **options)


def _contexts(setting: _Setting, to_the_end: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if setting.kind == "full":
        return nullcontext(), _AsInForward(setting.modules, nullcontext())
    kept: list[Any] = []
    return _remember(kept, to_the_end), _AsInForward(setting.modules, _Replay(kept))


class _AsInForward:
    """In a recomputation give the modules the modes, numbers and buffers that they had before the forward.

    All values are kept, since batch norm and `buffer.data` write to buffers without a new version. The recomputation
    writes to copies. If a buffer's version is still the same at its end, autograd would read the value that the buffer
    has now, so the copy gets this value.
    """

    def __init__(self, modules: Iterable[nn.Module], context: AbstractContextManager[Any]) -> None:
        self.numbers = [(module, _numbers(module)) for module in modules]
        self.buffers = [(m, name, x) for m in modules for name, x in m._buffers.items() if x is not None]
        self.values = {buffer: _copy(buffer) for _, _, buffer in self.buffers}
        self.versions = {buffer: buffer._version for buffer in self.values if not buffer.is_inference()}
        self.context = context

    def __enter__(self) -> None:
        self.now = [(module, _numbers(module)) for module, _ in self.numbers]
        self.buffers_now = [(module, name, getattr(module, name)) for module, name, _ in self.buffers]
        self.copies = {buffer: _copy(value) for buffer, value in self.values.items()}
        self._set(self.numbers, [(module, name, self.copies[buffer]) for module, name, buffer in self.buffers])
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
        for buffer in (x for x, version in self.versions.items() if x._version == version):
            self.copies[buffer].data.copy_(buffer)
        self._set(self.now, self.buffers_now)
        del self.now, self.buffers_now, self.copies
        node = running_node()  # nodes run from the last to the first: this one saved the last tensor
        if error[0] and node and "RreluWithNoise" in type(node).__name__ and getattr(node, "_saved_training", True):
            raise ValueError("torch.rrelu ends a recomputed block, and its noise is lost: use nn.RReLU")

    def _set(self, numbers: list[tuple[nn.Module, Any]], buffers: list[tuple[nn.Module, str, Tensor]]) -> None:
        for module, held in numbers:
            for name in _numbers(module).keys() - held.keys():
                if name in dir(type(module)):  # the first value is the class's
                    del vars(module)[name]
            vars(module).update(held)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if isinstance(x, int | float | str)}


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


def kept_bytes(block: nn.Module, example: Example, kind: str | None = None) -> int:
    """Count the bytes that a call of the block keeps for backward, with its output and without its input.

    Args:
        example: `(args, kwargs)` of the call; only shapes, dtypes and what needs a gradient matter.
        kind: of recomputation; None: as the block is.
    """
    before = [(module, dict(module.__dict__)) for module in block.modules()]  # routers, for one, count tokens
    device = next((p.device for p in block.parameters() if not p.is_meta), torch.device("cpu"))
    with fake_tensors():

        def alike(x: Tensor) -> Tensor:
            return torch.empty_like(x, device=device).requires_grad_(x.requires_grad)

        args, kwargs = map_tensors(alike, (list(example[0]), dict(example[1])))
        parameters = {name: alike(p) for name, p in block.named_parameters()}
        try:
            if kind is not None:
                _apply(block, kind, False)
            with StorageTracker() as storages, torch.enable_grad():
                out = torch.func.functional_call(block, parameters, tuple(args), kwargs)
            total = storages.held()
            del out
        finally:
            for module, held in before:
                module.__dict__.clear()
                module.__dict__.update(held)
    return total


def _within(
    budget: float, blocks: list[nn.Module], example: Example | Callable[[nn.Module], Example], axes: Sequence[Axis]
) -> list[str]:
    calls = [example(block) if callable(example) else example for block in blocks]
    counted = [[kept_bytes(*call, kind) for kind in KINDS] for call in zip(blocks, calls, strict=True)]
    most = torch.tensor(counted, device=next((p.device for b in blocks for p in b.parameters() if not p.is_meta), None))
    for axis in axes:
        most = all_reduce(most, axis, "max")
    bytes_of: list[dict[str, int]] = [dict(zip(KINDS, each, strict=True)) for each in most.tolist()]
    kinds = ["none"] * len(blocks)
    limit = budget * sum(each["none"] for each in bytes_of)

    def total() -> int:
        return sum(each[kind] for each, kind in zip(bytes_of, kinds, strict=True))

    for kind in ("selective", "full"):
        for i, each in enumerate(bytes_of):
            if total() > limit and each[kind] < each[kinds[i]]:
                kinds[i] = kind
    if total() > limit:
        least = math.ceil(1000 * total() / sum(each["none"] for each in bytes_of)) / 1000  # one that can be asked for
        raise ValueError(f"budget {budget} is out of reach: with all blocks recomputed in full {least:.3f} is kept")
    return kinds


def _is_kept(func: Any) -> bool:
    return func.overloadpacket in _PRODUCTS or func.namespace == "_c10d_functional"


def _policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(func) else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _remember(kept: list[Any], to_the_end: bool) -> Iterator[None]:
    """In this context run a block's forward; at its end add the results of products and collectives to `kept`."""
    log = _Log()
    pack, unpack = saved_tensor_hooks()

    def noted(x: Tensor) -> Any:
        log.saved(x)
        return pack(x)

    with saved_tensors_hooks(noted, unpack), log:
        yield
    if to_the_end:
        log.end = len(log.entries)
    kept.extend(log.kept())
    log.entries.clear()  # autograd keeps the hook that knows it


class _Log(TorchDispatchMode):
    """Record which storages each operator of a forward reads and makes, and which storages autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weak: dict[int, StorageWeakRef] = {}  # so that no address is used twice
        self.entries: list[tuple[frozenset[int], frozenset[int], Any, bool]] = []
        self.written: set[int] = set()
        self.end = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.written |= self._ids(written_arguments(func, args, kwargs))
        result = map_tensors(Tensor.detach, out) if _is_kept(func) else None
        looks = bool(_LOOKS & set(func.tags)) or func.namespace == "c10d"
        self.entries.append((self._ids((args, kwargs)), self._ids(out), result, looks))
        return out

    def saved(self, x: Tensor) -> None:
        """Record that autograd saves `x`. Backward needs its value; recomputation stops at the last saved tensor."""
        self.entries.append((self._ids(x), frozenset(), None, True))
        self.end = len(self.entries)

    def kept(self) -> list[Any]:
        """Return an entry for each product and collective, in the order of the calls.

        The entry is the result. It is a tensor without memory if recomputation needs only the shape, and None if the
        result was written to in place, so that it must be computed again.
        """
        needed: set[int] = set()
        values = []
        for i, (reads, makes, result, looks) in reversed([*enumerate(self.entries)]):
            if result is not None and not makes & self.written:
                values.append(
                    result if makes & needed else map_tensors(lambda x: x.new_empty(()).expand(x.shape), result)
                )
                continue
            if result is not None:
                values.append(None)
            if i < self.end and (looks or makes & needed):
                needed |= reads
        return values[::-1]

    def _ids(self, tree: Any) -> frozenset[int]:
        ids = []
        for x in tensors_in(tree):
            storage = x.untyped_storage()
            self.weak.setdefault(address(storage), StorageWeakRef(storage))
            ids.append(address(storage))
        return frozenset(ids)


class _Replay(TorchDispatchMode):
    """In a recomputation return the recorded results of products and collectives instead of computing them."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.results, self.next = kept, 0

    def __enter__(self):
        self.next = 0  # split backward recomputes twice
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if _is_kept(func):
            result = self.results[self.next]
            self.next += 1
            if result is not None:
                return map_tensors(Tensor.detach, result)
        return func(*args, **(kwargs or {}))
