"""Pretrain a GPT on any mesh: `python -m examples.gpt.pretrain`, or under torchrun with --tp, --pp, --cp, --dp."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from examples.gpt.data import IndexedDataset, TokenSamples, default_corpus, split_documents
from examples.gpt.generate import generate
from examples.gpt.model import GPT, PRESETS, GPTConfig, build_stages, count_parameters
from examples.gpt.tokenizer import load_tokenizer
from mpcore import Mesh, build_mesh, clip_gradients, grad_norm, materialize, reduce_gradients
from mpcore.checkpoint import Saving, checkpoints, load, reshard, save, save_async, step_path
from mpcore.collectives import all_reduce
from mpcore.data_parallel import shard_data_parallel
from mpcore.layers import vocab_parallel_cross_entropy
from mpcore.mesh import check_same, raise_together
from mpcore.pipeline import Pipeline
from mpcore.pipeline.draw import draw, plan_title, write_chrome_trace
from mpcore.pipeline.partition import join_stages, parameter_costs, partition
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import NAMES, Schedule, Span, find_schedule
from mpcore.sharding import local_tensor

DTYPES = {n: getattr(torch, n) for n in ("float64", "float32", "bfloat16", "float16")}
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, from the vendor's datasheets


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; every flag has a default."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.pretrain", description=__doc__)
    add = parser.add_argument_group("mesh").add_argument
    for axis, text in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        add(f"--{axis}", type=int, default=1, help=f"{text} parallel size (default 1)")
    add("--dp", type=int, help="data parallel size (default: what the others leave of the world)")
    add(
        "--sequence-parallel",
        action="store_true",
        help="cut activations along the sequence between tp regions",
    )
    add("--schedule", default="1f1b", metavar="NAME|PATH.csv", help=f"of --pp: {', '.join(NAMES)} (default 1f1b)")
    add("--virtual-stages", type=int, help="stages on each pipeline rank (default: what the schedule takes)")
    add("--trace", action="store_true", help="draw what each pipeline rank did in the last step, and its plan")
    add = parser.add_argument_group("model").add_argument
    add(
        "--preset",
        choices=sorted(PRESETS),
        default="tiny",
        help="shape that the flags below change (default tiny)",
    )
    add("--layers", type=int)
    add("--d-model", type=int)
    add("--heads", type=int)
    add("--kv-heads", type=int)
    add("--d-ff", type=int)
    add("--dropout", type=float)
    add("--tie-embeddings", action="store_true", default=None, help="head and embedding share one table")
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        help="PREFIX of .bin and .idx, as examples.gpt.prepare writes (default: Python's standard library)",
    )
    add("--tokenizer", default="byte", help="'byte' or a tokenizer.json (default byte)")
    add("--seq-len", type=int, help="tokens a sample (default: the preset's)")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=200)
    add("--global-batch", type=int, default=16, help="samples a step, over all ranks")
    add("--micro-batch", type=int, default=2, help="samples a forward, on one rank")
    add("--lr", type=float, default=3e-3)
    add("--warmup", type=int, default=20, help="steps of linear warm-up; a cosine to a tenth follows")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="bound on the gradient norm; 0: none")
    add("--seed", type=int, default=0)
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="bfloat16, float16: fp32 weights, matrix products in it",
    )
    add("--eval-every", type=int, default=50)
    add("--eval-samples", type=int, default=32, help="held-out samples an evaluation")
    add("--out", default="runs/pretrain", help="folder for metrics.jsonl, config.json, loss.png, checkpoints")
    add = parser.add_argument_group("checkpoints").add_argument
    add("--save-every", type=int, default=0, help="steps between checkpoints in OUT/checkpoints; 0: none (default)")
    add("--keep", type=int, help="how many of the last checkpoints stay (default: all)")
    add("--async-save", action="store_true", help="write in the background while training goes on")
    add(
        "--resume",
        default="none",
        metavar="{auto,PATH,none}",
        help="go on from a checkpoint of any layout; auto: from the newest in OUT that is whole (default none)",
    )
    add("--exit-step", type=int, help="save after so many steps and leave, as on SIGTERM and SIGUSR1")
    return parser.parse_args(argv)


def model_config(args: argparse.Namespace, vocab_size: int) -> GPTConfig:
    """The preset with what the flags change of it."""
    names = ("layers", "d_model", "heads", "kv_heads", "d_ff", "dropout", "tie_embeddings", "seq_len")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(PRESETS[args.preset], vocab_size=vocab_size, **changes)


def check(args: argparse.Namespace, config: GPTConfig, mesh: Mesh) -> int:
    """Refuse sizes that don't fit each other, before anything is built.

    Returns:
        The number of micro-batches a step has on each rank.
    """
    for name in ("steps", "global_batch", "micro_batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is smaller than 1")
    if args.save_every < 0:
        raise ValueError(f"--save-every {args.save_every} is smaller than 0")
    for name in ("keep", "exit_step"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is smaller than 1")
    for axis in (mesh.cp, mesh.ep):
        if axis.size > 1:
            raise ValueError(f"--{axis.name} {axis.size}: this model has no {axis.name} layers yet, only size 1 works")
    limit = PRESETS[args.preset].seq_len
    if PRESETS[args.preset].positions == "learned" and config.seq_len > limit:
        raise ValueError(f"--seq-len {config.seq_len} is longer than the {limit} positions of {args.preset}")
    if config.heads < mesh.tp.size:
        raise ValueError(f"--heads {config.heads} is smaller than the tp size {mesh.tp.size}")
    if config.layers < mesh.pp.size:
        raise ValueError(f"--layers {config.layers} is smaller than the pp size {mesh.pp.size}")
    if args.sequence_parallel and config.seq_len % mesh.tp.size:
        near = config.seq_len // mesh.tp.size * mesh.tp.size
        raise ValueError(
            f"--seq-len {config.seq_len} is not a multiple of the tp size {mesh.tp.size}, which --sequence-parallel "
            f"needs: {near} is"
        )
    each = mesh.data.size * args.micro_batch
    if args.global_batch % each:
        raise ValueError(
            f"--global-batch {args.global_batch} is not a multiple of dp x micro-batch = {mesh.data.size} x "
            f"{args.micro_batch} = {each}"
        )
    micro_batches = args.global_batch // each
    if args.schedule == "1f1b" and micro_batches < mesh.pp.size:
        raise ValueError(
            f"{micro_batches} micro-batches (--global-batch {args.global_batch} / {each}) are fewer than the pp size "
            f"{mesh.pp.size}: --global-batch {each * mesh.pp.size} is enough"
        )
    return micro_batches


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def plan_stages(
    args: argparse.Namespace, config: GPTConfig, pp: int, micro_batches: int
) -> tuple[Schedule, list[range]]:
    """The schedule, proved, and the blocks of each stage: head weighed in, the slowest as fast as can be."""
    plan = find_schedule(args.schedule, pp, micro_batches, args.virtual_stages)
    prove(plan)
    whole = GPT(config, device="meta")
    *blocks, head = parameter_costs([*whole.blocks.values(), whole.head])
    return plan, partition(blocks, plan.stages, last=head)


class Trainer:
    """What a run holds. `python -m examples.gpt.pretrain` makes one and calls `run`."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        self.args, self.mesh = args, mesh
        error = None
        try:
            self.tokenizer = load_tokenizer(args.tokenizer)
            data = IndexedDataset(args.data or default_corpus(tokenizer=self.tokenizer))
            config = model_config(args, self.tokenizer.vocab_size)
            self.micro_batches = check(args, config, mesh)
            plan, blocks = plan_stages(args, config, mesh.pp.size, self.micro_batches)
            data.check_tokens(config.vocab_size, mesh.world.rank, mesh.world.size)
            parts = split_documents(len(data), seed=args.seed)
            self.train, self.held_out = (
                TokenSamples(data, config.seq_len, seed=args.seed, documents=ids) for ids in parts
            )
        except (ValueError, OSError) as problem:
            error = problem
        raise_together(error)
        self.config = config
        flags = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
        self.corpus = {"documents": len(data), "tokens": data.num_tokens}
        check_same("configuration", {**flags, **self.corpus})

        torch.manual_seed(args.seed)
        self.half = DTYPES[args.dtype] if args.dtype in ("bfloat16", "float16") else None
        dtype = torch.float64 if args.dtype == "float64" else torch.float32
        ranks = [plan.rank_of[stage] for stage in range(plan.stages)]
        options: dict[str, Any] = {"sequence_parallel": args.sequence_parallel, "device": "meta", "dtype": dtype}
        self.stages = build_stages(config, mesh, blocks, ranks, **options)
        model = self.stages[0] if len(self.stages) == 1 else join_stages(self.stages)
        materialize(model, args.seed, mesh.device)
        # `fully_shard` would part a table that two stages of a rank share: then each data rank keeps the whole model.
        shared = config.tie_embeddings and plan.stages > 1 and ranks[0] == ranks[-1]
        self.replicated = [mesh.data] if shared else []
        for stage in [] if shared else self.stages:
            shard_data_parallel(stage, mesh, stage.blocks.values())
        self.model: nn.Module = model
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": args.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        self.pipeline = Pipeline(self.stages, mesh, self.micro_batches, self.loss, plan, trace=args.trace)
        self.spans: list[Span] = []
        self.scale = 2.0**16 if args.dtype == "float16" else 1.0  # so that small gradients don't vanish in fp16
        self.good_steps = 0
        self.tokens_of_step = 1.0
        self.first_step = self.first_sample = 0
        self.saving: Saving | None = None
        self.asked_to_stop = False
        self.resume()

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The micro-batch's share of the step's loss: its sum over tokens, divided once by the global count."""
        total = vocab_parallel_cross_entropy(
            logits, target, tp=self.mesh.tp, vocab_size=self.config.vocab_size, reduction="sum"
        )
        return total * (self.scale / self.tokens_of_step)

    def autocast(self) -> Any:
        """Matrix products in half precision, where that is asked for."""
        return torch.autocast(self.mesh.device_type, self.half) if self.half else nullcontext()

    def batch(self, samples: TokenSamples, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens, targets and sample indices of `count` samples from global index `first`."""
        each = count // self.mesh.data.size
        start = first + each * self.mesh.data.rank
        indices = range(start, start + each)
        tokens, targets = (t.to(self.mesh.device) for t in samples.batch(indices))
        return tokens, targets, torch.tensor(list(indices), device=self.mesh.device)

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step. Returns the loss before it, the gradient norm and the learning rate."""
        lr = learning_rate(self.args, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens, targets, samples = self.batch(self.train, self.sample(step), self.args.global_batch)
        self.tokens_of_step = float(all_reduce((targets != -100).sum(), self.mesh.data))
        with self.autocast():
            total = self.pipeline.forward_backward(tokens, targets, samples=samples)
        reduce_gradients(self.model, *self.replicated)
        if self.scale != 1:
            for p in self.model.parameters():
                if p.grad is not None:
                    local_tensor(p.grad).div_(self.scale)
        loss = float(all_reduce(total, self.mesh.data)) / self.scale
        norm = grad_norm(self.model, self.mesh)
        finite = bool(norm.isfinite()) and math.isfinite(loss)  # both are sums over all ranks: all decide alike
        if finite:
            clip_gradients(self.model, self.args.clip, norm)
            self.optimizer.step()
        self._adapt_scale(finite)
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "grad_norm": float(norm), "lr": lr}

    def sample(self, step: int) -> int:
        """Global index of a step's first sample: all that there is to know of the data's state."""
        return self.first_sample + (step - self.first_step) * self.args.global_batch

    @property
    def checkpoints(self) -> Path:
        """Where this run keeps them."""
        return Path(self.args.out) / "checkpoints"

    def about(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""
        return {"model": dataclasses.asdict(self.config), "corpus": self.corpus}

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps."""
        state = {"step": step, "sample": self.sample(step), "seed": self.args.seed, "config": self.about()}
        scaler = {"scale": self.scale, "good_steps": self.good_steps} if self.args.dtype == "float16" else {}
        state |= {"extra": scaler, "keep": self.args.keep}
        for stage in self.stages:
            reshard(stage)  # an evaluation leaves them gathered
        path, held = step_path(self.checkpoints, step), (self.model, self.optimizer)
        if self.args.async_save:
            after, self.saving = self.saving, None
            self.saving = save_async(path, *held, mesh=self.mesh, after=after, **state)
        else:
            save(path, *held, mesh=self.mesh, **state)

    def resume(self) -> None:
        """Go on from the checkpoint that `--resume` asks for; auto passes over those that are damaged."""
        resume, lead = self.args.resume, self.mesh.world.rank == 0
        found = checkpoints(self.checkpoints, self.mesh) if resume in ("auto", "none") else [Path(resume)]
        if resume == "none":
            if found and self.args.save_every:
                raise ValueError(f"{found[0]} is there: --resume auto goes on from it, another --out begins anew")
            return
        first_error, manifest = None, None
        for path in found:
            try:
                manifest = load(path, self.model, self.optimizer, mesh=self.mesh)
                break
            except ValueError as error:
                first_error = first_error or error
                if lead and resume == "auto":
                    print(f"passed over: {error}", file=sys.stderr, flush=True)
        if manifest is None:
            if first_error is not None:
                raise first_error
            return
        saved = manifest.config | {"seed": manifest.seed}
        for name, mine in (self.about() | {"seed": self.args.seed}).items():
            if saved.get(name) != mine:
                raise ValueError(f"the checkpoint's {name} is {saved.get(name)}, this run's is {mine}")
        self.first_step, self.first_sample = manifest.step, manifest.sample
        if self.args.dtype == "float16":
            self.scale = manifest.extra.get("scale", self.scale)
            self.good_steps = manifest.extra.get("good_steps", 0)
        if lead:
            print(f"resumed after step {manifest.step}, from sample {manifest.sample}", flush=True)

    def ask_to_stop(self, *_: Any) -> None:
        """Save and leave after this step: what a signal calls."""
        self.asked_to_stop = True

    def stopping(self) -> bool:
        """Whether any rank was asked to stop; tells of a save in the background that failed on any."""
        failed = self.saving is not None and self.saving.failed
        flags = torch.tensor([int(self.asked_to_stop), int(failed)], device=self.mesh.device)
        stop, failed = (bool(flag) for flag in all_reduce(flags, self.mesh.world, "max").tolist())
        if failed and self.saving is not None:
            saving, self.saving = self.saving, None
            self._try(saving.wait)
        return stop

    def _try(self, work: Callable[[], Any]) -> None:
        """A save that fails is told loudly, and training goes on: the next one is tried again."""
        try:
            work()
        except ValueError as error:
            if self.mesh.world.rank == 0:
                tqdm.write(f"NOT SAVED, training goes on: {error}", file=sys.stderr)

    def _adapt_scale(self, finite: bool) -> None:
        if self.args.dtype != "float16":
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps % 1000 == 0:
            self.scale *= 2

    def set_training(self, training: bool) -> None:
        """Dropout of all of this rank's stages on or off."""
        for stage in self.stages:
            stage.train(training)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the first held-out samples, the same for every layout."""
        self.set_training(False)
        each = self.mesh.data.size
        rounds = max(min(self.args.eval_samples, len(self.held_out)) // each, 1)
        batches = [self.batch(self.held_out, i * each, each)[:2] for i in range(rounds)]
        scale, self.scale, self.tokens_of_step = self.scale, 1.0, 1.0
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        with self.autocast():
            for y, (_, targets) in zip(self.pipeline.forward([x for x, _ in batches]), batches, strict=True):
                if self.stages[-1].last:
                    total += self.loss(y, targets)
        count = torch.tensor(sum(t.numel() for _, t in batches), device=self.mesh.device)
        total = all_reduce(self.pipeline.from_last(total), self.mesh.data)
        self.scale = scale
        self.set_training(True)
        return float(total) / int(all_reduce(count, self.mesh.data))

    def run(self) -> None:
        """All steps, with a progress bar, evaluations, metrics, a plot and a sample at the end."""
        args, lead = self.args, self.mesh.world.rank == 0
        out = Path(args.out)
        error = None
        records: list[dict] = []
        if lead:
            try:
                out.mkdir(parents=True, exist_ok=True)
                config = {"model": dataclasses.asdict(self.config), "run": vars(args)}
                write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
                records = read_records(out / "metrics.jsonl", self.first_step)
                write_whole(out / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in records))
                if args.save_every:
                    self.checkpoints.mkdir(exist_ok=True)  # fails now, or never
            except OSError as problem:
                error = ValueError(f"--out {out} can't be written: {problem}")
        raise_together(error)
        if lead:
            print(self.summary(), flush=True)

        def record(entry: dict) -> None:
            records.append(entry)
            if lead:
                with open(out / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(entry) + "\n")

        todo = range(self.first_step, args.steps)
        shown = {"unit": "step", "dynamic_ncols": True, "file": sys.stderr, "disable": not lead}
        bar = tqdm(todo, initial=self.first_step, total=args.steps, **shown)
        tokens_a_step = args.global_batch * self.config.seq_len
        for step in bar:
            began = time.perf_counter()
            entry = {"step": step, **self.step(step)}
            took = time.perf_counter() - began
            self.spans = self.pipeline.recorded() if args.trace else []
            entry |= {"tokens": (step + 1) * tokens_a_step, "tokens_per_second": tokens_a_step / took}
            record(entry)
            values = {"loss": f"{entry['loss']:.3f}", "norm": f"{entry['grad_norm']:.2f}"}
            values["tok/s"] = f"{entry['tokens_per_second']:.0f}"
            if self.mesh.device_type == "cuda":
                values["MFU"] = f"{self.mfu(entry['tokens_per_second']):.1%}"
            bar.set_postfix(values)
            if not math.isfinite(entry["grad_norm"]) and lead:
                tqdm.write(f"step {step}: the gradient is not finite, the step was skipped on all ranks")
            if args.eval_every and ((step + 1) % args.eval_every == 0 or step + 1 == args.steps):
                value = self.evaluate()
                record({"step": step, "val_loss": value})
                if lead:
                    tqdm.write(f"step {step}: validation loss {value:.4f}")
            done = step + 1
            leave = self.stopping() or done == args.exit_step
            if leave:
                bar.close()
                self.finish(done)
                return
            if args.save_every and (done % args.save_every == 0 or done == args.steps):
                self._try(lambda done=done: self.save(done))
        bar.close()
        if self.saving is not None:
            self.saving.wait()
        self.set_training(False)
        text = generate(self.stages[-1], self.pipeline, self.mesh, self.tokenizer, "def ", seed=args.seed)
        self.set_training(True)
        if lead and args.trace:
            draw_trace(self.pipeline.plan, self.spans, out)
        if lead:
            plot_losses(records, out / "loss.png")
            print(f"--- a sample\n{text}\n---\nwrote {', '.join(sorted(str(p) for p in out.iterdir()))}")

    def finish(self, step: int) -> None:
        """Save and leave. Here a save that fails is an error: nothing comes after it."""
        if self.saving is not None:
            self._try(self.saving.wait)
            self.saving = None
        self.save(step)
        if self.saving is not None:
            self.saving.wait()
        if self.mesh.world.rank == 0:
            print(f"saved {step_path(self.checkpoints, step)} and left: --resume auto goes on from it", flush=True)

    def summary(self) -> str:
        """The mesh, the parameters and the memory they take, for people."""
        here = sum(local_tensor(p).numel() for p in self.model.parameters())
        size = sum(local_tensor(p).numel() * p.element_size() for p in self.model.parameters())
        if self.mesh.device_type == "cuda":
            held = f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB allocated"
        else:
            held = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB resident"
        return (
            f"{self.mesh}\n"
            f"{count_parameters(self.config):,} parameters, {here:,} on this rank; parameters, gradients and Adam: "
            f"{4 * size / 2**20:.1f} MiB ({held} so far)\n"
            f"{len(self.train):,} training samples of {self.config.seq_len} tokens, {len(self.held_out):,} held out; "
            f"{self.micro_batches} micro-batches a step"
        )

    def mfu(self, tokens_per_second: float) -> float:
        """Model FLOPs (6N + 12 L D T a token, PaLM appendix B) over the device's peak."""
        c = self.config
        flops = 6 * count_parameters(c) + 12 * c.layers * c.d_model * c.seq_len
        name = torch.cuda.get_device_name()
        peak = next((v for k, v in PEAK_FLOPS.items() if k in name), math.nan)
        return flops * tokens_per_second / (peak * self.mesh.world.size)


