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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench import protocol
from bench.cases import KERNELS
from bench.examples.bench_gpt_step import longest, measure_on_gpu
from bench.interleave import spread
from bench.machine import ROOT, describe
from bench.protocol import OURS, Kernel, WrongError
from examples.gpt.config import PRESETS, MoEConfig
from examples.gpt.model import GPT
from examples.gpt.pretrain import main as pretrain
from mpcore import vocab_parallel_cross_entropy
from mpcore.kernels import _dispatch, use_kernels
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.grouped_linear import grouped_linear
from mpcore.kernels.quantize_fp8 import quantize_fp8

WRONG = 3  # the status of a process whose result is wrong
PEERS = ("liger_kernel", "quack", "cut_cross_entropy", "flash_attn", "megatron.core", "apex", "torchao", "transformers")
ALONE = ("ceilings", "measure", "add", "products", "step", "block", "example")  # jobs that have the GPU to themselves
AS_USERS = ("step", "block", "example", "planner", "add", "products")  # jobs that run the kernels a user would get
SHAPES = {"attention": 2, "attention, window": 2, "attention, documents": 2}  # of a kernel; else its first
MEDIUM = "--d-model 2048 --layers 16 --heads 16 --seq-len 2048 --global-batch 16 --micro-batch 8"
EXAMPLES = {
    "small": "--d-model 1024 --layers 24 --heads 16 --seq-len 2048 --global-batch 16 --micro-batch 8",
    "medium": MEDIUM,
    "large": "--d-model 4096 --layers 8 --heads 32 --seq-len 4096 --global-batch 8 --micro-batch 2",
    "experts": f"{MEDIUM} --experts 8 --top-k 2",
    "documents": f"{MEDIUM} --document-masking",
}
CUDA = torch.cuda.is_available()


def kernels() -> dict[str, Kernel]:
    """Return every kernel of the table by its name."""
    return dict(KERNELS)


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
        low, middle, high = spread(protocol.time_calls({"it": call})["it"])
        yield {"unit": unit, "rate": cost / middle / scale, "low": cost / high / scale, "high": cost / low / scale}


def check(name: str) -> Rows:
    """One correct case and one repeat of each pass; on a GPU its peers too, which warms the caches of compilers."""
    kernel = kernels()[name]
    shape, dtype = _case(kernel)
    device = torch.device("cuda" if CUDA else "cpu")
    checked = kernel.checked(shape)
    for which in kernel.passes:
        torch.manual_seed(0)
        protocol.begin()
        inputs = kernel.inputs(checked, dtype, device)
        bounds = protocol.find_bounds(kernel, inputs, which)
        error = protocol.check_results(kernel, OURS, kernel.ours, inputs, which, bounds)
        first, second = (protocol.run_once(kernel, kernel.ours, inputs, which) for _ in range(2))
        if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            raise WrongError(f"{which}: two runs of the same inputs differ in their bits")
        yield {"pass": which, "error": error, "repeats": True}
        for peer in kernel.peers.values() if CUDA else ():
            try:
                protocol.run_once(kernel, peer(shape), kernel.inputs(shape, dtype, device), which)
            except Exception:  # `measure` tells why
                torch.cuda.empty_cache()


def measure(name: str) -> Rows:
    """Shapes of a kernel beside all peers that are there, in each pass; the first shape of those that few ask for."""
    kernel = kernels()[name]
    for which in kernel.passes:
        for shape in kernel.shapes[: SHAPES.get(name, 1)] if CUDA else [kernel.toy]:
            row, times = protocol.measure(kernel, shape, _case(kernel)[1], which)
            if OURS not in times:
                raise WrongError(row["wrong"].get(OURS) or row["skipped"][OURS])
            for provider in row["providers"].values():
                provider["host_us"] = "-"  # the next process starts meanwhile, on the same cores
            row["peer_ratios"] = {n: round(times.ratio(n, OURS), 3) for n in row["providers"] if n != OURS}
            yield row | {"skipped": row["skipped"] | row["wrong"]}


def add(name: str) -> Rows:
    """A weight gradient added to the float32 main gradient: by the product itself, and by a second pass."""
    M, K, N = (8192, 4096, 14336) if CUDA else (32, 16, 48)
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    dy, x = torch.randn(M, N, device=device, dtype=dtype), torch.randn(M, K, device=device, dtype=dtype)
    main = torch.zeros(N, K, device=device)
    calls = {
        "mpcore": lambda: torch.addmm(main, dy.t(), x, out_dtype=torch.float32, out=main) if CUDA
        else main.addmm_(dy.t(), x),
        "two passes": lambda: main.add_(dy.t() @ x),
    }  # fmt: skip
    yield {"shape": f"M {M}, K {K}, N {N}", "us": _microseconds(calls)}


