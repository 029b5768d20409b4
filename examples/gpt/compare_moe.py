"""A small mixture of experts against the dense model of equal active size: `python -m examples.gpt.compare_moe`.

Both go through the same tokens of the default corpus, with the same learning rate, for each of several seeds. The
mixture has 8 experts of half the dense MLP's width and two of them for each token.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

from examples.gpt.arguments import parse
from examples.gpt.pretrain import Trainer
from mpcore import build_mesh

SHAPE = ["--layers", "4", "--d-model", "96", "--heads", "4", "--seq-len", "128", "--micro-batch", "16"]
MODELS = {
    "dense": ["--d-ff", "256"],
    "8 experts, 2 a token": ["--d-ff", "256", "--experts", "8", "--top-k", "2", "--expert-d-ff", "128"],
}


def held_out(flags: list[str], seed: int, steps: int, every: int) -> tuple[list[tuple[int, float]], float | None]:
    """(Tokens seen, held-out loss) along a run, and how much fuller than the mean the fullest expert is at its end."""
    run = ["--steps", str(steps), "--seed", str(seed), "--eval-samples", "128", "--eval-every", str(every)]
    args = parse([*SHAPE, *flags, *run])
    trainer = Trainer(args, build_mesh())
    curve, violation = [], None
    for step in range(steps):
        entry = trainer.step(step)
        if "experts" in entry:
            violation = max(entry["experts"]["max_violation"])
        if (step + 1) % every == 0:
            curve.append(((step + 1) * args.global_batch * trainer.config.seq_len, trainer.evaluate()))
            print(f"seed {seed}, {' '.join(flags)}: step {step + 1}, held out {curve[-1][1]:.4f}", flush=True)
    return curve, violation


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.compare_moe", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=10, help="along a run")
    parser.add_argument("--out", default="docs/moe.png", help="the plot; its numbers lie beside it as .json")
    args = parser.parse_args(argv)
    every = max(args.steps // args.evaluations, 1)
    runs = {
        name: [held_out(flags, seed, args.steps, every) for seed in range(args.seeds)] for name, flags in MODELS.items()
    }
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, found in runs.items():
        tokens = [seen for seen, _ in found[0][0]]
        losses = [[loss for _, loss in curve] for curve, _ in found]
        mean = [statistics.fmean(at) for at in zip(*losses, strict=True)]
        low, high = ([pick(at) for at in zip(*losses, strict=True)] for pick in (min, max))
        (line,) = axes.plot(tokens, mean, "o-", ms=3, label=f"{name}: {mean[-1]:.3f}")
        axes.fill_between(tokens, low, high, alpha=0.2, color=line.get_color())
    axes.set(xlabel="tokens", ylabel="held-out loss (nats a token)", title=f"{args.seeds} seeds: mean and range")
    axes.grid(alpha=0.3)
    axes.legend()
    out = Path(args.out)
    figure.savefig(out, dpi=120)
    out.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
    for name, found in runs.items():
        ends = ", ".join(f"{curve[-1][1]:.4f}" for curve, _ in found)
        loads = [f"{1 + violation:.2f}" for _, violation in found if violation is not None]
        print(f"{name}: {ends}" + (f"; fullest expert over the mean: {', '.join(loads)}" if loads else ""))


if __name__ == "__main__":
    main()
