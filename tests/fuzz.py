"""Draw flags of `examples.gpt.pretrain` at random: legal ones must train as one process does, illegal ones be refused.

python -m tests.fuzz --cases 200              1 to 8 ranks in this process, in float64
python -m tests.fuzz --illegal --cases 200    one flag of each command is made wrong
python -m tests.fuzz --seed 17 --cases 1      one case again; a failure is printed as its least command
python -m tests.fuzz --cases 500 --record tests/fuzz_record.json    the next 500 after those that the file counts
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import math
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from examples.gpt.checks import inner_size
from examples.gpt.pretrain import Trainer, parse
from mpcore import build_mesh, full_state_dict, simulate
from mpcore.simulation import DeadlockError, RankError
from tests.examples.test_any_flags import COMMON, STEPS, draw_layout, draw_model
from tests.oracles.runs import corpus

LIMIT_S = 120
DIVERGED = 1e6  # a loss or a norm of a sound run is far below
WRONG = ("-1", "0", "3", "7", "1.5", "nan", "inf", "1e400", "x", "", "none", "99999999999")
Outcome = tuple[str, str]  # "equal", "refused" or "failed", and why

# Flags whose values a case of illegal ones may change, besides those that it has.
MORE = ("--tp", "--pp", "--cp", "--dp", "--ep", "--etp", "--zero", "--replicate", "--cp-inner", "--virtual-stages",
        "--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--dropout", "--seq-len", "--steps",
        "--global-batch", "--micro-batch", "--lr", "--min-lr", "--warmup", "--weight-decay", "--clip", "--experts",
        "--top-k", "--capacity-factor", "--router-jitter", "--init-std", "--workers", "--local-steps", "--fragments",
        "--eval-samples", "--eval-every", "--keep", "--save-every", "--exit-step", "--max-skips", "--recompute",
        "--schedule", "--offload", "--optimizer", "--balance", "--aux-loss", "--dtype", "--rampup-batch-size",
        "--betas", "--profile", "--compile", "--twin", "--record-tensors", "--cp-kind", "--dispatch")  # fmt: skip


def commands(words: Sequence[str]) -> list[list[str]]:
    """The flags of a command, each with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return found


def draw(seed: int) -> tuple[int, list[str]]:
    """The ranks and the flags of a case that may be legal."""
    dice = random.Random(seed)
    world = dice.choice([1, 2, 3, 4, 4, 6, 8, 8])
    model = draw_model(dice)
    sizes, layout = draw_layout(dice, world, "tiny-moe" in model)
    axes = [word for axis, size in sizes.items() for word in (f"--{axis.replace('_', '-')}", str(size))]
    return world, [*COMMON, *model, *axes, *layout]


