"""`mpcore preflight -- COMMAND`: check on this machine, in minutes, that a large run on many GPUs will work.

For a command `-m package.module FLAGS`, the module `package.preflight` must define `checks(flags, options)`, which
returns a list of `Check`; see `examples.gpt.preflight`. For a model, `module:build`, the checks are defined here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from mpcore.sharding.state_dict import full_state_dict
from mpcore.tools.command_line import Parser, reports_errors
from mpcore.tools.verify import parse_layout, verify, what_happened
from mpcore.tools.verify.__main__ import find
from mpcore.tools.verify.layout import Layout
from mpcore.tools.verify.pool import Pool, RankError, mesh
from mpcore.tools.verify.run import SHIFT, STEP, Seen, Task, build_model, check_slope, run_step
from mpcore.training.policies import Zero
from mpcore.training.prepare import prepare

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
_COUNTS = {
    "nodes": ("--nnodes", "-N", "--nodes"),
    "each": ("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node"),
    "all": ("-n", "--ntasks"),
}


class Skip(Exception):  # noqa: N818  (not an error)
    """Raised by a check that doesn't apply; its text says why."""


@dataclass(frozen=True)
class Check:
    """One check, printed as one line.

    Attributes:
        name: the name of the check.
        run: runs the check and returns the measured numbers as text. It raises ValueError with the problem and how to
            fix it, or `Skip` with the reason why the check doesn't apply.
        meaning: one sentence: what a failure means, and what to do.
        needed: if True and the check fails, later checks are skipped.
    """

    name: str
    run: Callable[[], str]
    meaning: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        name, meaning: the `Check`'s name and meaning.
        state: "ok", "FAILED" or "skipped".
        detail: the numbers, the problem, or the reason for skipping.
        seconds: the time the check took.
    """

    name: str
    state: str
    detail: str
    seconds: float = 0.0
    meaning: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8}{self.name:<26}{self.seconds:6.1f} s  {self.detail}".rstrip()


@dataclass(frozen=True)
class Options:
    """Facts about the run that checks may use.

    Attributes:
        ranks: the number of ranks, from the launcher's arguments; None: the product of the axes.
        each: the number of ranks per node; None if unknown.
        memory: bytes of memory per GPU; None if unknown.
        timeout: seconds that a toy run may take.
    """

    ranks: int | None = None
    each: int | None = None
    memory: float | None = None
    timeout: float = 120.0


@dataclass(frozen=True)
class Command:
    """The command of a run: what it starts, its flags, its ranks and its ranks per node (None if not given)."""

    target: str
    flags: list[str]
    ranks: int | None = None
    each: int | None = None


def read_command(words: Sequence[str]) -> Command:
    """Read a command such as `torchrun --nproc-per-node 8 -m package.module FLAGS`, or `module:build FLAGS`.

    Raises:
        ValueError: if it starts neither a module nor a model, or its number of ranks is no number.
    """
    words = [part for word in words for part in (word.split("=", 1) if _counts(word.split("=")[0]) else [word])]
    for i, word in enumerate(words):
        module = words[i + 1] if word in ("-m", "--module") and i + 1 < len(words) else "-"
        named = module not in LAUNCHERS and not module.startswith("-")
        if named or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", word):
            found = {what: _number(words[j], words[j + 1]) for j in range(i) if (what := _counts(words[j]))}
            each, nodes = found.get("each"), found.get("nodes", 1)
            ranks = found.get("all", None if each is None else each * nodes)
            return Command(words[i + named], words[i + 1 + named :], ranks, each)
    raise ValueError(
        f"{' '.join(words) or 'nothing'} starts no module: write the words of the run, such as "
        f"-- torchrun --nproc-per-node 8 -m examples.gpt.pretrain --tp 8, or a model as -- module:build"
    )


def _counts(word: str) -> str:
    return next((what for what, flags in _COUNTS.items() if word in flags), "")


def _number(flag: str, word: str) -> int:
    number = word.rpartition(":")[2]  # of torchrun's MIN:MAX nodes the most
    if not number.isdigit():
        raise ValueError(f"{flag} {word} is no number: say how many ranks the run has")
    return int(number)


def run_checks(checks: Sequence[Check], begin: Callable[[int], None] = lambda at: None) -> Iterator[Result]:
    """Run checks one after another, and yield each result. `begin` is called with the index of the next check."""
    stopped = ""
    for at, check in enumerate(checks):
        begin(at)
        began, state, detail = time.perf_counter(), OK, ""
        try:
            if stopped:
                raise Skip(f"{stopped} failed")
            detail = _run(check)
        except Skip as why:
            state, detail = SKIPPED, str(why)
        except RankError as error:
            state, detail = FAILED, what_happened(str(error))
        except Exception as error:  # a check runs the user's own code
            state, detail = FAILED, _explained(error)
        stopped = stopped or (check.name if check.needed and state == FAILED else "")
        yield Result(check.name, state, detail, time.perf_counter() - began, check.meaning)


def _run(check: Check) -> str:
    """Run a check, and run it again if a process crashed in native code: gloo does so once in some hundred runs."""
    try:
        return check.run()
    except RankError as error:
        crash = re.search(r"died \((SIGABRT|SIGBUS|SIGSEGV)\)", str(error))
        if crash is None:
            raise
    return f"{check.run()}; a process had crashed before ({crash[1]})".lstrip("; ")


def _explained(error: Exception) -> str:
    """Return the text of an error; for one of torch about a write in place, also its line and what to change."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    text, frames = f"{type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)]
    if not own or not re.search(r"modified (by an )?in-?place", text):
        return text
    return (
        f"{own[-1].filename}:{own[-1].lineno}, {own[-1].name}: a tensor is written to in place that shares its memory "
        f"with another result, or whose values a backward needs. Write to a clone, or return a new tensor. {text}"
    )