def products(name: str) -> Rows:
    """A linear layer in FP8 and grouped products of experts, beside bfloat16."""
    M, K, N, E = (8192, 4096, 14336, 8) if CUDA else (256, 128, 128, 2)
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    x, weights = torch.randn(M, K, device=device, dtype=dtype), torch.randn(E, N, K, device=device, dtype=dtype)
    counts = torch.full((E,), M // E, device=device)
    weight = quantize_fp8(weights[0], square=True)[0]  # once a step; the input in each call
    assert weight is not None
    calls = {
        "bfloat16": lambda: x @ weights[0].t(),
        "fp8": lambda: fp8_matmul(quantize_fp8(x)[0], weight, dtype),  # pyright: ignore[reportArgumentType]
        "grouped": lambda: grouped_linear(x, weights, counts),
        "one by one": lambda: [part @ w.t() for part, w in zip(x.chunk(E), weights, strict=True)],
    }
    yield {"shape": f"M {M}, K {K}, N {N}, experts {E}", "us": _microseconds(calls)}


def _microseconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each call, in turn, after one that compiles."""
    for call in calls.values():
        call()
    times = protocol.time_calls(calls)
    return {name: round(1e6 * times.median(name), 2) for name in times}


def step(name: str) -> Rows:
    """A training step of a GPT beside plain torch, torch.compile and transformers, and which kernels ours launches."""
    yield measure_on_gpu()


def block(name: str) -> Rows:
    """A step of one 8B-shaped block and its head, dense or with experts: the list of its kernels by time."""
    size = {"vocab_size": 128256, "seq_len": 8192, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336}
    if not CUDA:
        size = {"vocab_size": 64, "seq_len": 16, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 64}
    config = replace(
        PRESETS["llama3-8b"], layers=1, **size, moe=MoEConfig(aux_loss=None) if name == "experts" else None
    )
    device = torch.device("cuda" if CUDA else "cpu")
    model = GPT(config, device=device, dtype=torch.bfloat16 if CUDA else torch.float32)
    x = torch.randint(config.vocab_size, (1, config.seq_len), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def once() -> None:
        vocab_parallel_cross_entropy(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        once()
    yield {"shape": f"{name}, {size}", "kernels": longest(once) if CUDA else []}


def example(name: str) -> Rows:
    """Tokens per second, model FLOPs utilization and memory of the example's pretraining, over the last half of it."""
    steps = 24 if CUDA else 4
    flags = f"{EXAMPLES[name]} --dtype bfloat16" if CUDA else "--device cpu"
    with tempfile.TemporaryDirectory() as out:
        pretrain(f"{flags} --steps {steps} --eval-every 0 --set no_save=true --out {out}".split())
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line.get("step", 0) >= steps // 2 and "tokens_per_second" in line]
    told = {key: statistics.median(line[key] for line in last) for key in ("tokens_per_second", "memory")}
    if CUDA:
        told["mfu"] = statistics.median(line["mfu"] for line in last)
    yield {"flags": flags, "steps": len(last), "losses": [line["loss"] for line in last], **told}


def planner(name: str) -> Rows:
    """What `mpcore plan` predicts of a run of the example on one H100."""
    words = (
        f"plan examples.gpt.plan:build --world 1 --machine h100 {EXAMPLES[name]} --dtype bfloat16 --vocab-size 50304"
    )
    told = subprocess.run(
        [sys.executable, "-m", "mpcore", *words.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = (told.stderr if told.returncode else told.stdout).splitlines()  # that no layout fits is an answer, too
    yield {"flags": EXAMPLES[name], "told": [line for line in lines if line.strip()][:8]}


def _case(kernel: Kernel) -> tuple[protocol.Shape, torch.dtype]:
    return (kernel.shapes[0], kernel.dtypes[0]) if CUDA else (kernel.toy, torch.float32)


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
    job.__name__: job for job in (environment, ceilings, check, measure, add, products, step, block, example, planner)
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
        if (CUDA or _dispatch.INTERPRETING) and args.job not in AS_USERS:
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
