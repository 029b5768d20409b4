"""Print the summary and the progress of a run; write metrics.jsonl, plots, dashboards and profiles."""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.gpt.dashboards import Dashboards
from examples.gpt.generate import sample_text
from examples.gpt.model import count_active_parameters, count_parameters, flops_of_token
from examples.gpt.policies import long_warmup, lr_schedule
from mpcore import Mesh
from mpcore.sharding import local_tensor
from mpcore.tools.diloco import Merge
from mpcore.tools.draw import draw_trace, plot_losses
from mpcore.tools.fault_tolerance.metrics import MetricsWriter

if TYPE_CHECKING:
    from tqdm import tqdm

    from examples.gpt.config import GPTConfig
    from examples.gpt.train import Trainer


EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, from the vendor's datasheets


class Console:
    """Prints and records: rank 0 of each worker writes its records, rank 0 of the job shows the progress bar."""

    def __init__(self, mesh: Mesh, out: Path) -> None:
        self.mesh, self.out = mesh, out
        self.lead, self.shows = mesh.world.rank == 0, mesh.job.rank == 0
        self.records: list[dict] = []
        self.writer: MetricsWriter | None = None
        self.dashboards: Dashboards | None = None
        self.bytes_of_token = math.nan
        self.unwritten: set[str] = set()
        self.spans: list = []

    def tell(self, text: str, file: Any = None) -> None:
        """Print a line above the progress bar, once for each worker."""
        from tqdm import tqdm

        if self.lead:
            workers = self.mesh.worlds
            tqdm.write(f"worker {workers.rank}: {text}" if workers.size > 1 else text, file=file)

    def write(self, what: str, work: Callable[[], Any]) -> None:
        """Write a file that the run doesn't need. If that fails, as on a full disk, print one warning."""
        try:
            work()
            self.unwritten.discard(what)
        except OSError as error:
            if what not in self.unwritten:
                self.tell(f"NOT WRITTEN: {what}: {error}", file=sys.stderr)
            self.unwritten.add(what)

    @contextmanager
    def recording(self, trainer: Trainer, records: list[dict]) -> Iterator[None]:
        """Print the summary of the run, and write its records until its end."""
        self.records, self.writer = records, MetricsWriter(self.out / "metrics.jsonl")
        args, steps, done = trainer.args, trainer.args.steps, trainer.run.step
        if self.lead:
            self.bytes_of_token = bytes_of_token(trainer)
            self.dashboards = Dashboards(args.log_to, self.out, vars(args), done)
        if self.shows:
            print(summary(trainer), flush=True)
        if done >= steps:
            self.tell(f"nothing is left to train: {done} steps are done, --steps is {steps}; to train on, {on(args)}")
        elif done >= (args.exit_step or steps):
            self.tell(f"nothing is left to train: {done} steps are done, exit_step is {args.exit_step}")
        try:
            yield
        finally:
            if self.dashboards is not None:
                self.dashboards.close()

    def bar(self, todo: range, steps: int) -> tqdm | Lines:
        """Return the steps that are left, with a progress bar on a terminal, and with lines elsewhere."""
        from tqdm import tqdm

        if self.shows and not sys.stderr.isatty():
            return Lines(todo, steps)
        shown = {"unit": "step", "dynamic_ncols": True, "file": sys.stderr, "disable": not self.shows}
        return tqdm(todo, initial=todo.start, total=steps, **shown)

    def record(self, entry: dict) -> None:
        """Add a line to metrics.jsonl."""
        self.records.append(entry)
        if self.lead and self.writer is not None:
            self.write("metrics.jsonl", lambda: self.writer.add(entry))  # type: ignore[union-attr]
        if self.dashboards is not None:
            self.write("the dashboards", lambda: self.dashboards.add(entry))  # type: ignore[union-attr]

    def record_step(self, trainer: Trainer, step: int, entry: dict, bar: tqdm | Lines) -> None:
        """Record a step, and show it on the bar."""
        if trainer.args.trace:
            pipeline, clock = trainer.run.pipeline, trainer.times.clock
            if pipeline.spans is not None and clock is not None:
                pipeline.spans += clock.spans(pipeline.pp.rank)
            self.spans = pipeline.recorded()
        length, samples = trainer.config.seq_len, trainer.checkpoints.samples(step)
        speed, tokens = len(samples) * length / trainer.times.seconds, samples.stop * length
        speeds = {"tokens_per_second": speed, **trainer.times.record(), "memory": peak_memory(self.mesh)}
        if self.mesh.device_type == "cuda" and math.isfinite(used := mfu(trainer, speed)):
            speeds["mfu"] = used
        read = {"samples": [samples.start, samples.stop - 1], "tokens": tokens}
        self.record({"step": step, **entry, **read, **speeds})
        shown = {"loss": f"{entry['loss']:.3f}", "norm": f"{entry['grad_norm']:.2f}", "tok/s": f"{speed:.0f}"}
        if "experts" in entry:
            shown["max load"] = f"{1 + max(entry['experts']['max_violation']):.2f}"
            shown["dropped"] = f"{max(entry['experts']['dropped']):.1%}"
        if "mfu" in speeds:
            shown["MFU"] = f"{speeds['mfu']:.1%}"
        bar.set_postfix(shown)

    def record_merge(self, step: int, merge: Merge | None) -> None:
        """Record a merge of the workers, if there was one."""
        if merge is not None:
            facts = {"fragment": merge.fragment, "norm": merge.norm, "agreement": merge.agreement}
            self.record({"step": step, "merge": {**facts, "norms": merge.norms}})

    def record_evaluation(self, step: int, value: float, sets: dict[str, float]) -> None:
        """Record and print the validation loss, also as perplexity and in bits a byte, and that of each named set."""
        also = {"perplexity": math.exp(min(value, 700.0)), "bits_per_byte": value / math.log(2) / self.bytes_of_token}
        self.record({"step": step, "val_loss": value, **also, **({"val_losses": sets} if sets else {})})
        named = "".join(f", {name} {of:.4f}" for name, of in sets.items())
        also_shown = f"perplexity {also['perplexity']:.2f}, {also['bits_per_byte']:.3f} bits a byte"
        self.tell(f"after {step + 1} steps: validation loss {value:.4f} ({also_shown}){named}")

    def end(self, trainer: Trainer) -> None:
        """Draw the plots, generate a sample of text, and print the files and what to do next. Call it on all ranks."""
        if self.lead and self.spans:  # none where no step was left
            self.write("the trace", lambda: draw_trace(trainer.run.pipeline.plan, self.spans, self.out))
        if self.lead:
            self.write("loss.png", lambda: plot_losses(self.records, self.out / "loss.png"))
        text = sample_text(trainer)
        if self.shows:
            earlier = (".lock", "errors")  # a run that writes errors doesn't end here: they are an earlier run's
            written = sorted(str(path) for path in self.out.iterdir() if path.name not in earlier)
            print(f"--- a sample\n{text}\n---\nwrote {', '.join(written)}")
            if (saved := trainer.checkpoints.last) is not None:
                here = os.path.relpath(sys.executable)  # such as .venv/bin/python, which needs no activation
                python = "python" if here.startswith("..") else here
                print(
                    f"train on:  {on(trainer.args)}\n"
                    f"generate:  {python} -m examples.gpt.generate --checkpoint {saved} --prompt 'def '\n"
                    f"export:    {python} -m mpcore convert examples.gpt.hf:SPEC --from {saved} "
                    f"--to-hf {self.out / 'hugging_face'}"
                )


