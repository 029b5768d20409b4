"""`mpcore documents RUN` lists the documents that a training run read in a step, or in the spikes of its loss.

Samples are a pure function of the seed and their index, so that the run's config.json and metrics.jsonl are enough.
With a checkpoint the documents are ranked by their loss. The lines are what the field `without_documents` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from mpcore.layers.attention.documents import document_ids
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.fault_tolerance.metrics import read_records
from mpcore.tools.fault_tolerance.spikes import Spikes


class Found(NamedTuple):
    """A part of a document that was read in a step.

    Attributes:
        piece: the document and its tokens: `corpus`, `document`, `first` and `count`.
        loss: their mean loss in nats a token; None without a checkpoint.
    """

    step: int
    sample: int
    piece: Any
    text: str
    loss: float | None

    def __str__(self) -> str:
        piece = self.piece
        loss = "" if self.loss is None else f"loss {self.loss:.3f}, "
        where = f"step {self.step}, sample {self.sample}, {loss}tokens {piece.first} to {piece.first + piece.count - 1}"
        return f"{piece.corpus} {piece.document}  # {where}: {self.text!r}"


class Text:
    """The data of a run, as its config.json names it."""

    def __init__(self, run: Path, program: str) -> None:
        self.program: ModuleType = import_module(program)
        if not (run / "config.json").is_file():
            raise ValueError(f"{run / 'config.json'} isn't there: name the --out folder of a run of {program}")
        self.args: Any = self.program.parse(["--config", str(run / "config.json")])
        self.records: list[dict[str, Any]] = [
            entry for entry in read_records(run / "metrics.jsonl", sys.maxsize) if "samples" in entry
        ]
        if not self.records:
            raise ValueError(f"{run / 'metrics.jsonl'} has no step with its samples")
        self.tokenizer: Any = self.program.find_tokenizer(self.args)
        corpora, _ = self.program.open_data(self.args, self.tokenizer)
        first = self.records[0]
        self.seq_len: Any = first["tokens"] // (first["samples"][1] + 1)
        self.samples, _ = corpora.split(self.seq_len, seed=self.args.seed, evaluate=self.args.eval_every > 0)

    def spikes(self) -> list[int]:
        """List the steps whose loss was a spike, as the run saw them, and those that were skipped."""
        spikes = Spikes()
        return [
            entry["step"] for entry in self.records if entry["loss"] is None or spikes.score(entry["loss"]) is not None
        ]

    def samples_of(self, step: int) -> range:
        found = {entry["step"]: entry["samples"] for entry in self.records}
        if step not in found:
            raise ValueError(f"step {step} has no record: there are steps {min(found)} to {max(found)}")
        return range(found[step][0], found[step][1] + 1)

    def find(self, steps: Sequence[int], checkpoint: Path | None) -> list[Found]:
        """List what was read in these steps; with a checkpoint the largest loss comes first."""
        model = None
        if checkpoint is not None:
            model = self.program.load_model(checkpoint).eval()
            if model.config.seq_len < self.seq_len:
                raise ValueError(f"{checkpoint} reads {model.config.seq_len} tokens, and a sample has {self.seq_len}")
        where = [(step, sample) for step in steps for sample in self.samples_of(step)]
        found = [each for step, sample in where for each in self._of_sample(step, sample, model)]
        return found if model is None else sorted(found, key=lambda each: -(each.loss or 0.0))

    @torch.no_grad()
    def _of_sample(self, step: int, sample: int, model: torch.nn.Module | None) -> Iterator[Found]:
        tokens, targets = self.samples.batch([sample])
        losses = None
        if model is not None:
            documents = {}
            if self.args.document_masking:
                documents["documents"] = document_ids(tokens, self.tokenizer.end_of_document)
            logits = model(tokens, **documents)[0].double()
            losses = F.cross_entropy(logits, targets[0], reduction="none")
        at = 0
        for piece in self.samples.pieces(sample):
            ids = torch.cat([tokens[0], targets[0, -1:]])[at : at + piece.count].tolist()
            mine = slice(max(at - 1, 0), at + piece.count - 1)  # a target lies one token before itself
            loss = losses[mine].mean().item() if losses is not None and mine.start < mine.stop else None
            yield Found(step, sample, piece, self.tokenizer.decode(ids)[:60], loss)
            at += piece.count


@reports_errors("mpcore documents")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if the run, its data or the checkpoint can't be read."""
    args = parsers.documents().parse_args(argv)
    text = Text(args.run, args.program)
    steps = text.spikes() if args.steps is None else args.steps
    found = text.find(steps, args.checkpoint)
    if not steps:
        print("# no step was a spike or skipped: --steps names others")
    print("\n".join(map(str, found[: args.most])))
    if len(found) > args.most:
        print(f"# and {len(found) - args.most} more: --most")
    return 0
