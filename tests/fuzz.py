"""Draw flags of `examples.gpt.pretrain` at random: legal ones must train as one process does, illegal ones be refused.

Cases that follow each other share a model, and so one run of one process: each has a layout of its own.

python -m tests.fuzz --cases 200              1 to 8 ranks in this process, in float64
python -m tests.fuzz --illegal --cases 200    one flag of each command is made wrong
python -m tests.fuzz --seed 17 --cases 1      one case again; a failure is printed as its least command
python -m tests.fuzz --cases 500 --record tests/fuzz_record.json    the next 500 after those that the file counts
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import io
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from examples.gpt import setup
from examples.gpt.pretrain import Trainer, parse
from examples.gpt.setup import mesh_arguments, read_model
from mpcore import Mesh, build_mesh, full_state_dict, simulate
from mpcore.tools.analysis.curves import round_anew
from mpcore.tools.analysis.dry_run import pretend
from mpcore.tools.simulation import DeadlockError, RankError
from tests.examples.test_any_flags import draw_layout, draw_model
from tests.oracles.runs import corpus, folder

LIMIT_S = 60
LAYOUTS = 6  # cases that share a model
STEPS = 2  # the second shows what the first changed; its own change is in the parameters and the held-out loss
COMMON = ["--dtype", "float64", "--warmup", "1", "--steps", "3", "--set", "eval_samples=3"]
EVERY = 10  # of so many cases that one process refuses, one is tried on its ranks too
DIVERGED = 1e6  # a loss or a norm of a sound run is far below
CLOSE = {"numbers": 1e-9, "state": 1e-8}
TWINS, TIMES = 3, 100  # runs of one process from weights rounded anew, and how much further a layout's roundings may go
# Flags that change no number; the run of one process has their defaults.
LAYOUT = ("tp", "pp", "cp", "dp", "ep", "etp", "cp_inner", "cp_kind", "schedule", "virtual_stages", "zero", "replicate",
          "sequence_parallel", "offload", "recompute", "dispatch", "micro_batch")  # fmt: skip
WRONG = ("-1", "0", "3", "7", "1.5", "nan", "inf", "1e400", "x", "", "none", "99999999999")
Outcome = tuple[str, str]  # "equal", "refused" or "failed", and why

# Flags whose values a case of illegal ones may change, besides those that it has.
MORE = ("--tp", "--pp", "--cp", "--dp", "--ep", "--etp", "--zero", "replicate", "cp_inner", "--virtual-stages",
        "--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--dropout", "--seq-len", "--steps", "--warmup",
        "--global-batch", "--micro-batch", "--lr", "min_lr", "weight_decay", "clip", "--experts", "moe.top_k",
        "moe.capacity_factor", "moe.jitter", "init_std", "--workers", "--local-steps", "fragments", "eval_samples",
        "--eval-every", "keep", "--save-every", "exit_step", "max_skips", "--recompute", "--schedule", "--offload",
        "--optimizer", "moe.aux_loss", "--dtype", "rampup_batch_size", "betas", "profile", "--compile", "twin",
        "record_tensors", "--cp-kind", "moe.dispatch")  # fmt: skip


def commands(words: Sequence[str]) -> list[list[str]]:
    """The flags of a command, each with its values; each field of `--set` alone, as `--set=FIELD`, `VALUE`."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([])
        if found[-1] and found[-1][0].partition("=")[0] == "--set":
            name, _, value = word.partition("=")
            found[-1:] = [*(found[-1:] if found[-1] != ["--set"] else []), [f"--set={name}", value]]
        else:
            found[-1].append(word)
    return found


def words_of(flags: Iterable[Sequence[str]]) -> list[str]:
    """The command of such flags."""
    return [
        word
        for name, *values in flags
        for word in (["--set", f"{name[6:]}={','.join(values)}"] if name.startswith("--set=") else [name, *values])
    ]


