"""Print the summary and the progress bar of a run, and write metrics.jsonl and the plots."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from examples.gpt.flops import count_active_parameters, count_parameters, flops_of_token
from examples.gpt.generate import sample_text
from examples.gpt.records import LOCK, draw_trace, plot_losses
from mpcore import Mesh
from mpcore.fault_tolerance.metrics import MetricsWriter
from mpcore.parallel.local_updates import Merge
from mpcore.sharding import local_tensor

if TYPE_CHECKING:
    from examples.gpt.train import Trainer

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, from the vendor's datasheets


class Console:
    """Prints and records: rank 0 of each worker writes its records, rank 0 of the job shows the progress bar."""

    def __init__(self, mesh: Mesh, out: Path) -> None:
        self.mesh, self.out = mesh, out
        self.lead, self.shows = mesh.world.rank == 0, mesh.job.rank == 0
        self.records: list[dict] = []
        self.writer: MetricsWriter | None = None
        self.unwritten: set[str] = set()
        self.spans: list = []

    def tell(self, text: str, file: Any = None) -> None:
        """Print a line above the progress bar, once for each worker."""
        if self.lead:
            workers = self.mesh.workers
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

    def begin(self, trainer: Trainer, records: list[dict]) -> None:
        """Print the summary of the run."""
        self.records, self.writer = records, MetricsWriter(self.out / "metrics.jsonl")
        steps, done = trainer.args.steps, trainer.run.step
        if self.shows:
            print(summary(trainer), flush=True)
        if done >= steps:
            self.tell(f"nothing is left to train: {done} steps are done, --steps is {steps}")

    def bar(self, todo: range, steps: int) -> tqdm:
        """Return the progress bar over the steps that are left."""
        shown = {"unit": "step", "dynamic_ncols": True, "file": sys.stderr, "disable": not self.shows}
        return tqdm(todo, initial=todo.start, total=steps, **shown)

    def record(self, entry: dict) -> None:
        """Add a line to metrics.jsonl."""
        self.records.append(entry)
        if self.lead and self.writer is not None:
            self.write("metrics.jsonl", lambda: self.writer.add(entry))  # type: ignore[union-attr]

    def record_step(self, trainer: Trainer, step: int, entry: dict, seconds: float, bar: tqdm) -> None:
        """Record a step, and show it on the bar."""
        if trainer.args.trace:
            self.spans = trainer.run.pipeline.recorded()
        length, samples = trainer.config.seq_len, trainer.checkpoints.samples(step)
        speed, tokens = len(samples) * length / seconds, samples.stop * length
        self.record({"step": step, **entry, "tokens": tokens, "tokens_per_second": speed})
        shown = {"loss": f"{entry['loss']:.3f}", "norm": f"{entry['grad_norm']:.2f}", "tok/s": f"{speed:.0f}"}
        if "experts" in entry:
            shown["max load"] = f"{1 + max(entry['experts']['max_violation']):.2f}"
            shown["dropped"] = f"{max(entry['experts']['dropped']):.1%}"
        if self.mesh.device_type == "cuda":
            shown["MFU"] = f"{mfu(trainer, speed):.1%}"
        bar.set_postfix(shown)

    def record_merge(self, step: int, merge: Merge | None) -> None:
        """Record a merge of the workers, if there was one."""
        if merge is not None:
            facts = {"fragment": merge.fragment, "norm": merge.norm, "agreement": merge.agreement}
            self.record({"step": step, "merge": {**facts, "norms": merge.norms}})

    def record_evaluation(self, step: int, value: float, sets: dict[str, float]) -> None:
        """Record and print the validation loss, and that of each named set."""
        self.record({"step": step, "val_loss": value, **({"val_losses": sets} if sets else {})})
        named = "".join(f", {name} {of:.4f}" for name, of in sets.items())
        self.tell(f"step {step}: validation loss {value:.4f}{named}")

    def end(self, trainer: Trainer) -> None:
        """Draw the plots, generate a sample of text, and print the names of all files. Call it on all ranks."""
        if self.lead and self.spans:  # none where no step was left
            self.write("the trace", lambda: draw_trace(trainer.run.pipeline.plan, self.spans, self.out))
        if self.lead:
            self.write("loss.png", lambda: plot_losses(self.records, self.out / "loss.png"))
        text = sample_text(trainer)
        if self.shows:
            written = sorted(str(path) for path in self.out.iterdir() if path.name != LOCK)
            print(f"--- a sample\n{text}\n---\nwrote {', '.join(written)}")


def summary(trainer: Trainer) -> str:
    """Describe the mesh, the parameters, their memory and the samples."""
    config, mesh, model = trainer.config, trainer.mesh, trainer.model
    active = f" ({count_active_parameters(config):,} active)" if config.moe is not None else ""
    here = sum(local_tensor(p).numel() for p in model.parameters())
    widths = {2: 2 + 16, 4: 16, 8: 32}  # with gradient and two moments; of 16-bit ones in float32, as the master is
    size = sum(local_tensor(p).numel() * widths[p.element_size()] for p in model.parameters())
    if mesh.device_type == "cuda":
        held = f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB allocated"
    else:
        held = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB resident"
    return (
        f"{mesh}\n"
        f"{count_parameters(config):,} parameters{active}, {here:,} on this rank; "
        f"parameters, gradients and Adam: {size / 2**20:.1f} MiB ({held} so far)\n"
        f"{len(trainer.setup.train):,} training samples of {config.seq_len} tokens, "
        f"{len(trainer.held_out or ()):,} held out; {trainer.setup.micro_batches} micro-batches a step"
    )


def mfu(trainer: Trainer, tokens_per_second: float) -> float:
    """Return the share of the devices' peak FLOPs that the model uses."""
    name = torch.cuda.get_device_name()
    peak = next((v for k, v in PEAK_FLOPS.items() if k in name), math.nan)
    return flops_of_token(trainer.config) * tokens_per_second / (peak * trainer.mesh.job.size)
