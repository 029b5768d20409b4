"""Replay steps of a run as all of its ranks in this process, and name the first operator whose output isn't finite.

Use it after a run diverged or met NaN, to find the rank, layer and micro-batch. A program's `replay(run, step)` returns
the number of ranks and the function that each rank calls. `examples.gpt.replay:replay` is an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from mpcore.tools.command_line import Parser, find_object, reports_errors
from mpcore.tools.simulation.nonfinite import FiniteCheck, NonFiniteError
from mpcore.tools.simulation.ranks import simulate
from mpcore.tools.simulation.turns import RankError

Watch = Callable[[Sequence[nn.Module], str], AbstractContextManager]
Program = Callable[[Path, int], "tuple[int, Callable[[Watch], object]]"]


def replay(program: Program, run: Path, step: int) -> tuple[int, str | None]:
    """Replay the steps of a run up to `step`.

    Args:
        program: a function. `program(run, step)` returns the number of ranks, and a function that each rank calls with
            the argument `watch`. That function must run each step within `with watch(stages, "step 7")`.
        run: the run's folder.
        step: the last step to replay, as in metrics.jsonl.

    Returns:
        The number of ranks, and a description of the first non-finite output, or None if all outputs are finite.

    Raises:
        ValueError: if the run can't be replayed.
    """
    ranks, play = program(run, step)
    try:
        simulate(play, FiniteCheck, ranks=ranks)
    except RankError as error:
        if not isinstance(error.__cause__, NonFiniteError):
            raise
        return ranks, str(error).replace(f"{NonFiniteError.__module__}.{NonFiniteError.__name__}: ", "")
    return ranks, None


@reports_errors("mpcore replay", RankError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status. 0: all outputs are finite. 1: one is not. 2: the run can't be replayed.
    """
    parser = Parser(
        prog="mpcore replay", description=(__doc__ or "").partition("\n\n")[0],
        examples=["mpcore replay runs/gpt --step 120", "mpcore replay runs/mine --step 7 --program mine.replay:replay"],
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="folder of a run, with config.json and checkpoints")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, as in metrics.jsonl")
    parser.add_argument(
        "--program", default="examples.gpt.replay:replay", metavar="package.module:replay",
        help="says how the run trains (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    ranks, found = replay(find_object(args.program), Path(args.run), args.step)
    print(found or f"step {args.step} and those before it, from the checkpoint on: finite on all {ranks} ranks")
    return 0 if found is None else 1
