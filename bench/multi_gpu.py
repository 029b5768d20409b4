"""Try and measure mpcore on 2 to 8 GPUs of one machine: `python -m bench.multi_gpu [--ranks N]`, from a checkout.

No collective of mpcore has run between two GPUs yet: paste the report into an issue. First each axis trains the example
in float64, and its losses are compared with those of one GPU. Then come the milliseconds of a step in bfloat16, each
option that hides communication in turns with the run without it, and the bus bandwidth of the collectives.

Each job is one torchrun under a time limit, and its outcome joins a file of results at once. The limit is at least 4
times what the run on one GPU took. Run the command again to go on: jobs that the file has are skipped. `--device cpu`
rehearses all of it on gloo, with toy sizes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_hour.__main__ import FAILED, OK, WRONG_RESULT, Job, Results, run
from bench.machine import ROOT, describe
from examples.gpt import pretrain

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SMALL = "--layers 4 --d-model 64 --heads 8 --d-ff 128 --seq-len 64 --global-batch 16 --micro-batch 2 --steps 4"
SMALL += " --warmup 1 --dtype float64 --seed 3"
LARGE = {
    "cuda": "--layers 8 --d-model 4096 --heads 32 --seq-len 4096 --global-batch 16 --micro-batch 1 --steps 12",
    "cpu": "--layers 2 --d-model 64 --heads 8 --seq-len 64 --global-batch 16 --micro-batch 1 --steps 6",
}
MOE = "--experts 8 --set moe.shared_experts=1"
AXES = {  # what each axis adds to the flags of one GPU; {n} is the number of ranks
    "tp": "--tp {n}", "tp, sequence parallel": "--tp {n} --sequence-parallel",
    "tp, sequence parallel, overlap": "--tp {n} --sequence-parallel --set overlap=256",
    "tp, in halves": "--tp {n} --set overlap_halves=true",
    "tp, sequence parallel, in halves": "--tp {n} --sequence-parallel --set overlap_halves=true",
    **{f"ZeRO-{stage}": f"--dp {{n}} --zero {stage}" for stage in range(4)},
    **{f"cp, {kind}": f"--cp {{n}} --cp-kind {kind}" for kind in ("zigzag", "ring", "alltoall", "allgather")},
    **{f"pp, {kind}": f"--pp {{n}} --schedule {kind}" for kind in ("1f1b", "interleaved", "zb")},
    "ep, all-gather": f"--dp {{n}} --ep {{n}} {MOE}",
    "ep, all-to-all": f"--dp {{n}} --ep {{n}} {MOE} moe.dispatch=all_to_all",
    "ep, in halves": f"--dp {{n}} --ep {{n}} {MOE} moe.dispatch=all_to_all overlap_experts=true",
}  # fmt: skip
PAIRS = {  # a layout, and the field that hides more of its messages; "": nothing to turn off
    "tp": ("--tp {n}", "overlap=4194304"),
    "tp, in halves": ("--tp {n} --micro-batch 2", "overlap_halves=true"),
    "tp, sequence parallel": ("--tp {n} --sequence-parallel", "overlap=4194304"),
    "tp, sequence parallel, in halves": ("--tp {n} --sequence-parallel --micro-batch 2", "overlap_halves=true"),
    "ZeRO-1": ("--dp {n} --zero 1", ""), "ZeRO-3": ("--dp {n} --zero 3", ""), "pp, 1f1b": ("--pp {n}", ""),
    "ep, all-to-all": (f"--dp {{n}} --ep {{n}} --micro-batch 2 {MOE} moe.dispatch=all_to_all", "overlap_experts=true"),
}  # fmt: skip
BOUND = 1e-9  # of a float64 loss, relative


def jobs(args: argparse.Namespace, folder: Path) -> Iterator[Job]:
    """Yield the jobs in their order."""
    faults = {name: fault for fault, _, name in (given.partition(":") for given in args.inject)}

    def train(kind: str, name: str, ranks: int, flags: str) -> Job:
        command = (*TORCHRUN, str(ranks), "-m", "bench.multi_gpu", "--fault", faults.get(name, "none"))
        words = f"--device {args.device} {flags} --set no_save=true".split()
        return Job(kind, name, (*command, "--train", *words, "--out", str(_out(folder, kind, name))), args.job_seconds)

    yield train("equal", "one", 1, SMALL)
    yield train("equal", "one with experts", 1, f"{SMALL} {MOE}")
    for name, flags in AXES.items():
        yield train("equal", name, args.ranks, f"{SMALL} {flags.format(n=args.ranks)}")
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    for name, (flags, field) in PAIRS.items():
        for turn in range(args.turns):
            words = f"{LARGE[args.device]} --dtype {dtype} --warmup 1 {flags.format(n=args.ranks)}"
            yield train("speed", f"{name} | plain {turn}", args.ranks, words)
            if field:
                yield train("speed", f"{name} | {field.partition('=')[0]} {turn}", args.ranks, f"{words} --set {field}")
    command = (*TORCHRUN, str(args.ranks), "-m", "bench.multi_gpu", "--device", args.device, "--bandwidth", "{rows}")
    yield Job("bandwidth", "collectives", command, args.job_seconds)


def limited(job: Job, lines: Sequence[dict[str, Any]]) -> Job:
    """Give a job at least 4 times the seconds of the runs on one rank: a busy machine slows both.

    A run on one rank waits for no other rank, so it has 10 times the limit.
    """
    if job.name.startswith("one"):
        return job._replace(seconds=10 * job.seconds)
    return job._replace(seconds=max([job.seconds, *(4 * x["seconds"] for x in lines if x["name"].startswith("one"))]))


def _out(folder: Path, kind: str, name: str) -> Path:
    return folder / f"{kind} {name}".replace(" ", "_").replace(",", "")


def _truth(name: str) -> str:
    """Return the name of the run on one GPU that an axis is compared with."""
    return "one with experts" if name.startswith("ep") else "one"


def _steps(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [entry for entry in map(json.loads, path.open()) if "loss" in entry] if path.is_file() else []


def judge(line: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add what a job's run wrote: its losses, beside those of one GPU, or the median seconds of its last steps."""
    if line["state"] != OK:  # torchrun ends with a frame: the cause stands before it
        said = [each for each in line["log"] if re.search(r"Error: \S|\(exitcode|waits for rank", each)]
        return line | {"why": ": ".join([line["why"].strip("=") or "ended", *said[-2:]])}
    if line["job"] == "bandwidth":
        return line
    steps = _steps(_out(folder, line["job"], line["name"]))
    if line["job"] == "speed":
        return line | {"ms": 1e3 * statistics.median(entry["seconds"] for entry in steps[len(steps) // 3 :])}
    line |= {"losses": [entry["loss"] for entry in steps]}
    if line["name"].startswith("one"):
        return line
    want = [entry["loss"] for entry in _steps(_out(folder, "equal", _truth(line["name"])))]
    if not want:
        return line | {"state": FAILED, "why": "the run on one GPU is missing"}
    far = max((abs(a - b) / abs(b) for a, b in zip(line["losses"], want, strict=True)), default=1.0)
    wrong = not far <= BOUND
    return line | {"far": far} | ({"state": WRONG_RESULT, "why": f"a loss is off by {far:.1e}"} if wrong else {})


def report(lines: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return the report in Markdown."""
    about = {**describe(), "torch": torch.__version__, "nccl": _nccl()}
    facts = ", ".join(f"{key} {value}" for key, value in about.items() if not isinstance(value, (dict, list)))
    text = [f"# mpcore on {args.ranks} ranks ({args.device})", "", facts, "", "| axis | result | largest error |",
            "|---|---|---|"]  # fmt: skip
    for line in lines:
        if line["job"] == "equal" and not line["name"].startswith("one"):
            result = "equal to one" if line["state"] == OK else f"**{line['state']}**: {line['why']}"
            text.append(f"| {line['name']} | {result} | " + (f"{line['far']:.1e} |" if "far" in line else "- |"))
    text += ["", "| layout | plain, ms | with overlap, ms |", "|---|---|---|"]
    for name, (_, field) in PAIRS.items():
        cells = [_median(lines, f"{name} | {kind} ") for kind in ("plain", field.partition("=")[0] or "none")]
        text.append(f"| {name} | {cells[0]} | {cells[1]} |")
    rows = [row for line in lines if line["job"] == "bandwidth" for row in line["rows"]]
    text += ["", "| collective | MB | ms | bus, GB/s |", "|---|---|---|---|"]
    text += [f"| {r['collective']} | {r['bytes'] / 1e6:.3g} | {r['ms']:.3f} | {r['bus']:.2f} |" for r in rows]
    text += [f"\n{bad['job']} {bad['name']}: {bad['state']}, {bad['why']}" for bad in lines if bad["state"] != OK]
    return "\n".join(text) + "\n"


def _median(lines: Sequence[dict[str, Any]], start: str) -> str:
    found = [line["ms"] for line in lines if line["name"].startswith(start) and "ms" in line]
    return f"{statistics.median(found):.1f}" if found else "-"


def _nccl() -> str:
    from torch.cuda import nccl  # a build for CPUs lacks it

    return ".".join(map(str, nccl.version())) if torch.cuda.is_available() else "none"


def bandwidth(device: str, file: Path) -> None:
    """On each rank: time the collectives over three sizes. Rank 0 writes the rows."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    for size in (2**20, 2**24, 2**28) if device == "cuda" else (2**12, 2**16):
        x = torch.ones(size // 4 // n * n, device=place)
        part, like = x[: len(x) // n], torch.empty_like(x)
        calls = {
            "all_reduce": (lambda x=x: dist.all_reduce(x), 2 * (n - 1) / n),
            "all_gather": (lambda like=like, part=part: dist.all_gather_into_tensor(like, part), (n - 1) / n),
            "reduce_scatter": (lambda x=x, part=part: dist.reduce_scatter_tensor(part.clone(), x), (n - 1) / n),
            "all_to_all": (lambda like=like, x=x: dist.all_to_all_single(like, x), (n - 1) / n),
            "send": (lambda like=like, x=x: _around(x, like, rank, n), 1.0),
        }
        for name, (call, share) in calls.items():
            seconds = statistics.median(_seconds(call, place) for _ in range(7))
            if rank == 0:
                row = {"collective": name, "bytes": x.nbytes, "ms": 1e3 * seconds}
                with file.open("a") as rows:
                    rows.write(json.dumps(row | {"bus": share * x.nbytes / seconds / 1e9}) + "\n")
    dist.destroy_process_group()


def _around(x: torch.Tensor, like: torch.Tensor, rank: int, n: int) -> None:
    there, back = dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, like, (rank - 1) % n)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()


def _seconds(call: Any, place: torch.device) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - began


def train(fault: str, flags: Sequence[str]) -> int:
    """On each rank: run the example; a fault of `--inject` waits, dies or spoils the loss on the last rank."""
    if fault == "wrong":
        flags = [*flags, "--lr", "0.1"]
    elif fault in ("hang", "crash") and int(os.environ["RANK"]) > 0:
        time.sleep(1e4 if fault == "hang" else 0)
        return 1
    return pretrain.main([*flags])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if all results are right, otherwise 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "RANK" in os.environ and sys.platform == "linux":  # a rank ends with its torchrun, also if that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        words = words if os.getppid() > 1 else sys.exit("torchrun was killed before this rank began")
    if "--train" in words:
        return train(words[1], words[words.index("--train") + 1 :])
    parser = argparse.ArgumentParser(prog="python -m bench.multi_gpu", description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="GPUs (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "multi_gpu", help="a folder")
    parser.add_argument("--only", default="", metavar="WORD", help="jobs whose name has this word")
    parser.add_argument("--turns", type=int, default=3, help="runs of each speed, in turns (3)")
    parser.add_argument("--job-seconds", type=float, default=180, help="the least limit of a job (180)")
    parser.add_argument("--inject", nargs="*", default=[], metavar="FAULT:AXIS", help="plant hang, crash or wrong")
    parser.add_argument("--bandwidth", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.bandwidth is not None:
        bandwidth(args.device, args.bandwidth)
        return 0
    results, folder = Results(args.out / "results.jsonl"), args.out.resolve()
    chosen = [job for job in jobs(args, folder) if args.only in f"{job.kind} {job.name}"]
    truths = [_truth(job.name) for job in chosen]
    chosen = [job for job in jobs(args, folder) if job in chosen or job.name in truths]
    for i, job in enumerate(chosen):
        if not results.has(job):
            line = judge(run(limited(job, results.lines)), folder)
            results.add(line)
            print(f"{i + 1} of {len(chosen)}  {line['state']:<7}{line['seconds']:6.1f} s  {job.kind} {job.name}  "
                  f"{line['why']}", flush=True)  # fmt: skip
        (args.out / "report.md").write_text(report(results.lines, args))
    print(f"{args.out}/report.md")
    return int(any(line["state"] != OK for line in results.lines))


if __name__ == "__main__":
    sys.exit(main())
