"""Short runs of the example whose losses, gradient norms and final weights must not change.

`tests/recorded_runs.json` holds them as they were at commit ef70cef. `python -m tests.recorded_runs --write NAME ...`
records rows anew; a commit that does so says why the numbers changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from tests.pool import Pool, start_pool

RECORD = Path(__file__).with_suffix(".json")
TINY = (
    "--layers 4 --d-model 16 --heads 4 --kv-heads 2 --d-ff 24 --seq-len 16 --global-batch 8 --micro-batch 2 --warmup 2 "
    "--dtype float64 --dropout 0.1 --steps 4 --eval-every 2 --set eval_samples=5 --save-every 4 --device cpu"
)
MOE = "--micro-batch 1 --preset tiny-moe --experts 4 --set moe.top_k=2 --set moe.d_ff=8"
LIMITS = "--set moe.capacity_factor=0.7 --set moe.aux_loss=none moe.bias_rate=0.001"

# name: (ranks, flags); of several commands the later ones go on from what the earlier ones saved.
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ("",)), "tied, learned positions": (1, ("--preset gpt2 --set tie_embeddings=true",)),
    "accumulation": (1, ("--micro-batch 1 --set clip=0.05",)), "muon": (1, ("--optimizer muon --set lr_schedule=wsd",)),
    "adamw with bf16 moments": (2, ("--tp 2 --optimizer adamw-bf16",)),
    "fp16 with a scale": (2, ("--tp 2 --dtype float16",)),
    "bf16 autocast": (2, ("--dp 2 --dtype bfloat16 --set autocast=true --zero 0",)),
    "bf16": (2, ("--dp 2 --dtype bfloat16 --zero 0",)),
    "fp8": (2, ("--tp 2 --fp8 --d-model 256 --d-ff 512 --heads 2 --layers 1",)), "tp 2": (2, ("--tp 2",)),
    "tp 3, sequence parallel": (3, ("--tp 3 --micro-batch 4 --heads 6 --d-model 24 --seq-len 18 --sequence-parallel",)),
    "tp 4, more ranks than KV heads": (4, ("--tp 4 --micro-batch 4 --sequence-parallel",)),
    "dp 2, ZeRO-0": (2, ("--dp 2 --zero 0",)), "dp 4, ZeRO-1": (4, ("--dp 4 --zero 1",)),
    "tp 2 x dp 2, ZeRO-2": (4, ("--tp 2 --dp 2 --zero 2",)),
    "tp 2 x dp 2, ZeRO-3": (4, ("--tp 2 --dp 2 --micro-batch 4 --zero 3 --recompute full",)),
    "HSDP": (4, ("--dp 4 --zero 3 --set replicate=2",)), "pp 2, 1f1b": (2, ("--pp 2 --set tie_embeddings=true",)),
    "pp 2, interleaved": (2, ("--pp 2 --schedule interleaved --virtual-stages 2",)),
    "pp 2 x dp 2, zb": (4, ("--pp 2 --dp 2 --schedule zb --zero 2",)),
    "pp 2, zbv": (2, ("--pp 2 --schedule zbv --set tie_embeddings=true",)),
    "tp 2 x pp 2, dualpipev": (4, ("--tp 2 --pp 2 --schedule dualpipev --sequence-parallel",)),
    "selective recompute": (2, ("--tp 2 --micro-batch 4 --recompute selective",)),
    "offload": (2, ("--dp 2 --zero 0 --offload optimizer activations parameters",)),
    "cp 2, zigzag ring": (2, ("--cp 2 --cp-kind zigzag",)),
    "cp 2 x tp 2, all-to-all": (4, ("--cp 2 --tp 2 --micro-batch 4 --cp-kind alltoall --sequence-parallel",)),
    "experts, ep 2, balanced by a loss": (2, (f"{MOE} --ep 2 --set moe.aux_loss=sequence",)),
    "experts, ep 2 x tp 2, capacity": (4, (f"{MOE} --ep 2 --tp 2 --dp 2 --zero 3 {LIMITS}",)),
    "latent attention": (2, ("--preset tiny-mla --tp 2",)),
    "DiLoCo": (4, ("--workers 2 --tp 2 --local-steps 2 --set fragments=2",)),
    "resume on another layout": (4, ("--tp 2 --pp 2 --set exit_step=2 --resume auto", "--dp 4 --zero 3 --resume auto")),
}  # fmt: skip
KV_FREE = ("--preset tiny-mla",)  # these have no KV heads to choose


def command(flags: str, folder: str) -> list[str]:
    """The flags of a run: those given come after the common ones, and so replace them."""
    common = TINY if not any(kind in flags for kind in KV_FREE) else TINY.replace("--kv-heads 2 ", "")
    return [*common.split(), *flags.split(), "--data", f"{folder}/corpus", "--out", f"{folder}/out"]


def write_corpus(folder: str) -> None:
    """A corpus that no version of Python changes: words of a seeded generator."""
    from examples.gpt import prepare

    dice = random.Random(0)
    words = ["".join(dice.choice("abcdefgh") for _ in range(dice.randint(1, 8))) for _ in range(200)]
    for i in range(20):
        Path(folder, f"{i}.txt").write_text(" ".join(dice.choice(words) for _ in range(200)))
    prepare.main(["--input", folder, "--out", f"{folder}/corpus"])


def without_end() -> AbstractContextManager:
    """Leave out half of a run's time: the picture and the sample of text."""
    from examples.gpt.console import Console

    return mock.patch.object(Console, "end")