# --- a model, module:build --------------------------------------------------------------------------------------------


def checks_of_model(target: str, flags: Sequence[str], options: Options, pool: Pool) -> list[Check]:
    """Make the checks of `module:build`, with the flags of `mpcore verify`."""
    parser = Parser(prog=target)
    parser.add_argument("--layouts", default="tp2,dp2")
    layouts = [parse_layout(name) for name in parser.parse_args(flags).layouts.split(",") if name]
    build, batch, loss = find(target)

    def same(name: str) -> str:
        (verdict,) = verify(build, batch, [name], loss=loss, pool=pool, timeout=options.timeout)
        if not verdict.equal:
            raise ValueError(str(verdict.departure or verdict.error))
        return f"equal to {max(verdict.worst.values()):.2g} ULPs"

    task = Task(build, batch, loss)

    def slope() -> str:
        one = parse_layout("tp1")
        seen, above, below = (
            pool(1, step_of, replace(task, shift=shift), one, timeout=options.timeout)[0]
            for shift in (0.0, SHIFT, -SHIFT)
        )
        off = check_slope(seen.gradients, seen.norm, above.loss, below.loss)
        return f"the gradient of one process is the slope of its loss to {off:.1g} of the norm"

    def saved(layout: Layout) -> str:
        with tempfile.TemporaryDirectory(prefix="mpcore-preflight-") as folder:
            pool(layout.size, save_model, task, layout, folder, timeout=options.timeout)
            one = parse_layout("tp1")
            (whole,) = pool(1, load_model, task, one, folder, timeout=options.timeout)
            for rank in pool(layout.size, load_model, task, layout, folder, timeout=options.timeout):
                for name, value in whole.items():
                    if not torch.equal(rank[name], value):
                        raise ValueError(f"{name} of {layout.name} is another one when one process loads it")
        return f"{len(whole)} tensors"

    meaning = "the sharded model is another model than the one you tested: mpcore verify shows every stage of it"
    wrong = "one process computes it wrong too, so no layout can be right"
    found = [Check("gradient of one process", slope, wrong)]
    found += [
        Check(f"{layout.name} against unsharded", lambda name=layout.name: same(name), meaning) for layout in layouts
    ]
    found.append(Check("two micro-batches", lambda: same("dp1mb2"), "the loss must be a sum over tokens, no mean"))
    kept = "a parameter is saved as another one than it is: declare how each is sharded"
    more = [Check(f"save {layout.name}, load on 1", lambda layout=layout: saved(layout), kept) for layout in layouts]
    return found + [check for check, layout in zip(more, layouts, strict=True) if layout.size > 1 and layout.pp == 1]


def _prepared(task: Task, layout: Layout):
    """The model, prepared for this layout."""
    on = mesh(tp=layout.tp, cp=layout.cp, pp=layout.pp, dp=layout.dp, ep=layout.ep)
    model = build_model(task, on, layout)
    return prepare(
        model, on, blocks=(), loss=lambda output, target: output.sum(), optimizer=_optimizer, seed=task.seed,
        initialize=False, micro_batches=layout.micro_batches, data=Zero(layout.zero),
    )  # fmt: skip


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=STEP)


