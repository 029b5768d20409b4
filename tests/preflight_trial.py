"""The trial of `mpcore preflight` on sound runs: valid commands must pass every check.

python -m tests.preflight_trial --valid 200       commands drawn at random, on up to 1,024 ranks; a minute each

`tests.preflight_broken` is the other half: bugs that are planted must be found.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from examples.gpt.preflight import Preflight
from mpcore.preflight import FAILED, Options, run_checks
from mpcore.verify.pool import Pool
from tests.examples.planted import Lent
from tests.examples.test_any_flags import draw_layout, draw_model
from tests.fuzz import commands


def draw(seed: int) -> list[str]:
    """The flags of a run on many ranks, which may not fit each other."""
    dice = random.Random(f"preflight {seed}")
    flags = {flag[0]: flag for flag in commands(draw_model(dice))}
    world = dice.choice([1, 2, 4, 8, 12, 16, 64, 128])
    sizes, layout = draw_layout(dice, world, "--experts" in flags)
    heads = dice.choice([4, 6, 8, 16])
    more = [
        "--heads",
        str(heads),
        "--d-model",
        str(heads * dice.choice([8, 16])),
        "--layers",
        str(dice.choice([4, 6, 12])),
    ]
    more += ["--seq-len", str(dice.choice([48, 64, 128])), "--global-batch", str(dice.choice([64, 128, 256]))]
    more += dice.choice([[], ["--dtype", "bfloat16"], ["--dtype", "float16"], ["--dtype", "bfloat16", "--autocast"]])
    more += dice.choice([[], [], ["--compile", "aot_eager"]])
    if world >= 4 and dice.random() < 0.2 and sizes["dp"] % 2 == 0:
        sizes["dp"] //= 2
        more += ["--workers", "2", "--local-steps", str(dice.choice([2, 5]))]
    more += dice.choice([[], [], [], ["--rampup-batch-size", "32", "32", "256"]])
    axes = [word for axis, size in sizes.items() for word in (f"--{axis.replace('_', '-')}", str(size))]
    flags |= {flag[0]: flag for part in (axes, layout, more) for flag in commands(part)}
    return [*(word for flag in flags.values() for word in flag), "--steps", "6", "--device", "cpu"]


def try_valid(count: int, seed: int) -> int:
    """Draw commands until so many fit, and run the checks before `rank killed`. Returns the number with an alarm."""
    pool, alarms, tried, refused = Pool(8, preload=("examples.gpt.rehearse",)), 0, 0, 0
    lent: Any = Lent(pool)  # whatever the first toy's size is
    seconds: list[float] = []
    try:
        while tried < count:
            flags = draw(seed)
            seed += 1
            with tempfile.TemporaryDirectory(prefix="preflight-trial-") as folder:
                checks = Preflight([*flags, "--out", f"{folder}/out"], Options(timeout=300), lent).checks()[:-1]
                began, found = time.monotonic(), []
                for result in run_checks(checks):
                    found.append(result)
                    if result.name == "flags" and result.state == FAILED:
                        break
            if found[0].state == FAILED:
                refused += 1
                continue
            tried += 1
            seconds.append(time.monotonic() - began)
            failed = [result for result in found if result.state == FAILED]
            alarms += bool(failed)
            print(
                f"{tried} of {count}, {seconds[-1]:.0f} s, {'ALARM' if failed else 'ok'}: {' '.join(flags)}", flush=True
            )
            for result in failed:
                print(f"    {result}", flush=True)
    finally:
        pool.stop()
    print(f"{alarms} alarms in {tried} valid commands; {refused} others don't fit; seconds: median "
          f"{sorted(seconds)[len(seconds) // 2]:.0f}, most {max(seconds):.0f}")  # fmt: skip
    return alarms


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.preflight_trial", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--valid", type=int, default=200, metavar="N", help="so many valid commands (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first command")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    return int(try_valid(args.valid, args.seed) > 0)


if __name__ == "__main__":
    sys.exit(main())
