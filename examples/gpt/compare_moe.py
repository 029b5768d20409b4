"""Compare a small mixture of experts with the dense model of equal active size: `python -m examples.gpt.compare_moe`.

For each of several seeds both train on the same tokens of the default corpus, with the same learning rate. Each of the
8 experts has half the width of the dense MLP. A token is routed to two experts, whose weights sum to two, so that two
equal experts would be a dense MLP.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib
import torch

from examples.gpt.arguments import parse
from examples.gpt.compare import compare
from examples.gpt.flops import count_active_parameters, count_parameters
from examples.gpt.pretrain import Trainer
from mpcore import build_mesh

SHAPE = ["--layers", "2", "--d-model", "64", "--heads", "4", "--seq-len", "128", "--micro-batch", "16", "--d-ff", "256"]
MODELS = {
    "dense": [],
    "8 experts, 2 a token": ["--experts", "8", "--top-k", "2", "--expert-d-ff", "128", "--routed-scale", "2"],
}


def train(flags: list[str], seed: int, steps: int, every: int) -> dict:
    """Train one model.

    Returns:
        `parameters`; `active`, how many of them a token uses; and, each `every` steps, `tokens` seen, `held_out` loss,
        and with experts `loads`: of the emptiest and the fullest expert since the last time, divided by the mean.
    """
    run = ["--steps", str(steps), "--seed", str(seed), "--eval-samples", "128"]
    args = parse([*SHAPE, *flags, *run])
    trainer = Trainer(args, build_mesh(device_type=args.device))
    sizes = {"parameters": count_parameters(trainer.config), "active": count_active_parameters(trainer.config)}
    curve: dict[str, list] = {"tokens": [], "held_out": [], "loads": []}
    counts: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        entry = trainer.step()
        if "experts" in entry:
            counts.append(torch.tensor(entry["experts"]["tokens_per_expert"], dtype=torch.float64))
        if step % every == 0 or step == steps:
            curve["tokens"].append(step * args.global_batch * trainer.config.seq_len)
            curve["held_out"].append(trainer.evaluate())
            if counts:
                total = torch.stack(counts).sum(0)  # [blocks, E]
                loads = total / total.mean(-1, keepdim=True)
                curve["loads"].append([loads.min().item(), loads.max().item()])
                counts.clear()
            print(f"seed {seed}, {' '.join(flags) or 'dense'}: step {step}", curve["held_out"][-1], flush=True)
    return sizes | curve


def draw(runs: dict[str, list[dict]], out: Path) -> None:
    """Plot the held-out loss and the loads of the experts, for each seed and as a mean."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, loads) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    for color, (name, found) in zip(("C0", "C1"), runs.items(), strict=True):
        seen = [tokens / 1e6 for tokens in found[0]["tokens"]]
        for run in found:
            losses.plot(seen, run["held_out"], color=color, lw=0.8, alpha=0.6)
        mean = [statistics.fmean(at) for at in zip(*(run["held_out"] for run in found), strict=True)]
        losses.plot(seen, mean, "o-", ms=3, color=color, label=f"{name}: {mean[-1]:.3f} at the end")
        for run in found:
            for which in range(2 if run["loads"] else 0):
                at = [load[which] for load in run["loads"]]
                label = ("emptiest", "fullest")[which] if run is found[0] else None
                loads.plot(seen, at, "-" if which else "--", color=color, lw=1, label=label)
    losses.set(xlabel="million tokens", ylabel="held-out loss, nats a byte", ylim=(None, 3))
    losses.set_title(f"{len(found)} seeds (thin) and their mean")
    loads.set(xlabel="million tokens", ylabel="tokens of an expert over the mean", ylim=(0, None))
    loads.set_title("loads, of the worse block")
    loads.axhline(1, color="gray", lw=0.5)
    for axes in (losses, loads):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    runs = compare(
        argv, MODELS, train, draw,
        prog="python -m examples.gpt.compare_moe", about=__doc__, steps=600, evaluations=12, out="docs/moe.png",
    )  # fmt: skip
    for name, found in runs.items():
        ends = [run["held_out"][-1] for run in found]
        line = f"{name}, {found[0]['active']:,} of {found[0]['parameters']:,} parameters active: held-out loss "
        line += f"{statistics.fmean(ends):.4f} ({', '.join(f'{end:.4f}' for end in ends)})"
        loads = [run["loads"][-1] for run in found if run["loads"]]
        print(line + "".join(f"; {low:.2f} to {high:.2f} of the mean load" for low, high in loads))


if __name__ == "__main__":
    main()