def run(argv: list[str], folder: str) -> dict | None:
    """On each rank: run the example; rank 0 returns the numbers that must not change."""
    import torch.distributed as dist

    from examples.gpt import pretrain

    lead = not dist.is_initialized() or dist.get_rank() == 0
    with nullcontext() if threading.current_thread() is not threading.main_thread() else without_end():
        pretrain.main(argv)
    return numbers(Path(folder, "out")) if lead else None


def numbers(out: Path) -> dict:
    """Losses and norms of all steps, validation losses, and the final weights: their hash, norm and a projection."""
    from mpcore.checkpoint.format import read_manifest
    from mpcore.checkpoint.tensor_file import Files

    out = out / "worker-0" if (out / "worker-0").exists() else out
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {name: [line[key] for line in lines if key in line]
             for name, key in (("losses", "loss"), ("norms", "grad_norm"), ("validation", "val_loss"))}  # fmt: skip
    newest = max(path for path in (out / "checkpoints").iterdir() if path.is_dir())
    files = Files(newest, manifest := read_manifest(newest))
    digest, squares, projection = hashlib.sha256(), 0.0, 0.0
    for name in sorted(name for name in manifest.tensors if name.startswith("model/")):
        value = files.assemble(name).double()
        digest.update(value.numpy().tobytes())
        squares += float(value.square().sum())
        projection += float((value.flatten() * torch.arange(value.numel(), dtype=torch.float64).cos()).sum())
    return {**found, "weights": [math.sqrt(squares), projection], "hash": digest.hexdigest()}


def rerun(pool: Pool, name: str) -> dict:
    """A row as the code of today gives it."""
    ranks, commands = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(folder)
        with without_end():  # ranks that are threads share it, and end at different times
            for flags in commands:
                (found, *_) = pool(ranks, run, command(flags, folder), folder)
    return found


def main() -> None:
    """Record rows anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", nargs="*", help="the rows to record; none: all")
    names = parser.parse_args().write or list(RUNS)
    pool = start_pool()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in names:
        record[name] = rerun(pool, name)
        print(name, record[name]["losses"], record[name]["norms"][-1], flush=True)
    RECORD.write_text(json.dumps({name: record[name] for name in RUNS if name in record}, indent=1) + "\n")
    pool.stop()


if __name__ == "__main__":
    main()
