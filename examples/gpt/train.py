"""The training loop of the example. `examples/own_model.py` is the same in a hundred lines: read it first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from examples.gpt.arguments import parse
from examples.gpt.checkpoints import Checkpoints, Stop
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.console import Console, Lines
from examples.gpt.dashboards import Profile
from examples.gpt.model import GPT, build_stages
from examples.gpt.policies import (
    build_optimizer,
    learning_rate,
    local_updates,
    lr_schedule,
    policies,
    residual_dtype,
    worker_settings,
)
from examples.gpt.samples import Samples, to_device
from examples.gpt.setup import profiled_steps, set_up
from mpcore import Mesh, document_ids, prepare, shard_sequence
from mpcore.collectives import all_reduce
from mpcore.experimental import overlap_experts, overlap_halves, shift_tokens
from mpcore.layers import RouterStatistics
from mpcore.tools import invariant
from mpcore.tools.analysis.communication import StepTimes
from mpcore.tools.fault_tolerance.faults import Faults, is_timed
from mpcore.tools.fault_tolerance.stragglers import Stragglers

if TYPE_CHECKING:
    from tqdm import tqdm


class Trainer:
    """A GPT in training: `Trainer(args, mesh).train()` is a run."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh, config: GPTConfig | None = None) -> None:
        self.args, self.mesh = args, mesh
        self.out = Path(args.out) / (f"worker-{mesh.worlds.rank}" if mesh.worlds.size > 1 else "")
        self.setup = setup = set_up(args, mesh, config)  # refuses what doesn't fit, before anything is built
        self.config, self.train_samples, self.held_out = setup.config, setup.train, setup.held_out
        torch.manual_seed(args.seed)
        self.stages: list[GPT] = build_stages(
            setup.config, mesh, setup.blocks, [setup.plan.rank_of[stage] for stage in range(setup.plan.stages)],
            sequence_parallel=args.sequence_parallel, context=args.cp_kind, device="meta",
            dtype=torch.float64 if args.dtype == "float64" else torch.float32, residual_dtype=residual_dtype(args),
        )  # fmt: skip
        if args.overlap_experts:
            overlap_experts(self.stages, mesh.pp)
        if args.overlap_halves:
            overlap_halves(self.stages, mesh.pp)
        self.run = (invariant.prepare if args.bitwise else prepare)(
            self.stages, mesh, blocks={int(i): block for stage in self.stages for i, block in stage.blocks.items()},
            loss=self.stages[-1].loss, optimizer=lambda model: build_optimizer(args, model, mesh, self.stages),
            seed=args.seed, micro_batches=setup.micro_batches, schedule=setup.plan, trace=args.trace,
            overlap=args.overlap, **policies(args, self.stages),
        )  # fmt: skip
        self.model = self.run.model
        self.console = Console(mesh, self.out)
        self.checkpoints = Checkpoints(self.run, setup, args, self.out, self.console)
        self.checkpoints.begin()  # loads a checkpoint or other weights, if the flags name any
        self.stragglers, self.stop = Stragglers(mesh), Stop(self.run, self.checkpoints)
        self.profile = Profile(profiled_steps(args.profile), mesh, self.out)
        self.times = StepTimes(mesh, compiled=args.compile is not None)  # of the last step
        self.beat: Callable[[], None] = lambda: None  # tells a watchdog of progress
        if (worker := local_updates(self.run, are_jobs=True)) is not None:
            offset = self.checkpoints.first_sample - self.checkpoints.first_step * args.global_batch
            data = f"{setup.corpus}, seed {args.seed}, {args.global_batch} samples a step, from sample {offset}"
            worker.data = {"data": data, **worker_settings(args, setup.config)}
            worker.defaults = worker_settings(parse([]), GPTConfig(moe=MoEConfig())) | {"moe.experts": "0"}
            worker.should_stop = self.while_waiting
            worker.begin()

    def tell_workers(self) -> None:
        """Print which workers joined and left, if this job is one of several."""
        job = local_updates(self.run, are_jobs=True)
        for line in job.worker.news() if job is not None and job.worker is not None else ():
            self.console.tell(line)

    def while_waiting(self) -> bool:
        """Tell the watchdog that this worker waits for others. Return whether this rank was asked to stop."""
        self.beat()
        self.tell_workers()
        return self.stop.is_asked()

    def batch(self, samples: Samples, indices: Sequence[int]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return tokens and targets of these samples, this rank's part over cp, and the model's arguments by name.

        With `mtp` the argument `later` is a pair: further inputs and their targets, [B, n, T/cp].
        """
        tokens, targets = samples.batch(indices)
        arguments: dict[str, Any] = {"samples": to_device(torch.tensor(list(indices)), self.mesh)}
        if self.args.document_masking:
            arguments["documents"] = to_device(document_ids(tokens, self.setup.tokenizer.end_of_document), self.mesh)
        both = [tokens, targets]
        if depth := self.config.mtp:
            inputs, further = shift_tokens(tokens, depth, arguments.get("documents"))
            both += [torch.stack(each, 1) for each in (inputs, further)]
        x, y, *later = (to_device(shard_sequence(t, self.mesh.cp, self.args.cp_kind, dim=-1), self.mesh) for t in both)
        return x, y, arguments | ({"later": later} if later else {})

    def share(self, step: int) -> Sequence[int]:
        """Return the global indices of this rank's samples of a step. They depend on the step alone."""
        samples, args = self.checkpoints.samples(step), self.args
        micro_batches = len(samples) * self.setup.micro_batches // args.global_batch
        if micro_batches != self.run.pipeline.micro_batches:  # the ranks compare the number
            self.run.set_micro_batches(micro_batches)
        mine = self.run.share(len(samples))
        return samples[mine.start : mine.stop]

    def step(self) -> dict[str, Any]:
        """Train one step. Return the loss before it, the gradient norm, the learning rate and the experts' loads."""
        step, lr = self.run.step, learning_rate(lr_schedule(self.args), self.run.step)
        timed = self.stragglers.timed("data") if is_timed(self.args.check_speed, self.mesh, step) else nullcontext()
        with self.times.data(), timed:
            tokens, targets, arguments = self.batch(self.train_samples, self.share(step))
        count = self.run.count_tokens(targets)
        if "later" in arguments:
            arguments["later"], further = arguments["later"]
            targets = torch.cat([targets.unsqueeze(1), further], 1)
        if self.config.moe is not None:  # the layers add the balance loss of the experts themselves
            arguments["loss_factor"] = self.run.loss_factor(count).repeat(len(tokens))
        self.run.forward_backward(tokens, targets, tokens=count, **arguments)
        self.run.clip_gradients(self.args.clip)
        result = self.run.optimizer_step(lr=lr)
        entry: dict[str, Any] = {"step": step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
        if self.config.mtp:
            entry["mtp_loss"] = self.further_loss(count)
        if self.config.moe is not None:  # a collective over pp, of stages without experts too
            entry["experts"] = summarize_experts(result.routers, self.config, self.mesh)
        if self.run.bounds.is_used:
            entry["dispatch"] = {"repeats": result.repeats, "rows": self.run.bounds.rows}
        updates = local_updates(self.run)
        if updates is not None and updates.merged is not None:
            entry["merge"] = updates.merged
        return entry

    def further_loss(self, tokens: Tensor) -> float:
        """Return the cross-entropy of the tokens that `mtp` predicts, its mean over depths and the step's tokens."""
        here = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for stage in self.stages:  # the last stage of the pipeline has it
            last = stage.further_losses[-self.run.pipeline.micro_batches :]  # of the last time that the step ran
            here, stage.further_losses = here + sum(last), []
        return (all_reduce(all_reduce(here, self.mesh.data), self.mesh.pp) / tokens).item()

    def evaluate(self, samples: Samples | None = None) -> float:
        """Return the mean loss over the first of these samples, by default the held-out ones: alike on every layout."""
        if (samples := samples or self.held_out) is None:
            raise ValueError("the held-out part has no sample: --eval-every above 0 says why")
        count, dp = min(self.args.eval_samples, len(samples)), self.mesh.dp
        batches, documents = [], []
        for i in range(dp.rank, -(-count // dp.size) * dp.size, dp.size):
            x, targets, arguments = self.batch(samples, range(i, i + 1))
            batches.append((x, targets if i < count else torch.full_like(targets, -100)))  # fill the last round
            documents.append(arguments.get("documents"))
        return self.run.evaluate(batches, documents=documents)

    def steps(self, bar: tqdm | Lines, until: int) -> Iterator[int]:
        """Yield the steps to train, and advance the bar. They jump if this job is one worker of several."""
        while (step := self.run.step) < until:
            yield step
            bar.update(self.run.step - step)

    def train(self) -> bool:
        """Train all steps that are left. Return whether a signal stopped the run."""
        args, console, checkpoints = self.args, self.console, self.checkpoints
        with checkpoints.folder() as records, console.recording(self, records), closing(self.profile):
            faults = Faults(self.mesh, records, self.out, max_skips=args.max_skips,
                            check_replicas=args.check_replicas, check_speed=args.check_speed)  # fmt: skip
            until, worker = min(args.steps, args.exit_step or args.steps), local_updates(self.run, are_jobs=True)
            if self.run.step < until and self.stop.before_steps():
                checkpoints.save_and_leave()
                return True
            bar = console.bar(range(self.run.step, until), args.steps)
            for step in self.steps(bar, until):
                self.profile.before(step)
                with self.times:
                    entry = self.step()
                self.profile.after(step)
                merge = entry.pop("merge", None)
                self.beat()
                console.record_step(self, step, entry, bar)
                for line in faults.after(entry, checkpoints.samples(step), self.run, self.stragglers):
                    console.tell(line)
                console.record_merge(step, merge)
                self.tell_workers()
                if args.eval_every and ((step + 1) % args.eval_every == 0 or self.run.step == args.steps):
                    sets = {name: self.evaluate(samples) for name, samples in self.setup.eval_sets.items()}
                    console.record_evaluation(step, self.evaluate(), sets)
                self.beat()
                checkpoints.tell_saved()
                if self.stop.after_step(until) or until <= self.run.step < args.steps:
                    bar.close()
                    checkpoints.save_and_leave()
                    if worker is not None:
                        worker.stop(10.0 if self.stop.stopped else args.worker_timeout)
                    self.stop.tell_workers()
                    return self.stop.stopped
                if checkpoints.is_due(step):
                    checkpoints.save_last() if self.run.step == args.steps else checkpoints.attempt(checkpoints.save)
                self.beat()
            bar.close()
            if self.run.step >= args.steps:  # otherwise exit_step left nothing to train
                console.end(self)
        return False


FACTS = ("entropy", "dropped", "max_violation", "aux_loss", "z_loss")


def summarize_experts(routers: Mapping[str, RouterStatistics], config: GPTConfig, mesh: Mesh) -> dict[str, Any]:
    """Return, for each layer with experts, its facts and how many tokens each expert got. A collective over pp."""
    assert config.moe is not None
    L = config.layers
    rows = torch.zeros(L + config.mtp, len(FACTS) + config.moe.experts, dtype=torch.float64, device=mesh.device)
    for name, of in routers.items():
        before, block = name.split("blocks.")
        rows[int(block.split(".")[0]) + L * ("mtp." in before)] = torch.cat([torch.stack(of[1:]), of.tokens_per_expert])
    mixed = [i for i in range(L + config.mtp) if config.has_experts(min(i, L - 1))]
    *facts, tokens = all_reduce(rows, mesh.pp)[mixed].split([1] * len(FACTS) + [config.moe.experts], 1)
    found: dict[str, Any] = {name: fact.flatten().tolist() for name, fact in zip(FACTS, facts, strict=True)}
    return found | {"tokens_per_expert": tokens.long().tolist()}
