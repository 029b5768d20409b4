"""The trial of `mpcore compare`: honest pairs of runs, and runs with a planted fault.

python -m tests.compare_trial             what docs/debugging.md says: 200 honest pairs, 92 faults; 12 minutes of a core
python -m tests.compare_trial --part 10   a tenth of it
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from tqdm import tqdm

from examples.gpt.pretrain import Trainer, parse
from mpcore import simulate
from mpcore.gradients import gradient_of
from mpcore.tools.analysis.compare import Curves, Verdict, compare_runs
from tests.oracles.runs import MOE, build, flags_of

STEPS, TWINS, LATE = 100, 4, 40
TRAINED = {"steps": STEPS, "warmup": 10, "global_batch": 4, "micro_batch": 2, "clip": 0.3}
CONFIGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float64": {},
    "float32, gpt2, dropout": {"dtype": "float32", "preset": "gpt2", "dropout": 0.2},
    "float32, muon": {"dtype": "float32", "optimizer": "muon", "kv_heads": 2},
    "float32, experts": {"dtype": "float32", **MOE, "aux_coefficient": 0.1},
    "float32, experts, bias": {"dtype": "float32", **MOE, "balance": "bias"},
    "float32, latent attention": {"dtype": "float32", "preset": "tiny-mla"},
    "bfloat16, autocast": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "tie_embeddings": True},
    "float32, no clipping, tied": {"dtype": "float32", "clip": 0.0, "tie_embeddings": True, "lr_schedule": "wsd"},
}
# What an honest run may differ in: the order of samples, the cut of a batch, the layout.
HONEST: list[tuple[int, dict[str, Any], dict[str, int]]] = [
    *((twin, {}, {}) for twin in range(101, 111)),
    *((twin, {"micro_batch": 1}, {}) for twin in (0, 111, 112)),
    *((twin, {"micro_batch": 4}, {}) for twin in (0, 113, 114)),
    (0, {}, {"tp": 2}), (115, {}, {"tp": 2}), (0, {}, {"dp": 2}), (116, {"micro_batch": 1}, {"pp": 2}),
]  # fmt: skip

Fault = Callable[[Trainer], Any]


def observe(trainer: Trainer, fault: Fault | None = None) -> Curves:
    """Train, and return the curves of the run."""
    curves: Curves = {}

    def record() -> None:
        for kind, values in trainer.curves.measure().items():
            for tensor, value in values.items():
                keep(kind, tensor, value)

    def keep(kind: str, tensor: str, value: float) -> None:
        curves.setdefault((kind, tensor), {})[trainer.run.step] = value if math.isfinite(value) else None

    trainer.curves.after_backward = record  # type: ignore[method-assign]
    if fault is not None:
        fault(trainer)
    for step in range(STEPS):
        entry = trainer.step()
        for kind, name in (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr")):
            curves.setdefault((kind, ""), {})[step] = entry[name] if math.isfinite(entry[name]) else None
    return curves


@cache
def train(config: str, twin: int, seed: int = 0, changes: tuple = (), sizes: tuple = ()) -> Curves:
    """An honest run."""
    case = {**TRAINED, **CONFIGS[config], **dict(changes), "seed": seed}
    if not sizes:
        return observe(build(case, "--set", f"twin={twin}"))
    words = [*flags_of(case), "--set", f"twin={twin}"]
    return simulate(lambda mesh: observe(Trainer(parse(words), mesh)), **dict(sizes))[0]


def twins_of(config: str, seed: int = 0) -> tuple[Curves, list[Curves]]:
    return train(config, 0, seed), [train(config, 1 + i, seed) for i in range(TWINS)]


# --- faults -----------------------------------------------------------------------------------------------------------


def on_gradients(trainer: Trainer, change: Callable[[], None], since: int) -> None:
    """Change gradients when they are summed, before they are measured and clipped."""
    finish = trainer.run.pipeline.forward_backward

    def then(*args: Any, **kwargs: Any) -> Any:
        total = finish(*args, **kwargs)
        if trainer.run.step >= since:
            change()
        return total

    trainer.run.pipeline.forward_backward = then  # type: ignore[method-assign]


def gradient(trainer: Trainer, tensor: str, change: Callable[[Tensor], Any], since: int = 0) -> None:
    p = trainer.model.get_parameter(tensor)
    on_gradients(trainer, lambda: change(gradient_of(p)), since)  # type: ignore[arg-type]


def after_step(trainer: Trainer, change: Callable[[], Any], since: int = 0, once: bool = False) -> None:
    """Change something after a step, or after each."""
    step = trainer.run.optimizer_step

    def then(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if trainer.run.step > since and not (once and trainer.run.step > since + 1):
            with torch.no_grad():
                change()
        return result

    trainer.run.optimizer_step = then  # type: ignore[method-assign]


def weight(trainer: Trainer, tensor: str, change: Callable[[Tensor], Any], since: int = 0, once: bool = True) -> None:
    p = trainer.model.get_parameter(tensor)
    after_step(trainer, lambda: change(p), since, once)


def rate(trainer: Trainer, change: Callable[[float, int], float]) -> None:
    """Step with another learning rate than the one that is recorded."""
    step = trainer.run.optimizer_step
    trainer.run.optimizer_step = lambda lr: step(lr=change(lr, trainer.run.step))  # type: ignore[method-assign]


def option(trainer: Trainer, since: int = 0, groups: slice = slice(None), **values: Any) -> None:
    step = trainer.run.optimizer_step

    def then(*args: Any, **kwargs: Any) -> Any:
        if trainer.run.step >= since:
            for group in trainer.run.optimizer.param_groups[groups]:
                group.update({name: value(group[name]) for name, value in values.items()})
        return step(*args, **kwargs)

    trainer.run.optimizer_step = then  # type: ignore[method-assign]


def stuck_rate(trainer: Trainer) -> None:
    """The rate is set in the first group alone."""
    optimizer = trainer.run.optimizer

    def before(*_: Any) -> None:
        for group in optimizer.param_groups[1:]:
            group["lr"] = 3e-3

    optimizer.register_step_pre_hook(before)


def moments(trainer: Trainer, change: Callable[[dict[str, Tensor]], Any], since: int = LATE) -> None:
    after_step(trainer, lambda: [change(state) for state in trainer.run.optimizer.state.values()], since, once=True)


def batch(trainer: Trainer, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], since: int = 0) -> None:
    read = trainer.batch

    def then(samples: Any, indices: Any) -> Any:
        x, y, more = read(samples, indices)
        return (*(change(x, y) if trainer.run.step >= since else (x, y)), more)

    trainer.batch = then  # type: ignore[method-assign]


def samples(trainer: Trainer, change: Callable[[list[int]], list[int]], since: int = 0) -> None:
    share = trainer.share

    def then(step: int) -> Any:
        return change(list(share(step))) if step >= since else share(step)

    trainer.share = then  # type: ignore[method-assign]


def clip(trainer: Trainer, change: Callable[[float], float]) -> None:
    real = trainer.run.clip_gradients
    trainer.run.clip_gradients = lambda bound: real(change(bound))  # type: ignore[method-assign]


def tokens(trainer: Trainer, change: Callable[[Tensor], Tensor], since: int = 0) -> None:
    count = trainer.run.count_tokens
    trainer.run.count_tokens = lambda y: change(count(y)) if trainer.run.step >= since else count(y)  # type: ignore[method-assign]


def attribute(trainer: Trainer, module: str, since: int = 0, **values: Any) -> None:
    """Change a layer's setting before a step."""
    step = trainer.step

    def then() -> Any:
        if trainer.run.step == since:
            layer = trainer.model.get_submodule(module)
            for name, change in values.items():
                assert hasattr(layer, name), name
                setattr(layer, name, change(getattr(layer, name)))
        return step()

    trainer.step = then  # type: ignore[method-assign]


