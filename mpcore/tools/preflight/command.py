"""`mpcore preflight -- COMMAND`: check on this machine, in minutes, that a large run on many GPUs will work.

For a command `-m package.module FLAGS`, the module `package.preflight` may define `checks(flags, options, pool)`, which
returns a list of `Check`. Otherwise the module itself must have the names of `mpcore.tools.preflight.training`, as
`examples.gpt.pretrain` has them. For a model, `module:build`, the checks are defined here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from mpcore.sharding.state_dict import full_state_dict
from mpcore.tools import parsers
from mpcore.tools.command_line import Parser, reports_errors, search_current_folder
from mpcore.tools.preflight import training
from mpcore.tools.preflight.checks import FAILED, Check, Options, run_checks
from mpcore.tools.preflight.checks import verdict as conclusion
from mpcore.tools.verify import parse_layout, verify
from mpcore.tools.verify.__main__ import find
from mpcore.tools.verify.layout import Layout
from mpcore.tools.verify.pool import Pool, mesh
from mpcore.tools.verify.run import SHIFT, STEP, RankRecord, Task, build_model, check_slope, run_step
from mpcore.training.policies import Zero
from mpcore.training.prepare import prepare

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
HOST = ("nice", "ionice", "numactl")  # start no ranks; -n and -N are of their own
_COUNTS = {
    "nodes": ("--nnodes", "-N", "--nodes"),
    "each": ("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node"),
    "all": ("-n", "--ntasks", "-np", "--np"),
}


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
    words = [re.sub(r"^(-np?|-N)(?=\d)", r"\1=", word) for word in words]  # -n16 is -n 16
    words = [part for word in words for part in (word.split("=", 1) if _counts(word.split("=")[0]) else [word])]
    for i, word in enumerate(words):
        module = words[i + 1] if word in ("-m", "--module") and i + 1 < len(words) else "-"
        named = module not in LAUNCHERS and not re.match(r"-|\d", module)  # numactl -m 0 is of memory
        if named or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", word):
            counts = {j: what for j in range(i) if (what := _counts(words[j]))}
            owners = {j: next((w for w in words[j::-1] if w[:1] not in "-0123456789"), "") for j in counts}
            found = {what: _number(*words[j : j + 2]) for j, what in counts.items() if owners[j] not in HOST}
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
            raise ValueError(str(verdict.mismatch or verdict.error))
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
    found = [Check("gradient of one process", slope, "one process computes it wrong too, so no layout can be right")]
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
        model, on, blocks=(), loss=lambda output, target: output.sum(), seed=task.seed,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=STEP), initialize=False,
        micro_batches=layout.micro_batches, data=Zero(layout.zero),
    )  # fmt: skip


def step_of(task: Task, layout: Layout) -> RankRecord:
    return run_step(task, mesh(), layout)


def save_model(task: Task, layout: Layout, folder: str) -> None:
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
    """Make the checks of a command. ValueError if its module has none."""
    if ":" in command.target:
        return checks_of_model(command.target, command.flags, options, pool)
    search_current_folder()
    if _has(name := f"{command.target.rpartition('.')[0] or command.target}.preflight", ("checks",)):
        return import_module(name).checks(command.flags, options, pool)
    if _has(command.target, training.NEEDED):
        return training.Preflight(command.target, command.flags, options, pool).checks()
    raise ValueError(
        f"{command.target} has no module {name} with checks(flags, options, pool), and lacks one of its own functions "
        f"{', '.join(training.NEEDED)}: add either, or check only the model, as module:build"
    )


def _has(module: str, names: Sequence[str]) -> bool:
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    return there and set(names) <= vars(import_module(module)).keys()


@reports_errors("mpcore preflight")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if no check failed, 1 if one did, 2 if they could not run."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args: argparse.Namespace = parsers.preflight().parse_args(words[:at])
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
        print(conclusion(results))
    return int(bool(failed))


def _show(checks: Sequence[Check], at: int) -> None:
    """Draw how far the checks are, on the terminal's last line."""
    print(f"\r\x1b[K[{'#' * at}{'.' * (len(checks) - at)}] {checks[at].name}\r", end="", file=sys.stderr, flush=True)
