"""The example's command with one fault in it: `python -m tests.examples.faulty KIND RANK STEP FLAGS ...`.

The fault happens on the first attempt only, so that a run that torchrun or Slurm starts again meets none.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from examples.gpt import pretrain
from mpcore.mesh import read_launch
from mpcore.sharding.local import local_tensor


def inject(kind: str, trainer: pretrain.Trainer, step: int) -> None:
    """What goes wrong on this rank at the begin of a step."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "sleep":
        time.sleep(3)
    elif kind == "raise":
        raise LookupError("a planted fault")
    elif kind == "exit":
        sys.exit(0)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "nan":
        with torch.no_grad():  # from this step on, whatever is fed
            local_tensor(trainer.stages[-1].norm.weight)[3] = torch.nan


def main() -> None:
    """The command."""
    kind, rank, at, *flags = sys.argv[1:]
    restarts = [os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    mine = read_launch(os.environ).rank == int(rank) and restarts == ["0", "0"]
    real_step = pretrain.Trainer.step

    def step(self: pretrain.Trainer) -> dict[str, float]:
        if mine and self.run.step == int(at):
            inject(kind, self, self.run.step)
        return real_step(self)

    pretrain.Trainer.step = step  # type: ignore[method-assign]
    pretrain.leave(pretrain.main(flags))


if __name__ == "__main__":
    main()