def output(trainer: Trainer, module: str, change: Callable[[Tensor], Tensor], since: int = 0) -> None:
    def hook(layer: nn.Module, args: Any, y: Any) -> Any:
        return change(y) if trainer.run.step >= since and layer.training else y

    trainer.model.get_submodule(module).register_forward_hook(hook)


def swap_rows(g: Tensor) -> None:
    g[:2] = g[:2].flip(0).clone()


def flip(p: Tensor) -> None:
    p.view(-1)[7] *= -1


def scramble(mine: list[int]) -> list[int]:
    return [mine[0], *mine[:-1]]


def shift(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y.roll(1, -1)


def one_wrong(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.clone()
    y[0, 0] = (y[0, 0] + 1) % 257
    return x, y


def one_ignored(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.clone()
    y[0, -1] = -100
    return x, y


QKV, UP, DOWN = "blocks.0.attention.qkv.weight", "blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"
OUT, NORM, TABLE, HEAD = "blocks.1.attention.output.weight", "norm.weight", "embedding.weight", "head.weight"


def make_faults() -> list[tuple[str, str, Fault, int]]:
    """What is planted: its name, the config, how, and the first step in which it can be seen."""
    found: list[tuple[str, str, Fault, int]] = []

    def plant(name: str, how: Any, *configs: str, since: Sequence[int] = (0,), **options: Any) -> None:
        for config in configs or ("float32",):
            for at in since:
                late = {"since": at} if at or "since" in how.__code__.co_varnames else {}
                found.append(
                    (f"{name}{f', from step {at}' if at else ''}", config, partial(how, **options, **late), at)
                )

    for tensor in (QKV, DOWN, NORM, TABLE):
        plant(
            f"the gradient of {tensor} is 1 % too large",
            gradient,
            since=(0, LATE),
            tensor=tensor,
            change=lambda g: g.mul_(1.01),
        )
        plant(f"{tensor} is not trained", gradient, since=(0, LATE), tensor=tensor, change=Tensor.zero_)
    for tensor in (UP, HEAD):
        plant(
            f"two rows of the gradient of {tensor} change places",
            gradient,
            "float32",
            "bfloat16, autocast",
            since=(0, LATE),
            tensor=tensor,
            change=swap_rows,
        )
    for tensor in (OUT, NORM):
        plant(
            f"the gradient of {tensor} has the wrong sign", gradient, since=(0, LATE), tensor=tensor, change=Tensor.neg_
        )
    plant("the gradient of the table is 0.1 % too large", gradient, "float32", "float16", tensor=TABLE,
          change=lambda g: g.mul_(1.001))  # fmt: skip
    for tensor in (QKV, UP):
        plant(
            f"a weight of {tensor} changes its sign once",
            weight,
            "float32",
            "bfloat16, autocast",
            since=(5, LATE),
            tensor=tensor,
            change=flip,
        )
    plant("weights are rounded to bfloat16", weight, tensor=QKV, once=False,
          change=lambda p: p.copy_(p.bfloat16().float()))  # fmt: skip
    plant("a tensor drifts by 1e-4 a step", weight, "float32", "float32, muon", tensor=DOWN, once=False,
          change=lambda p: p.mul_(1 + 1e-4))  # fmt: skip
    plant("the rate is 0.1 % too high", rate, "float32", "float32, muon", "bfloat16, autocast",
          change=lambda lr, step: lr * 1.001)  # fmt: skip
    plant("the rate is that of the next step", rate, change=lambda lr, step: lr * ((step + 2) / (step + 1)))
    plant("the rate of one group stands still", stuck_rate)
    plant("nothing is clipped", clip, "float32", "float32, experts", change=lambda bound: 0.0)
    plant("the bound of clipping is 1 % too high", clip, "float32", "float16", change=lambda bound: bound * 1.01)
    plant("all tensors decay", option, groups=slice(1, None), weight_decay=lambda decay: 0.1)
    plant("no tensor decays", option, "float32", "float32, muon", since=(0, LATE), weight_decay=lambda decay: 0.0)
    plant("decay is 1 % too strong", option, weight_decay=lambda decay: decay * 1.01)
    plant("eps is 1e-5", option, "float32", "float32, gpt2, dropout", eps=lambda eps: 1e-5)
    plant("eps is 1e-7", option, eps=lambda eps: 1e-7)
    plant("beta2 is 0.951", option, "float32", "bfloat16, autocast", betas=lambda betas: (0.9, 0.951))
    plant("beta1 is 0.9 of another run, 0.89", option, since=(0, LATE), betas=lambda betas: (0.89, 0.95))
    plant("first moments are lost", moments, "float32", since=(LATE,), change=lambda state: state["exp_avg"].zero_())
    plant("second moments are halved", moments, "float32", since=(LATE,),
          change=lambda state: state["exp_avg_sq"].mul_(0.5))  # fmt: skip
    plant("the count of steps is lost", moments, "float32", since=(LATE,), change=lambda state: state["step"].zero_())
    plant("momenta are lost", moments, "float32, muon", since=(LATE,), change=lambda state: [
        state[slot].zero_() for slot in ("momentum_buffer",) if slot in state])  # fmt: skip
    plant("the loss is divided by twice the tokens", tokens, "float32", "float32, no clipping, tied",
          change=lambda count: 2 * count)  # fmt: skip
    plant("the loss is divided by one token more", tokens, since=(0, LATE), change=lambda count: count + 1)
    plant("targets are shifted", batch, change=shift)
    plant("one target is wrong", batch, "float32", "bfloat16, autocast", since=(0, LATE), change=one_wrong)
    plant("one target is left out", batch, since=(0, LATE), change=one_ignored)
    plant("a sample comes twice, another not", samples, "float32", "float16", since=(0, LATE), change=scramble)
    plant("samples are those of the next step", samples, since=(LATE,), change=lambda mine: [i + 4 for i in mine])
    plant("the eps of a norm is 1e-5", attribute, module="norm", eps=lambda eps: 1e-5)
    plant("the eps of a norm is 1e-4", attribute, module="blocks.0.attention_norm", since=(0, LATE), eps=lambda e: 1e-4)
    plant("dropout drops 5 % more", attribute, "float32, gpt2, dropout", module="dropout", p=lambda p: p * 1.05)
    plant("dropout draws another mask", attribute, "float32, gpt2, dropout", module="dropout", key=lambda key: key + 1,
          since=(0, LATE))  # fmt: skip
    plant("an output is 1 % too large", output, "float32", "float32, latent attention", "bfloat16, autocast",
          module="blocks.0.attention", change=lambda y: y * 1.01)  # fmt: skip
    plant("an output is rounded to bfloat16", output, "float32", "float64", module="blocks.1.mlp",
          change=lambda y: y.bfloat16().to(y))  # fmt: skip
    plant("an output is rounded to float32", output, "float64", module="blocks.1.mlp", since=(0, LATE),
          change=lambda y: y.float().double())  # fmt: skip
    plant("a router is not trained", gradient, "float32, experts", since=(0, LATE),
          tensor="blocks.0.mlp.router.weight", change=Tensor.zero_)  # fmt: skip
    plant("experts' gradients are halved", gradient, "float32, experts",
          tensor="blocks.1.mlp.experts.down.weight", change=lambda g: g.mul_(0.5))  # fmt: skip
    plant("the bias of a router goes too far", attribute, "float32, experts, bias", module="blocks.0.mlp.router",
          bias_rate=lambda rate: rate * 1.1)  # fmt: skip
    plant("the loss scale is not undone in one tensor", gradient, "float16", tensor=OUT, change=lambda g: g.mul_(0.99))
    return found


# --- the trial --------------------------------------------------------------------------------------------------------


def honest(config: str, i: int, seed: int = 0) -> Verdict:
    """One honest pair."""
    twin, changes, sizes = HONEST[i]
    a, twins = twins_of(config, seed)
    return compare_runs(a, train(config, twin, seed, tuple(changes.items()), tuple(sizes.items())), twins)


def planted(config: str, fault: Fault, seed: int = 0) -> Verdict:
    """A run with a fault beside one without, dealt out in another order as well."""
    a, twins = twins_of(config, seed)
    case = {**TRAINED, **CONFIGS[config], "seed": seed}
    with mock.patch("torch.manual_seed"):  # of the whole process; nothing here draws from it
        return compare_runs(a, observe(build(case, "--set", "twin=99"), fault), twins)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compare_trial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, default=1, metavar="N", help="every N-th case (default 1: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the runs (default 0)")
    parser.add_argument("--only", choices=("honest", "faults"), help="half of it")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    pairs = [(config, i) for config in CONFIGS for i in range(len(HONEST))][:: args.part]
    pairs = [] if args.only == "faults" else pairs
    alarms, nearest = [], []
    for config, i in tqdm(pairs, desc="honest"):
        verdict = honest(config, i, args.seed)
        nearest.append(verdict.nearest)
        if verdict.first is not None:
            alarms.append((config, HONEST[i]))
            tqdm.write(f"ALARM {config}, {HONEST[i]}: {verdict.first}, {verdict.first.times:.3g} times")
    if nearest:
        nearest.sort()
        print(f"{len(alarms)} alarms in {len(pairs)} honest pairs; the median, the 95th in 100 and the largest are "
              f"{nearest[len(nearest) // 2]:.2f}, {nearest[int(len(nearest) * 0.95)]:.2f} and {nearest[-1]:.2f} of the "
              f"band")  # fmt: skip
    found: Counter[str] = Counter()
    faults = [] if args.only == "honest" else make_faults()[:: args.part]
    for name, config, fault, since in tqdm(faults, desc="faults"):
        verdict = planted(config, fault, args.seed)
        first = verdict.first
        kind = "missed" if first is None else "found" if first.step >= since else "found too early"
        found[kind] += 1
        told = f"{verdict.nearest:.2f} of the band" if first is None else f"{first}, {first.times:.3g} times the band"
        tqdm.write(f"{kind}: {config}: {name}: {told}")
    if faults:
        print(f"{found['found']} of {len(faults)} faults found within {STEPS} steps, {dict(found)}")
    return 0


if __name__ == "__main__":
    main()