def on(args: argparse.Namespace) -> str:
    """Return how to train on after the last step, with the learning rate that the run ended with."""
    kept = lr_schedule(args)["lr_decay_steps"]
    more = f"--steps {2 * args.steps} --lr-decay-steps {kept}"
    if args.listen or args.join:
        return f"start workers in new folders (--out), each with --resume of this checkpoint and {more}"
    return f"the same command with --resume auto {more}"


class Lines:
    """Counts steps in lines of a log, one every few seconds."""

    def __init__(self, todo: range, steps: int) -> None:
        self.first = self.step = todo.start
        self.steps, self.shown = steps, {}
        self.began = self.told = time.monotonic()

    def update(self, steps: int) -> None:
        """Count more steps."""
        self.step, now = self.step + steps, time.monotonic()
        if now - self.told >= EVERY or self.step == self.steps:
            self.told, left = now, (now - self.began) / max(self.step - self.first, 1) * (self.steps - self.step)
            facts = "".join(f", {name} {value}" for name, value in self.shown.items())
            print(f"step {self.step} of {self.steps}{facts}, {left:.0f} s left", file=sys.stderr, flush=True)

    def set_postfix(self, shown: dict[str, str]) -> None:
        """Set what the next line says."""
        self.shown = shown

    def close(self) -> None:
        """Do nothing: a bar has to be closed."""


def bytes_of_token(trainer: Trainer, samples: int = 8) -> float:
    """Return the mean length in bytes of a token of the first held-out samples; NaN without any."""
    held_out, tokenizer = trainer.held_out, trainer.setup.tokenizer
    if not held_out:
        return math.nan
    ids = held_out.batch(range(min(samples, len(held_out))))[1].flatten().tolist()
    return tokenizer.count_bytes(ids) / len(ids) or math.nan


def peak_memory(mesh: Mesh) -> int:
    """Return the most bytes that this rank has held so far: of its GPU, or of the process without one."""
    if mesh.device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10


def summary(trainer: Trainer) -> str:
    """Describe the mesh, the parameters, their memory and the samples."""
    config, mesh, model = trainer.config, trainer.mesh, trainer.model
    active = f" ({count_active_parameters(config):,} active)" if config.moe is not None else ""
    here = sum(local_tensor(p).numel() for p in model.parameters())
    widths = {2: 2 + 16, 4: 16, 8: 32}  # with gradient and two moments; of 16-bit ones in float32, as the master is
    size = sum(local_tensor(p).numel() * widths[p.element_size()] for p in model.parameters())
    return (
        f"{mesh}\n"
        f"{count_parameters(config):,} parameters{active}, {here:,} on rank [{mesh.world.rank}]; "
        f"parameters, gradients and Adam: {size / 2**20:.1f} MiB ({peak_memory(mesh) / 2**20:.0f} MiB held so far)\n"
        f"{len(trainer.setup.train):,} training samples of {config.seq_len} tokens, "
        f"{len(trainer.held_out or ()):,} held out; {trainer.setup.micro_batches} micro-batches a step"
        + "".join(f"\n{told}" for told in (long_warmup(trainer.args), idle_width(trainer.args, config)) if told)
    )


def idle_width(args: argparse.Namespace, config: GPTConfig) -> str:
    """Return a warning if `--d-ff` was given and no block has a dense MLP."""
    own = config.moe.d_ff if config.moe and all(map(config.has_experts, range(config.layers))) else None
    if own is None or {**vars(args), **args.model}.get("d_ff") is None or config.mtp:
        return ""
    return f"--d-ff {config.d_ff} has no effect: every block has experts, of moe.d_ff {own}"


def mfu(trainer: Trainer, tokens_per_second: float) -> float:
    """Return the share of the devices' peak FLOPs that the model uses."""
    name = torch.cuda.get_device_name()
    peak = next((v for k, v in PEAK_FLOPS.items() if k in name), math.nan)
    return flops_of_token(trainer.config) * tokens_per_second / (peak * trainer.mesh.job.size)
