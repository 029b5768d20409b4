"""Pretrain a GPT on any mesh: `python -m examples.gpt.pretrain`, or under torchrun with --tp, --pp, --cp, --dp."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the other imports take seconds, in which a signal must not look like a failure
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: os._exit(75))

import torch.distributed as dist

from examples.gpt.arguments import parse
from examples.gpt.checkpoints import other_run
from examples.gpt.generate import load_model
from examples.gpt.indexed_dataset import IndexedDatasetWriter
from examples.gpt.setup import find_tokenizer, mesh_arguments, open_data, read_model
from examples.gpt.train import Trainer
from mpcore import build_mesh
from mpcore.mesh import read_launch
from mpcore.tools.fault_tolerance import (
    EXIT_STOPPED,
    StopSignals,
    Watchdog,
    leave,
    leave_together,
    record,
    tell_launcher,
)
from mpcore.tools.invariant import invariant_mesh

__all__ = ["IndexedDatasetWriter", "Trainer", "find_tokenizer", "load_model", "main", "mesh_arguments", "open_data",
           "other_run", "parse", "read_model"]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0 after the last step or exit_step, 75 if a signal stopped the run; otherwise exit."""
    if not dist.is_initialized():
        record()  # collectives, so that a watchdog can explain a hang
    stopped, begun = False, False
    with StopSignals(leave_with=EXIT_STOPPED) as signals:
        try:
            args = parse(argv)
            begun = True
            out = Path(args.out)
            limit = args.timeout + 15  # the watchdog comes first, because it can say more
            mesh = build_mesh(**mesh_arguments(args), timeout=limit)
            mesh = invariant_mesh(mesh, args.bitwise) if args.bitwise else mesh
            with (
                leave_together(mesh, folder=out / "errors") as leaving,
                Watchdog(mesh, timeout=args.timeout, folder=out / "hang") as watchdog,
            ):
                try:
                    trainer = Trainer(args, mesh)
                    watchdog.model, trainer.beat, leaving.run = trainer.model, watchdog.beat, trainer.run
                    signals.leave_with, trainer.stop.signals = None, signals
                    stopped = trainer.train()
                except ValueError as error:
                    sys.exit(f"rank {mesh.job.rank}: error: {error}")
        except ValueError as error:
            tell_launcher(f"error: {error}")
            if not dist.is_initialized():
                one = begun or os.environ.get("LOCAL_RANK", "0") == "0"  # flags are wrong on every rank of a host
                sys.exit(f"error: {error}" if one else 1)
            one = read_launch(os.environ).local_rank == 0  # every rank raised it: one of each host says so
            sys.exit(f"rank {dist.get_rank()}: error: {error}" if one else 1)
    if dist.is_initialized():  # not after a failure: a save in the background may still use the groups
        dist.destroy_process_group()
    return EXIT_STOPPED if stopped else 0


if __name__ == "__main__":
    gc.freeze()  # a collection over all imported modules would hold up a rank for 0.2 s, and the ranks that wait for it
    try:
        status: str | int | None = main()
    except SystemExit as error:
        status = error.code
    leave(status)  # a thread of gloo could keep the interpreter from ending
