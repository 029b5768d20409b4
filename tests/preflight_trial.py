"""The trial of `mpcore preflight`: valid commands must pass every check, and broken copies of the library must not.

python -m tests.preflight_trial --valid 200       commands drawn at random, on up to 1,024 ranks; a minute each
python -m tests.preflight_trial --broken 57       the hand-written mutations that depend on the layout, in copies
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from examples.gpt.preflight import Preflight
from examples.gpt.rehearse import Rehearsal
from examples.gpt.toy import Toy
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

FLAGS = {  # of a mutation that other runs of its area don't reach
    "copy sums its gradient in place": "--tp 2 --dp 2",
    "reduce sums its gradient again": "--tp 2 --dp 2",
    "reduce writes to its input": "--tp 2 --dp 2",
    "a row bias under sequence parallelism is not pending": "--tp 2 --dp 2 --sequence-parallel --preset gpt2",
    "the row bias is added on every rank": "--tp 2 --dp 2 --preset gpt2",
    "experts are reduced over all data ranks": "--ep 2 --dp 4 --experts 4",
    "the norm is of this stage alone": "--pp 2 --dp 2",
    "a table that stages share is not summed": "--pp 2 --dp 2 --zero 2 --tie-embeddings",
    "replicas of shards are never summed": "--dp 4 --zero 3 --replicate 2",
    "recomputed tokens are counted again": "--ep 2 --dp 2 --experts 4 --balance bias --recompute full",
    "the balance loss ignores the loss scale": "--ep 2 --dp 2 --experts 4 --dtype float16",
    "evaluation counts": "--ep 2 --dp 2 --experts 4 --balance bias",
    "a product that backward splits is not summed over tp": "--pp 2 --tp 2 --schedule zb",
    "the first stage answers for the last": "--pp 2 --dp 2 --schedule zbv",
    "torch narrows the masters that it loads": "--tp 2 --dp 2 --dtype bfloat16",
    "sequence shards share a mask": "--tp 2 --cp 2 --dropout 0.2 --sequence-parallel",
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


def first_failure(flags: list[str]) -> dict[str, Any]:
    """Run the checks before `rank killed` until one fails; return it, and a hash of each run of a toy."""
    pool = Pool(8)
    preflight = Preflight(flags, Options(), pool)
    train, runs = preflight.train, {}

    def recorded(toy: Toy, out: str, **how: Any) -> list[Rehearsal]:
        ranks = train(toy, out, **how)
        seen = [
            (r.losses, r.norms, r.scales, r.validation, sorted((name, x.tolist()) for name, x in r.state.items()))
            for r in ranks
        ]
        runs[f"{out} {sorted(how)}"] = sha256(pickle.dumps([repr(x) for x in seen])).hexdigest()
        return ranks

    preflight.train = recorded  # type: ignore[method-assign]
    try:
        checks = run_checks(preflight.checks()[:-1])
        found = next((result for result in checks if result.state == FAILED), None)
        return {"found": found and f"{found.name}: {' '.join(found.detail.split())}", "runs": runs}
    finally:
        pool.stop()


def try_broken(count: int, seed: int) -> int:
    """Check runs of copies that have a mutation, in a random order. Returns the number that no check finds."""
    project = Project(Path(__file__).parents[1])
    chosen = [hand for hand in MUTATIONS if hand.area in AREAS]
    chosen = random.Random(seed).sample(chosen, min(count, len(chosen)))
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="preflight-trial-") as folder:
        copy = Copy(project.root, Path(folder) / "copy")
        environment = {**os.environ, "PYTHONPATH": str(copy.folder), "PYTHONDONTWRITEBYTECODE": "1"}

        @cache
        def sound(words: str) -> dict[str, str]:
            got = check(words)
            assert not got["found"], got["found"]
            return got["runs"]

        def check(words: str) -> dict[str, Any]:
            command = f"{sys.executable} -m tests.preflight_trial --flags {words} --out {folder}/out".split()
            ran = subprocess.run(command, cwd=copy.folder, env=environment, text=True, capture_output=True, timeout=600)
            last = (ran.stdout.strip() or ran.stderr.strip()).splitlines()[-1]
            return json.loads(last) if last.startswith("{") else {"found": last, "runs": {}}

        for tried, hand in enumerate(chosen, 1):
            words = f"{SMALL} {FLAGS.get(hand.what, AREAS[hand.area])}"
            want = sound(words)
            module, mutant = locate(project, hand)
            file = copy.folder / project.paths[module]
            before = file.read_text()
            file.write_text(mutant.applied(project.texts[module]))
            began = time.monotonic()
            try:
                got = check(words)
            except subprocess.TimeoutExpired:
                got = {"found": "no end after 600 s", "runs": {}}
            finally:
                file.write_text(before)
            changed = sorted(name for name, run in got["runs"].items() if run != want.get(name))
            kind = "found" if got["found"] else "missed" if changed else "without effect"
            if kind == "missed" and any(name.startswith(("dense", "dtype-dense")) for name in changed):
                kind = "in one process too"
            kinds[kind] += 1
            told = f"{hand.area}, {hand.what}: {kind}: {(got['found'] or ', '.join(changed))[:240]}"
            print(f"{tried} of {len(chosen)}, {time.monotonic() - began:.0f} s, {told}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), f"of {len(chosen)} mutations")
    return kinds["missed"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.preflight_trial", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--valid", type=int, metavar="N", help="so many valid commands")
    parser.add_argument("--seed", type=int, default=0, help="of the first command and of the copies' order")
    parser.add_argument("--broken", type=int, metavar="N", help="so many broken copies of the library")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, help="print what these flags' checks find, as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bad = try_valid(args.valid, args.seed) if args.valid else 0
    bad += try_broken(args.broken, args.seed) if args.broken else 0
    if args.flags is not None:
        print(json.dumps(first_failure(args.flags)))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
