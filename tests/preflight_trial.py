"""The trial of `mpcore preflight` on sound runs: valid commands must pass every check.

python -m tests.preflight_trial --valid 200                    commands drawn at random, on up to 128 ranks
python -m tests.preflight_trial --valid 50 --record FILE       the next 50 after those that the file counts

`tests.preflight_broken` is the other half: bugs that are planted must be found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpcore.tools.preflight import FAILED, Options, run_checks
from mpcore.tools.preflight.training import Preflight
from mpcore.tools.verify.pool import Pool
from tests.examples.test_any_flags import draw_layout, draw_model
from tests.fuzz import commands, words_of
from tests.preflight.planted import Lent

TIMEOUT_S = 3000.0  # of each toy, on a machine that may be busy


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
    more += dice.choice(
        [[], ["--dtype", "bfloat16"], ["--dtype", "float16"], ["--dtype", "bfloat16", "--set", "autocast=true"]]
    )
    more += dice.choice([[], [], ["--compile", "aot_eager"]])
    if world >= 4 and dice.random() < 0.2 and sizes["dp"] % 2 == 0:
        sizes["dp"] //= 2
        more += ["--workers", "2", "--local-steps", str(dice.choice([2, 5]))]
    more += dice.choice([[], [], [], ["--set", "rampup_batch_size=32,32,256"]])
    axes = [
        word
        for axis, size in sizes.items()
        for word in (["--set", f"cp_inner={size}"] if axis == "cp_inner" else [f"--{axis}", str(size)])
    ]
    flags |= {flag[0]: flag for part in (axes, layout, more) for flag in commands(part)}
    return [*words_of(flags.values()), "--steps", "6", "--device", "cpu"]


def try_valid(count: int, seed: int, path: Path | None = None) -> int:
    """Draw commands until so many fit, and run the checks before `rank killed`. Returns the number with an alarm.

    Args:
        count: the number of commands that fit.
        seed: the seed of the first command.
        path: a file that counts the commands so far, and is written after each; the next call goes on after them.
    """
    fresh: dict[str, Any] = {"first_seed": seed, "next_seed": seed, "refused": 0, "alarms": [], "seconds": []}
    record = json.loads(path.read_text()) if path is not None and path.is_file() else fresh
    pool, before, tried = (
        Pool(8, preload=("mpcore.tools.preflight.rehearse", "examples.gpt.pretrain")),
        len(record["alarms"]),
        0,
    )
    lent: Any = Lent(pool)  # whatever the first toy's size is
    try:
        while tried < count:
            seed = record["next_seed"]
            flags = draw(seed)
            with tempfile.TemporaryDirectory(prefix="preflight-trial-") as folder:
                checks = Preflight(
                    "examples.gpt.pretrain", [*flags, "--out", f"{folder}/out"], Options(timeout=TIMEOUT_S), lent
                ).checks()[:-1]
                began, found = time.monotonic(), []
                for result in run_checks(checks):
                    found.append(result)
                    if result.name == "flags" and result.state == FAILED:
                        break
            record["next_seed"] = seed + 1
            failed = [result for result in found if result.state == FAILED]
            if found[0].state == FAILED:
                record["refused"] += 1
            else:
                tried += 1
                record["seconds"].append(round(time.monotonic() - began))
                record["alarms"] += [seed] if failed else []
                said = "ALARM" if failed else "ok"
                print(f"{tried} of {count}, {record['seconds'][-1]} s, {said}: {' '.join(flags)}", flush=True)
                for result in failed:
                    print(f"    {result}", flush=True)
            if path is not None:
                path.write_text(json.dumps(record) + "\n")
    finally:
        pool.stop()
    seconds = sorted(record["seconds"])
    print(f"{len(record['alarms'])} alarms in {len(seconds)} valid commands; {record['refused']} others don't fit; "
          f"seconds: median {seconds[len(seconds) // 2]}, most {seconds[-1]}")  # fmt: skip
    return len(record["alarms"]) - before


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.preflight_trial", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--valid", type=int, default=200, metavar="N", help="so many valid commands (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first command")
    parser.add_argument("--record", type=Path, metavar="FILE", help="go on after the commands that this file counts")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    return int(try_valid(args.valid, args.seed, args.record) > 0)


if __name__ == "__main__":
    sys.exit(main())
