"""What each job of `bench.gpu_hour` does, in a process of its own: `python -m bench.gpu_hour.jobs JOB NAME FILE`.

A job writes rows to FILE, one JSON object a line, each as soon as it is there. It ends with status 0, or with `WRONG`
where a result is wrong; any other end is a failure, a crash or a hang.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.examples.bench_gpt_step import measure_on_gpu
from bench.interleave import interleave, spread
from bench.kernels import protocol
from bench.kernels.protocol import OURS, Kernel, WrongError
from bench.machine import ROOT, describe
from examples.gpt.pretrain import main as pretrain
from mpcore.kernels import _dispatch, use_kernels

WRONG = 3  # the status of a process whose result is wrong
BENCHES = (  # what matters most comes first
    "rms_norm", "cross_entropy", "linear_cross_entropy", "activation", "attention", "rope", "layer_norm", "adamw",
    "dropout_add", "moe_permute", "quantize_fp8",
)  # fmt: skip
PEERS = ("liger_kernel", "quack", "cut_cross_entropy", "flash_attn", "megatron.core", "apex", "torchao", "transformers")
ALONE = ("ceilings", "measure", "stages", "step", "example")  # jobs that have the GPU to themselves
EXAMPLE = "--d-model 2048 --layers 16 --heads 16 --seq-len 2048 --global-batch 16 --micro-batch 8 --dtype bfloat16"
EXAMPLES = {"dense": "", "compiled": "--compile", "fp8": "--fp8", "recomputed": "--recompute full"}
CUDA = torch.cuda.is_available()


def kernels() -> dict[str, Kernel]:
    """Return every kernel that has a bench by its name, in the order in which they are measured."""
    found = {}
    for bench in BENCHES:
        for value in vars(importlib.import_module(f"bench.kernels.bench_{bench}")).values():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Kernel):
                    found[one.name] = one
    return found


Rows = Iterator[dict[str, Any]]


def environment(name: str) -> Rows:
    """Versions, the device, which peers are there, and whether every kernel can be imported."""
    there = {}
    for peer in PEERS:
        try:
            importlib.import_module(peer)
            there[peer] = "yes"
        except Exception as error:  # whatever a broken package raises
            there[peer] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    versions = {}
    for package in ("triton", "numpy", "pytest", "pytest-xdist", "pytest-timeout", "matplotlib", "einops"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    found = {"platform": platform.platform(), "versions": versions, "peers": there, "kernels": len(kernels())}
    yield {**describe(), "cuda": CUDA, **found}


def ceilings(name: str) -> Rows:
    """What this machine copies and multiplies: the yardsticks of all tables."""
    device = torch.device("cuda" if CUDA else "cpu")
    for unit, scale in (("GB/s", 1e9), ("TFLOP/s", 1e12)):
        call, cost = protocol.yardstick(unit, device)
        for _ in range(3):
            call()
        it = {"it": call}
        times = protocol.device_times(it, 1e-3) if CUDA else interleave(it, rounds=5, iterations=2)
        low, middle, high = spread(times["it"])
        yield {"unit": unit, "rate": cost / middle / scale, "low": cost / high / scale, "high": cost / low / scale}


def check(name: str) -> Rows:
    """One correct case and one repeat of each pass; on a GPU its peers too, which warms the caches of compilers."""
    kernel = _kernel(name)
    shape, dtype = _case(kernel)
    device = torch.device("cuda" if CUDA else "cpu")
    checked = {**shape, **{size: min(n, shape[size]) for size, n in kernel.check.items()}}
    for which in kernel.passes:
        torch.manual_seed(0)
        protocol.begin()
        inputs = kernel.inputs(checked, dtype, device)
        bounds = protocol._bounds(kernel, inputs, which)
        error = protocol._check(kernel, OURS, kernel.ours, inputs, which, bounds)
        first, second = (_once(kernel, kernel.ours, inputs, which) for _ in range(2))
        if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            raise WrongError(f"{which}: two runs of the same inputs differ in their bits")
        yield {"pass": which, "error": error, "repeats": True}
        for peer in kernel.peers.values() if CUDA else ():
            try:
                _once(kernel, peer(shape), kernel.inputs(shape, dtype, device), which)
            except Exception:  # `measure` tells why
                torch.cuda.empty_cache()


def measure(name: str) -> Rows:
    """One shape of a kernel beside all peers that are there, in each pass."""
    kernel = _kernel(name)
    shape, dtype = _case(kernel)
    for which in kernel.passes:
        row = protocol.measure(kernel, shape, dtype, which)[0]
        for provider in row["providers"].values():
            provider["host_us"] = "-"  # the next process starts meanwhile, on the same cores
        yield row


def stages(name: str) -> Rows:
    """The time of a kernel alone, in the copy of the sources that the caller made."""
    kernel = replace(_kernel(name), peers={})
    shape, dtype = _case(kernel)
    sources = str(Path(_dispatch.__file__).resolve().parent)
    yield protocol.measure(kernel, shape, dtype, kernel.passes[-1])[0] | {"sources": sources}


def step(name: str) -> Rows:
    """A training step of a GPT beside plain torch, torch.compile and transformers, and which kernels ours launches."""
    yield measure_on_gpu()


def example(name: str) -> Rows:
    """Tokens per second, model FLOPs utilization and memory of the example's pretraining, over the last half of it."""
    steps = 24 if CUDA else 4
    size = EXAMPLE if CUDA else "--device cpu"
    with tempfile.TemporaryDirectory() as out:
        words = f"{size} {EXAMPLES[name]} --steps {steps} --eval-every 0 --set no_save=true --out {out}"
        pretrain(words.split())
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line.get("step", 0) >= steps // 2 and "tokens_per_second" in line]
    told = {key: statistics.median(line[key] for line in last) for key in ("tokens_per_second", "memory")}
    if CUDA:
        told["mfu"] = statistics.median(line["mfu"] for line in last)
    yield {"flags": f"{size} {EXAMPLES[name]}", "steps": len(last), "losses": [line["loss"] for line in last], **told}


