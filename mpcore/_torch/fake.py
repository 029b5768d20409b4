"""Tensors without memory, and process groups without other processes.

Checked with torch 2.11 and 2.13: no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (the import registers the backend)

NoValueError = DataDependentOutputException
"""Raised where an operator reads the value of a fake tensor. Its `func` is the operator."""


_aten = torch.ops.aten
_STRAIGHT = {  # views, whose results share a storage; and what works without tensors
    _aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.permute.default,
    _aten.detach.default, _aten.alias.default, _aten.select.int, _aten.slice.Tensor, _aten.as_strided.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.unsafe_split_with_sizes.default, _aten.add_.Tensor, _aten.mul_.Tensor,
    _aten.copy_.default, torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}  # fmt: skip
_KEPT = ("aten", "_c10d_functional", "mpcore")
"""The namespaces of operators whose results are cached if they are new tensors. Those of mpcore may write to arguments:
fake tensors have no values."""
_WRITE = ("aten::_foreach_copy_", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")
"""Operators that only write to arguments of the right shapes."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)


class _Fake(FakeTensorMode):
    """torch's mode, but a view runs its meta kernel at once, and more results are cached: a third of the time.

    Attributes:
        results: the form of each result, by operator and arguments. None: they can't be cached. All modes share it.
    """

    results: ClassVar[dict[object, tuple[Any, ...] | None]] = {}

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> object:
        if func is torch.ops.prim.device.default:
            return device_of(args[0])
        if func in _STRAIGHT:
            device = self._device_of(args)
            if device is None or kwargs:
                return super().dispatch(func, types, args, kwargs)
            with in_kernel_invocation_manager(self):
                out = func(*args)
            return self._wrap(out, device)
        key = self._key((args, *(kwargs or {}).items())) if _is_kept(func) else None
        if key is None:
            return super().dispatch(func, types, args, kwargs)
        key = func, torch.get_default_dtype(), key
        if key not in self.results:
            out = super().dispatch(func, types, args, kwargs)
            self.results[key] = _form_of(out, (args, *(kwargs or {}).values()))
            return out
        found = self.results[key]
        if found is None:
            return super().dispatch(func, types, args, kwargs)
        is_one, forms = found
        with in_kernel_invocation_manager(self):
            made = [form and torch.empty_strided(*form[:2], dtype=form[2], device="meta") for form in forms]
        out = [x if x is None else FakeTensor(self, x, form[3]) for x, form in zip(made, forms, strict=True)]
        return out[0] if is_one else tuple(out)

    def _device_of(self, args: Sequence[Any]) -> torch.device | None:
        """Return the one device of the tensors among the arguments. None: torch must look at them."""
        device = torch.device("cpu")
        first = None
        for x in args:
            if isinstance(x, Tensor):
                if type(x) is not FakeTensor or x.fake_mode is not self or x.constant is not None:
                    return None
                if first is None:
                    first = device = x.fake_device
                elif x.fake_device != first:
                    return None
        return device

    def _key(self, tree: Any) -> Any:
        """Return what an operator's result depends on, as a key. None: torch must look at the arguments."""
        if type(tree) is FakeTensor:
            if tree.fake_mode is not self or tree.constant is not None or tree.layout != torch.strided:
                return None
            return tuple(tree.shape), tree.stride(), tree.dtype, tree.storage_offset(), tree.fake_device
        if isinstance(tree, (list, tuple)):
            parts = []
            for x in tree:
                part = self._key(x)
                if part is None:
                    return None
                parts.append(part)
            return tuple(parts)
        return (type(tree), tree) if isinstance(tree, _PLAIN) else None

    def _wrap(self, out: Any, device: torch.device) -> Any:
        if isinstance(out, Tensor):
            return out if isinstance(out, FakeTensor) else FakeTensor(self, out, device)
        return [self._wrap(x, device) for x in out] if isinstance(out, (list, tuple)) else out


@cache
def _is_kept(func: Any) -> bool:
    namespace = getattr(func, "namespace", "")
    if func.name() in _WRITE:
        return True
    return namespace in _KEPT and not func.is_view and (namespace == "mpcore" or not func._schema.is_mutable)


def _form_of(out: Any, args: Any) -> tuple[Any, ...] | None:
    """Return whether there is one result, and the form of each. None: one isn't a new tensor that fills its storage."""
    outs = out if isinstance(out, tuple) else (out,)
    seen = set()
    forms: list[tuple[Any, ...] | None] = []
    for x in outs:
        if x is None:
            forms.append(None)
            continue
        if type(x) is not FakeTensor or x.constant is not None or x.layout != torch.strided or x.dtype.is_complex:
            return None
        storage = x.untyped_storage()
        size = (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.itemsize if x.numel() else 0
        if storage._cdata in seen or storage.nbytes() != size or _shares(storage, args):
            return None
        seen.add(storage._cdata)
        forms.append((tuple(x.shape), x.stride(), x.dtype, x.fake_device))
    return not isinstance(out, tuple), tuple(forms)


def _shares(storage: torch.UntypedStorage, tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return tree.untyped_storage()._cdata == storage._cdata
    return isinstance(tree, (list, tuple)) and any(_shares(storage, x) for x in tree)


def is_fake(x: object) -> bool:
    """Return whether a tensor is fake: it has a shape, a dtype and a device, but no values."""
    return isinstance(x, FakeTensor)


def device_of(x: FakeTensor) -> torch.device:
    """Return the device that a fake tensor pretends to be on."""
    return x.fake_device


def fake_tensors(stands_for_gpu: bool = False) -> FakeTensorMode:
    """Return a context in which every new tensor is fake. Operators accept real tensors too.

    Args:
        stands_for_gpu: if True, `mpcore.kernels` calls its GPU kernels for fake tensors on the CPU. Fake tensors on
            "cuda" would raise in autograd if torch is built without CUDA.
    """
    mode = _Fake(allow_non_fake_inputs=True)
    mode.stands_for_gpu = stands_for_gpu  # type: ignore[attr-defined]  # read by `mpcore.kernels`
    return mode


def start_fake_world(size: int, rank: int) -> None:
    """Start torch.distributed as one rank of a world whose other ranks don't exist. Collectives compute nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
