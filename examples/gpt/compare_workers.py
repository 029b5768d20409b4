"""Compare local updates with data parallelism: `torchrun --nproc-per-node 4 -m examples.gpt.compare_workers`.

All runs train on the same tokens of the default corpus with the same learning rate. Their ranks send each other
gradients every step, or parameters at each merge. A run begins from scratch, or from a model that data parallelism has
trained for half of the steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import matplotlib
import torch.distributed as dist

from examples.gpt.arguments import parse
from examples.gpt.flops import count_parameters
from examples.gpt.pretrain import Trainer
from mpcore import build_mesh
from mpcore.checkpoint import step_path

SHAPE = ["--layers", "2", "--d-model", "64", "--heads", "4", "--seq-len", "128", "--micro-batch", "4", "--d-ff", "256"]
AVERAGE = ["--outer-lr", "1", "--outer-momentum", "0"]
DATA_PARALLEL = "data parallel"
KINDS = {
    DATA_PARALLEL: [],
    "Local SGD, every 10 steps": ["--local-steps", "10", *AVERAGE],
    "Local SGD, every 50 steps": ["--local-steps", "50", *AVERAGE],
    "DiLoCo, every 10 steps": ["--local-steps", "10"],
    "DiLoCo, every 50 steps": ["--local-steps", "50"],
}


def train(flags: list[str], seed: int, steps: int, every: int, out: str, begin: int = 0) -> dict:
    """Train one model.

    Args:
        flags: the flags of local updates; none for data parallelism.
        seed, steps: those of the run.
        every: steps between evaluations.
        out: a folder, in which data parallelism saves a checkpoint after half of the steps.
        begin: 0, or half of the steps, to resume from that checkpoint.

    Returns:
        Each `every` steps: `tokens` seen by all, `held_out` loss of the first worker, `reduced`: elements that each
        rank has summed with the others; and the `agreement` of each merge.
    """
    size = dist.get_world_size()
    workers = ["--workers", str(size)] if flags else ["--dp", str(size), "--zero", "0"]
    run = ["--steps", str(steps), "--seed", str(seed), "--eval-samples", "128", "--out", out]
    run += ["--resume", str(step_path(Path(out) / "checkpoints", begin))] if begin else []
    args = parse([*SHAPE, *flags, *workers, *run])
    trainer = Trainer(args, build_mesh(dp=args.dp, worlds=args.workers, device_type=args.device))
    found: dict[str, list] = {"tokens": [], "held_out": [], "reduced": [], "agreement": []}
    parameters, sums = count_parameters(trainer.config), 0
    for done in range(trainer.run.step + 1, steps + 1):
        merged = trainer.step().get("merge")
        if merged is not None:
            found["agreement"].append(merged.agreement)
        sums += merged is not None or not flags
        if done % every == 0 or done == steps:
            found["tokens"].append(done * args.global_batch * trainer.config.seq_len)
            found["held_out"].append(trainer.evaluate())
            found["reduced"].append(sums * parameters)
        if done == steps // 2 and not flags:
            trainer.checkpoints.save()
    if dist.get_rank() == 0:
        print(f"seed {seed}, {' '.join(flags) or DATA_PARALLEL}, from {begin}: {found['held_out'][-1]}", flush=True)
    return found


def draw(runs: dict[str, dict[str, list[dict]]], out: Path) -> None:
    """Plot the held-out loss over tokens, for the first seed."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, (start, kinds) in zip(panels, runs.items(), strict=True):
        for name, (run, *_) in kinds.items():
            megabytes = 4 * run["reduced"][-1] / 1e6
            seen = [tokens / 1e6 for tokens in run["tokens"]]
            axes.plot(seen, run["held_out"], "o-", ms=3, lw=1, label=f"{name}: {megabytes:.1f} MB")
        axes.set(xlabel="million tokens", title=start)
        axes.grid(alpha=0.3)
        axes.legend(title="summed over the ranks, by each", fontsize="small")
    panels[0].set(ylabel="held-out loss, nats a byte", ylim=(None, 3))
    figure.savefig(out, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.compare_workers", description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--evaluations", type=int, default=12, help="along a run")
    parser.add_argument("--out", default="docs/local_updates.png", help="the plot; its numbers lie beside it as .json")
    args = parser.parse_args(argv)
    build_mesh()
    starts = {"from scratch": 0, f"after {args.steps // 2} steps of data parallelism": args.steps // 2}
    runs: dict[str, dict[str, list[dict]]] = {start: {name: [] for name in KINDS} for start in starts}
    for seed in range(args.seeds):
        folder: list = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        for start, begin in starts.items():
            for name, flags in KINDS.items():
                found = train(flags, seed, args.steps, max(args.steps // args.evaluations, 1), folder[0], begin)
                runs[start][name].append(found)
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    if dist.get_rank() == 0:
        Path(args.out).with_suffix(".json").write_text(json.dumps(runs) + "\n")
        draw(runs, Path(args.out))
        for start, kinds in runs.items():
            for name, found in kinds.items():
                ends = ", ".join(f"{run['held_out'][-1]:.3f}" for run in found)
                print(f"{start}, {name}: held-out loss {ends}; {4 * found[0]['reduced'][-1] / 1e6:.1f} MB summed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
