"""Verdicts that stay: a file of what was tried, so that a sample of a thousand is reached in pieces, over days."""

from __future__ import annotations

import ast
import json
from hashlib import sha256
from pathlib import Path

from tests.mutations.choice import Project
from tests.mutations.operators import Mutant
from tests.mutations.report import Row
from tests.mutations.trial import Verdict


class Record:
    """The verdicts in a JSON file, by mutation. A verdict holds as long as the definition's source is the same.

    Args:
        path: the file, which is made where there is none; it is written after each verdict.
        project: the tree.
    """

    def __init__(self, path: Path, project: Project) -> None:
        self.path, self.project = path, project
        self.kept: dict[str, dict] = json.loads(path.read_text()) if path.is_file() else {}
        self.places = {":".join(key.split(":", 3)[:3]) for key in self.kept}
        self.digests: dict[tuple[str, str], str] = {}

    def get(self, module: str, mutant: Mutant) -> Row | None:
        """The row of a mutation that was tried on this very definition."""
        if f"{module}:{mutant.definition}: {mutant.operator}" not in self.places:
            return None
        held = self.kept.get(mutant.key(module, self.project.texts[module]))
        if held is None or held["source"] != self._digest(module, mutant.definition):
            return None
        verdict = Verdict(held["verdict"], held["by"], held["seconds"])
        change = (mutant.operator, mutant.definition, held["before"], held["after"])
        return Row(held["group"], *change, verdict, held.get("first", ""))

    def add(self, module: str, mutant: Mutant, row: Row, late: bool = False) -> None:
        """Keep a verdict; of a late one, by tests that were written since, also what the earlier one was."""
        kind, by, seconds = row.verdict
        before = self.get(module, mutant)
        first = "" if before is None or not late else before.first or before.verdict.kind
        self.kept[mutant.key(module, self.project.texts[module])] = {
            "group": row.group, "before": row.before, "after": row.after, "verdict": kind, "by": by,
            "seconds": round(seconds), "source": self._digest(module, mutant.definition),
            **({"first": first} if first not in ("", kind) else {}),
        }  # fmt: skip
        self.places.add(f"{module}:{mutant.definition}: {mutant.operator}")
        self.path.write_text(json.dumps(self.kept, indent=0, ensure_ascii=False, sort_keys=True) + "\n")

    def _digest(self, module: str, definition: str) -> str:
        """A hash of a definition's source; of a module's for what stands at its top."""
        if (module, definition) not in self.digests:
            text, node = self.project.texts[module], self.project.trees[module]
            for name in filter(None, definition.split(".")):
                inner = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == name]
                node = inner[0] if inner else node
            source = text if isinstance(node, ast.Module) else ast.get_source_segment(text, node) or text
            self.digests[module, definition] = sha256(source.encode()).hexdigest()[:12]
        return self.digests[module, definition]
