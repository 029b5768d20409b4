"""The checks of `mpcore preflight -- -m PROGRAM FLAGS`: of a training run itself, and of a toy of it.

PROGRAM is a module with the names of `NEEDED`, such as `examples.gpt.pretrain`; the module `plan` of its package has a
`build` for the planners:

    parse(flags)                        -> the flags as a Namespace
    mesh_arguments(args, each)          -> the arguments of `build_mesh`; `each` is the number of ranks of a node
    read_model(args, mesh)              -> dict: tokenizer, config, ramp, micro_batches, plan
    open_data(args, tokenizer)          -> the corpora of the run, and those of its validation sets by name
    other_run(path, about, seed, dtype, begun_elsewhere) -> why a checkpoint is another run's, or None
    IndexedDatasetWriter(prefix, dtype) writes the corpus of the toys
    Trainer(args, mesh, config)         trains them
"""

from __future__ import annotations

import argparse
import io
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mpcore.checkpoint import checkpoints, verify
from mpcore.mesh import build_mesh
from mpcore.tools.analysis.dry_run import dry_run, pretend
from mpcore.tools.analysis.memory import UNITS
from mpcore.tools.command_line import find_object
from mpcore.tools.fault_tolerance.faults import check_writable
from mpcore.tools.preflight.checks import Check, Options, Skip
from mpcore.tools.preflight.rehearsals import OWN_DTYPE, check_digits, compare, distinct, pick, resumed, within_rounding
from mpcore.tools.preflight.rehearse import Rehearsal, kill, rehearse
from mpcore.tools.preflight.toy import SIZE_NAMES, STEPS, Toy, shrink, with_flags, write_corpus
from mpcore.tools.verify.judge import Judge
from mpcore.tools.verify.layout import Layout
from mpcore.tools.verify.pool import Pool
from mpcore.tools.verify.run import SHIFT, check_slope

NEEDED = ("parse", "mesh_arguments", "read_model", "open_data", "other_run", "IndexedDatasetWriter", "Trainer")
TOKENS_READ = 2**29  # of each corpus: a few seconds of a disk
DRY_RANKS = 3
E4M3_EPS = 2.0**-3
NUDGED = 3  # runs of one process whose roundings say how far those of a layout may go


