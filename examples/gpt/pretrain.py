"""Pretrain a GPT on any mesh: `python -m examples.gpt.pretrain`, or under torchrun with --tp, --pp, --cp, --dp."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from examples.gpt.arguments import (
    DTYPES,
    build_optimizer,
    check,
    find_carried,
    find_tokenizer,
    flag,
    inner_size,
    learning_rate,
    merge_options,
    model_config,
    parse,
    plan_stages,
)
from examples.gpt.blend import Corpora, parse_sources
from examples.gpt.data import Samples, default_corpus
from examples.gpt.faults import Faults, check_writable, is_timed, was_restarted
from examples.gpt.generate import generate
from examples.gpt.hf import ROUTER_BIAS, ROUTER_STATISTICS, load_hf
from examples.gpt.model import (
    GPTConfig,
    build_stages,
    compile_blocks,
    count_active_parameters,
    count_parameters,
    flops_of_token,
)
from examples.gpt.plan import recompute_blocks
from examples.gpt.records import LOCK, draw_trace, locked, plot_losses, read_records, write_whole
from mpcore import (
    Mesh,
    build_mesh,
    clip_gradients,
    grad_norm,
    main_gradients,
    materialize,
    reduce_gradients,
    shard_sequence,
    update_routers,
)
from mpcore.checkpoint import Saving, checkpoints, inspect, latest, load, save, save_async, step_path
from mpcore.checkpoint.format import Manifest, read_manifest
from mpcore.collectives import all_reduce
from mpcore.fault_tolerance.leave import EXIT_STOPPED, leave, leave_together
from mpcore.fault_tolerance.metrics import MetricsWriter
from mpcore.fault_tolerance.signals import StopSignals
from mpcore.fault_tolerance.stragglers import Stragglers
from mpcore.fault_tolerance.trace import record
from mpcore.fault_tolerance.versions import code_versions
from mpcore.fault_tolerance.watchdog import Watchdog
from mpcore.layers import vocab_parallel_cross_entropy
from mpcore.mesh.agreement import check_same, raise_together
from mpcore.optim.loss_scale import LossScaler
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.local_updates import OUTER_SLOTS, DiLoCo, Merge
from mpcore.parallel.offload import ParameterOffload, offload_activations, offload_optimizer, offload_parameters
from mpcore.parallel.precision import autocast, convert_to_fp8
from mpcore.pipeline import Pipeline
from mpcore.pipeline.partition import join_stages
from mpcore.pipeline.schedules import Span
from mpcore.sharding.local import is_dtensor, local_tensor, reshard

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, from the vendor's datasheets


class Trainer:
    """What a run holds. `python -m examples.gpt.pretrain` makes one and calls `run`."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        self.args, self.mesh = args, mesh
        self.lead = mesh.world.rank == 0  # writes, and speaks for its worker
        self.shows = mesh.job.rank == 0  # has the progress bar
        self.out = Path(args.out) / (f"worker-{mesh.workers.rank}" if mesh.workers.size > 1 else "")
        check_same("code", code_versions(Path(__file__).parent))
        error = None
        try:
            self.tokenizer = find_tokenizer(args)
            self.carried = find_carried(args, self.tokenizer)
            prefixes, weights = parse_sources(args.data or [default_corpus(tokenizer=self.tokenizer)])
            refused = other_dtype(args.init_from, inspect(args.init_from), args.dtype) if args.init_from else None
            if refused is not None:
                raise refused
            data = Corpora(prefixes, weights)
            config = model_config(args, self.tokenizer.vocab_size)
            self.micro_batches = check(args, config, mesh)
            plan, blocks = plan_stages(args, config, mesh.pp.size, self.micro_batches)
            data.check_tokens(config.vocab_size, mesh.job.rank, mesh.job.size)
            evaluate = args.eval_every > 0
            self.train, self.held_out = data.split(config.seq_len, seed=args.seed, evaluate=evaluate)
        except (ValueError, OSError) as problem:
            error = problem
        raise_together(error)
        self.config = config
        flags = {flag(name): value for name, value in vars(args).items()}
        self.corpus = data.about
        check_same("configuration", {**flags, **self.corpus})
        check_same("data", data.files)

        torch.manual_seed(args.seed)
        self.dtype = DTYPES[args.dtype]
        dtype = torch.float64 if args.dtype == "float64" else torch.float32
        ranks = [plan.rank_of[stage] for stage in range(plan.stages)]
        options: dict[str, Any] = {"sequence_parallel": args.sequence_parallel, "device": "meta", "dtype": dtype}
        options["context"] = args.cp_kind
        self.stages = build_stages(config, mesh, blocks, ranks, **options)
        model = self.stages[0] if len(self.stages) == 1 else join_stages(self.stages)
        materialize(model, args.seed, mesh.device)
        try:
            for stage in self.stages:
                if args.fp8:
                    convert_to_fp8(stage.blocks)
                recompute_blocks(stage, args, mesh)
        except ValueError as problem:  # of these blocks alone, such as a budget that is out of their reach
            error = problem
        raise_together(error)
        layers = [block for stage in self.stages for block in stage.blocks.values()]
        shard_data_parallel(self.stages, mesh, layers, zero=args.zero, replicate=args.replicate)
        if args.compile is not None:
            compile_blocks(layers, args.compile)
        self.model: nn.Module = model
        if self.dtype in (torch.bfloat16, torch.float16) and not any(map(is_dtensor, model.parameters())):
            main_gradients(model)  # `fully_shard` accumulates in float32 by itself
        heads = [stage.head for stage in self.stages if stage.last]
        self.optimizer: torch.optim.Optimizer = build_optimizer(args, model, mesh, heads)
        if "optimizer" in args.offload:
            offload_optimizer(self.optimizer)
        self.merges: DiLoCo | None = None
        if mesh.workers.size > 1:
            numbered = {int(i): block for stage in self.stages for i, block in stage.blocks.items()}
            self.optimizer = self.merges = DiLoCo(self.optimizer, model, mesh, blocks=numbered, **merge_options(args))
        self.pipeline = Pipeline(self.stages, mesh, self.micro_batches, self.loss, plan, trace=args.trace)
        self.spans: list[Span] = []
        self.scaler = LossScaler(mesh) if args.dtype == "float16" else None
        self.tokens_of_step = torch.ones((), dtype=torch.float64, device=mesh.device)
        self.first_step = self.first_sample = 0
        self.saving: Saving | None = None
        self.told: Saving | None = None
        self.unwritten: set[str] = set()
        self.asked_to_stop = self.stopped = False
        self.signals: StopSignals | None = None
        self.stragglers = Stragglers(mesh)
        self.beat: Callable[[], None] = lambda: None  # tells a watchdog of progress
        self.parameters_elsewhere: ParameterOffload | None = None
        if not self.resume():
            if args.init_from_hf:
                load_hf(args.init_from_hf, model, mesh)
            if args.init_from:
                init_from(args.init_from, model, mesh)
                if self.lead and config.moe is not None and config.moe.bias and config.moe.bias_rate == 0:
                    print(f"the experts' bias of {args.init_from} stays as it is: --balance bias moves it", flush=True)
        if self.merges is not None:
            self.merges.begin()
        if "parameters" in args.offload:
            self.parameters_elsewhere = offload_parameters(layers, self.optimizer)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The micro-batch's share of the step's loss: its sum over tokens, divided once by the global count."""
        total = vocab_parallel_cross_entropy(
            logits, target, tp=self.mesh.tp, vocab_size=self.config.vocab_size, reduction="sum"
        )
        return total * (self.scale / self.tokens_of_step).to(total.dtype)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by in backward."""
        return self.scaler.scale if self.scaler else 1.0

    def autocast(self) -> Any:
        """Matrix products in half precision, where that is asked for."""
        return autocast(self.dtype, self.mesh.device_type, self.scaler)

    def eager(self) -> Any:
        """What is not a training step runs uncompiled: its shapes and modes would each take a compilation."""
        return torch.compiler.set_stance("force_eager") if self.args.compile is not None else nullcontext()

    def batch(self, samples: Samples, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens, targets and sample indices of `count` samples from global index `first`.

        Samples are dealt out over dp, the tokens of each over cp.
        """
        each = count // self.mesh.dp.size
        start = first + each * self.mesh.dp.rank
        indices = range(start, start + each)
        tokens, targets = (shard_sequence(t, self.mesh.cp, self.args.cp_kind) for t in samples.batch(indices))
        tokens, targets, places = (self.to_device(t) for t in (tokens, targets, torch.tensor(list(indices))))
        return tokens, targets, places

    def to_device(self, x: Tensor) -> Tensor:
        """A copy on this rank's device, for which the host doesn't wait."""
        return x.pin_memory().to(self.mesh.device, non_blocking=True) if self.mesh.device_type == "cuda" else x

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step. Returns the loss before it, the gradient norm, the learning rate, the experts' loads.

        The host waits for the device once, for the loss and the norm, by which a step is taken or not.
        """
        lr = learning_rate(self.args, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.stragglers.timed("data") if is_timed(self.args, self.mesh, step) else nullcontext():
            tokens, targets, samples = self.batch(self.train, *self.share(step))
        self.tokens_of_step = all_reduce((targets != -100).sum(), self.mesh.data).double()
        arguments = {"samples": samples}
        if self.config.moe is not None:
            arguments["loss_scale"] = (self.scale / self.tokens_of_step).repeat(len(samples))
        with self.autocast(), offload_activations() if "activations" in self.args.offload else nullcontext():
            total = self.pipeline.forward_backward(tokens, targets, **arguments)
        reduce_gradients(self.model)
        if self.scaler:
            self.scaler.unscale(self.model)
        norm = grad_norm(self.model, self.mesh)
        loss, length = torch.stack([all_reduce(total, self.mesh.data).to(norm), norm]).tolist()
        loss /= self.scale
        finite = math.isfinite(loss) and math.isfinite(length)  # both are sums over all ranks: all decide alike
        if self.scaler.update(finite) if self.scaler else finite:
            clip_gradients(self.model, self.args.clip, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "grad_norm": length, "lr": lr, **self.balance()}

    def balance(self) -> dict[str, Any]:
        """Move the routers' biases, and say what the experts' loads were: of each layer with experts, lowest first."""
        if self.config.moe is None:
            return {}
        rows = torch.zeros(
            self.config.layers, 5 + self.config.moe.experts, dtype=torch.float64, device=self.mesh.device
        )
        for name, of in update_routers(self.model, self.mesh).items():
            block = int(name.split("blocks.")[1].split(".")[0])
            rows[block] = torch.cat([torch.stack(of[1:]), of.tokens_per_expert])
        mixed = [i for i in range(self.config.layers) if self.config.has_experts(i)]
        names = ("entropy", "dropped", "max_violation", "aux_loss", "z_loss")
        *facts, tokens = all_reduce(rows, self.mesh.pp)[mixed].split([1] * 5 + [self.config.moe.experts], 1)
        found: dict[str, Any] = {name: fact.flatten().tolist() for name, fact in zip(names, facts, strict=True)}
        return {"experts": found | {"tokens_per_expert": tokens.long().tolist()}}

    def sample(self, step: int) -> int:
        """Global index of a step's first sample: all that there is to know of the data's state."""
        return self.first_sample + (step - self.first_step) * self.args.global_batch

    def share(self, step: int) -> tuple[int, int]:
        """Global index of a step's first sample that is this worker's, and how many are."""
        count = self.args.global_batch // self.mesh.workers.size
        return self.sample(step) + self.mesh.workers.rank * count, count

    def merge(self, done: int) -> Merge | None:
        """Merge the workers, where that is due after so many steps."""
        if self.merges is None or self.merges.due(done) is None:
            return None
        for stage in self.stages:
            reshard(stage)
        with self.parameters_elsewhere.here() if self.parameters_elsewhere else nullcontext():
            return self.merges.merge(done)

    def tell(self, text: str, file: Any = None) -> None:
        """Say something above the progress bar, once for each worker."""
        if self.lead:
            tqdm.write(f"worker {self.mesh.workers.rank}: {text}" if self.mesh.workers.size > 1 else text, file=file)

    @property
    def checkpoints(self) -> Path:
        """Where this worker keeps them."""
        return self.out / "checkpoints"

    def about(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""
        return {
            "model": dataclasses.asdict(self.config),
            "corpus": self.corpus,
            "optimizer": self.args.optimizer,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def other_run(self, path: Path) -> ValueError | None:
        """Why this run can't go on from a checkpoint; None too where it can't be read, of which `load` tells."""
        try:
            manifest = inspect(path)
        except (ValueError, OSError):
            return None
        saved: dict[str, Any] = {"tokenizer": self.tokenizer.fingerprint, **manifest.config, "seed": manifest.seed}
        saved["model"] = dataclasses.asdict(GPTConfig()) | saved.get("model", {})  # fields that came later
        refused = other_dtype(path, manifest, self.args.dtype)
        if refused is not None:
            return refused
        found = differing(saved, self.about() | {"seed": self.args.seed})
        if not found:
            return None
        begun = ""
        if not (self.args.init_from_hf or self.args.init_from) and saved["model"] != self.about()["model"]:
            begun = " If it began with --init-from-hf or --init-from, give that again: the shape comes from there."
        return ValueError(
            f"{path} is of another run: {'; '.join(found)}.{begun} --init-from {path} with another --out begins a new "
            f"one from its weights"
        )

    def left_behind(self, path: Path, newest: Path | None) -> ValueError | None:
        """Why this run can't go on here from a checkpoint: `auto` and restarts would go on from a later one instead."""
        try:
            if newest is None or read_manifest(newest).step <= read_manifest(path).step:
                return None
        except (ValueError, OSError):  # of which `load` tells
            return None
        return ValueError(
            f"--resume {path} leaves behind what was trained after it, up to {newest}, from which restarts and "
            f"--resume auto would go on: take another --out, or remove or rename the later checkpoints"
        )

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps."""
        state = {"step": step, "sample": self.sample(step), "seed": self.args.seed, "config": self.about()}
        state["extra"] = self.carried.extra | (self.scaler.state_dict() if self.scaler else {})
        state |= {"keep": self.args.keep, "beside": self.carried.beside}
        for stage in self.stages:
            reshard(stage)  # an evaluation leaves them gathered
        path, held = step_path(self.checkpoints, step), (self.model, self.optimizer)
        with self.parameters_elsewhere.here() if self.parameters_elsewhere else nullcontext():
            if self.args.async_save:
                after, self.saving = self.saving, None
                if after is not None:
                    after.wait()
                    self.tell_saved(after)
                began = time.perf_counter()
                self.saving = save_async(path, *held, mesh=self.mesh, after=after, **state)
                self.tell(f"saving {path.name} in the background, copied in {time.perf_counter() - began:.2f} s")
            else:
                save(path, *held, mesh=self.mesh, **state)

    def tell_saved(self, saving: Saving) -> None:
        """Say once, when a save in the background has ended, how it went."""
        if self.lead and saving.done and saving.bytes and saving is not self.told:
            self.told = saving
            rate = saving.bytes / 1e6 / max(saving.seconds, 1e-9)
            self.tell(
                f"saved {saving.path.name}: {saving.bytes / 1e6:.1f} MB in {saving.seconds:.2f} s ({rate:.0f} MB/s)"
            )

    def resume(self) -> bool:
        """Go on from the checkpoint that `--resume` asks for, if there is one; auto passes over those that are damaged.

        Workers go on from checkpoints of their own, which need not be of one step, but lie between the same two merges;
        one that has none there takes worker 0's.
        """
        resume = self.args.resume
        restarted = torch.tensor(int(was_restarted() and self.args.save_every > 0), device=self.mesh.device)
        if int(all_reduce(restarted, self.mesh.job, "max")):  # torchrun counts on each node by itself
            own = self.common(self.own_checkpoints())
            resume = resume if resume != "none" and not own else "auto"
        if resume == "none":
            return False
        found = self.own_checkpoints() if resume == "auto" else [Path(resume)]
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        error, manifest = None, None
        while path := next(iter(self.common(found)), None):
            newest = None if resume == "auto" else latest(self.checkpoints, self.mesh)
            raise_together(self.other_run(path) or self.left_behind(path, newest))
            failed, manifest = torch.zeros((), device=self.mesh.device), None
            try:
                manifest = load(path, self.model, self.optimizer, mesh=self.mesh)
            except ValueError as problem:
                error, failed = error or problem, failed + 1
            if not int(all_reduce(failed, self.mesh.workers, "max")):
                if self.merges is None:
                    break
                try:
                    self.merges.begin()
                    break
                except ValueError as problem:  # on all workers: each tries the one before
                    error, failed = error or problem, failed + 1
            manifest = None
            if int(failed):
                found = [other for other in found if other != path]
                if self.lead and resume == "auto":
                    print(f"passed over: {error}", file=sys.stderr, flush=True)
        if manifest is None:
            raise_together(error)
            if found and self.lead:
                print(f"{found[0]} is passed over: the workers have none in common", file=sys.stderr, flush=True)
            return False
        if self.merges is None:
            for slots in self.optimizer.state.values():  # of a run with workers
                for slot in OUTER_SLOTS:
                    slots.pop(slot, None)
        for group, mine in zip(self.optimizer.param_groups, options, strict=True):
            group.update(mine)  # as the flags are now: of the checkpoint's, the state alone counts
        self.first_step, self.first_sample = manifest.step, manifest.sample
        before = self.first_step * self.args.global_batch  # of one line for all, where the batch has changed
        ahead = torch.tensor(self.first_sample - before, device=self.mesh.device)
        self.first_sample = before + int(all_reduce(ahead, self.mesh.workers, "max"))
        if self.scaler:
            self.scaler.load_state_dict(manifest.extra)
        if self.lead:
            worker = f"worker {self.mesh.workers.rank} " if self.mesh.workers.size > 1 else ""
            other = f" of {path}" if path is not None and self.out not in path.parents else ""
            print(f"{worker}resumed after step {manifest.step}, from sample {manifest.sample}{other}", flush=True)
        return True

    def own_checkpoints(self) -> list[Path]:
        """This worker's, then those of worker 0 and of a run without workers; the newest of each first."""
        places = [self.out, Path(self.args.out) / "worker-0", Path(self.args.out)]
        by_place = [checkpoints(at / "checkpoints", self.mesh) for at in dict.fromkeys(places)]
        found = [path for paths in by_place for path in paths]
        if self.merges is None and sum(map(bool, by_place)) > 1:
            found.sort(key=lambda path: -read_manifest(path).step)
        return found

    def common(self, found: list[Path]) -> list[Path]:
        """Those that have seen as many merges as some that each worker can take, of the most merges that there are."""
        if self.merges is None:
            return found
        merges = {path: self.merges.merges_until(read_manifest(path).step) for path in found}
        every: list = [None] * self.mesh.workers.size
        dist.all_gather_object(every, set(merges.values()), group=self.mesh.workers.group)
        most = max(set.intersection(*every), default=None)
        return [path for path in found if merges[path] == most]

    def ask_to_stop(self, *_: Any) -> None:
        """Save and leave after this step, as on a signal."""
        self.asked_to_stop = True

    def stopping(self, done: int) -> bool:
        """Whether any rank was asked to stop; tells of a save in the background that failed on any.

        Workers hear of each other at the last step before a merge, which would wait for one that has left.
        """
        failed = self.saving is not None and self.saving.failed
        asked = self.asked_to_stop or (self.signals is not None and self.signals.asked)
        flags = torch.tensor([int(asked), int(failed)])  # of the host, which doesn't wait for the device then
        stop, failed = (bool(flag) for flag in all_reduce(flags, self.mesh.world, "max").tolist())
        if failed and self.saving is not None:
            saving, self.saving = self.saving, None
            self._try(saving.wait)
        return self.meet(stop) if self.before_merge(done) else stop

    def before_merge(self, done: int) -> bool:
        """Whether the step after `done` steps ends in a merge."""
        return self.merges is not None and self.merges.due(done + 1) is not None

    def meet(self, stop: bool) -> bool:
        """Whether any worker stops: each asks once between two merges."""
        return bool(all_reduce(torch.tensor(int(stop), device=self.mesh.device), self.mesh.workers, "max"))

    def _try(self, work: Callable[[], Any]) -> None:
        """A save that fails is told loudly, and training goes on: the next one is tried again."""
        try:
            work()
        except ValueError as error:
            self.tell(f"NOT SAVED, training goes on: {error}", file=sys.stderr)

    def write(self, what: str, work: Callable[[], Any]) -> None:
        """Write what a run can do without; where that fails, as on a full disk, it is told once."""
        try:
            work()
            self.unwritten.discard(what)
        except OSError as error:
            if what not in self.unwritten:
                self.tell(f"NOT WRITTEN: {what}: {error}", file=sys.stderr)
            self.unwritten.add(what)

    def set_training(self, training: bool) -> None:
        """Dropout of all of this rank's stages on or off."""
        for stage in self.stages:
            stage.train(training)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the first held-out samples, the same for every layout."""
        self.set_training(False)
        each = self.mesh.dp.size
        if self.held_out is None:
            raise ValueError("the held-out part has no sample: --eval-every above 0 says why")
        samples = max(min(self.args.eval_samples, len(self.held_out)), 1)
        batches = []
        for first in range(0, samples, each):
            x, targets, indices = self.batch(self.held_out, first, each)
            batches.append((x, targets.masked_fill((indices >= samples)[:, None], -100)))  # what fills the last round
        self.tokens_of_step = torch.ones_like(self.tokens_of_step)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        with self.autocast(), self.eager():
            for y, (_, targets) in zip(self.pipeline.forward([x for x, _ in batches]), batches, strict=True):
                if self.stages[-1].last:
                    total += self.loss(y, targets) / self.scale
        count = all_reduce(torch.stack([(t != -100).sum() for _, t in batches]).sum(), self.mesh.data)
        total = all_reduce(self.pipeline.from_last(total), self.mesh.data)
        self.set_training(True)
        return float(total) / int(count)

    def run(self) -> None:
        """All steps, with a progress bar, evaluations, metrics, a plot and a sample at the end."""
        with ExitStack() as stack:
            self.train_all(self.begin(stack))

    def begin(self, stack: ExitStack) -> list[dict]:
        """Make the folder ready, this run's alone until `stack` closes. Returns what is recorded of earlier steps."""
        args, lead, out = self.args, self.lead, self.out
        error = None
        found = self.own_checkpoints() if args.resume == "none" and self.first_step == 0 else []
        if found:
            error = ValueError(f"{found[0]} is there: --resume auto goes on from it, another --out begins anew")
        raise_together(error)
        records: list[dict] = []
        if lead:
            try:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(out))
                config = {"model": dataclasses.asdict(self.config), "run": vars(args)}
                write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
                records = read_records(out / "metrics.jsonl", self.first_step)
                write_whole(out / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in records))
                if args.save_every:
                    self.checkpoints.mkdir(exist_ok=True)  # fails now, or never
            except ValueError as problem:
                error = problem
            except OSError as problem:
                error = ValueError(f"--out {out} can't be written: {problem}")
        raise_together(error)
        try:
            if args.save_every:
                check_writable(self.checkpoints, self.mesh.world.rank)
        except ValueError as problem:
            error = problem
        raise_together(error)
        return records

    def train_all(self, records: list[dict]) -> None:
        """All steps, added to the records."""
        args, lead, out = self.args, self.lead, self.out
        if self.shows:
            print(self.summary(), flush=True)
        if self.first_step >= args.steps:
            self.tell(f"nothing is left to train: {self.first_step} steps are done, --steps is {args.steps}")
        faults = Faults(args, self.mesh, records, out)
        lines = MetricsWriter(out / "metrics.jsonl")

        def record(entry: dict) -> None:
            records.append(entry)
            if lead:
                self.write("metrics.jsonl", lambda: lines.add(entry))

        todo = range(self.first_step, args.steps)
        shown = {"unit": "step", "dynamic_ncols": True, "file": sys.stderr, "disable": not self.shows}
        bar = tqdm(todo, initial=self.first_step, total=args.steps, **shown)
        tokens_a_step = args.global_batch * self.config.seq_len
        for step in bar:
            began = time.perf_counter()
            entry = {"step": step, **self.step(step)}
            took = time.perf_counter() - began
            self.beat()
            self.spans = self.pipeline.recorded() if args.trace else []
            entry |= {"tokens": self.sample(step + 1) * self.config.seq_len, "tokens_per_second": tokens_a_step / took}
            record(entry)
            values = {"loss": f"{entry['loss']:.3f}", "norm": f"{entry['grad_norm']:.2f}"}
            values["tok/s"] = f"{entry['tokens_per_second']:.0f}"
            if "experts" in entry:
                values["max load"] = f"{1 + max(entry['experts']['max_violation']):.2f}"
                values["dropped"] = f"{max(entry['experts']['dropped']):.1%}"
            if self.mesh.device_type == "cuda":
                values["MFU"] = f"{self.mfu(entry['tokens_per_second']):.1%}"
            bar.set_postfix(values)
            for line in faults.after(entry, self.share(step)[0], self.model, self.stragglers):
                self.tell(line)
            merged = self.merge(step + 1)
            if merged is not None:
                self.beat()
                facts = {"fragment": merged.fragment, "norm": merged.norm, "agreement": merged.agreement}
                record({"step": step, "merge": {**facts, "norms": merged.norms}})
            if args.eval_every and ((step + 1) % args.eval_every == 0 or step + 1 == args.steps):
                value = self.evaluate()
                self.beat()
                record({"step": step, "val_loss": value})
                self.tell(f"step {step}: validation loss {value:.4f}")
            if self.saving is not None:
                self.tell_saved(self.saving)
            done = step + 1
            self.stopped = self.stopping(done)
            if self.stopped or done == args.exit_step:
                bar.close()
                self.finish(done)
                if self.stopped and self.merges is not None and not self.before_merge(done):
                    with suppress(RuntimeError):  # of workers that have reached their end
                        self.meet(True)
                return
            if args.save_every and done == args.steps:
                self.save_last(done)
            elif args.save_every and done % args.save_every == 0:
                self._try(lambda done=done: self.save(done))
            self.beat()
        bar.close()
        if lead and self.spans:  # none where no step was left
            self.write("the trace", lambda: draw_trace(self.pipeline.plan, self.spans, out))
        if lead:
            self.write("loss.png", lambda: plot_losses(records, out / "loss.png"))
        text = self.sample_text()
        if self.shows:
            written = sorted(str(p) for p in out.iterdir() if p.name != LOCK)
            print(f"--- a sample\n{text}\n---\nwrote {', '.join(written)}")

    def sample_text(self) -> str:
        """A sample for people; a tokenizer that fails at it, on all ranks alike, ends no run that is done."""
        self.set_training(False)
        try:
            with self.eager():
                return generate(self.stages[-1], self.pipeline, self.mesh, self.tokenizer, "def ", seed=self.args.seed)
        except RuntimeError:  # of this rank alone, as may be: the others wait for it
            raise
        except Exception as error:  # the tokenizers' library has no narrower class
            return f"none: {error}"
        finally:
            self.set_training(True)

    def finish(self, step: int) -> None:
        """Save and leave."""
        self.save_last(step)
        if self.lead:
            print(f"saved {step_path(self.checkpoints, step)} and left: --resume auto goes on from it", flush=True)

    def save_last(self, step: int) -> None:
        """Save, and see it written. Here a save that fails is an error: nothing comes after it."""
        if self.saving is not None:
            self._try(self.saving.wait)
            self.tell_saved(self.saving)
            self.saving = None
        self.save(step)
        if self.saving is not None:
            self.saving.wait()
            self.tell_saved(self.saving)

    def summary(self) -> str:
        """The mesh, the parameters and the memory they take, for people."""
        active = f" ({count_active_parameters(self.config):,} active)" if self.config.moe is not None else ""
        here = sum(local_tensor(p).numel() for p in self.model.parameters())
        size = sum(local_tensor(p).numel() * p.element_size() for p in self.model.parameters())
        if self.mesh.device_type == "cuda":
            held = f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB allocated"
        else:
            held = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB resident"
        return (
            f"{self.mesh}\n"
            f"{count_parameters(self.config):,} parameters{active}, {here:,} on this rank; "
            f"parameters, gradients and Adam: "
            f"{4 * size / 2**20:.1f} MiB ({held} so far)\n"
            f"{len(self.train):,} training samples of {self.config.seq_len} tokens, {len(self.held_out or ()):,} held "
            f"out; "
            f"{self.micro_batches} micro-batches a step"
        )

    def mfu(self, tokens_per_second: float) -> float:
        """Model FLOPs over the device's peak."""
        name = torch.cuda.get_device_name()
        peak = next((v for k, v in PEAK_FLOPS.items() if k in name), math.nan)
        return flops_of_token(self.config) * tokens_per_second / (peak * self.mesh.job.size)


def differing(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> list[str]:
    """The fields in which two configs differ, each with both values."""
    found = []
    for name in dict.fromkeys([*here, *there]):
        a, b = there.get(name), here.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing(a, b, f"{within}{name}.")
        elif a != b:
            a, b = ("not set" if value is None else repr(value) for value in (a, b))
            found.append(f"{within}{name} is {a} there, {b} here")
    return found


def init_from(path: str, model: nn.Module, mesh: Mesh) -> None:
    """Load the weights of a checkpoint; what a router keeps besides its own begins anew where the checkpoint has none.

    Raises:
        ValueError: as `load`.
    """
    loaded = load(path, model, mesh=mesh, strict=False, cast=True)  # an import may be in half precision
    missing = [name for name in loaded.missing_keys if not name.endswith((ROUTER_BIAS, ROUTER_STATISTICS))]
    if missing or any(not name.endswith(ROUTER_STATISTICS) for name in loaded.unexpected_keys):
        load(path, model, mesh=mesh, cast=True)  # says what


def other_dtype(path: Path | str, manifest: Manifest, dtype: str) -> ValueError | None:
    """Why weights of a checkpoint can't be those of a run: they are float64 for --dtype float64, else float32."""
    found = {entry.dtype for name, entry in manifest.tensors.items() if name.startswith("model/")}
    if dtype == "float64" and "F64" not in found and "F32" in found:
        return ValueError(f"{path} has float32 weights: --dtype float32 goes on from it, not float64")
    if dtype != "float64" and "F64" in found:
        return ValueError(f"{path} has float64 weights: --dtype float64 goes on from it, not {dtype}")
    return None


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status: 0 when all is done, 75 after a signal made it save; else it exits."""
    args = parse(argv)
    if not dist.is_initialized():
        record()  # what a watchdog explains hangs with
    try:
        if not 0 < args.timeout < math.inf:
            raise ValueError(f"--timeout {args.timeout} s is no number above 0")
        sizes = {axis: getattr(args, axis) for axis in ("tp", "cp", "pp", "ep", "dp", "etp")}
        limit = args.timeout + 15  # the watchdog comes first: it knows more
        on = {"device_type": args.device, "workers": args.workers}
        mesh = build_mesh(**sizes, **on, cp_inner=inner_size(args), timeout=limit)
        with ExitStack() as stack:
            stack.enter_context(leave_together(mesh))
            watchdog = stack.enter_context(Watchdog(mesh, timeout=args.timeout, folder=Path(args.out) / "hang"))
            try:
                trainer = Trainer(args, mesh)
                watchdog.model, trainer.beat = trainer.model, watchdog.beat
                trainer.signals = stack.enter_context(StopSignals())
                trainer.run()
            except ValueError as error:
                sys.exit(f"rank {mesh.job.rank}: error: {error}")
    except ValueError as error:
        sys.exit(f"rank {dist.get_rank() if dist.is_initialized() else 0}: error: {error}")
    if dist.is_initialized():  # not after a failure: a save in the background may still use the groups
        dist.destroy_process_group()
    return EXIT_STOPPED if trainer.stopped else 0


if __name__ == "__main__":
    gc.freeze()  # to look through all that was imported held a rank up for 0.2 s, and all that wait for it
    leave(main())