def step_of(task: Task, layout: Layout) -> Seen:
    """Run one step of the model, and record it."""
    return run_step(task, mesh(), layout)


def save_model(task: Task, layout: Layout, folder: str) -> None:
    """Save the model as it begins."""
    _prepared(task, layout).save(folder)


def load_model(task: Task, layout: Layout, folder: str) -> dict[str, torch.Tensor]:
    """Load it into a model with other first values; return the logical tensors."""
    run = _prepared(replace(task, seed=task.seed + 1), layout)
    run.seed = task.seed
    run.load(next(Path(folder).glob("step-*")))
    with run.parameters() as model:
        return {name: value.clone() for name, value in full_state_dict(model).items()}


# --- the command ------------------------------------------------------------------------------------------------------


def checks_of(command: Command, options: Options, pool: Pool) -> list[Check]:
    """Make the checks of a command.

    Raises:
        ValueError: if its module has none.
    """
    if ":" in command.target:
        return checks_of_model(command.target, command.flags, options, pool)
    sys.path.insert(0, "") if "" not in sys.path else None
    name = f"{command.target.rpartition('.')[0] or command.target}.preflight"
    try:
        there = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        there = None
    if there is None:
        raise ValueError(
            f"{command.target} has no module {name} with checks(flags, options, pool): write one as "
            f"examples/gpt/preflight.py, or check the model alone, as module:build"
        )
    return import_module(name).checks(command.flags, options, pool)


@reports_errors("mpcore preflight")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if no check failed, 1 if one did, 2 if they could not run.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = Parser(
        prog="mpcore preflight",
        usage="mpcore preflight [--memory GB] [--timeout S] [--json] -- COMMAND",
        description="Try on this machine what a large run will do. COMMAND is the run's own, with its launcher's words "
        "if it has any: a toy with its divisions, ties, schedule, dtype and options is trained on up to 8 local "
        "processes and on one, saved and loaded on another layout, stopped and resumed, and killed; memory and bytes "
        "are planned in full size, and all data is opened. Or a model, package.module:build --layouts tp2,dp2.",
        examples=[
            "mpcore preflight -- torchrun --nproc-per-node 8 -m examples.gpt.pretrain --tp 4 --pp 2",
            "mpcore preflight -- package.module:build --layouts tp2,tp2sp,dp2zero3",
        ],
    )
    parser.add_argument("--memory", type=float, metavar="GB", help="of a GPU, in 10^9 bytes (default: of this one)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each toy (default 120)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args: argparse.Namespace = parser.parse_args(words[:at])
    pool = Pool(8)
    try:
        command = read_command(words[at + 1 :])
        memory = args.memory * 1e9 if args.memory else None
        if memory is None and torch.cuda.is_available():
            memory = float(torch.cuda.get_device_properties(0).total_memory)
        checks = checks_of(command, Options(command.ranks, command.each, memory, args.timeout), pool)
        results, shows = [], sys.stderr.isatty()
        for result in run_checks(checks, lambda i: _show(checks, i) if shows else None):
            results.append(result)
            if shows:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            if not args.json:
                print(result, flush=True)
    finally:
        pool.stop()
    failed = [result for result in results if result.state == FAILED]
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(verdict(results))
    return int(bool(failed))


def _show(checks: Sequence[Check], at: int) -> None:
    """Draw how far the checks are, on the terminal's last line."""
    print(f"\r\x1b[K[{'#' * at}{'.' * (len(checks) - at)}] {checks[at].name}\r", end="", file=sys.stderr, flush=True)


def verdict(results: Sequence[Result]) -> str:
    """Say in a sentence whether to start the run, and what each failure means."""
    failed = [result for result in results if result.state == FAILED]
    seconds = sum(result.seconds for result in results)
    if not failed:
        return f"Nothing found that speaks against this run: {len(results)} checks in {seconds:.0f} s."
    names = ", ".join(result.name for result in failed)
    lines = [f"Don't start this run: {len(failed)} of {len(results)} checks failed ({names})."]
    return "\n".join(lines + [f"- {result.name}: {result.meaning}." for result in failed if result.meaning])


if __name__ == "__main__":
    sys.exit(main())
