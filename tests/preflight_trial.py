"""The trial of `mpcore preflight`: valid commands must pass every check, and broken copies of the library must not.

python -m tests.preflight_trial --valid 200       commands drawn at random, on up to 1,024 ranks; a minute each
python -m tests.preflight_trial --broken          the hand-written mutations that depend on the layout, in copies
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.gpt.preflight import Preflight
from mpcore.preflight import FAILED, Options, run_checks
from mpcore.verify.pool import Pool
from tests.examples.planted import Lent
from tests.examples.test_any_flags import draw_layout, draw_model
from tests.fuzz import commands
from tests.mutations.choice import Project
from tests.mutations.hand import MUTATIONS
from tests.mutations.patterns import locate
from tests.mutations.trial import Copy

SMALL = "--steps 6 --global-batch 16 --micro-batch 1 --seq-len 32 --layers 4 --device cpu"
# By area of a mutation, the flags of a run that it concerns; the areas that are left out don't depend on a layout.
AREAS = {
    "collectives": "--tp 2 --dp 2 --sequence-parallel",
    "sharding": "--tp 2 --dp 2 --heads 4 --kv-heads 1 --preset tiny",
    "gradients": "--tp 2 --dp 2 --sequence-parallel --zero 0",
    "main gradients": "--tp 2 --dp 2 --dtype bfloat16",
    "ZeRO": "--dp 4 --zero 3 --dtype bfloat16",
    "context": "--cp 2 --dp 2 --cp-kind ring",
    "moe": "--ep 2 --dp 2 --experts 4 --tp 2",
    "loss": "--tp 2 --dp 2",
    "pipeline": "--pp 2 --dp 2 --tie-embeddings",
    "checkpoint": "--tp 2 --dp 2 --zero 2 --optimizer adamw-bf16",
    "dropout keys": "--tp 2 --dp 2 --dropout 0.2 --sequence-parallel",
}


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


def try_broken(every: int) -> int:
    """Run the command in copies with a mutation. Returns the number that it does not find."""
    project = Project(Path(__file__).parents[1])
    chosen = [hand for hand in MUTATIONS if hand.area in AREAS][::every]
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="preflight-trial-") as folder:
        copy = Copy(project.root, Path(folder) / "copy")
        for hand in chosen:
            module, mutant = locate(project, hand)
            file = copy.folder / project.paths[module]
            before = file.read_text()
            file.write_text(mutant.applied(project.texts[module]))
            began = time.monotonic()
            words = [*SMALL.split(), *AREAS[hand.area].split(), "--out", f"{folder}/out"]
            try:
                run = [
                    sys.executable,
                    "-m",
                    "mpcore",
                    "preflight",
                    "--json",
                    "--",
                    "-m",
                    "examples.gpt.pretrain",
                    *words,
                ]
                ran = subprocess.run(
                    run, cwd=copy.folder, env={**os.environ, "PYTHONPATH": str(copy.folder)}, text=True,
                    capture_output=True, timeout=600,
                )  # fmt: skip
                failed = [each for each in json.loads(ran.stdout) if each["state"] == FAILED]
            except (ValueError, subprocess.TimeoutExpired) as error:
                failed = [{"name": type(error).__name__, "detail": str(error)[:200]}]
            finally:
                file.write_text(before)
            kinds["found" if failed else "missed"] += 1
            told = f"{failed[0]['name']}: {failed[0]['detail'][:160]}" if failed else "every check passes"
            kind, seconds = "found" if failed else "MISSED", time.monotonic() - began
            print(f"{kind}, {seconds:.0f} s: {hand.area}: {hand.what}: {told}", flush=True)
    print(f"{kinds['found']} of {len(chosen)} mutations found")
    return kinds["missed"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.preflight_trial", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--valid", type=int, metavar="N", help="so many valid commands")
    parser.add_argument("--seed", type=int, default=0, help="of the first command (default 0)")
    parser.add_argument("--broken", action="store_true", help="broken copies of the library")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th of them (default 1)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bad = try_valid(args.valid, args.seed) if args.valid else 0
    bad += try_broken(args.every) if args.broken else 0
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
