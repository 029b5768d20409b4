"""Hide messages of sequence parallelism with torch's operators on symmetric memory of the GPUs of one host.

`torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter` copy shards from GPU to GPU while
parts of the product run. A self-test compares them with `overlap_communication` before they are used.

Note: no run on GPUs has tested this. The tests run torch's fallbacks of the two operators on CPUs.

Source: Wang et al. 2024, "Introducing async tensor parallelism in PyTorch" (TorchTitan; pytorch.org forum).
"""

from __future__ import annotations

import socket
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpcore._torch.symmetric_memory import lacks_fused_products, symmetric_memory_ops
from mpcore.layers.linear import ParallelLinear
from mpcore.layers.overlap import SMALLEST, OverlapProduct, overlap_communication
from mpcore.mesh.agreement import gather_objects
from mpcore.mesh.axis import Axis


@dataclass(frozen=True)
class SymmetricProduct(OverlapProduct):
    """An `OverlapProduct` whose all-gathers and reduce-scatters of a sequence run in torch's fused operators."""

    def all_gather_linear(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, tp: Axis, dim: int, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """See `OverlapProduct.all_gather_linear`."""
        gather = symmetric_memory_ops.fused_all_gather_matmul
        whole, (y,) = gather(x, [matrix], dim % x.dim(), tp.group_name, return_A=keep)
        return (whole.contiguous() if keep else x), (y if bias is None else y + bias).contiguous()

    def linear_reduce_scatter(self, x: Tensor, matrix: Tensor, tp: Axis, dim: int) -> Tensor:
        """See `OverlapProduct.linear_reduce_scatter`."""
        scatter = symmetric_memory_ops.fused_matmul_reduce_scatter
        return scatter(x, matrix, "sum", dim % x.dim(), tp.group_name).contiguous()


def overlap_in_symmetric_memory(
    model: nn.Module, tp: Axis, device: torch.device | str = "cuda", smallest: int = SMALLEST
) -> str:
    """Call `overlap_communication`, and use torch's operators on symmetric memory if they pass a self-test.

    Call it on every rank before `prepare`, and leave out prepare's `overlap`. The ranks of tp agree: if one of them
    can't use the operators, none does, and a warning says why. Layers on other axes than `tp`, and messages without
    sequence parallelism, are overlapped as by `overlap_communication`.

    Args:
        model: the model, or this rank's pipeline stage.
        tp: the axis of tensor parallelism, `mesh.tp`.
        device: the device of this rank, with its index, such as `torch.device("cuda", 0)`.
        smallest: see `overlap_communication`.

    Returns:
        Why the operators are not used; "" if they are.

    Raises:
        ValueError: see `overlap_communication`.

    Example:
        >>> mlp = mpcore.ParallelMLP(4, 8)
        >>> mpcore.experimental.overlap_in_symmetric_memory(mlp, mpcore.Axis(role="tp"), "cpu")
        'tp has one rank'
    """
    overlap_communication(model, smallest)
    if why := _problem(tp, torch.device(device)):
        if tp.size > 1:
            warnings.warn(f"symmetric memory is not used: {why}. overlap_communication is", stacklevel=2)
        return why
    for layer in model.modules():
        if isinstance(layer, ParallelLinear) and layer.tp is tp:
            layer.product = layer.product.change(lambda base: SymmetricProduct(**vars(base)))
    return ""


def _problem(tp: Axis, device: torch.device) -> str:
    """Return why the ranks of tp can't use the operators. All ranks return the same."""
    if tp.size == 1:
        return "tp has one rank"
    peers = gather_objects((lacks_fused_products(device), socket.gethostname(), device.index or 0), tp.group)
    missing, hosts, indices = zip(*peers, strict=True)
    if any(missing) or len({*hosts}) > 1:
        return next(filter(None, missing), f"the {tp.size} ranks of tp are on {len({*hosts})} hosts")
    others = {*indices} - {device.index or 0} if device.type == "cuda" else ()
    far = [i for i in others if not torch.cuda.can_device_access_peer(device, i)]
    found = gather_objects(f"GPU {device.index} can't access the memory of GPU {far[0]}" if far else "", tp.group)
    if not any(found):
        found = gather_objects(_fault(tp, device), tp.group)
    return next(filter(None, found), "")


@torch.no_grad()
def _fault(tp: Axis, device: torch.device) -> str:
    """Compare both operators with `OverlapProduct` on whole numbers, whose sums are exact in bfloat16."""
    draws, found = torch.Generator().manual_seed(tp.rank), ""
    for dim in (0, 1):
        x, dy = (torch.randint(-1, 2, (8 * tp.size,) * 3, generator=draws).to(device, torch.bfloat16) for _ in range(2))
        gather, scatter = (x, dy[0], dy[0, 0], tp, dim, True), (x, dy[0], tp, dim)
        for name, arguments in (("all_gather_linear", gather), ("linear_reduce_scatter", scatter)):
            want = getattr(OverlapProduct(), name)(*arguments)
            try:  # all ranks go on, as the others wait for this one in the next call
                got = getattr(SymmetricProduct(), name)(*arguments)
            except Exception as error:  # whatever a driver raises is the finding
                found = found or f"{name} raises {type(error).__name__}: {error}"
            else:
                pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
                if not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
                    found = found or f"{name} over dimension {dim} has other results than overlap_communication"
    return found
