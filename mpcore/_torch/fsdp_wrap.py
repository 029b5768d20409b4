"""Options of torch's `fully_shard`, and the output tensors that it finds.

Checked with torch 2.11 and 2.13. Before 2.13 all parameters of a unit are on one mesh, and `fully_shard` doesn't look
into dataclasses. This file imports FSDP, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData, FSDPParam

from mpcore._torch import pytree
from mpcore._torch.fsdp import parameters_of

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
except ImportError:  # before torch 2.13
    FSDPMeshInfo = HSDPMeshInfo = ShardPlacementResult = None
try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
except ImportError:  # before torch 2.13
    collect_grad_tensors = None

SEVERAL_MESHES = ShardPlacementResult is not None
"""Whether the parameters of one unit may lie on several meshes."""


def placement_on(mesh: DeviceMesh) -> Any:
    """Return the value that a `shard_placement_fn` returns for a parameter on a mesh of its own."""
    assert FSDPMeshInfo is not None
    assert HSDPMeshInfo is not None
    assert ShardPlacementResult is not None
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)
    return ShardPlacementResult(None, info)


class GatherForm(Protocol):
    """The form in which a unit gathers a parameter."""

    def cut(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Return what one rank sends of its shard, in the dtype to compute in: contiguous, in shards of dimension 0."""
        ...

    def join(self, gathered: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the gathered parameter, of `dtype`. It reads `gathered`, whose memory is filled again later."""
        ...


class _FormedParam(FSDPParam):
    """A parameter that `fully_shard` gathers in another form, by its extension points `fsdp_{pre,post}_all_gather`."""

    form: GatherForm

    @property
    def _sharded_local_tensor(self) -> Tensor:
        shard: Any = super()._sharded_local_tensor.detach()  # the parameter itself has no new attributes to save
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self._cut, self._join
        return shard

    def _cut(self, mesh: DeviceMesh, size: Any, stride: Any, module: nn.Module, policy: Any) -> tuple[Any, None]:
        return self.form.cut(super()._sharded_local_tensor.detach().to(self.param_dtype or self.orig_dtype)), None

    def _join(self, gathered: Any, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        return None if out is not None else (self.form.join(gathered, dtype), ())


def gather_in(unit: FSDPModule, forms: dict[tuple[nn.Module, str], GatherForm]) -> None:
    """Let a new unit gather parameters, given by module and name in it, in another form."""
    for p in parameters_of(unit) if forms else ():
        form = forms.get((p._module_info.module, p._module_info.param_name))
        if form is not None:
            p.__class__, p.form, p._extensions_data = _FormedParam, form, ExtensionsData()


def trained_tensors(out: Any) -> Sequence[Tensor]:
    """Return the tensors of an output that need a gradient and that `fully_shard` finds."""
    if collect_grad_tensors is not None:
        return collect_grad_tensors(out)
    return [x for x in pytree.leaves(out) if isinstance(x, Tensor) and x.requires_grad]


def looks_into(x: object) -> bool:
    """Return whether `fully_shard` looks for tensors inside an object that is not one of torch's containers."""
    return collect_grad_tensors is not None and is_dataclass(x)
