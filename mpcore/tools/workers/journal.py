"""The journal of a run, and its replay in one process.

`journal.jsonl` has the lines of `mpcore.tools.workers.outer`, each with the time `at`, in seconds. The tensors of the
outer state after line N are in `outer-N.safetensors`. The worker that leads the run and its replicas write both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from torch import Tensor

from mpcore.checkpoint.store import Store
from mpcore.checkpoint.tensor_file import write_tensors
from mpcore.mesh.log import Logger, get_logger
from mpcore.tools.fault_tolerance.metrics import MetricsWriter, write_whole
from mpcore.tools.workers.outer import Line, Outer, Tensors, digest, like
from mpcore.tools.workers.wire import unpack

log: Logger = get_logger(__name__)
FILE = "journal.jsonl"
_KEPT = 2  # files of tensors


class Journal:
    """Locks a folder, and writes the lines of a run to it. None: keep nothing on the disk.

    Attributes:
        lines: all lines of the run.

    Raises:
        ValueError: if another process uses the folder.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.lines: list[Line] = list[Line]()
        self.writer: MetricsWriter | None = None if folder is None else MetricsWriter(folder / FILE)
        self.lock: IO[str] | None = None if folder is None else Store[Path]().lock(folder)

    def close(self) -> None:
        """Let another process use the folder."""
        lock, self.lock = self.lock, None  # two threads may close, and a file that both close raises
        if lock is not None:
            lock.close()

    def replace(self, lines: Sequence[Line]) -> None:
        """Begin with these lines, in the place of those in the folder."""
        self.lines = list(lines)
        if self.writer is not None:
            write_whole(self.writer.path, "".join(json.dumps(line) + "\n" for line in lines))
            self.writer.waiting = b""

    def append(self, line: Line) -> None:
        """Write one more line. Warn if the disk is full: the lines wait, and the next call writes them."""
        self.lines.append(line)
        if self.writer is None:
            return
        fits = not self.writer.waiting
        try:
            self.writer.add(line)
        except OSError as error:
            if fits:
                log.warning("NOT WRITTEN, training goes on: %s: %s", self.writer.path, error)

    def save(self, outer: Outer) -> None:
        """Write the tensors of the outer state after the last line, and remove older ones. Warn if the disk is full."""
        if self.folder is None:
            return
        path = self.folder / f"outer-{len(self.lines):08d}.safetensors"
        temporary = path.with_suffix(".new")
        try:
            temporary.unlink(missing_ok=True)
            write_tensors(temporary, outer.tensors())
            os.replace(temporary, path)
            mine = [at for at in saved(self.folder) if line_count(at) <= len(self.lines)]  # not of an earlier run
            for old in mine[:-_KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("NOT WRITTEN, training goes on: the outer state in %s: %s", self.folder, error)


def saved(folder: Path) -> list[Path]:
    """Return the files of outer states in a folder, the oldest first."""
    return sorted(folder.glob("outer-*.safetensors"))


def line_count(path: Path) -> int:
    """Return how many lines of the journal a file of an outer state has."""
    return int(path.stem.removeprefix("outer-"))


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of a journal. A last line that was cut off in a crash is left out.

    Raises:
        ValueError: if the folder has no journal, or a line is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}: the worker that leads a run and its replicas write it")
    *texts, _ = path.read_text().split("\n")
    try:
        lines = [json.loads(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not lines or lines[0].get("op") != "begin":
        raise ValueError(f"{path} doesn't begin with the line begin")
    return lines


def resume(folder: Path, anchor: Mapping[str, Tensor]) -> tuple[Outer, list[Line]] | None:
    """Return the newest outer state of a folder and the lines before it; None if there is none.

    Workers train the steps after this state again. A file of an earlier start is skipped: its anchor differs from the
    anchor in the lines.
    """
    files = saved(folder) if (folder / FILE).is_file() else []
    written = read_lines(folder) if files else []
    for path in reversed(files):
        lines = written[: line_count(path)]
        outer = Outer(lines[0], anchor, lines[1:])
        outer.load_tensors(unpack(memoryview(path.read_bytes()), str(path)))
        if digest(outer.anchor) == [line["anchor"] for line in lines if "anchor" in line][-1]:
            return outer, lines
    return None


class Replayed(NamedTuple):
    """The result of `replay`.

    Attributes:
        outer: the outer state at the end.
        updates: the number of updates, those that were too stale included.
        differing: the version of each anchor, and worker and phase of each update, whose hash is not the journal's.
    """

    outer: Outer
    updates: int
    differing: list[str]


def replay(
    lines: Sequence[Line],
    anchor: Mapping[str, Tensor],
    train: Callable[[int, Tensors, int, int, int], Mapping[str, Tensor]],
) -> Replayed:
    """Run the phases of a journal in their order, in this process.

    Args:
        lines: the journal.
        anchor: the parameters that the run began with, by logical name.
        train: called as `train(worker, anchor, first, last, merged)`: what this worker's phase of the steps [first,
            last) returns, x_anchor - x_local by logical name. It begins with the anchor if `merged` is `first`. If not,
            it goes on from its last phase, and the anchor comes before step `merged` (`Options.overlap`). A worker's
            calls come in the order of its phases, so that it may keep its inner optimizer, which begins empty.

    Raises:
        ValueError: if the run began with other parameters.
    """
    outer = Outer(lines[0], anchor)
    if digest(outer.anchor) != lines[0]["anchor"]:
        raise ValueError(f"the replay begins with {digest(outer.anchor)}, the run began with {lines[0]['anchor']}")
    updates = [entry for line in lines for entry in line.get("updates", ())]
    last_use = {entry["base"]: place for place, entry in enumerate(updates)}
    anchors, differing, place = {0: {name: x.clone() for name, x in outer.anchor.items()}}, list[str](), 0
    for line in lines[1:]:
        trained = []
        for entry in line.get("updates", ()):
            (first, last), base = entry["steps"], anchors[entry["base"]]
            found = like(train(entry["worker"], base, first, last, entry.get("merged", first)), outer.anchor)
            if digest(found) != entry["update"]:
                differing.append(f"update of worker {entry['worker']}, phase {entry['phase']}")
            trained.append(found)
            if last_use[entry["base"]] == place and entry["base"] != outer.version:
                del anchors[entry["base"]]
            place += 1
        outer.apply(line, trained)
        if trained:
            anchors[outer.version] = {name: x.clone() for name, x in outer.anchor.items()}
            differing += [f"anchor {outer.version}"] if digest(outer.anchor) != line["anchor"] else []
    return Replayed(outer, place, differing)
