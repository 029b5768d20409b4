"""`Run`: the calls of a training loop on a prepared model. It refuses calls in a wrong order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpcore._torch.compile import eagerly
from mpcore._torch.distributed import ranks_are_threads
from mpcore.checkpoint import Loaded, Saving, load, save, save_async, step_path
from mpcore.checkpoint.remote import store_of
from mpcore.collectives import all_reduce
from mpcore.gradients import clip_gradients, drop_gradients, gradient_of, reduce_gradients
from mpcore.gradients.norm import norm_of
from mpcore.layers.module import in_eval_mode
from mpcore.layers.moe.bounds import DispatchBounds
from mpcore.layers.moe.statistics import RouterStatistics, update_routers
from mpcore.mesh.agreement import check_same, raise_together, together
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.optim.loss_scale import LossScaler
from mpcore.parallel import autocast, offload_activations
from mpcore.parallel.offload import ParameterOffload
from mpcore.pipeline.engine import Pipeline, one_number
from mpcore.pipeline.messages import EarlierStageError
from mpcore.sharding.declarations import ModelTree
from mpcore.sharding.local import reshard
from mpcore.training.block_order import BlockOrder
from mpcore.training.first_step import FirstStep, GradientWrites
from mpcore.training.observers import BoundedDispatch, Observer
from mpcore.training.parameter_check import ParameterCheck
from mpcore.training.phase import Phase
from mpcore.training.policies import Offload, Precision
from mpcore.training.rank_checks import AlikeCheck, smallest_count
from mpcore.training.samples import SampleCheck, share_of
from mpcore.training.wrong_width import wrong_width

log: Logger = get_logger(__name__)


class StepResult(NamedTuple):
    """The result of a step, the same on every rank of a world.

    Attributes:
        loss: the mean loss over the tokens of the world's step, before the step.
        grad_norm: the gradient norm of the unsharded model, before clipping.
        taken: whether the optimizer stepped; False if the loss or a gradient was not finite.
        routers: the experts' load statistics, by the name of each router of this rank.
        repeats: how often the step was computed again because a dispatch buffer of the experts overflowed.

    Example:
        >>> result = mpcore.training.StepResult(loss=2.5, grad_norm=1.0, taken=True, routers={})
        >>> result.taken
        True
    """

    loss: float
    grad_norm: float
    taken: bool
    routers: Mapping[str, RouterStatistics]
    repeats: int = 0


class Run:
    """The calls of a training loop, from `prepare`: `forward_backward`, optionally `clip_gradients`, `optimizer_step`.

    Attributes:
        model: the prepared model. Several stages are joined in one module, which you can save but not call.
        stages: this rank's pipeline stages, in pipeline order.
        optimizer: the optimizer that `prepare` made; call `optimizer_step` instead of its `step`.
        pipeline: runs the micro-batches.
        scaler: the `LossScaler` of float16; otherwise None.
        bounds: the `DispatchBounds` of the experts' dispatch buffers.
        observers: each an `Observer` of the steps, in the order of their calls. Append your own.
        phase: the `Phase`.
        tree: the model's modules, parameters and declarations.
        factor: multiplies the losses of this step's tokens.
        measure_norm: computes the gradient norm from `tree` and `mesh`, and sums `numbers` over all ranks.
        step: the number of optimizer steps that are done, skipped ones included.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4, device="meta")
        >>> loss = lambda output, target: (output - target).square().sum()
        >>> make = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)
        >>> run = mpcore.prepare(model, mpcore.Mesh(), blocks=(), loss=loss, optimizer=make)
        >>> for step in range(run.step, 1):
        ...     _ = run.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        ...     _ = run.clip_gradients(1.0)
        ...     result = run.optimizer_step()
        >>> result.taken
        True
    """

    def __init__(
        self, model: nn.Module, stages: list[nn.Module], mesh: Mesh, optimizer: torch.optim.Optimizer, *,
        blocks: Sequence[nn.Module], precision: Precision, offload: Offload, seed: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.stages = stages
        self.mesh = mesh
        self.optimizer = optimizer
        self.seed = seed
        self.precision = precision
        self.offload = offload
        scaled = precision.autocast_dtype == torch.float16
        self.scaler: LossScaler | None = LossScaler(mesh, precision.first_loss_scale) if scaled else None
        self.step: int = 0
        self.pipeline: Pipeline
        self.offloaded: ParameterOffload | None = None
        self.tree: ModelTree = ModelTree(model)
        self._parameter_check = ParameterCheck(self.tree, precision.param_dtype, precision.dtype)
        self.bounds: DispatchBounds = DispatchBounds(self.tree, mesh)
        half, writes = bool(precision.param_dtype or precision.autocast_dtype or precision.fp8), GradientWrites()
        self._first = FirstStep(self.tree, mesh, half, writes)
        order, samples = BlockOrder(blocks, mesh), SampleCheck(model, mesh)
        self.observers: list[Observer] = [BoundedDispatch(self.bounds), samples, order, writes, self._first]
        self.factor: Tensor = torch.ones((), dtype=torch.float64, device=mesh.device)
        self._stepping = False
        optimizer.register_step_pre_hook(self._refuse_bare_step)
        self.measure_norm: Callable[..., Tensor] = partial(norm_of, of=gradient_of)
        self.phase: Phase = Phase.IDLE
        self._loss = self._norm = self.factor
        self._locks: dict[Path, Any] = {}  # of the folders that this run saves into, on rank 0
        self._attached: list[Observer] = []
        self._given: dict[str, float | str | None] = {}  # since the last norm; replicas must be given the same
        self._alike: AlikeCheck = AlikeCheck(mesh, self.tree, order)

    # --- a step -------------------------------------------------------------------------------------------------------

    def scaled(self, loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        """Wrap a loss that sums over tokens: divide it by the step's tokens, and scale it for float16."""

        checked = self._first.watch(loss)

        def scaled_loss(output: Any, target: Tensor) -> Tensor:
            total = checked(output, target)
            return total * self.factor.to(total.dtype) if isinstance(total, Tensor) else total

        return scaled_loss

    def loss_factor(self, tokens: Tensor | int) -> Tensor:
        """Return the factor of each token's loss, for layers that add a loss of their own, such as experts."""
        scale = self.scaler.scale if self.scaler else 1.0
        shape = tokens.shape if isinstance(tokens, Tensor) else ()
        if isinstance(tokens, bool) or not isinstance(tokens, Tensor | Real) or shape:
            is_ = f"has shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"is {tokens!r:.100}"
            raise ValueError(
                f"tokens {is_}, and is the step's number of tokens, which divides the loss: give one number, and "
                f"rename an argument of the model that is called tokens"
            )
        count = torch.as_tensor(tokens, dtype=torch.float64, device=self.mesh.device)
        return scale / torch.where(count == 0, 1.0, count)  # a batch without tokens has loss 0 and gradients 0

    def count_tokens(self, target: Tensor | Sequence[Tensor]) -> Tensor:
        """Count the targets that are not -100, as torch's cross_entropy does, over all data-parallel ranks."""
        targets = [target] if isinstance(target, Tensor) else target
        count = sum(((t if t.is_floating_point() else t.long()) != -100).sum() for t in targets)  # 156 isn't -100
        return all_reduce(torch.as_tensor(count, device=self.mesh.device), self.mesh.data).double()

    def forward_backward(
        self, x: Tensor | Sequence[Tensor], target: Tensor | Sequence[Tensor], *, tokens: Tensor | int | None = None,
        **arguments: Tensor | Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Run forward and backward of this rank's part of a batch, micro-batch by micro-batch.

        Args:
            x: [B, ...], the model's input, on every rank of the pipeline. A tensor is split into micro-batches along
                dimension 0. Or pass a list with one tensor per micro-batch; their shapes may differ.
            target: [B, ...], the target of the loss; a list if x is a list.
            tokens: the divisor of the summed loss, the number of tokens over all ranks. None: count the targets that
                are not -100.
            arguments: tensors [B, ...] for the model's keyword arguments; lists if x is a list.

        Returns:
            The mean loss over the step's tokens in float64, the same on every rank of a world.

        Raises:
            ValueError: if gradients of the previous call still exist, or the batch doesn't fit the micro-batches; in
                the first step, if the loss is a mean, or differs between the ranks of tp.

        Note:
            - After the first step the host does not wait for the device. With experts and dropless all-to-all it waits
              once, at the end, and computes the step again if a buffer of `bounds` overflowed.
        """
        self.phase.check("forward_backward")
        self.attach()
        first, check = self._first in self.observers, self._parameter_check
        self._given["parameters"] = together(self.mesh.world, partial(check, True)) if first else check()
        if first:
            self._first.agree(self, tokens, {"x": x, "target": target, **arguments})
        told, tokens = tokens is not None, self.count_tokens(target) if tokens is None else tokens
        self.factor = self.loss_factor(tokens)
        if told and (not isinstance(tokens, Tensor) or self._first in self.observers):
            self._given["tokens"] = float(tokens)  # a tensor in the first step only: the host waits for it
            if not 0 <= float(tokens) < math.inf:
                raise ValueError(f"tokens is {float(tokens):g}, and divides the loss: give the number over all ranks")
        self.phase = Phase.COMPUTING
        for observer in self.observers:
            observer.before_forward(self, tokens, {"x": x, "target": target, **arguments})
        total = self._compute(x, target, arguments)
        while total is None:
            self._forget()
            self.bounds.begin(again=True)
            total = self._compute(x, target, arguments)
        self._loss = all_reduce(total, self.mesh.data) / (self.scaler.scale if self.scaler else 1.0)
        self.phase = Phase.COMPUTED
        return self._loss

    def attach(self) -> None:
        """Let observers that were appended look at the run."""
        while (new := next((each for each in self.observers if each not in self._attached), None)) is not None:
            with self.parameters():
                new.attach(self)
            self._attached.append(new)

    def _compute(self, x: Any, target: Any, arguments: Mapping[str, Any]) -> Tensor | None:
        with self._autocast(), offload_activations() if self.offload.activations else nullcontext():
            try:
                total: Tensor | None = self.pipeline.forward_backward(x, target, **arguments)
            except (RuntimeError, ValueError) as error:
                if (told := wrong_width(error, self.mesh)) is not None:
                    raise told from error
                raise
        for observer in self.observers:
            total = None if total is None else observer.after_backward(self, total)
        return total

    def set_micro_batches(self, micro_batches: int) -> None:
        """Set the number of micro-batches of the next steps, for example to grow the batch. All ranks must call it.

        Raises:
            ValueError: on every rank, if the schedule does not support this number, ranks pass different numbers, or it
                is called between `forward_backward` and `optimizer_step`. Data ranks may pass different numbers with
                ZeRO 0 and 1, without cp and ep.
        """
        self.phase.check("forward_backward", "set_micro_batches")
        check_same("step of run.set_micro_batches", {"step": self.step}, self.mesh.world)
        smallest_count(self.mesh, self.stages, "micro-batches", micro_batches)
        if micro_batches != self.pipeline.micro_batches:
            self.pipeline.set_micro_batches(micro_batches)

    def finish_gradients(self) -> Tensor:
        """All-reduce partial gradients, undo the loss scale, and measure the norm.

        `clip_gradients` and `optimizer_step` call it. Call it yourself to read gradients first.

        Returns:
            The gradient norm of the unsharded model in float64, the same on every rank.

        Raises:
            ValueError: if `forward_backward` was not called first; in the first step, if the ranks of tp have different
                gradients of a replicated parameter.
        """
        if self.phase is Phase.COMPUTED:
            for observer in self.observers:
                observer.before_reduce(self)
            reduce_gradients(self.tree)
            for observer in [*self.observers]:  # those of the first step leave
                observer.after_reduce(self)
            if self.scaler:
                self.scaler.unscale(self.tree)
            numbers = self._alike.begin({"step": self.step, **self._given}, self.optimizer.param_groups)
            self._norm, *self._alike.sums = self.measure_norm(self.tree, self.mesh, numbers=numbers)
            self._given = {}
            self.phase = Phase.REDUCED
        self.phase.check("optimizer_step")
        return self._norm

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; 0 or less clips nothing.

        Note:
            - Don't call torch's `clip_grad_norm_`: see `mpcore.gradients.clip_gradients`. Its 1e-6 changes losses by
              about 1e-8 relative.
            - The run doesn't notice changes of `p.grad` after this call, for example `p.grad.mul_(0.5)`: the result's
              `grad_norm` and the check for values that aren't finite come from before. `p.grad` is this rank's shard.

        Returns:
            The norm before clipping, in float64, the same on every rank.

        Raises:
            ValueError: if there are no gradients, or they are already clipped.
        """
        self.phase.check("clip_gradients")
        self._given["max_norm"] = max_norm
        norm = self.finish_gradients()
        clip_gradients(self.tree, max_norm, norm)
        return norm

    def optimizer_step(self, lr: float | None = None) -> StepResult:
        """Step the optimizer. If the loss or a gradient is not finite, every rank skips the step.

        Then drop the gradients, and update the routers' biases. The host waits for the device once, for the result.

        Args:
            lr: the learning rate to set in every parameter group, times the group's "lr_scale" if it has one; None:
                leave the groups' learning rates unchanged.

        Raises:
            ValueError: if `forward_backward` was not called first; on every rank, if ranks are in different steps, ran
                other blocks (but on dp with ZeRO 0), clipped by different norms, have different `lr` or `weight_decay`
                in the optimizer's groups, or were given different `tokens` or, at the latest one step later, `lr`.
        """
        self._given["lr"] = lr
        norm = self.finish_gradients()
        loss, length, *sums = torch.stack([self._loss.to(norm), norm, *self._alike.sums]).tolist()
        self._alike.end(*sums)
        if lr is not None and not 0 <= lr < math.inf:
            raise ValueError(f"lr is {lr} in step {self.step}, and must be from 0 to below infinity: mend the schedule")
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr * group.get("lr_scale", 1.0)
        finite = math.isfinite(loss) and math.isfinite(length)  # both are sums over all ranks: all decide alike
        taken = self.scaler.update(finite) if self.scaler else finite
        if taken:
            self._stepping = True
            try:
                self.optimizer.step()
            finally:
                self._stepping = False
        drop_gradients(self.tree)
        routers = update_routers(self.tree, self.mesh)
        self.step += 1
        self.phase = Phase.IDLE
        self._loss = self._norm = self.factor
        for observer in self.observers:
            observer.after_step(self, taken)
        return StepResult(loss, length, taken, routers, self.bounds.repeats)

    def drop_gradients(self) -> None:
        """Abandon a step, also after a `forward_backward` that raised. Call it on every rank."""
        self._forget()
        for observer in self.observers:
            observer.dropped(self)
        self.phase = Phase.IDLE

    def _forget(self) -> None:
        for module in (*self.stages, self.model):
            drop_gradients(module)

    def _refuse_bare_step(self, *_: object) -> None:
        if not self._stepping:
            raise ValueError("the optimizer of a run was stepped by itself: call run.optimizer_step() instead")

    def _autocast(self) -> Any:
        dtype = self.precision.autocast_dtype
        return nullcontext() if dtype is None else autocast(dtype, self.mesh.device_type, self.scaler)

    # --- without gradients --------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turn off dropout, gradients and torch.compile, for example to generate text."""
        with in_eval_mode(self.stages), torch.no_grad(), self._autocast(), eagerly():
            yield

    def evaluate(
        self, batches: Iterable[tuple[Tensor, Tensor]], *, tokens: Tensor | int | None = None,
        **arguments: Tensor | Sequence[Tensor],
    ) -> float:  # fmt: skip
        """Return the mean loss over the tokens of all batches on all ranks, without gradients.

        The result is the same on every rank of a world.

        Args:
            batches: pairs `(x, target)` of this rank. Every rank must have the same number, and at least one.
            tokens: the divisor of the summed loss, as of `forward_backward`.
            arguments: tensors for the model's keyword arguments, or lists with one tensor per batch.

        Raises:
            ValueError: on every rank, if a rank has no batch, ranks have different numbers where one would wait, or a
                stage or the loss failed on one rank. Ranks inside that stage's collectives (tp, ZeRO 3) time out.
        """
        self.phase.check("forward_backward", "evaluate")
        told = {"step": self.step, "tokens": tokens if tokens is None else float(tokens)}
        check_same("step of run.evaluate", told, self.mesh.world)
        held, error = list(batches), None
        for name, given in arguments.items():
            if isinstance(given, list | tuple) and len(given) != len(held):
                error = ValueError(f"{name} has {len(given)} tensors, and evaluate got {len(held)} batches: one each")
        raise_together(error, self.mesh.world)
        if smallest_count(self.mesh, self.stages, "batches", len(held)) == 0:
            raise ValueError("evaluate got 0 batches: give at least one (x, target) on every rank")
        self.factor = torch.ones_like(self.factor)
        count = self.count_tokens([target for _, target in held]) if tokens is None else tokens
        factor = self.loss_factor(count) / (self.scaler.scale if self.scaler else 1.0)
        last = self.pipeline.last_rank == self.mesh.pp.rank
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        with self.evaluating():
            outputs = self.pipeline.forward([x for x, _ in held], **arguments)
            try:
                for y, (_, target) in zip(outputs, held, strict=True):
                    try:
                        total += one_number(self.pipeline.loss(y, target)) if last else 0
                    except Exception as problem:  # the other stages go on to send
                        error = error or problem
            except Exception as problem:  # of a stage
                error = error or problem
        if error is not None:
            self._forget()  # a forward that raised left gathered parameters
        raise_together(None if isinstance(error, EarlierStageError) else error, self.mesh.world)
        return float(all_reduce(self.pipeline.from_last(total), self.mesh.data) * factor)

    # --- parameters and state -----------------------------------------------------------------------------------------

    @contextmanager
    def parameters(self) -> Iterator[nn.Module]:
        """Yield the model, to read and write this rank's shards. Offloaded parameters are then on the device."""
        reshard(self.model)  # after a forward without gradients they are still gathered
        with self.offloaded.here() if self.offloaded else nullcontext():
            yield self.model

    def share(self, count: int) -> range:
        """Return the indices of this rank's samples among the `count` samples of a step.

        All ranks of a tp, cp or pp group have the same samples.

        Raises:
            ValueError: if `count` is no multiple of worlds x data-parallel ranks x micro-batches.
        """
        return share_of(self.mesh, self.pipeline.micro_batches, count)

    def samples(self, count: int) -> Tensor:
        """Return the indices of this rank's samples of this step in the whole run, int64 [B], for `mpcore.Dropout`.

        Step s has the indices s * count to (s + 1) * count - 1, so dropout draws other masks in each step.

        Raises:
            ValueError: as `share`.
        """
        return self.step * count + torch.tensor([*self.share(count)], dtype=torch.int64, device=self.mesh.device)

    def save(
        self, folder: str | os.PathLike[str], *, background: bool = False, after: Saving | None = None, **about: Any
    ) -> Path | Saving:
        """Write the checkpoint `folder`/step-N, which any layout can read. All ranks must call it.

        Args:
            folder: the folder for all checkpoints of the run.
            background: copy the state, and write it while training goes on.
            after: an earlier save in the background, which is waited for first.
            about: `keep=2` deletes all checkpoints but the newest two; `extra={..}` is returned by `load`; `sample`,
                `config`, `keep_every` and `beside` are explained at `mpcore.checkpoint.save`.

        Returns:
            The path. With `background=True` a `Saving`, whose `wait()` returns the path.

        Raises:
            ValueError: between `forward_backward` and `optimizer_step`, or if the checkpoint can't be written, or
                another process saves into `folder`: from its first save on, the run locks it (`folder/.lock`).
        """
        self.phase.check("forward_backward", "save")
        check_same("step of run.save", {"step": self.step, "background": background}, self.mesh.world)
        extra, own = about.pop("extra", {}), self.scaler.state_dict() if self.scaler else {}
        for observer in self.observers:
            own |= observer.state()
        if names := sorted(extra.keys() & own.keys()):
            raise ValueError(f"extra has {', '.join(names)}, which the run saves itself: take other names")
        state = {"step": self.step, "seed": self.seed, "extra": {**extra, **own}, **about}
        path, held = step_path(folder, self.step), (self.model, self.optimizer)
        if path.parent not in self._locks:
            lead = self.mesh.world.rank == 0 and not ranks_are_threads()  # these share the lock's process
            store = store_of(path.parent)
            self._locks[path.parent] = together(self.mesh.world, lambda: store.lock(path.parent) if lead else None)
        with self.parameters():
            if background:
                return save_async(path, *held, mesh=self.mesh, after=after, **state)
            together(self.mesh.world, lambda: isinstance(after, Saving) and after.wait())
            save(path, *held, mesh=self.mesh, **state)
            return path

    def load(self, path: str | os.PathLike[str]) -> Loaded:
        """Resume from a checkpoint of any layout: load parameters, optimizer state, loss scale and step.

        Options of the optimizer's groups, such as the learning rate, keep the values that they have in this run. If a
        scheduler of `torch.optim.lr_scheduler` was created before, the learning rate and the momentum or betas are the
        checkpoint's. Save the scheduler's state in `extra`, and load it from there.

        Args:
            path: a checkpoint, such as `mpcore.checkpoint.latest(folder, run.mesh)`.

        Returns:
            The checkpoint's facts, such as `sample` and `config`.

        Raises:
            ValueError: on every rank, before anything changes, if the checkpoint doesn't fit (see `checkpoint.load`).
        """
        self.phase.check("forward_backward", "load")
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"load got {path!r} and no path: mpcore.checkpoint.latest is None without a checkpoint")
        check_same("call of run.load", "", self.mesh.world)
        groups, scheduled = self.optimizer.param_groups, {"lr", "momentum", "betas"}  # a scheduler of torch sets these
        leave = [{"params"} | (scheduled if "initial_lr" in group else set()) for group in groups]
        options = [{k: v for k, v in group.items() if k not in left} for group, left in zip(groups, leave, strict=True)]
        with self.parameters():
            loaded = load(path, self.model, self.optimizer, mesh=self.mesh)
        for group, mine in zip(self.optimizer.param_groups, options, strict=True):
            group.update(mine)
        kept = {slot for observer in self.observers for slot in observer.slots}
        for slots in self.optimizer.state.values():
            for slot in [slot for slot in slots if slot.startswith("outer_") and slot not in kept]:
                del slots[slot]  # of an observer that this run has not
        if self.scaler:
            self.scaler.load_state_dict(loaded.extra)
        for observer in self.observers:
            observer.load_state(loaded.extra)
        self.step = loaded.step
        if loaded.seed not in (None, self.seed) and self.mesh.job.rank == 0:
            log.warning("%s was trained with seed %s, and this run has seed %s: dropout draws other masks", path,
                        loaded.seed, self.seed)  # fmt: skip
        return loaded
