"""Check the loss in a run's first step: a mean, or a shard of logits used as all logits, would raise no error."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpcore._torch import pytree
from mpcore._torch.compile import eagerly
from mpcore.collectives import all_reduce
from mpcore.mesh.agreement import raise_together
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.training.replica_check import sketch

log: Logger = get_logger(__name__)
Loss = Callable[[Any, Tensor], Tensor]
SHARDED = "sharded logits need mpcore.vocab_parallel_cross_entropy(.., tp=mesh.tp, vocab_size=V), not F.cross_entropy"


def with_mesh(loss: Callable[..., Tensor], mesh: Mesh) -> Loss:
    """Return `loss(output, target)` of a loss that may also accept the mesh: as `mesh`, or as a third argument."""
    try:
        asked = inspect.signature(loss).parameters
    except (ValueError, TypeError):  # a builtin function without a signature
        return loss
    if "mesh" in asked:
        return partial(loss, mesh=mesh)
    needed = sum(x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in asked.values())
    return (lambda output, target: loss(output, target, mesh)) if needed > 2 else loss


class LossCheck:
    """Check the loss of a step: a sum over tokens, the same on every rank of tp, of other samples on each rank of dp.

    If each micro-batch has one token, a mean equals a sum, and nothing is checked. A loss that can't be checked passes.
    A cross-entropy that is divided by a number of ranks gets a warning: the loss of equal logits is log(vocabulary
    size) for each token, so the factor shows.
    """

    def __init__(self, mesh: Mesh, tokens: Tensor | int, micro_batches: int) -> None:
        self.mesh = mesh
        self.micro_batches = micro_batches
        self.tokens: int = int(tokens) if int(tokens) > micro_batches * mesh.data.size else 0
        self.is_due: bool = self.tokens > 0
        self.is_mean: bool = False
        self.samples: float = math.nan
        self.width: int = 0
        self.flat: float = math.nan  # the loss of a token whose logits are equal

    def call(self, loss: Loss, output: Any, target: Tensor) -> Any:
        """Return the loss. In the first micro-batch, compare it with the loss of the same samples repeated twice."""
        if not self.is_due:
            return loss(output, target)
        self.is_due = False
        devices = [self.mesh.device] if self.mesh.device_type == "cuda" else []
        try:
            with torch.no_grad(), eagerly(), torch.random.fork_rng(devices):
                samples = pytree.map_tensors(lambda x: torch.cat([x, x]) if x.dim() else x, (output, target))
                twice = float(loss(*samples))
                if isinstance(output, Tensor) and target.shape == output.shape[:-1] and not target.is_floating_point():
                    flat = float(loss(torch.zeros_like(output), target))
                    self.width: int = output.shape[-1]
                    self.flat: float = flat / max(1, int((target.long() != -100).sum()))
        except Exception:  # for example, a loss that accepts only one batch size
            twice = math.nan
        try:
            once = loss(output, target)
        except IndexError as error:
            if self.mesh.tp.size == 1:
                raise
            raise ValueError(f"the loss looked outside its input ({error}); if that is sharded: {SHARDED}") from error
        if isinstance(once, Tensor) and once.numel() == 1 and once.is_floating_point():
            varied = target.numel() and (target != target.flatten()[0]).any()  # not a batch of constants
            if self.mesh.dp.size > 1 and varied:
                self.samples = float(sketch(target, target.device)[0]) + float(once.detach())
            value, slack = float(once.detach()), max(1e-5, 4 * torch.finfo(once.dtype).eps)
            self.is_mean = abs(twice - value) <= slack * abs(value) > 0  # a sum is twice as large
            if once.dtype.itemsize == 2 and self.mesh.job.rank == 0:
                log.warning("the loss is %s, with three digits: give it logits.float()", once.dtype)
        return once

    def end(self, total: Tensor) -> None:
        """After backward, raise on every rank if the loss is wrong. `total` is the sum of this rank's losses."""
        if not self.tokens:
            return
        self._warn_of_factor(int(all_reduce(torch.tensor(self.width, device=self.mesh.device), self.mesh.tp)))
        high, low = (all_reduce(torch.stack([total, -total]), self.mesh.tp, "max") * total.new_tensor([1, -1])).tolist()
        error, dp = None, self.mesh.dp
        mine = dp.rank if math.isnan(self.samples) else self.samples
        samples = torch.tensor([mine, -mine], dtype=torch.float64, device=self.mesh.device)
        most, least = all_reduce(samples, dp, "max").tolist()
        if high - low > 1e-5 * abs(high):
            error = ValueError(
                f"the ranks of tp have different losses, from {low:.6g} to {high:.6g}: "
                f"{SHARDED}; or nn.Dropout drops other elements on each rank: use mpcore.Dropout, or seed the ranks of "
                f"tp alike; or the ranks hold other weights, as without one torch.manual_seed for all"
            )
        elif self.is_mean:
            error = ValueError(
                f"the loss is a mean, as it stays the same when each sample comes twice: return the sum over tokens "
                f"(reduction='sum'), which the run divides by the {self.tokens} tokens of the step"
            )
        elif most == -least and dp.size > 1:
            error = ValueError(
                f"all {dp.size} ranks of dp have the same samples: pass each rank its own, x[run.share(B)] of the B "
                f"samples of a step"
            )
        raise_together(error, self.mesh.world)

    def _warn_of_factor(self, vocabulary: int) -> None:
        """Warn if the cross-entropy of equal logits is off by a factor that is a number of ranks or micro-batches."""
        mesh = self.mesh
        sizes = {"tp": mesh.tp.size, "dp": mesh.dp.size, "dp x cp": mesh.data.size, "the world size": mesh.job.size}
        sizes["micro_batches"] = self.micro_batches
        for width in {self.width, vocabulary} - {0, 1}:
            factor = self.flat / math.log(width)
            names = [name for name, n in sizes.items() if n > 1 and abs(max(factor, 1 / (factor or 1)) / n - 1) < 1e-4]
            if names and mesh.tp.rank == mesh.data.rank == 0:
                how, against = ("divided", "divide") if factor < 1 else ("multiplied", "multiply")
                log.warning("the loss is %.4g times the cross-entropy of its tokens: if it is %s by %s, do not %s it. "
                            "The run divides the sum once, by the tokens of the step on all ranks",
                            factor, how, " or ".join(names), against)  # fmt: skip


def check_targets(mesh: Mesh, target: Any) -> None:
    """Raise ValueError on every rank if the ranks of tp or pp have different targets in the first step.

    Each rank would compute a part of another batch, and no shape or loss would show it.
    """
    held = [x for x in ([target] if isinstance(target, Tensor) else target) if isinstance(x, Tensor)]
    found = sum(float(sketch(x, x.device)[0]) + x.numel() for x in held)  # the count, if all targets are 0
    mine = torch.tensor(float(found), dtype=torch.float64, device=mesh.device)
    error = None
    for axis in (mesh.tp, mesh.pp):
        most, least = all_reduce(torch.stack([mine, -mine]), axis, "max").tolist()
        if most + least > 1e-9 * abs(most):
            error = ValueError(
                f"the ranks of {axis.name} have different targets, though they compute the same samples: pass "
                f"x[run.share(B)] of the B samples of a step; torch's DistributedSampler shards over all processes"
            )
    raise_together(error, mesh.world)
