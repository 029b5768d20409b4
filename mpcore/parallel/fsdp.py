"""Apply torch's `fully_shard` to units, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mpcore._torch import fsdp, fsdp_wrap
from mpcore._torch.autograd import is_view
from mpcore._torch.compile import uncompiled
from mpcore._torch.distributed import reserve_groups, share_group
from mpcore._torch.pytree import map_tensors
from mpcore.layers.linear import ParallelLinear
from mpcore.mesh.agreement import merged
from mpcore.mesh.axis import Axis, Mesh
from mpcore.mesh.layout import divisors
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import is_dtensor


@dataclass(frozen=True)
class Zero:
    """Shard over the data-parallel ranks: ZeRO, and HSDP with `replicate`.

    Args:
        stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.
        replicate: the number of groups that hold all shards, each of `data.size / replicate` ranks, such as a node.
        param_dtype: the dtype in which parameters are gathered and used; None keeps their own.
        reduce_dtype: sum gradients in this dtype. Gradients of float64 parameters are summed in float64.

    Raises:
        ValueError: if the stage is none of 0, 1, 2 and 3.

    Example:
        >>> Zero(stage=3, replicate=2).stage
        3
    """

    stage: int = 1
    replicate: int = 1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero stage {self.stage!r} is none of 0, 1, 2 and 3")

    def check(self, mesh: Mesh) -> None:
        """Raise ValueError if the mesh can't be sharded so."""
        zero, replicate, data = self.stage, self.replicate, mesh.data.size
        if not isinstance(replicate, int) or replicate < 1 or data % replicate:
            raise ValueError(f"replicate {replicate!r} does not divide the data size {data}: {divisors(data)}")
        if replicate > 1 and (zero == 0 or replicate == data):
            raise ValueError(
                f"replicate {replicate} with zero {zero} on {data} data ranks leaves nothing to shard: zero=0 "
                f"with replicate=1 replicates everything; with zero from 1 {divisors(data)} below {data}"
            )
        if replicate > 1 and mesh.edp.size % replicate:
            raise ValueError(
                f"replicate {replicate} does not divide the edp size {mesh.edp.size} of the experts: "
                f"{divisors(mesh.edp.size)}"
            )
        if zero == 0 and (self.param_dtype is not None or self.reduce_dtype != torch.float32):
            raise ValueError(
                f"zero 0 computes in the parameters' own dtype and sums in float32, not in {self.param_dtype} and "
                f"{self.reduce_dtype}: use torch.autocast, or zero=1"
            )
        if self.param_dtype is not None and mesh.device_mesh is None:
            raise ValueError(f"param_dtype {self.param_dtype} needs a running torch.distributed: use torch.autocast")


class ExchangeReduceScatter:
    """The reduce-scatter of `fully_shard` as one exchange of shards. gloo's own sums all shards on every rank."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **how: Any) -> None:
        """Sum the ranks' inputs in rank order, and keep this rank's shard of the sum."""
        rank, size, shard = group.rank(), group.size(), len(output_tensor)
        kept = {0: input_tensor[shard:], size - 1: input_tensor[:-shard]}  # a message has no gap for one's own shard
        message = kept.get(rank, input_tensor)
        sizes = [0 if other == rank in kept else shard for other in range(size)]
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, sizes, sizes, group=group)
        terms = list(received.split(shard))
        if rank in kept:
            terms.insert(rank, input_tensor[rank * shard : (rank + 1) * shard])
        torch.add(terms[0], terms[1], out=output_tensor)
        for term in terms[2:]:
            output_tensor.add_(term)


class BroadcastAllGather:
    """The all-gather of `fully_shard` as one broadcast from each rank. gloo's own copies each shard once more."""

    allocate: Callable[..., Tensor] = ExchangeReduceScatter.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **how: Any) -> None:
        """Gather the ranks' inputs. This rank's input is already its part of the output."""
        shards = output_tensor.chunk(group.size())
        for work in [dist.broadcast(x, group=group, group_src=i, async_op=True) for i, x in enumerate(shards)]:
            assert work is not None
            work.wait()


class _NoView(torch.autograd.Function):
    """Return the same values in the same memory, but not as a view."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


@uncompiled
def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a unit's output without views: an in-place operation on one loses the hook that gathers parameters."""
    return map_tensors(lambda x: _NoView.apply(x) if x.requires_grad and is_view(x) else x, output)