def _once(
    kernel: Kernel, function: Callable[..., Any], inputs: protocol.Inputs, which: str
) -> tuple[torch.Tensor, ...]:
    return protocol._call(function, protocol._leaves(kernel, inputs, which), which)()


def _kernel(name: str) -> Kernel:
    return kernels()[name]


def _case(kernel: Kernel) -> tuple[protocol.Shape, torch.dtype]:
    return (kernel.shapes[0], kernel.dtypes[0]) if CUDA else (kernel.toy, torch.float32)


def sources_with_stages(count: int, folder: Path) -> list[str]:
    """Copy the sources to a folder with another number of stages in every loop that names one.

    Returns:
        The files that changed.
    """
    for package in ("mpcore", "bench", "examples", "tests"):
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    changed = []
    for path in sorted((folder / "kernels").rglob("*.py")):
        text = path.read_text()
        new = re.sub(r"(STAGES = |Tile\(blocks, )[23]\b", rf"\g<1>{count}", text)
        path.write_text(new)
        changed += [str(path.relative_to(folder))] * (new != text)
    return changed


# --- faults, for the rehearsal ----------------------------------------------------------------------------------------


def inject(fault: str, kernel: Kernel) -> AbstractContextManager[Any]:
    """Plant a fault: a hang that no signal but SIGKILL ends, a crash, or a wrong result."""

    def hang(**inputs: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
        while True:
            time.sleep(1)

    def crash(**inputs: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def wrong(**inputs: Any) -> Any:
        found = kernel.ours(**inputs)
        return tuple(y * 1.01 for y in found) if isinstance(found, tuple) else found * 1.01

    ours = {"hang": hang, "crash": crash, "wrong": wrong}[fault]
    planted = kernels() | {kernel.name: replace(kernel, ours=ours)}
    return mock.patch.object(sys.modules[__name__], "kernels", return_value=planted)


JOBS: dict[str, Callable[[str], Rows]] = {
    job.__name__: job for job in (environment, ceilings, check, measure, stages, step, example)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job.

    Returns:
        0, or `WRONG`.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_hour.jobs", description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("name", help="of a kernel or a run of the example, or empty")
    parser.add_argument("file", type=Path)
    parser.add_argument("--fault", choices=("hang", "crash", "wrong"))
    args = parser.parse_args(argv)
    with ExitStack() as stack, args.file.open("a") as file:
        if args.fault:
            stack.enter_context(inject(args.fault, kernels()[args.name]))
        if _dispatch.INTERPRETING:
            sys.path.insert(0, str(ROOT / "tests" / "kernels"))
            importlib.import_module("interpreter_repair").install()
        if (CUDA or _dispatch.INTERPRETING) and args.job not in ("step", "example"):
            stack.enter_context(use_kernels("triton"))
        if CUDA and args.job in ALONE:  # two processes may start side by side; one at a time uses the GPU
            lock = stack.enter_context((Path(tempfile.gettempdir()) / "gpu_hour.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            for row in JOBS[args.job](args.name):
                file.write(json.dumps(row) + "\n")
                file.flush()
        except WrongError as error:
            print(error, file=sys.stderr)
            return WRONG
    return 0


if __name__ == "__main__":
    sys.exit(main())