def plot_losses(records: list[dict], path: Path) -> None:
    """Training and validation loss over the tokens seen."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [r for r in records if "loss" in r]
    seen = {r["step"]: r["tokens"] for r in steps}
    evaluations = [r for r in records if "val_loss" in r]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([r["tokens"] for r in steps], [r["loss"] for r in steps], lw=1, label="training")
    axes.plot([seen[r["step"]] for r in evaluations], [r["val_loss"] for r in evaluations], "o-", label="held out")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path.with_suffix(".tmp.png"), dpi=120)
    os.replace(path.with_suffix(".tmp.png"), path)
    plt.close(figure)


def read_records(path: Path, steps: int) -> list[dict]:
    """What an earlier run wrote of its first `steps` steps."""
    if steps == 0 or not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:  # the machine stopped in the middle of the last line
            break
    return [entry for entry in records if entry["step"] < steps]


def draw_trace(plan: Schedule, spans: list[Span], out: Path) -> None:
    """The plan and the run of a step side by side, in the same colours, and the run as a Chrome trace."""
    proof = prove(plan)
    draw(proof.spans, out / "plan.png", title=plan_title(plan, proof))
    busy, ranks = sum(span.end - span.start for span in spans), len(plan.ranks)
    bubble = 1 - busy / (ranks * max(span.end for span in spans))
    shown = [span._replace(start=1e3 * span.start, end=1e3 * span.end) for span in spans]
    draw(shown, out / "trace.png", title=f"{plan.name}: the last step, bubble {bubble:.1%}", unit="ms")
    write_chrome_trace(spans, out / "trace.json")


def write_whole(path: Path, text: str) -> None:
    """Write a file in one piece: never half of it."""
    part = path.with_name(path.name + ".tmp")
    part.write_text(text)
    os.replace(part, path)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = parse(argv)
    try:
        trainer = Trainer(args, build_mesh(tp=args.tp, cp=args.cp, pp=args.pp, ep=args.ep, dp=args.dp))
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, trainer.ask_to_stop)
        trainer.run()
    except ValueError as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        sys.exit(f"rank {rank}: error: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
