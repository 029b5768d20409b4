"""Convert public launch files with `mpcore from-config`, and run them shrunk: `python -m tests.launch_files FOLDER`.

FOLDER holds the files, at any depth. Each is converted, and the example parses the result; no file may end in a
traceback. Those named after `--run` are shrunk to two layers (a layer for each pipeline stage, if that is more) and run
for three steps on the same axes, each of at most 2 ranks, at most 8 in all.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.gpt.arguments import parse
from mpcore.tools.from_config import convert, read, toml

AXES = ("tp", "pp", "cp", "ep", "dp")


def shrink(fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the fields of a small model on the same axes, and the number of ranks."""
    sizes = {name: min(fields.get(name, 1), 2) for name in AXES}
    if fields.get("zero") or sizes["ep"] == 2:
        sizes["dp"] = 2  # ep is a part of dp
    while (ranks := math.prod(sizes[name] for name in AXES if name != "ep")) > 8:
        sizes["dp"] = sizes["ep"] = 1
    heads = 4 if fields.get("kv_heads", fields.get("heads")) != fields.get("heads") else 2
    small = {name: value for name, value in fields.items() if name not in ("data", "kv_heads", "head_dim", "replicate")}
    small |= sizes | {"device": "cpu", "layers": 2}
    small |= {"d_model": 64, "d_ff": 96, "heads": heads, "seq_len": 64, "micro_batch": 1, "global_batch": 8, "steps": 3}
    small |= {"warmup": 1, "lr_decay_steps": 3, "eval_every": 0, "save_every": 0, "kv_heads": 2}
    for name in ("exit_step", "exit_minutes", "warmup_share", "warmup_samples"):
        small.pop(name, None)
    if "rampup_batch_size" in small:
        small["rampup_batch_size"] = [4, 4, 8]
    if small.get("experts"):
        small["experts"] = 4
        small["moe.d_ff"] = 32
        small["moe.top_k"] = min(small.get("moe.top_k", 2), 2)
    return small, ranks


def run(path: Path) -> str:
    """Run a shrunk file. Return its layout and its last lines."""
    small, ranks = shrink(convert(*read(path))[0])
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(toml(small))
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m"]
        command += ["examples.gpt.pretrain", "--config", str(config), "--out", f"{folder}/out"]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
    layout = " ".join(f"{name} {small[name]}" for name in (*AXES, "zero", "dtype") if small.get(name, 1) not in (1, 0))
    losses = [line for line in lines if "loss" in line and "step" in line][-3:]
    return f"{ranks} ranks, {layout}: exit {done.returncode}; " + " | ".join(losses if not done.returncode else lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", nargs="*", default=[], metavar="NAME", help="files to run, as parts of their paths")
    args = parser.parse_args()
    counts = collections.Counter[tuple[str, str]]()
    for path in sorted(path for path in args.folder.rglob("*") if path.is_file()):
        try:
            peer, values = read(path)
            fields, _ = convert(peer, values)
        except ValueError as error:
            counts[path.suffix, "refused"] += 1
            print(f"refused: {path}: {error}")
            continue
        kind = "functional config" if peer == "Megatron-LM" and path.suffix != ".sh" else path.suffix
        counts[f"{peer}, {kind}", "converted"] += 1
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as told:
            (Path(folder) / "run.toml").write_text(toml(fields))
            try:
                parse(["--config", f"{folder}/run.toml"])
                counts[f"{peer}, {kind}", "accepted by the example"] += 1
            except (SystemExit, ValueError) as error:
                print(f"not accepted: {path}: {error} {told.getvalue()[-300:]}")
    for (kind, what), count in sorted(counts.items()):
        print(f"{kind}: {count} {what}")
    for part in args.run:
        (path,) = (path for path in sorted(args.folder.rglob("*")) if path.is_file() and str(path).endswith(part))
        print(f"{path.relative_to(args.folder)}: {run(path)}", flush=True)


if __name__ == "__main__":
    main()
