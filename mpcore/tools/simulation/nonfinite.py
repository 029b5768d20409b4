"""Find the first operator whose output isn't finite, with its module and micro-batch."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mpcore._torch.autograd import running_node
from mpcore._torch.dispatch import OpOverload, TorchDispatchMode, overload_name, written_arguments
from mpcore.tools.fault_tolerance.trace import call_site

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
_COLLECTIVES = ("_c10d_functional", "c10d")
_EXECUTOR = os.path.join("pipeline", "executor.py")
_MODULE = "mpcore.module"  # in the metadata of autograd's nodes
_KEPT = 4096  # number of excuses from which those of freed memory are dropped


class NonFiniteError(BaseException):
    """An operator computed NaN or infinity. The message names the operator and where it ran.

    It is not an `Exception`: a pipeline would catch that and continue to the end of the step.
    """


def _metadata(node: Any) -> dict[str, str]:
    return node.metadata  # torch's stubs declare it as a method


class FiniteCheck(TorchDispatchMode):
    """Raise `NonFiniteError` at the first operator in this context whose output isn't finite.

    Forward, backward and the optimizer are checked. An infinity that the program writes on purpose, such as the -inf of
    a mask, is allowed, and so are infinities computed from it; NaN is not. Uninitialized memory is not checked.

    Note:
        - The host waits for each operator.
        - Operators inside a compiled graph or inside one Triton kernel, and operators on DTensors, are not checked.
    """

    def __init__(self, stages: Sequence[nn.Module], doing: str = "") -> None:
        super().__init__()
        self.stages = stages
        self.doing = doing
        self._path: list[str] = []
        self._excused: dict[int, tuple[StorageWeakRef, str]] = {}  # "inf", or "any" for memory that nobody wrote
        self._handles: list[Any] = []

    def __enter__(self) -> FiniteCheck:
        for stage in self.stages:
            self._note([x for x in stage.buffers() if not _is_finite(x) and not x.isnan().any()], "inf")  # masks
            for name, module in stage.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._begin(name)))
                self._handles.append(module.register_forward_hook(self._end(name), always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, name: str) -> Any:
        return lambda *_: self._path.append(name)

    def _end(self, name: str) -> Any:
        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            self._path.pop()
            given = {x.grad_fn for x in _tensors(inputs)}
            todo = [x.grad_fn for x in _tensors([output]) if x.grad_fn is not None]
            while todo:  # the nodes that this module made itself, not its submodules
                node = todo.pop()
                if node in given or _MODULE in _metadata(node):
                    continue
                _metadata(node)[_MODULE] = name
                todo += [other for other, _ in node.next_functions if other is not None]

        return end

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [x for x in written_arguments(func, args, kwargs) if isinstance(x, Tensor)]
        overwrites = func.overloadpacket.__name__ in ("copy_", "fill_", "zero_") or "out" in overload_name(func)
        spoiled = [] if overwrites else [x for x in written if not _is_finite(x)]
        output = func(*args, **kwargs)
        bad = [x for x in _tensors([output]) if not _is_finite(x)]
        if bad and not func.is_view:  # a view computes nothing
            self._judge(func, [*args, *kwargs.values()], written, spoiled, bad, output)
        return output

    def _judge(
        self, func: OpOverload, given: list[Any], written: list[Any], spoiled: list[Any], bad: list[Tensor], output: Any
    ) -> None:
        """Allow a value that isn't finite, or raise."""
        name, own = func.overloadpacket.__name__, {id(x) for x in written}
        inputs = [x for x in _tensors(given) if id(x) not in own]
        wrong = [x for x in inputs if not _is_finite(x)] + spoiled
        excuses = {self._excuse(x) for x in wrong}
        nan = any(bool(x.isnan().any()) for x in bad)
        if name in _EMPTY or (func.namespace in _COLLECTIVES and name != "wait_tensor") or "any" in excuses:
            excuse = "any"
        elif not nan and (
            (not inputs and not written) or any(isinstance(x, float) and not math.isfinite(x) for x in _leaves(given))
        ):
            excuse = "inf"
        elif not nan and "attention" in name and bad[0] is not output[0]:
            excuse = "inf"  # the log-sum-exp of a row that attends to no key
        elif not nan and (excuses == {"inf"} or (name == "wait_tensor" and None not in excuses)):
            excuse = "inf"
        else:
            raise NonFiniteError(self._text(func, bad[0], wrong))
        self._note(bad, excuse)

    def _note(self, tensors: list[Tensor], excuse: str) -> None:
        for x in tensors:
            ref = StorageWeakRef(x.untyped_storage())
            self._excused[ref.cdata] = ref, excuse
        if len(self._excused) > _KEPT:
            self._excused = {key: entry for key, entry in self._excused.items() if not entry[0].expired()}

    def _excuse(self, x: Tensor) -> str | None:
        found = self._excused.get(StorageWeakRef(x.untyped_storage()).cdata)
        return found[1] if found and not found[0].expired() else None

    def _text(self, func: OpOverload, x: Tensor, wrong: list[Tensor]) -> str:
        node = running_node()
        module = self._path[-1] if self._path else _metadata(node).get(_MODULE) if node is not None else None
        where = f"in {module or 'the model itself'}" if module is not None else "outside of the model's modules"
        way = "backward" if node is not None else "forward" if module is not None else "neither forward nor backward"
        batch = _micro_batch()
        batched = "" if batch is None else f", micro-batch {batch}"
        count = int(_plain(x).isfinite().logical_not().sum())
        kind = "NaN" if bool(_plain(x).isnan().any()) else "infinity"
        inputs = "an input was not finite already" if wrong else "its inputs are finite"
        return (
            f"{self.doing}{self.doing and ': '}{func} made {kind} {where} ({way}{batched}): {count} of {x.numel()} "
            f"elements of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}; {inputs}; at "
            f"{call_site(_caller())}"
        )


def _caller() -> Any:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _micro_batch() -> int | None:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_EXECUTOR) and "m" in frame.f_locals:
            return frame.f_locals["m"]
        frame = frame.f_back
    return None


def _leaves(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, list | tuple | Mapping):
            yield from _leaves(value)
        else:
            yield value


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in _leaves(values) if type(x) in (Tensor, nn.Parameter)]


def _plain(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _is_finite(x: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()) or type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return True
    if x.untyped_storage().nbytes() == 0:  # freed by ZeRO
        return True
    return bool(_plain(x).isfinite().all())
