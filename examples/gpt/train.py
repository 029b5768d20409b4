"""The training loop of the example. `examples/own_model.py` is the same in a hundred lines: read it first."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.gpt.arguments import build_optimizer, learning_rate
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.console import Console
from examples.gpt.experts import summarize_experts
from examples.gpt.faults import Faults, is_timed
from examples.gpt.generate import generate
from examples.gpt.model import GPT
from examples.gpt.policies import policies
from examples.gpt.samples import Samples
from examples.gpt.setup import set_up
from examples.gpt.stages import build_stages
from examples.gpt.stop import Stop
from mpcore import Mesh, prepare, shard_sequence
from mpcore.fault_tolerance.stragglers import Stragglers


class Trainer:
    """A GPT in training: `Trainer(args, mesh).train()` is a run."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        self.args, self.mesh = args, mesh
        self.out = Path(args.out) / (f"worker-{mesh.workers.rank}" if mesh.workers.size > 1 else "")
        self.setup = setup = set_up(args, mesh)  # refuses what doesn't fit, before anything is built
        self.config, self.train_samples, self.held_out = setup.config, setup.train, setup.held_out
        torch.manual_seed(args.seed)
        self.stages: list[GPT] = build_stages(
            setup.config, mesh, setup.blocks, [setup.plan.rank_of[stage] for stage in range(setup.plan.stages)],
            sequence_parallel=args.sequence_parallel, context=args.cp_kind, device="meta",
            dtype=torch.float64 if args.dtype == "float64" else torch.float32,
        )  # fmt: skip
        heads = [stage.head for stage in self.stages if stage.last]
        self.run = prepare(
            self.stages, mesh, blocks={int(i): block for stage in self.stages for i, block in stage.blocks.items()},
            loss=self.stages[-1].loss, optimizer=lambda model: build_optimizer(args, model, mesh, heads),
            seed=args.seed, micro_batches=setup.micro_batches, schedule=setup.plan, trace=args.trace,
            **policies(args, self.stages),
        )  # fmt: skip
        self.model = self.run.model
        self.console = Console(mesh, self.out)
        self.checkpoints = Checkpoints(self.run, setup, args, self.out, self.console)
        self.checkpoints.begin()  # loads a checkpoint or other weights, if the flags name any
        self.stragglers, self.stop = Stragglers(mesh), Stop(self.run, self.checkpoints)
        self.beat: Callable[[], None] = lambda: None  # tells a watchdog of progress

    def batch(self, samples: Samples, indices: range) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, targets and global indices of these samples: this rank's part of each sequence over cp."""
        tokens, targets = (shard_sequence(t, self.mesh.cp, self.args.cp_kind) for t in samples.batch(indices))
        return tuple(self.to_device(t) for t in (tokens, targets, torch.tensor(list(indices))))  # type: ignore[return-value]

    def to_device(self, x: Tensor) -> Tensor:
        """Copy to this rank's device. The host doesn't wait for the copy."""
        return x.pin_memory().to(self.mesh.device, non_blocking=True) if self.mesh.device_type == "cuda" else x

    def share(self, step: int) -> range:
        """Return the global indices of this rank's samples of a step. They depend on the step alone."""
        first, mine = self.checkpoints.sample(step), self.run.share(self.args.global_batch)
        return range(first + mine.start, first + mine.stop)

    def step(self) -> dict[str, Any]:
        """Train one step. Return the loss before it, the gradient norm, the learning rate and the experts' loads."""
        step, lr = self.run.step, learning_rate(self.args, self.run.step)
        with self.stragglers.timed("data") if is_timed(self.args, self.mesh, step) else nullcontext():
            tokens, targets, samples = self.batch(self.train_samples, self.share(step))
        arguments = {"samples": samples}
        count = self.run.count_tokens(targets)
        if self.config.moe is not None:  # the layers add the balance loss of the experts themselves
            arguments["loss_factor"] = self.run.loss_factor(count).repeat(len(samples))
        self.run.forward_backward(tokens, targets, tokens=count, **arguments)
        self.run.clip_gradients(self.args.clip)
        result = self.run.optimizer_step(lr=lr)
        entry: dict[str, Any] = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
        if result.routers:
            entry["experts"] = summarize_experts(result.routers, self.config, self.mesh)
        if result.merge is not None:
            entry["merge"] = result.merge
        return entry

    def evaluate(self) -> float:
        """Return the mean loss over the first held-out samples, the same for every layout."""
        if self.held_out is None:
            raise ValueError("the held-out part has no sample: --eval-every above 0 says why")
        samples, dp = max(min(self.args.eval_samples, len(self.held_out)), 1), self.mesh.dp
        batches = []
        for first in range(0, samples, dp.size):
            x, targets, indices = self.batch(self.held_out, range(first + dp.rank, first + dp.rank + 1))
            batches.append((x, targets.masked_fill((indices >= samples)[:, None], -100)))  # fill the last round
        return self.run.evaluate(batches)

    def train(self) -> bool:
        """Train all steps that are left. Return whether a signal stopped the run."""
        args, console, checkpoints = self.args, self.console, self.checkpoints
        with checkpoints.folder() as records:
            console.begin(self, records)
            faults = Faults(args, self.mesh, records, self.out)
            bar = console.bar(range(self.run.step, args.steps), args.steps)
            for step in bar:
                began = time.perf_counter()
                entry = self.step()
                merge = entry.pop("merge", None)
                self.beat()
                console.record_step(self, step, entry, time.perf_counter() - began, bar)
                for line in faults.after(
                    {"step": step, **entry}, checkpoints.sample(step), self.model, self.stragglers
                ):
                    console.tell(line)
                console.record_merge(step, merge)
                if args.eval_every and ((step + 1) % args.eval_every == 0 or step + 1 == args.steps):
                    console.record_evaluation(step, self.evaluate())
                self.beat()
                checkpoints.tell_saved()
                if self.stop.after_step() or self.run.step == args.exit_step:
                    bar.close()
                    checkpoints.save_and_leave()
                    self.stop.tell_workers()
                    return self.stop.stopped
                if args.save_every and (step + 1 == args.steps or (step + 1) % args.save_every == 0):
                    checkpoints.save_last() if step + 1 == args.steps else checkpoints.try_to_save()
                self.beat()
            bar.close()
            console.end(self, self.sample_text)
        return False

    def sample_text(self) -> str:
        """Generate a sample of text. A tokenizer that fails, on all ranks alike, doesn't fail the finished run."""
        tokenizer = self.setup.tokenizer
        try:
            with self.run.evaluating():
                return generate(self.stages[-1], self.run.pipeline, self.mesh, tokenizer, "def ", seed=self.args.seed)
        except RuntimeError:  # perhaps on this rank alone, and the others wait for it
            raise
        except Exception as error:  # the tokenizers library raises no narrower class
            return f"none: {error}"