class Preflight:
    """The checks of a run. What one finds out, those after it use."""

    def __init__(self, program: str, flags: Sequence[str], options: Options, pool: Pool) -> None:
        self.flags: list[str] = list(flags)
        self.options = options
        self.pool = pool
        self.name = program
        self.program: ModuleType = import_module(program)
        self.folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="mpcore-preflight-")
        self.args: argparse.Namespace
        self.config: Any
        self.model: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.corpus: dict[str, Any] = {}
        self.toys: list[Toy] = []
        self.dense: dict[int, list[Rehearsal]] = {}
        self.sharded: dict[int, list[Rehearsal]] = {}

    def checks(self) -> list[Check]:
        """List them in order."""
        read = "correct the flag that the line names"
        differs = "the sharded run is not the run that one process computes: don't trust its loss"
        state = "a run that is stopped would not go on as it was: something of its state is not in the checkpoint"
        return [
            Check("flags", self.check_flags, read, needed=True),
            Check("data", self.check_data, "a rank would stop on this data, perhaps after hours: prepare it again"),
            Check("output folder", self.check_folder, "the run could not save what it trains"),
            Check("memory and bytes", self.check_memory, "shard more, recompute, or take a smaller --micro-batch"),
            Check("one process", self.check_dense, "the model does not train at all, sharded or not", needed=True),
            Check("against torch", self.check_torch, "one process computes it wrong too, so no layout can be right"),
            Check("sharded against unsharded", self.check_sharded, differs, needed=True),
            Check("accumulation", self.check_accumulation, "the loss depends on how a batch is cut in micro-batches"),
            Check("save, load elsewhere", self.check_layouts, state),
            Check("signal and resume", self.check_signal, state),
            Check("NaN on one rank", self.check_nan, "one bad batch would end the run, or part its replicas"),
            Check("dtype", self.check_dtype, "the layout is right, the numbers of this dtype are not"),
            Check("rank killed", self.check_killed, "a lost GPU would leave all others waiting, and paid for"),
        ]

    # --- the run itself -----------------------------------------------------------------------------------------------

    def check_flags(self) -> str:
        """Parse the flags, and fit them to each other, the model and the ranks."""
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                self.args = args = self.program.parse(self.flags)
        except SystemExit:
            raise ValueError(said.getvalue().strip() or "the flags ask for help, not for a run") from None
        sizes = {axis: getattr(args, axis) for axis in SIZE_NAMES}
        ranks = self.options.ranks
        if min(sizes["tp"], sizes["cp"], sizes["pp"], args.workers) >= 1 and ranks is None:
            ranks = sizes["tp"] * sizes["cp"] * sizes["pp"] * (sizes["dp"] or 1) * args.workers
        with pretend(ranks or 1):
            mesh = build_mesh(**{**self.program.mesh_arguments(args, self.options.each), "device_type": "cpu"})
            self.model = self.program.read_model(args, mesh)
        self.sizes = {axis: getattr(mesh, axis).size for axis in SIZE_NAMES}
        self.config = self.model["config"]
        folder = Path(self.folder.name)
        write_corpus(self.name, folder / "corpus")
        schedule = self.model["micro_batches"], self.model["plan"]
        self.toys = shrink(args, self.config, self.sizes, *schedule, folder, self.name)
        if not self.pool.workers:
            self.pool.most = max(toy.ranks for toy in self.toys)
            self.pool.preload = (rehearse.__module__, self.name)
        return f"{ranks} ranks; toys: {'; '.join(toy.name for toy in self.toys)}"

    def check_data(self) -> str:
        """Open every source, read a part of each, and the samples at both ends of the run."""
        args, vocab, length = self.args, self.config.vocab_size, self.config.seq_len
        data, sets = self.program.open_data(args, self.model["tokenizer"])
        self.corpus = data.about
        for corpora in (data, *sets.values()):
            tokens = sum(each.num_tokens for each in corpora.datasets)
            corpora.check_tokens(vocab, 0, max(1, tokens // TOKENS_READ))
        train, held_out = data.split(length, seed=args.seed, evaluate=args.eval_every > 0)
        wanted = self.model["ramp"].after(0, args.steps)
        every: dict[str, tuple[Any, int]] = {"--data": (train, wanted), "held out": (held_out, args.eval_samples)}
        every |= {name: (corpora.whole(length), args.eval_samples) for name, corpora in sets.items()}
        for name, (samples, count) in every.items():
            for index in sorted({i * max(count - 1, 0) // 64 for i in range(65)}):
                if samples is None:  # a run without evaluation
                    break
                read = samples.sample(index)
                if len(read) != length + 1 or not 0 <= read.min() <= read.max() < vocab:
                    raise ValueError(
                        f"{name}: sample {index} has {len(read)} tokens from {read.min()} to {read.max()}, wanted "
                        f"{length + 1} from 0 to {vocab - 1}"
                    )
        return f"{data.about['tokens']:,} tokens; the run takes {wanted:,} samples, {wanted / len(train):.2g} epochs"

    def check_folder(self) -> str:
        """See whether the run can write, and whether it may begin or resume there."""
        args = self.args
        out = Path(args.out) / ("worker-0" if args.workers > 1 else "")
        found = checkpoints(out / "checkpoints")
        if found and args.resume == "none":
            raise ValueError(f"{found[0]} is there: --resume auto goes on from it, another --out begins anew")
        for path in found[:1] if args.resume == "auto" else [Path(args.resume)] if args.resume != "none" else []:
            damaged = verify(path)
            if damaged:
                raise ValueError(f"--resume {path}: {damaged[0]}")
            fields = {"model": vars(self.config), "corpus": self.corpus, "optimizer": args.optimizer}
            about = {**fields, "tokenizer": self.model["tokenizer"].fingerprint}
            refused = self.program.other_run(path, about, args.seed, args.dtype, bool(args.init_from))
            if refused is not None:
                raise refused
        there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
        if not there.is_dir():
            raise ValueError(f"--out {out} can't be written: {there} is a file")
        check_writable(there, 0)
        stat = os.statvfs(there)
        return f"{stat.f_bavail * stat.f_frsize / 1e9:.0f} GB are free"

    def check_memory(self) -> str:
        """Plan the first, the second and the last stage in full size."""
        args = self.args
        dropped = [what for what in ("offload", "compile") if getattr(args, what) not in (None, ["none"])]
        flags = without(self.flags, {"--offload", "--compile", "--dp", "--data", "--resume"})
        sizes: dict[str, Any] = dict(self.sizes)
        inner = self.program.mesh_arguments(args, self.options.each)["cp_inner"]
        sizes |= {} if inner is None else {"cp_inner": inner}
        stride = sizes["dp"] * sizes["cp"] * sizes["tp"]
        ranks = sorted({0, min(1, sizes["pp"] - 1), sizes["pp"] - 1})[:DRY_RANKS]
        build = find_object(f"{self.name.rpartition('.')[0]}.plan:build")
        found = [dry_run(build, flags, rank * stride, args.device != "cpu", **sizes) for rank in ranks]
        fullest = max(found, key=lambda each: each.most)
        sent = ", ".join(f"{axis} {size / 1e9:.3g}" for axis, size in sorted(fullest.ledger.volumes().items()) if size)
        told = f"{fullest.most / UNITS['GiB']:.3g} GiB on the fullest rank; GB sent a step: {sent or 'none'}"
        if self.options.memory and fullest.most > self.options.memory and "offload" not in dropped:
            raise ValueError(f"{told}, and a GPU has {self.options.memory / UNITS['GiB']:.3g} GiB")
        return told + (f" (without --{' and --'.join(dropped)})" if dropped else "")

    # --- the toy ------------------------------------------------------------------------------------------------------

    def train(self, toy: Toy, out: str, **how: Any) -> list[Rehearsal]:
        """Train a toy on its ranks."""
        how = {"until": STEPS, **how}
        folder = Path(self.folder.name) / out
        return self.pool(toy.ranks, rehearse, toy, str(folder), timeout=self.options.timeout, **how)

    def check_dense(self) -> str:
        """Train each toy on one process for each worker."""
        losses: dict[int, float] = {}
        for i, toy in enumerate(self.toys):
            self.dense[i] = self.train(toy.alone(), f"dense-{i}", save_at=2, look=True)
            losses = self.dense[i][0].losses
            if not all(map(math.isfinite, losses.values())):
                raise ValueError(f"the toy's losses in float64 are {list(losses.values())}")
        return f"loss {losses[0]:.4f} to {losses[STEPS - 1]:.4f} in {STEPS} steps of {len(self.toys)} toys"

    def check_torch(self) -> str:
        """Compare one process with torch: the loss of its logits, and the slope of the loss along the gradient."""
        worst = 0.0
        for i, toy in enumerate(self.toys):
            for truth in self.dense[i]:
                loss, want = truth.losses[0], truth.reference
                if not math.isclose(loss, want, rel_tol=1e-9):
                    raise ValueError(
                        f"{toy.name}: the first loss is {loss:.12g}, torch's of the same logits {want:.12g}"
                    )
                if truth.wrong:
                    raise ValueError(f"{toy.name}: {truth.wrong}")
                distinct({name: truth.begun[name] for name in truth.seen.initial})
                keys = {key: name for name, key in truth.keys.items()}
                for name, key in truth.keys.items():
                    if keys[key] != name:
                        raise ValueError(f"{name} and {keys[key]} draw the same masks: they have one seed")
            moe = toy.config.moe
            if moe is not None and (moe.aux_loss is not None or moe.z_loss):
                continue  # the gradient has the balance loss, which the reported loss leaves out
            up, down = (
                self.train(toy.alone(), f"shifted-{i}-{sign}", until=1, shift=sign * SHIFT) for sign in (1.0, -1.0)
            )
            for truth, above, below in zip(self.dense[i], up, down, strict=True):
                seen = truth.seen
                worst = max(worst, check_slope(seen.gradients, seen.norm, above.losses[0], below.losses[0]))
        if not worst:
            return "the loss is torch's; the gradient has a balance loss, so it is not compared with the slope"
        return f"the loss is torch's; the gradient is its slope to {worst:.1g} of the norm"

    def check_sharded(self) -> str:
        """Train each toy on its layout: values, gradients, norm, and some steps."""
        worst = 0.0
        for i, toy in enumerate(self.toys):
            first = self.train(toy, f"first-{i}", until=1, look=True)  # a save would refuse drift, and not say why
            for truth in self.dense[i]:
                if missing := sorted(truth.state.keys() - pick(first, truth.worker).state.keys()):
                    raise ValueError(f"{toy.name}: no rank has {missing[0]}, which one process has")
                seen = [rank.seen for rank in first if rank.worker == truth.worker]
                verdict = Judge(truth.seen)(layout_of(toy), seen)
                if not verdict.equal:
                    raise ValueError(f"{toy.name}: {verdict.mismatch or verdict.error}")
                worst = max(worst, *verdict.worst.values())
            self.sharded[i] = self.train(toy, f"sharded-{i}", save_at=2)
            for truth in self.dense[i]:
                for rank in (rank for rank in self.sharded[i] if rank.worker == truth.worker):
                    cause = (
                        "the gradients of the first step are right, so look at what a step changes: the optimizer's "
                        "update and its rounding, its state, gradients that are not cleared, and other buffers"
                    )
                    compare(rank, truth, range(STEPS), f"{toy.name} against one process", cause)
        return f"{'; '.join(toy.name for toy in self.toys)}: equal to {worst:.2g} ULPs, {STEPS} steps"

    def check_accumulation(self) -> str:
        """Cut the same batches in fewer, larger micro-batches."""
        toy = self.toys[0]
        batch = toy.args.global_batch // toy.args.workers
        if toy.args.rampup_batch_size is not None:
            batch //= 2
        if batch == 1 or toy.args.bitwise:
            raise Skip(
                "a bitwise run sets its micro-batches" if toy.args.bitwise else "a step of one sample can't be cut"
            )
        got = self.train(toy.alone(micro_batch=batch), "accumulate")
        for rank, want in zip(got, self.dense[0], strict=True):
            compare(rank, want, range(STEPS), f"one micro-batch of {batch} against {batch} of 1", "a mean of means?")
        return f"1 x {batch} samples as {batch} x 1"

    def check_layouts(self) -> str:
        """Load what the toy saved on one process, and what one process saved on the toy's ranks."""
        for i, toy in enumerate(self.toys):
            for what, other, whole, out in (
                (f"{toy.name} saved, one process loaded", toy.alone(), self.sharded[i], f"sharded-{i}"),
                (f"one process saved, {toy.name} loaded", toy, self.dense[i], f"dense-{i}"),
            ):
                for rank in self.train(other, f"{out}-loaded", resume=str(Path(self.folder.name) / out)):
                    resumed(rank, pick(whole, rank.worker), 2, what)
        return f"{2 * len(self.toys)} changes of layout after step 2, two steps each"

    def check_signal(self) -> str:
        """Send the last rank a SIGTERM within a step; resume."""
        toy = self.toys[0]
        shutil.rmtree(Path(self.folder.name) / "signal", ignore_errors=True)  # of a check that a crash ended
        steps: dict[int, int] = {}  # workers leave after steps of their own, between the same two merges
        for rank in self.train(toy, "signal", stop_at=0):
            if not rank.stopped:
                raise ValueError(f"SIGTERM to rank {toy.ranks - 1} in step 0 did not stop a run of {STEPS} steps")
            if steps.setdefault(rank.worker, rank.step) != rank.step:
                raise ValueError(f"ranks of one worker left after step {steps[rank.worker]} and after {rank.step}")
        for rank in self.train(toy, "signal", resume="auto"):
            step = steps[rank.worker]
            resumed(rank, pick(self.sharded[0], rank.worker), step, f"resumed after step {step}")
        return f"saved and left after step {max(steps.values())}, and went on as if nothing had been"

    def check_nan(self) -> str:
        """Make the loss of the last data rank NaN: every rank must skip the step."""
        toy = self.toys[0]
        if toy.args.workers > 1:
            raise Skip("the toy's workers merge after this step, which moves all parameters")
        for number, rank in enumerate(self.train(toy, "nan", poison_at=1, until=2)):
            if not rank.skipped:
                raise ValueError(f"a NaN in the loss of the last data rank: rank {number} took the step")
        return "all ranks skip the step"

    def check_dtype(self) -> str:
        """Train the toy in the run's own dtype, with an overflow; save and resume."""
        args, toy = self.args, self.toys[0]
        own = {name: getattr(args, name) for name in ("dtype", "autocast", "residual_dtype", "fp8")}
        mine = replace(toy, args=with_flags(toy.args, **own))
        alone = toy.alone(**own)
        dense = self.train(alone, "dtype-dense", poison_at=1, look=True)
        moe = toy.config.moe
        starts = [nudged(dense[0].begun, seed, getattr(torch, args.dtype)) for seed in range(NUDGED)]
        others = [self.train(alone, f"dtype-{i}", until=1, look=True, start=each) for i, each in enumerate(starts)]
        whole = self.train(mine, "dtype", save_at=2, poison_at=1, look=True)
        truths = self.train(toy.alone(), "dtype-float64", until=1, look=True, start=dense[0].begun)
        near = OWN_DTYPE.get(args.dtype, 0.03)
        eps = E4M3_EPS if args.fp8 else torch.finfo(getattr(torch, args.dtype)).eps
        for rank in (*dense, *whole):
            if rank.left:
                raise ValueError(f"the gradient of {rank.left} in {args.dtype} is still there after the step")
        got, want = whole[0].losses[0], pick(dense, whole[0].worker).losses[0]
        for rank in whole:
            one = pick(dense, rank.worker)
            got, want = rank.losses[0], one.losses[0]
            if not abs(got - want) <= near * abs(want):
                raise ValueError(f"the first loss in {args.dtype} is {got:.6g}, on one process {want:.6g}")
            truth = pick(truths, rank.worker).seen
            rounded = [one.seen, *(pick(other, rank.worker).seen for other in others)]
            layers = toy.config.layers
            within_rounding(args.dtype, eps, truth, rounded, rank.seen, layers=layers, experts=moe is not None)
        data = toy.sizes["dp"] * toy.sizes["cp"]
        if args.dtype in ("bfloat16", "float16") and toy.sizes["pp"] == 1 < data and not args.bitwise:
            each = toy.args.global_batch // (toy.args.workers * toy.sizes["dp"])
            flags = with_flags(mine.args, micro_batch=each, rampup_batch_size=None)  # the start may be smaller than one
            one_sum = replace(mine, args=flags)
            for rank in self.train(one_sum, "dtype-sum", until=1, look=True):
                check_digits(getattr(torch, args.dtype), rank.seen)
        for rank in self.train(mine, "dtype-loaded", resume=str(Path(self.folder.name) / "dtype")):
            resumed(rank, pick(whole, rank.worker), 2, f"resumed in {args.dtype}")
        return f"{args.dtype}{', fp8' if args.fp8 else ''}: first loss {got:.4f}, on one process {want:.4f}"

    def check_killed(self) -> str:
        """Kill the last rank; all others must leave, and name it."""
        toy = self.toys[0]
        if toy.ranks == 1:
            raise Skip("one rank")
        return kill(toy, str(Path(self.folder.name) / "killed"), self.options.timeout)


def nudged(values: Mapping[str, Tensor], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Change each value by up to half a unit in the last place of a dtype."""
    dice, eps = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps
    return {name: x * (1 + (torch.rand(x.shape, generator=dice) - 0.5) * eps) for name, x in values.items()}


def layout_of(toy: Toy) -> Layout:
    sizes = {axis: toy.sizes[axis] for axis in ("tp", "cp", "pp", "dp", "ep")}
    each = toy.args.global_batch // (toy.args.workers * sizes["dp"] * toy.args.micro_batch)
    sharded = toy.args.sequence_parallel and sizes["tp"] > 1
    return Layout(toy.name, **sizes, sequence_parallel=sharded, zero=toy.args.zero, mb=each)


def without(flags: Sequence[str], names: set[str]) -> list[str]:
    """Return the flags but these, with their values."""
    kept, skipping = [], False
    for word in flags:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in names
        if not skipping:
            kept.append(word)
    return kept