def spoil(seed: int, words: Sequence[str]) -> list[str]:
    """The same command with a wrong value of one flag, most often."""
    dice = random.Random(f"wrong {seed}")
    flags = commands(words)
    name = dice.choice([dice.choice([flag[0] for flag in flags]), dice.choice(MORE)])
    flags = [flag for flag in flags if flag[0] != name]
    return [word for flag in [*flags, [name, *dice.choices(WRONG, k=dice.choice([1, 1, 1, 2]))]] for word in flag]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if a block takes more processor time, or ten times as long on the clock.

    All threads' stacks are printed after five times as long: a block that stands still may not reach its error.
    """
    used, began = time.process_time(), time.monotonic()

    def late(*_: Any) -> None:
        if time.process_time() - used < seconds and time.monotonic() - began < 10 * seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            raise TimeoutError(f"not done after {seconds:.0f} s")

    faulthandler.dump_traceback_later(5 * seconds, file=sys.__stderr__ or sys.stderr)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def train(words: list[str], alone: bool = False) -> dict[str, Any]:
    """Losses, norms, the held-out loss and the parameters on this rank."""
    args = parse([*words, "--data", corpus(), "--device", "cpu", "--out", "unused"])
    if alone:
        alike = parse([])
        for name in ("tp", "pp", "cp", "dp", "ep", "etp", "cp_inner", "cp_kind", "schedule", "virtual_stages", "zero",
                     "replicate", "sequence_parallel", "offload", "recompute", "dispatch", "micro_batch"):  # fmt: skip
            setattr(args, name, getattr(alike, name))
        args.zero = 0
    sizes = {axis: getattr(args, axis) for axis in ("tp", "cp", "pp", "ep", "dp", "etp")}
    mesh = build_mesh(**sizes, device_type="cpu", workers=args.workers, cp_inner=inner_size(args))
    trainer = Trainer(args, mesh)
    entries = [trainer.step() for _ in range(min(STEPS, args.steps))]
    numbers = [x for entry in entries for x in (entry["loss"], entry["grad_norm"])]
    numbers += [trainer.evaluate()] if args.eval_every else []
    with trainer.run.parameters() as model:
        return {"numbers": numbers, "state": {name: p.clone() for name, p in full_state_dict(model).items()}}


@cache
def dense(words: tuple[str, ...]) -> dict[str, Any]:
    return simulate(train, list(words), True, ranks=1)[0]


def judge(world: int, words: list[str]) -> Outcome:
    """Train on all ranks, and on one process."""
    said = io.StringIO()
    try:
        with limited(LIMIT_S), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            results = simulate(train, words, ranks=world)
            want = dense(tuple(words))
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and len(str(cause)) > 10:
            return "refused", str(cause)
        if isinstance(cause, SystemExit) and "error:" in said.getvalue():
            return "refused", said.getvalue().strip().splitlines()[-1]
        return "failed", f"{type(cause).__name__}: {cause}"
    except (DeadlockError, TimeoutError) as error:
        return "failed", f"{type(error).__name__}: {error}"
    for rank, got in enumerate(results):
        for i, (x, y) in enumerate(zip(got["numbers"], want["numbers"], strict=True)):
            if not abs(y) < DIVERGED:  # what comes after it are roundings, blown up
                return "equal", "until it diverges"
            if not math.isclose(x, y, rel_tol=1e-9) and not (math.isnan(x) and math.isnan(y)):
                return "failed", f"rank {rank}: number {i} is {x:.12g}, on one process {y:.12g}"
        for name, value in got["state"].items():
            far = float((value.double() - want["state"][name].double()).abs().max()) if value.numel() else 0.0
            if not far <= 1e-8 * max(float(want["state"][name].abs().max()), 1.0) and bool(value.isfinite().all()):
                return "failed", f"rank {rank}: {name} is off by {far:.3g}"
    return "equal", ""


def shrink(world: int, words: list[str]) -> list[str]:
    """Leave out flags as long as the command fails."""
    flags = commands(words)
    for flag in list(flags):
        fewer = [other for other in flags if other is not flag]
        if judge(world, [word for other in fewer for word in other])[0] == "failed":
            flags = fewer
    return [word for flag in flags for word in flag]


class Record:
    """Counts of the cases that have run so far, in a file that is written after each case.

    Args:
        path: the file; None: nothing is kept.
        kind: "legal" or "illegal".
        seed: of the first case, where the file counts none of this kind.
    """

    def __init__(self, path: Path | None, kind: str, seed: int) -> None:
        self.path = path
        self.kinds = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        fresh = {"first_seed": seed, "cases": 0, "equal": 0, "refused": 0, "failed": [], "processor_s": 0.0}
        self.counts: dict[str, Any] = self.kinds.setdefault(kind, fresh)

    @property
    def next_seed(self) -> int:
        """The seed of the next case."""
        return self.counts["first_seed"] + self.counts["cases"]

    def add(self, seed: int, kind: str, seconds: float) -> None:
        """Count a case."""
        self.counts["cases"] += 1
        self.counts["failed" if kind == "failed" else kind] += [seed] if kind == "failed" else 1
        self.counts["processor_s"] = round(self.counts["processor_s"] + seconds, 2)
        if self.path is not None:
            self.path.write_text(json.dumps(self.kinds, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default 0); a record goes on")
    parser.add_argument("--cases", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--illegal", action="store_true", help="with a wrong value of one flag")
    parser.add_argument("--shrink", action="store_true", help="print the least command of each failure")
    parser.add_argument("--record", type=Path, metavar="FILE", help="go on after the cases that this file counts")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    slowest = 0.0
    record = Record(args.record, "illegal" if args.illegal else "legal", args.seed)
    first = record.next_seed
    for seed in tqdm(range(first, first + args.cases), unit="case", dynamic_ncols=True):
        world, words = draw(seed)
        words = spoil(seed, words) if args.illegal else words
        began, used = time.monotonic(), time.process_time()
        kind, why = judge(world, words)
        record.add(seed, kind, time.process_time() - used)
        if kind == "refused":
            slowest = max(slowest, time.monotonic() - began)
        found[kind] += 1
        dense.cache_clear()
        if kind == "failed":
            least = shrink(world, words) if args.shrink else words
            tqdm.write(f"seed {seed}, {world} ranks: {why}\n    {' '.join(map(repr, least))}")
    print(f"{args.cases} cases: {found['equal']} equal to one process, {found['refused']} refused, the slowest after "
          f"{slowest:.1f} s, {found['failed']} failed")  # fmt: skip
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
