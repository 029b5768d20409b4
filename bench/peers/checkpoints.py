"""Rows of checkpoints: a model and its AdamW, 201 MB."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from bench.checkpoint.bench_save_load import Training, sync
from bench.peers.measure import Row, Step
from mpcore import Mesh
from mpcore.checkpoint import load, save


class Stored:
    """A training whose checkpoints go to a folder that lives as long as the process."""

    def __init__(self) -> None:
        self.training, self.folder = Training(), tempfile.TemporaryDirectory(prefix="mpcore-peers-")
        self.path, self.count = Path(self.folder.name), 0

    def save(self, kind: str) -> Path:
        """Write a new checkpoint, synced to the disk, in place of the one before."""
        old, self.count = self.path / f"step-{self.count}", self.count + 1
        new, t = self.path / f"step-{self.count}", self.training
        if kind == "mpcore":
            save(new, t.model, t.optimizer, mesh=Mesh(), step=self.count)
        elif kind == "safetensors":
            new.mkdir()
            save_file(t.tensors(), new / "raw")
            sync(new / "raw")
        else:
            dcp.save({"model": t.model.state_dict(), "optimizer": t.optimizer.state_dict()}, checkpoint_id=new)
        for file in sorted(old.glob("*")):
            file.unlink()
        return new

    def load(self, kind: str, path: Path) -> None:
        """Read a checkpoint into the memory of the model and its optimizer, as a run that goes back."""
        t = self.training
        if kind == "mpcore":
            load(path, t.model, t.optimizer, mesh=Mesh())
        elif kind == "safetensors":
            t.load_raw(path / "raw")
        else:
            state: dict[str, Any] = {"model": t.model.state_dict(), "optimizer": t.optimizer.state_dict()}
            dcp.load(state, checkpoint_id=path)
            t.model.load_state_dict(state["model"])
            t.optimizer.load_state_dict(state["optimizer"])

    def sums(self) -> list[Tensor]:
        """A sum of each tensor."""
        return [x.sum(dtype=torch.float64) for _, x in sorted(self.training.tensors().items())]


def save_step(kind: str) -> Step:
    """Save; returns nothing: that each side reads what it wrote is in the rows that load."""
    stored = Stored()

    def step() -> None:
        stored.save(kind)

    return step


def load_step(kind: str) -> Step:
    """Load; the first calls return the sums of what came, over memory that was wiped before."""
    stored = Stored()
    path, checks = stored.save(kind), iter(range(3))

    def step() -> list[Tensor]:
        checked = next(checks, None) is not None
        for x in stored.training.tensors().values() if checked else ():
            x.detach().zero_()
        stored.load(kind, path)
        return stored.sums() if checked else []

    return step


LOAD = (
    "mpcore verifies all checksums before it changes a tensor, so it reads each page twice: once for the checksum, "
    "once for the copy. Four threads of mpcore's loader make the copy. safetensors verifies nothing"
)
SAVE = "mpcore writes a checksum of each tensor and a manifest of the folder. safetensors writes no checksum"
ROWS = [
    Row(
        f"{verb} a checkpoint of 201 MB",
        peer,
        partial(step, "mpcore"),
        partial(step, kind),
        at_least,
        needs=needs,
        why=why,
    )
    for verb, step, why in (("load", load_step, LOAD), ("save", save_step, SAVE))
    for kind, peer, at_least, needs in (
        ("safetensors", "safetensors", 1.0, "safetensors"),
        ("dcp", "torch.distributed.checkpoint", 1.2, "torch"),
    )
]