def draw(seed: int) -> tuple[int, list[str]]:
    """The ranks and the flags of a case that may be legal."""
    dice = random.Random(f"model {seed // LAYOUTS}")
    model = {flag[0]: flag for flag in commands(draw_model(dice))}
    model["--layers"][1], batch = dice.choice("2234"), dice.choice("4468")
    dice = random.Random(seed)
    world = dice.choice([1, 2, 3, 4, 4, 6, 8, 8])
    sizes, layout = draw_layout(dice, world, "--experts" in model)
    axes = [
        word
        for axis, size in sizes.items()
        for word in (["--set", f"cp_inner={size}"] if axis == "cp_inner" else [f"--{axis}", str(size)])
    ]
    flags = words_of(model.values())
    return world, [*COMMON, "--global-batch", batch, *flags, *axes, *layout]


def spoil(seed: int, words: Sequence[str]) -> list[str]:
    """The same command with a wrong value of one flag, most often."""
    dice = random.Random(f"wrong {seed}")
    flags = commands(words)
    name = dice.choice([dice.choice([flag[0] for flag in flags]), dice.choice(MORE)])
    name = name if name.startswith("--") else f"--set={name}"
    flags = [flag for flag in flags if flag[0] != name]
    return words_of([*flags, [name, *dice.choices(WRONG, k=dice.choice([1, 1, 1, 2]))]])


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if a block takes more processor time, or stands still for ten times as long.

    A process that waits for a processor doesn't stand still. The stacks of all threads of one that does are printed.
    """
    began = seen = time.process_time(), _waited_s()
    still = 0

    def look(*_: Any) -> None:
        nonlocal seen, still
        now = time.process_time(), _waited_s()
        moved = sum(abs(x - y) for x, y in zip(now, seen, strict=True)) > seconds / 10
        seen, still = now, 0 if moved else still + 1
        if still == 10:
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        if still == 10 or now[0] - began[0] > seconds:
            raise TimeoutError(f"{'it stands still' if still == 10 else 'not done'} after {now[0] - began[0]:.0f} s")

    faulthandler.dump_traceback_later(50 * seconds, file=sys.__stderr__ or sys.stderr)  # it may not come to look
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _waited_s() -> float:
    """How long the threads of this process have waited for a processor."""
    found = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += int(thread.read_text().split()[1])
    return found / 1e9


def read(words: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of a case. Raises ValueError with the parser's error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse([*words, "--data", corpus(), "--device", "cpu", "--out", folder().name])
    except SystemExit:
        raise ValueError(said.getvalue().strip().splitlines()[-1]) from None


def make_mesh(args: argparse.Namespace) -> Mesh:
    """The mesh of this rank."""
    return build_mesh(**{**mesh_arguments(args), "device_type": "cpu"})


def train(args: argparse.Namespace, twin: int = 0) -> dict[str, Any]:
    """Losses, norms and the held-out loss, and the parameters on this rank."""
    args = copy.deepcopy(args)  # a run changes its own
    trainer = Trainer(args, make_mesh(args))
    if twin:
        round_anew(trainer.run, twin, torch.float64)
    entries = [trainer.step() for _ in range(min(STEPS, args.steps))]
    numbers = [x for entry in entries for x in (entry["loss"], entry["grad_norm"])]
    numbers += [trainer.evaluate()] if args.eval_every else []
    with trainer.run.parameters() as model:
        return {"numbers": numbers, "state": {name: p.clone() for name, p in full_state_dict(model).items()}}


@lru_cache(maxsize=8)
def dense(words: tuple[str, ...], twin: int = 0) -> dict[str, Any]:
    """Return the numbers of one process for these flags, which name no layout."""
    return simulate(train, read([*words, "--zero", "0"]), twin, ranks=1)[0]


def errors(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """How far each number and each parameter of a rank is from that of one process, by name, relative to `CLOSE`.

    After the first number that has diverged nothing is compared.
    """
    found: dict[str, float] = {}
    for i, (x, y) in enumerate(zip(got["numbers"], want["numbers"], strict=True)):
        if not abs(y) < DIVERGED:
            return found
        found[f"number {i}"] = abs(x - y) / max(abs(y), 1e-300) / CLOSE["numbers"]
    for name, part in got["state"].items():
        value = want["state"][name]
        if not bool(value.isfinite().all()):
            return found
        far = float((part.double() - value.double()).abs().max()) if value.numel() else 0.0
        found[name] = far / max(float(value.abs().max()), 1.0) / CLOSE["state"]
    return found


def refusal(world: int, args: argparse.Namespace) -> str | None:
    """Why the first of these ranks would refuse the flags before it builds anything."""
    try:
        with pretend(world):
            read_model(args, make_mesh(args))
    except ValueError as error:
        return str(error)
    return None


def judge(world: int, words: list[str], ranks_refuse: bool = True) -> Outcome:
    """Train on all ranks, and on one process.

    Args:
        world: the number of ranks.
        words: the flags.
        ranks_refuse: whether flags that one process refuses are tried on all ranks too, which must say the same.
    """
    try:
        with limited(LIMIT_S), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            args = read(words)
            early = refusal(world, copy.deepcopy(args))
            if early is not None and not ranks_refuse:
                return refused(early)
            results = simulate(train, args, ranks=world)
            if early is not None:
                return "failed", f"the ranks train what one process refuses: {early}"
            if args.workers > 1:
                return "equal", "trained: one process has no workers to merge"
            alone = [
                flag
                for flag in commands(words)
                if flag[0].removeprefix("--set=").lstrip("-").replace("-", "_") not in LAYOUT
            ]
            key = tuple(words_of(alone))
            want = dense(key)
            found = [errors(got, want) for got in results]
            missing = want["state"].keys() - {name for got in results for name in got["state"]}
            if missing:
                return "failed", f"no rank has {', '.join(sorted(missing))}"
            wrong = {name: x for each in found for name, x in each.items() if not x <= 1}
            if wrong:  # or roundings, blown up
                twins = [errors(dense(key, twin), want) for twin in range(1, TWINS + 1)]
                bands = {name: TIMES * max(twin.get(name, 0.0) for twin in twins) for name in wrong}
                wrong = {name: x for name, x in wrong.items() if not x <= bands[name]}
                if not wrong:
                    return "equal", "within the roundings of one process, which this model blows up"
    except ValueError as error:
        return refused(str(error))
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, ValueError):
            said = str(cause)
            same = early is None or said == early
            return refused(said) if same else ("failed", f"the ranks say {said!r}, one process {early!r}")
        return "failed", f"{type(cause).__name__}: {cause}"
    except (DeadlockError, TimeoutError) as error:
        return "failed", f"{type(error).__name__}: {error}"
    for rank, each in enumerate(found):
        for name, x in each.items():
            if name in wrong:
                kind = "numbers" if name.startswith("number ") else "state"
                return "failed", f"rank {rank}: {name} is off by {x * CLOSE[kind]:.3g}"
    return "equal", "" if all(abs(x) < DIVERGED for x in want["numbers"]) else "until it diverges"


def refused(why: str) -> Outcome:
    """A refusal must say something."""
    return ("refused", why) if len(why) > 10 else ("failed", f"refused without words: {why!r}")


def shrink(world: int, words: list[str]) -> list[str]:
    """Leave out flags as long as the command fails."""
    flags = commands(words)
    for flag in list(flags):
        fewer = [other for other in flags if other is not flag]
        if judge(world, words_of(fewer))[0] == "failed":
            flags = fewer
    return words_of(flags)


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
    setup.code_versions = cache(setup.code_versions)  # each rank is this process
    found: Counter[str] = Counter()
    slowest = 0.0
    record = Record(args.record, "illegal" if args.illegal else "legal", args.seed)
    first = record.next_seed
    for seed in tqdm(range(first, first + args.cases), unit="case", dynamic_ncols=True):
        world, words = draw(seed)
        words = spoil(seed, words) if args.illegal else words
        began, used = time.monotonic(), time.process_time()
        kind, why = judge(world, words, ranks_refuse=seed % EVERY == 0)
        record.add(seed, kind, time.process_time() - used)
        if kind == "refused":
            slowest = max(slowest, time.monotonic() - began)
        found[kind] += 1
        if kind == "failed":
            least = shrink(world, words) if args.shrink else words
            tqdm.write(f"seed {seed}, {world} ranks: {why}\n    {' '.join(map(repr, least))}")
    print(f"{args.cases} cases: {found['equal']} equal to one process, {found['refused']} refused, the slowest after "
          f"{slowest:.1f} s, {found['failed']} failed")  # fmt: skip
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
