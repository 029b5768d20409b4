"""Compare bfloat16 with float32 and autocast: `python -m examples.gpt.compare_precision` draws their losses.

Runs of one seed begin with the same float32 values and see the same samples of the default corpus. The band is the
spread of float32 over the seeds: what chance alone does.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import matplotlib

from examples.gpt.arguments import parse
from examples.gpt.compare import compare
from examples.gpt.pretrain import Trainer
from mpcore import Mesh

SHAPE = ["--layers", "2", "--d-model", "64", "--heads", "4", "--seq-len", "128", "--d-ff", "192", "--micro-batch", "8"]
SHAPE += ["--global-batch", "8", "--lr", "3e-3", "--warmup", "50", "--eval-samples", "64", "--device", "cpu"]
FLOAT32 = "float32"
KINDS = {
    FLOAT32: ["--dtype", "float32"],
    "bfloat16 by autocast": ["--dtype", "bfloat16", "--autocast"],
    "bfloat16": ["--dtype", "bfloat16"],
    "bfloat16, float32 residual": ["--dtype", "bfloat16", "--residual-dtype", "float32"],
}


def train(flags: list[str], seed: int, steps: int, every: int) -> dict:
    """Train one model. Each `every` steps: `steps` done, `train` loss of these, `held_out` loss; at last `seconds`."""
    trainer = Trainer(parse([*SHAPE, *flags, "--steps", str(steps), "--seed", str(seed)]), Mesh())
    began, losses = time.perf_counter(), []
    found: dict = {"steps": [], "train": [], "held_out": []}
    for done in range(1, steps + 1):
        losses.append(trainer.step()["loss"])
        if done % every == 0 or done == steps:
            found["steps"].append(done)
            found["train"].append(statistics.fmean(losses))
            found["held_out"].append(trainer.evaluate())
            losses = []
    found["seconds"] = time.perf_counter() - began
    print(f"seed {seed}, {' '.join(flags)}: {found['held_out'][-1]:.4f} after {found['seconds']:.0f} s", flush=True)
    return found


def differences(runs: dict[str, list[dict]], name: str) -> list[list[float]]:
    """Return of each seed the held-out losses of a kind less those of float32."""
    pairs = zip(runs[name], runs[FLOAT32], strict=True)
    return [[a - b for a, b in zip(run["held_out"], exact["held_out"], strict=True)] for run, exact in pairs]


def spread(runs: dict[str, list[dict]]) -> list[float]:
    """Return the standard deviation of float32's held-out loss over the seeds; 0 of one seed."""
    return [statistics.pstdev(at) for at in zip(*(run["held_out"] for run in runs[FLOAT32]), strict=True)]


def draw(runs: dict[str, list[dict]], out: Path) -> None:
    """Plot the mean loss over the seeds, and the difference from float32 of the same seed, with the band of chance."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, apart) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    steps, band = runs[FLOAT32][0]["steps"], spread(runs)
    exact = [run["held_out"] for run in runs[FLOAT32]]
    for axes, low, high in (
        (losses, list(map(min, *exact, exact[0])), list(map(max, *exact, exact[0]))),
        (apart, [-x for x in band], band),
    ):
        axes.fill_between(steps, low, high, color="gray", alpha=0.25, lw=0, label="float32 over the seeds")
    for i, (name, found) in enumerate(runs.items()):
        mean = [statistics.fmean(at) for at in zip(*(run["held_out"] for run in found), strict=True)]
        losses.plot(steps, mean, ("-", "--", ":", "-.")[i], color=f"C{i}", label=f"{name}: {mean[-1]:.4f} at the end")
        for seed, difference in enumerate(differences(runs, name) if i else ()):
            apart.plot(steps, difference, color=f"C{i}", lw=1, label=None if seed else name)
    losses.set(xlabel="steps", ylabel="held-out loss, nats a byte", title=f"mean of {len(exact)} seeds")
    apart.set(xlabel="steps", ylabel="difference from float32", title="each seed, beside float32's deviation")
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper right" if axes is losses else "lower left")
    figure.savefig(out, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    runs = compare(
        argv, KINDS, train, draw,
        prog="python -m examples.gpt.compare_precision", about=__doc__, steps=500, evaluations=10,
        out="docs/precision.png",
    )  # fmt: skip
    print(f"float32's deviation over the seeds at the end: {spread(runs)[-1]:.4f}")
    for name, found in runs.items():
        ends = [run["held_out"][-1] for run in found]
        apart = ", ".join(f"{of_seed[-1]:+.4f}" for of_seed in differences(runs, name))
        last = ", ".join(f"{run['train'][-1]:.4f}" for run in found)
        print(
            f"{name}: held-out loss {statistics.fmean(ends):.4f}; less float32 of the same seed {apart}; train {last}"
        )


if __name__ == "__main__":
    main()
