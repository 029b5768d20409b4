"""A prepared model in training: `Run` has the calls of a training loop, and refuses a wrong order of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpcore._torch.compile import eagerly
from mpcore.checkpoint import Loaded, Saving, load, save, save_async, step_path
from mpcore.collectives import all_reduce
from mpcore.gradients.drop import drop_gradients
from mpcore.gradients.norm import clip_gradients, grad_norm
from mpcore.gradients.reduce import reduce_gradients
from mpcore.layers.moe.statistics import RouterStatistics, update_routers
from mpcore.mesh.axis import Mesh
from mpcore.optim.loss_scale import LossScaler
from mpcore.parallel.local_updates import OUTER_SLOTS, DiLoCo, Merge
from mpcore.parallel.offload import ParameterOffload, offload_activations
from mpcore.parallel.precision import autocast
from mpcore.pipeline.engine import Pipeline
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.local import reshard
from mpcore.training.policies import Offload, Precision

IGNORED = -100  # a target that no loss counts, as of torch's cross_entropy


class StepResult(NamedTuple):
    """What a step did, the same on every rank.

    Attributes:
        loss: the mean over the step's tokens, before the step.
        grad_norm: of the whole model's gradient, before clipping.
        taken: whether the optimizer stepped; False where the loss or a gradient was not finite.
        merge: what the workers' merge after this step did; None: none was due.
        routers: by name of each router of this rank what its experts' loads were.
    """

    loss: float
    grad_norm: float
    taken: bool
    merge: Merge | None
    routers: Mapping[str, RouterStatistics]


class Run:
    """What `prepare` returns. A step is `forward_backward`, then `clip_gradients` if you clip, then `optimizer_step`.

        for step in range(run.step, steps):
            run.forward_backward(x, target)
            run.clip_gradients(1.0)
            result = run.optimizer_step()

    Attributes:
        model: the prepared model; of several stages all of this rank's as one module, to be saved and not called.
        stages: this rank's stages, lowest first.
        optimizer: as `prepare` made it.
        pipeline: runs the micro-batches.
        scaler: the loss scale of float16; else None.
        step: optimizer steps that are done, skipped ones too.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: list[nn.Module],
        mesh: Mesh,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Precision,
        offload: Offload = Offload(),
        seed: int = 0,
    ) -> None:
        self.model, self.stages, self.mesh, self.optimizer, self.seed = model, stages, mesh, optimizer, seed
        self.precision, self.offload = precision, offload
        half = precision.autocast == torch.float16
        self.scaler = LossScaler(mesh, precision.first_loss_scale) if half else None
        self.step = 0
        self.pipeline: Pipeline
        self.offloaded: ParameterOffload | None = None
        self._tree = ModelTree(model)
        self._factor = torch.ones((), dtype=torch.float64, device=mesh.device)  # of the loss, in the step at work
        self._begun = False  # the workers have agreed on what they begin with
        self._next = "forward_backward"  # the call that may come; "clip_gradients", "optimizer_step" follow
        self._loss = self._norm = self._factor

    # --- a step -------------------------------------------------------------------------------------------------------

    def scaled(self, loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        """A loss that sums over tokens as one that is divided by the step's tokens, and scaled for float16."""

        def scaled_loss(output: Any, target: Tensor) -> Tensor:
            total = loss(output, target)
            return total * self._factor.to(total.dtype) if isinstance(total, Tensor) else total

        return scaled_loss

    def loss_factor(self, tokens: Tensor | int) -> Tensor:
        """What each token's loss is multiplied by in a step of so many tokens on all ranks: a scalar in float64.

        A loss that a layer makes itself, such as the balance loss of experts, needs it as an argument.
        """
        scale = self.scaler.scale if self.scaler else 1.0
        count = torch.as_tensor(tokens, dtype=torch.float64, device=self.mesh.device)
        return scale / torch.where(count == 0, 1.0, count)  # a batch without tokens has loss 0 and gradients 0

    def count_tokens(self, target: Tensor) -> Tensor:
        """The tokens that count in the step, over all data-parallel ranks: targets that are not -100."""
        return all_reduce((target != IGNORED).sum().to(self.mesh.device), self.mesh.data).double()

    def forward_backward(
        self, x: Tensor, target: Tensor, *, tokens: Tensor | int | None = None, **arguments: Tensor
    ) -> Tensor:
        """Run forward and backward of this rank's part of a batch, micro-batch by micro-batch.

        Args:
            x: [B, ...] the model's input, on every rank of the pipeline.
            target: [B, ...] what the loss takes.
            tokens: what the summed loss is divided by, over all ranks; None: the targets that are not -100.
            arguments: [B, ...] tensors that the model takes by name.

        Returns:
            The mean loss over the step's tokens in float64, the same on every rank. Nothing waits for the device.

        Raises:
            ValueError: if gradients of the call before are still there, or the batch doesn't fit the micro-batches.
        """
        self._may("forward_backward")
        self.begin_merges()
        tokens = self.count_tokens(target) if tokens is None else tokens
        self._factor = self.loss_factor(tokens)
        self._next = "drop_gradients"  # where what follows raises
        moved = offload_activations() if self.offload.activations else nullcontext()
        with self._autocast(), moved:
            total = self.pipeline.forward_backward(x, target, **arguments)
        self._loss = all_reduce(total, self.mesh.data) / (self.scaler.scale if self.scaler else 1.0)
        self._next = "clip_gradients"
        return self._loss

    def finish_gradients(self) -> Tensor:
        """Sum the gradients that are pending over ranks, undo the loss scale, and measure the norm.

        `clip_gradients` and `optimizer_step` call it; call it yourself to read gradients before them.

        Returns:
            The norm of the whole model's gradient in float64, the same on every rank.
        """
        if self._next == "clip_gradients":
            reduce_gradients(self._tree)
            if self.scaler:
                self.scaler.unscale(self._tree)
            self._norm = grad_norm(self._tree, self.mesh)
            self._next = "optimizer_step"
        self._may("optimizer_step")
        return self._norm

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; 0 or less clips nothing.

        Returns:
            The norm before clipping, in float64, the same on every rank.

        Raises:
            ValueError: where no gradients are there, or they are clipped already.
        """
        self._may("clip_gradients")
        norm = self.finish_gradients()
        clip_gradients(self._tree, max_norm, norm)
        return norm

    def optimizer_step(self, lr: float | None = None) -> StepResult:
        """Step the optimizer, or skip the step on every rank alike where the loss or a gradient is not finite.

        Then forget the gradients, move the biases of routers, and merge workers where that is due. The host waits for
        the device once.

        Args:
            lr: the learning rate, set in every parameter group; None: as the groups have it.

        Raises:
            ValueError: before `forward_backward`.
        """
        norm = self.finish_gradients()
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        loss, length = torch.stack([self._loss.to(norm), norm]).tolist()
        finite = math.isfinite(loss) and math.isfinite(length)  # both are sums over all ranks: all decide alike
        taken = self.scaler.update(finite) if self.scaler else finite
        if taken:
            self.optimizer.step()
        drop_gradients(self._tree)
        routers = update_routers(self._tree, self.mesh)
        self.step += 1
        self._next = "forward_backward"
        self._loss = self._norm = self._factor
        return StepResult(loss, length, taken, self._merge(), routers)

    def drop_gradients(self) -> None:
        """Give up a step, on every rank: also after a `forward_backward` that raised."""
        for stage in self.stages:
            drop_gradients(stage)
        drop_gradients(self.model)
        self._next = "forward_backward"

    def _may(self, call: str) -> None:
        """Refuse a call that comes in a wrong order."""
        order = "forward_backward, clip_gradients (once, or not at all), optimizer_step"
        if self._next == "drop_gradients":
            raise ValueError(f"{call} after a forward_backward that raised: call drop_gradients() on every rank first")
        if call == "forward_backward" and self._next != call:
            raise ValueError(
                f"forward_backward while gradients of the last one wait: the order of a step is {order}; to give it "
                f"up, drop_gradients(); to accumulate, prepare(micro_batches=...)"
            )
        if self._next == "forward_backward" and call != self._next:
            raise ValueError(f"{call} without gradients: the order of a step is {order}")
        if call == "clip_gradients" and self._next != call:
            raise ValueError(f"gradients are finished or clipped already: the order of a step is {order}")

    def _autocast(self) -> Any:
        dtype = self.precision.autocast
        return nullcontext() if dtype is None else autocast(dtype, self.mesh.device_type, self.scaler)

    # --- local updates ------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> DiLoCo | None:
        """What merges the workers, where there are local updates."""
        return self.optimizer if isinstance(self.optimizer, DiLoCo) else None

    def begin_merges(self) -> None:
        """Agree with the other workers on the parameters that all begin with; the first step does it, if nobody has.

        Raises:
            ValueError: on every rank, if workers begin from different merges.
        """
        if self.workers is not None and not self._begun:
            with self.parameters():
                self.workers.begin()
        self._begun = True

    def _merge(self) -> Merge | None:
        if self.workers is None or self.workers.due(self.step) is None:
            return None
        with self.parameters():
            return self.workers.merge(self.step)

    # --- without gradients --------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off, no gradients, nothing compiled: for what is not a training step, such as generating text."""
        modes = [stage.training for stage in self.stages]
        for stage in self.stages:
            stage.eval()
        try:
            with torch.no_grad(), self._autocast(), eagerly():
                yield
        finally:
            for stage, mode in zip(self.stages, modes, strict=True):
                stage.train(mode)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], **arguments: Tensor) -> float:
        """The mean loss over the tokens of all batches on all ranks, without gradients; the same on every rank.

        Args:
            batches: `(x, target)` of this rank; every rank has as many.
            arguments: tensors that the model takes by name.
        """
        self._may("forward_backward")
        held = list(batches)
        if not held:
            raise ValueError("evaluate got 0 batches: give at least one (x, target) on every rank")
        self._factor = torch.ones_like(self._factor)
        last = self.pipeline.last_rank == self.mesh.pp.rank
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        with self.evaluating():
            for y, (_, target) in zip(self.pipeline.forward([x for x, _ in held], **arguments), held, strict=True):
                if last:
                    total += self.pipeline.loss(y, target)
        count = self.count_tokens(torch.cat([target.flatten() for _, target in held]))
        return float(all_reduce(self.pipeline.from_last(total), self.mesh.data)) / max(int(count), 1)

    # --- parameters and state -----------------------------------------------------------------------------------------

    @contextmanager
    def parameters(self) -> Iterator[nn.Module]:
        """The model with its parameters here to read and write: this rank's shards, and none offloaded."""
        for stage in self.stages:
            reshard(stage)  # a forward without gradients leaves them gathered
        with self.offloaded.here() if self.offloaded else nullcontext():
            yield self.model

    def share(self, count: int) -> range:
        """Which of a step's `count` samples are this rank's: the same for every rank of its tp, cp and pp groups.

        Raises:
            ValueError: if they can't be shared evenly by workers, data-parallel ranks and micro-batches.
        """
        workers, dp, each = self.mesh.workers, self.mesh.dp, self.pipeline.micro_batches
        parts = workers.size * dp.size * each
        if count % parts:
            raise ValueError(
                f"{count} samples a step are not a multiple of workers x dp x micro-batches = {workers.size} x "
                f"{dp.size} x {each} = {parts}: {-(-count // parts) * parts} are"
            )
        size = count // (workers.size * dp.size)
        first = (workers.rank * dp.size + dp.rank) * size
        return range(first, first + size)

    def save(
        self, folder: str | os.PathLike[str], *, background: bool = False, after: Saving | None = None, **about: Any
    ) -> Path | Saving:
        """Write a checkpoint that any layout reads, `folder`/step-N: a collective on all ranks.

        Args:
            folder: of all the run's checkpoints.
            background: copy the state and write it while training goes on.
            after: a save in the background to wait for.
            about: as of `mpcore.checkpoint.save`: `sample`, `config`, `extra`, `keep`, `beside`.

        Returns:
            The path; in the background the `Saving`, whose `wait` returns it.

        Raises:
            ValueError: between `forward_backward` and `optimizer_step`, or if it can't be written.
        """
        self._may("forward_backward")
        self.begin_merges()
        extra = {**about.pop("extra", {}), **(self.scaler.state_dict() if self.scaler else {})}
        state = {"step": self.step, "seed": self.seed, "extra": extra, **about}
        path, held = step_path(folder, self.step), (self.model, self.optimizer)
        with self.parameters():
            if background:
                return save_async(path, *held, mesh=self.mesh, after=after, **state)
            save(path, *held, mesh=self.mesh, **state)
            return path

    def load(self, path: str | os.PathLike[str]) -> Loaded:
        """Go on from a checkpoint of any layout: parameters, optimizer state, loss scale and step.

        Options of the optimizer's groups, such as the learning rate, stay as they are here.

        Returns:
            What the checkpoint says of itself, such as `sample` and `config`.

        Raises:
            ValueError: on every rank and before anything changes, as `mpcore.checkpoint.load`.
        """
        self._may("forward_backward")
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if self.workers is not None:
            self.workers.outer.clear()
        with self.parameters():
            loaded = load(path, self.model, self.optimizer, mesh=self.mesh)
        for group, mine in zip(self.optimizer.param_groups, options, strict=True):
            group.update(mine)
        if self.workers is None:
            for slots in self.optimizer.state.values():  # of a run with workers
                for slot in OUTER_SLOTS:
                    slots.pop(slot, None)
        if self.scaler:
            self.scaler.load_state_dict(loaded.extra)
        self.step, self._begun = loaded.step, False
        return loaded
