"""What to mutate, and which tests to run: both follow from names and import statements alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import deque
from functools import cached_property
from pathlib import Path

LIBRARY = ("mpcore", "examples")
SOURCES = ("mpcore", "examples", "tests")
LAST = "tests.test_recorded_runs"  # thirty short runs: slow, and they see nearly everything


class Project:
    """The modules of a tree by their import names, who imports whom, and where names are defined."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.paths: dict[str, Path] = {}
        for source in SOURCES:
            for folder, folders, files in os.walk(self.root / source, followlinks=True):
                folders.sort()
                for file in sorted(files):
                    if file.endswith(".py"):
                        parts = [*Path(folder).relative_to(self.root).parts, file[:-3]]
                        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                        self.paths[name] = (Path(folder) / file).resolve().relative_to(self.root)
        self.texts = {name: (self.root / path).read_text() for name, path in self.paths.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    def library(self, *prefixes: str) -> list[str]:
        """The modules below any of these import names, without tests and this package."""
        prefixes = prefixes or LIBRARY
        return [name for name in self.paths if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)]

    @cached_property
    def named(self) -> dict[str, list[tuple[str, str, ast.AST]]]:
        """By name, each definition and assignment: its dotted name, its module, its node."""
        found: dict[str, list[tuple[str, str, ast.AST]]] = {}
        for module in self.library():
            todo: list[tuple[str, ast.AST]] = [(module, self.trees[module])]
            while todo:
                outer, tree = todo.pop()
                for node in ast.iter_child_nodes(tree):
                    for name in _names(node):
                        found.setdefault(name, []).append((f"{outer}.{name}", module, node))
                    if isinstance(node, ast.FunctionDef | ast.ClassDef):
                        todo.append((f"{outer}.{node.name}", node))
                    elif isinstance(node, ast.If | ast.Try | ast.With):
                        todo.append((outer, node))
        return found

    @cached_property
    def definitions(self) -> dict[str, set[str]]:
        """The modules that define a function or class at their top level, by its name."""
        return {
            name: {module for dotted, module, node in places if dotted == f"{module}.{name}" and hasattr(node, "name")}
            for name, places in self.named.items()
        }

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules that each module uses; a name taken from a package counts for the module that defines it."""
        return {name: self._imports(name) for name in self.paths}

    def _imports(self, name: str) -> set[str]:
        package = name if self.paths[name].name == "__init__.py" else name.rpartition(".")[0]
        used: set[str] = set()
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
                base = base if node.level else node.module or ""
                for alias in node.names:
                    used |= self._defined(base, alias.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mpcore":
                used |= self._defined("mpcore", node.attr)
        return {module for module in used if module in self.paths and module != name}

    def _defined(self, base: str, name: str) -> set[str]:
        """The module that `from base import name` reads."""
        if f"{base}.{name}" in self.paths:
            return {f"{base}.{name}"}
        found = {module for module in self.definitions.get(name, ()) if f"{module}.".startswith(f"{base}.")}
        return {base} if base in found or not found else found

    @cached_property
    def tests(self) -> list[str]:
        """The test modules."""
        return [name for name in self.paths if name.rpartition(".")[2].startswith("test_")]

    def distances(self, module: str) -> dict[str, int]:
        """How many imports lie between each module that reaches `module` and it; packages' fronts are not passed."""
        users: dict[str, list[str]] = {}
        for name, used in self.imports.items():
            for other in used:
                users.setdefault(other, []).append(name)
        found, queue = {module: 0}, deque([module])
        while queue:
            name = queue.popleft()
            if name == module or self.paths[name].name != "__init__.py":
                for user in users.get(name, ()):
                    if user not in found:
                        found[user] = found[name] + 1
                        queue.append(user)
        return found

    def ranked(self, module: str, definition: str) -> list[str]:
        """The test modules that reach a change, nearest first.

        A test file that has the name of the module, or of a user of it, is near; then those that name the definition,
        those a few imports away, those in the same folder, and short ones.
        """
        distances = self.distances(module)
        parts = module.split(".")[1:]
        named = {part.strip("_"): i for i, part in enumerate(parts[::-1])}
        for user, distance in distances.items():
            if user.startswith(f"{module.partition('.')[0]}."):
                named.setdefault(user.rpartition(".")[2], distance)
        public = [name for name in definition.split(".") if not name.startswith("_")][:1]

        def key(test: str) -> tuple:
            stem = test.rpartition(".")[2].removeprefix("test_")
            mentions = any(re.search(rf"\b{name}\b", self.texts[test]) for name in public)
            beside = any(part in test.split(".") for part in parts[:-1])
            return (named.get(stem, 99), not mentions, distances.get(test, 99), not beside, len(self.texts[test]))

        return sorted((test for test in self.tests if test in distances or key(test)[0] < len(parts)), key=key)

    def test_files(self, module: str, definition: str, count: int) -> list[str]:
        """The nearest test modules, `count` at most, and the recorded runs where they reach the change."""
        ranked = self.ranked(module, definition)
        return [test for test in ranked if test != LAST][:count] + [LAST] * (LAST in ranked)


def _names(node: ast.AST) -> list[str]:
    """What a statement defines or assigns."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [x.id for target in targets if target is not None for x in ast.walk(target) if isinstance(x, ast.Name)]


# --- what changed -----------------------------------------------------------------------------------------------------


def _git(root: Path, *words: str) -> str:
    run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return run.stdout if run.returncode == 0 else ""


def default_base(root: Path) -> str:
    """Where this branch left the main one; the last commit but one where it is the main one."""
    head = _git(root, "rev-parse", "HEAD").strip()
    for main in ("origin/HEAD", "origin/main", "main", "master"):
        base = _git(root, "merge-base", "HEAD", main).strip()
        if base and base != head:
            return base
    return "HEAD~1"


def changed_lines(root: Path, since: str) -> dict[Path, set[int]]:
    """The lines of each Python file that differ from a revision, untracked files included; a moved line is none.

    Raises:
        ValueError: if git does not know the revision.
    """
    if not _git(root, "rev-parse", "--verify", f"{since}^{{commit}}"):
        raise ValueError(f"git knows no revision {since}: name a commit, or take --all or --module")
    found: dict[Path, set[int]] = {}
    path = Path()
    for line in _git(root, "diff", "-U0", "-M", "--no-color", "--relative", since, "--", "*.py").splitlines():
        if line.startswith("+++ "):
            path = Path(line.removeprefix("+++ ").removeprefix("b/"))
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            start, length = int(match[1]), int(match[2] or 1)
            found.setdefault(path, set()).update(range(start, start + length))
    for name in _git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
        found[Path(name)] = set(range(1, 1 + len((root / name).read_text().splitlines())))
    return found