class UnitWrapper:
    """Apply `fully_shard` with the arguments of one call of `shard_data_parallel`."""

    def __init__(self, mesh: Mesh, declared: dict[nn.Parameter, Sharding], policy: Zero) -> None:
        self.mesh = mesh
        self.declared = declared
        self.policy = policy
        assert mesh.device_mesh is not None
        self.data: DeviceMesh = _cut_axis(mesh.data, policy.replicate, mesh.device_type)
        self.is_gloo: bool = mesh.device_type == "cpu" and dist.get_backend(mesh.data.group) == "gloo"
        self.experts: Any = None
        if mesh.edp.size > policy.replicate and mesh.edp.group is not mesh.data.group:
            if not fsdp_wrap.SEVERAL_MESHES:
                raise ValueError(f"experts with zero {policy.stage} need torch 2.13, not {torch.__version__}: zero=0")
            self.experts = fsdp_wrap.placement_on(_cut_axis(mesh.edp, policy.replicate, mesh.device_type))

    def __call__(self, module: nn.Module, ignored: set[nn.Parameter], zero: int) -> None:
        """Make a module a unit. Parameters in `ignored`, or already in a unit, are unchanged."""
        held = [(owner, *place) for owner in module.modules() for place in owner.named_parameters(recurse=False)]
        mine = [(owner, leaf, p) for owner, leaf, p in held if p not in ignored and not is_dtensor(p)]
        reduce_dtype = None if any(p.dtype == torch.float64 for *_, p in mine) else self.policy.reduce_dtype
        dtypes = MixedPrecisionPolicy(self.policy.param_dtype, reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": self.data, "mp_policy": dtypes, "reshard_after_forward": zero == 3}
        if self.experts is not None:
            options["shard_placement_fn"] = self._placed
        if zero == 3:  # the others keep parameters gathered
            module.register_forward_hook(_without_views)  # before the hook of fully_shard
        unit = fully_shard(module, ignored_params=ignored, **options)
        for owner, leaf, p in mine:
            vars(owner.get_parameter(leaf)).update(vars(p))  # attributes that others read, such as groups' marks
        found = {(owner, leaf): self.form(owner, leaf, zero) for owner, leaf, _ in mine}
        fsdp_wrap.gather_in(unit, {place: form for place, form in found.items() if form is not None})
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if self.is_gloo and not any(self._placed(p) for *_, p in mine):  # torch refuses units on several meshes
            unit.set_custom_reduce_scatter(ExchangeReduceScatter())  # pyright: ignore[reportArgumentType]
            unit.set_custom_all_gather(BroadcastAllGather())  # pyright: ignore[reportArgumentType]
        fsdp.reduce_unused(unit)  # ranks may use different parameters
        fsdp.note_gathers(unit)  # and not different blocks

    def form(self, owner: nn.Module, leaf: str, zero: int, name: str = "") -> fsdp_wrap.GatherForm | None:
        """Return the form in which a layer's product wants its weight gathered, None for the weight as it is.

        Raises ValueError if the product refuses to have the weight sharded.
        """
        if not isinstance(owner, ParallelLinear) or leaf != "weight":
            return None
        return owner.product.gather_form(name, len(owner.weight), zero, self.mesh.data.size // self.policy.replicate)

    def _placed(self, parameter: nn.Parameter) -> Any:
        sharding = self.declared.get(parameter)
        return self.experts if sharding is not None and sharding.data_axis(self.mesh) is self.mesh.edp else None


def _cut_axis(axis: Axis, replicate: int, device_type: str) -> DeviceMesh:
    """Return the axis as torch's mesh; with `replicate` > 1 as (replicate, shard), each shard group consecutive."""
    assert axis.group is not None
    if replicate == 1:
        return DeviceMesh.from_group(axis.group, device_type, mesh_dim_names=(axis.name,))
    ranks = torch.tensor(dist.get_process_group_ranks(axis.group), dtype=torch.int)
    ranks = rearrange(ranks, "(replicate shard) -> replicate shard", replicate=replicate)
    row, column = divmod(axis.rank, ranks.shape[1])
    names = (f"{axis.name}_replicate", f"{axis.name}_shard")
    # The ranks of the axis make these groups alone: the others of the world may not be here.
    number = merged(axis, lambda: None, lambda _: reserve_groups(axis.size))
    groups = [
        share_group(ranks[:, column].tolist(), f"mpcore {names[0]}", number + column),
        share_group(ranks[row].tolist(), f"mpcore {names[1]}", number + ranks.shape[1] + row),
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)  # type: ignore[arg-type]
