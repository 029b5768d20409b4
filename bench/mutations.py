"""Put small mistakes into a copy of the tree, and see which tests notice. The work tree is never changed.

python -m bench.mutations                       20 mutations of the lines that changed since this branch left main
python -m bench.mutations --all --seed 3 --count 100
python -m bench.mutations --module mpcore.layers --files 4

A line of the core is drawn three times as often as one of interop, the tools or the examples; text for people is never
drawn. The tests are the files nearest to the module, by name and use, with ranks as threads. A kill counts only if the
same files pass without the mutation.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.machine import ROOT
from tests.storeys import storey

FOLDERS = {"mpcore": "mpcore", "mpcore.kernels": "kernels", "examples": "examples", "tests": "tests"}
LIBRARY = ("mpcore", "examples")
LAST = "tests.test_recorded_runs"  # thirty short runs: slow, and they see nearly everything
LEFT_OUT = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", "*.egg-info", "runs", "build", ".ci-out")
WEIGHTS = {"core": 3}  # of a storey; 1 for the others
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
              ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
              ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd}  # fmt: skip
BOOLEAN = {ast.And: ast.Or, ast.Or: ast.And}
# Text for people, types, and calls in which an order of arguments means nothing or raises at once.
TEXT_FUNCTIONS = {"__repr__", "__str__", "extra_repr"}
TEXT_CALLS = {"print", "warn", "warning", "info", "debug", "cast", "TypeVar", "isinstance", "issubclass"}
NO_MEANING = {"strict", "stacklevel", "non_blocking"}  # arguments without which a right program is the same
ANY_ORDER = {"max", "min", "maximum", "minimum", "hasattr", "getattr", "setattr", "equal", "gcd", "promote_types",
             "suppress", "zip"}  # fmt: skip


# --- what to change ---------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """One change: where it is, and what replaces the bytes from `start` to `end` of the UTF-8 source."""

    definition: str
    operator: str
    line: int
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """Return the whole source with this change."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def shown(self, source: str) -> tuple[str, str]:
        """Return the lines that change, before and after, each on one line."""
        data = source.encode()
        first, last = data.rfind(b"\n", 0, self.start) + 1, data.find(b"\n", self.end)
        before = data[first:last].decode()
        after = data[first : self.start].decode() + self.text + data[self.end : last].decode()
        return " ".join(before.split()), " ".join(after.split())


def candidates(source: str, kernels: bool = False) -> list[Mutant]:
    """Return every change that the operators can make. `kernels` changes the bodies of Triton's kernels too."""
    starts = [0, *accumulate(len(line) + 1 for line in source.encode().split(b"\n"))]
    found = []
    for place, end, node in walk(ast.parse(source), kernels):
        for operator, target, text in changes(node, end):
            span = starts[target.lineno - 1] + target.col_offset, starts[target.end_lineno - 1] + target.end_col_offset
            found.append(Mutant(place, operator, target.lineno, *span, text))
    return found


def walk(node: ast.AST, kernels: bool, place: str = "", end: int = 0) -> Iterator[tuple[str, int, ast.AST]]:
    """Yield each node that may change, the names of the definitions around it, and the last line of its function."""
    for child in parts(node, kernels):
        yield place, end, child
        name, last = place, end
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, last = f"{place}.{child.name}".strip("."), child.end_lineno or 0
        yield from walk(child, kernels, name, last)


def parts(node: ast.AST, kernels: bool) -> list[ast.AST]:
    """Return the children of a node, without annotations, decorators, messages and asserts."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return []
        case ast.Call() if called(node) in TEXT_CALLS:
            return []
        case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("__"):
            return []
        case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
            return [*node.orelse]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            decorators = {called(decorator) for decorator in node.decorator_list}
            untested = node.name in TEXT_FUNCTIONS or "overload" in decorators
            if untested or (not kernels and any("jit" in name for name in decorators)):
                return []
            return [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        case ast.ClassDef():
            return [*node.body]
        case ast.AnnAssign() | ast.Lambda():
            value = node.value if isinstance(node, ast.AnnAssign) else node.body
            return [] if value is None else [value]
    return [*ast.iter_child_nodes(node)]


def changes(node: Any, end: int) -> Iterator[tuple[str, Any, str]]:
    """Yield the operators that apply to a node: a name, the node that is replaced, and its new text.

    Args:
        node: of the syntax tree.
        end: the last line of the function around it.
    """
    match node:
        case ast.If() if isinstance(node.body[-1], ast.Raise):
            yield "refusal dropped", node.test, "False"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
            yield "negated condition", test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension():
            for test in node.ifs:
                yield "negated condition", test, f"(not ({ast.unparse(test)}))"
        case ast.Compare():
            for i, op in enumerate(node.ops):
                yield "compare", node, changed(node, ops=[*node.ops[:i], COMPARE[type(op)](), *node.ops[i + 1 :]])
        case ast.BoolOp():
            yield "boolean", node, changed(node, op=BOOLEAN[type(node.op)]())
        case ast.BinOp() if type(node.op) in ARITHMETIC and not (is_text(node.left) or is_text(node.right)):
            yield "arithmetic", node, changed(node, op=ARITHMETIC[type(node.op)]())
        case ast.AugAssign():
            yield "dropped statement", node, "pass"
            if type(node.op) in ARITHMETIC and not is_text(node.value):
                yield "arithmetic", node, ast.unparse(_with(node, op=ARITHMETIC[type(node.op)]()))
        case ast.Assign() if all(isinstance(target, ast.Subscript) for target in node.targets):
            yield "dropped statement", node, "pass"
        case ast.Expr(value=ast.Call()) if called(node.value) not in TEXT_CALLS:
            yield "dropped statement", node, "pass"
        case ast.Return(end_lineno=int(last)) if last < end:
            yield "early return removed", node, "pass"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield (
                "constant",
                node,
                f"{1 - value if value in (0, 1) else value + 1 if value == int(value) else 2 * value}",
            )
        case ast.Call() if called(node) not in TEXT_CALLS:
            for i, (one, two) in enumerate(pairwise(node.args)):
                # arguments of two kinds would raise at once
                if called(node) not in ANY_ORDER and type(one) is type(two) and ast.dump(one) != ast.dump(two):
                    swapped = [*node.args[:i], two, one, *node.args[i + 2 :]]
                    yield "swapped arguments", node, changed(node, args=swapped)
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in NO_MEANING:
                    others = [other for other in node.keywords if other is not keyword]
                    yield "dropped argument", node, changed(node, keywords=others)


def _with(node: ast.AST, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def changed(node: ast.AST, **fields: Any) -> str:
    """Return the text of an expression with other fields."""
    return f"({ast.unparse(_with(node, **fields))})"


def called(node: ast.expr) -> str:
    """Return the last name of what is called: `sum` of `x.sum(0)`."""
    target = node.func if isinstance(node, ast.Call) else node
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


def is_text(node: ast.expr) -> bool:
    """Return whether an operand is a string that is written out."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


# --- which tests to run -----------------------------------------------------------------------------------------------


class Project:
    """The modules of a tree by their import names, and who uses whom."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.paths: dict[str, Path] = {}
        for prefix, folder in FOLDERS.items():
            for path in sorted((self.root / folder).rglob("*.py")):
                parts = [prefix, *path.relative_to(self.root / folder).with_suffix("").parts]
                self.paths[".".join(parts).removesuffix(".__init__")] = path.relative_to(self.root)
        self.texts = {name: (self.root / path).read_text() for name, path in self.paths.items()}
        self.words = {name: set(re.findall(r"\w+", text)) for name, text in self.texts.items()}
        self.defined = {name: set(re.findall(r"^(?:def|class) (\w+)", text, re.M)) for name, text in self.texts.items()}
        self.definers = Counter(word for words in self.defined.values() for word in words)

    def library(self, *prefixes: str) -> list[str]:
        """Return the modules below any of these import names."""
        prefixes = prefixes or LIBRARY
        return [name for name in self.paths if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)]

    def users(self, module: str) -> Iterator[str]:
        """Yield the modules that name this one, or what no other module defines."""
        own = {word for word in self.defined[module] if self.definers[word] == 1}
        for name, text in self.texts.items():
            if name != module and (own & self.words[name] or f"{module} import" in text):
                yield name

    def distances(self, module: str) -> dict[str, int]:
        """Return how many uses lie between each module and this one; packages' fronts are not passed."""
        found, queue = {module: 0}, deque([module])
        while queue:
            name = queue.popleft()
            for user in self.users(name) if name == module or self.paths[name].name != "__init__.py" else ():
                if user not in found:
                    found[user] = found[name] + 1
                    queue.append(user)
        return found

    def test_files(self, module: str, definition: str, count: int) -> list[str]:
        """Return the nearest test modules, `count` at most, and the recorded runs where they reach the change.

        A test file that has the name of the module, or of a user of it, is near; then those that name the definition,
        those a few uses away, and short ones.
        """
        distances, parts = self.distances(module), module.split(".")[1:]
        near = {part.strip("_"): i for i, part in enumerate(parts[::-1])}
        for user, distance in distances.items():
            if user.startswith(LIBRARY):
                near.setdefault(user.rpartition(".")[2], distance)
        public = [name for name in definition.split(".") if not name.startswith("_")][:1]

        def key(test: str) -> tuple[int, bool, int, int]:
            stem = test.rpartition(".")[2].removeprefix("test_")
            return near.get(stem, 99), not self.words[test] & {*public}, distances[test], len(self.texts[test])

        ranked = sorted((name for name in distances if name.rpartition(".")[2].startswith("test_")), key=key)
        return [test for test in ranked if test != LAST][:count] + [LAST] * (LAST in ranked)


def changed_lines(root: Path, since: str) -> dict[Path, set[int]]:
    """Return the lines of each Python file that differ from a revision, untracked files included.

    Args:
        since: a revision, or "": where this branch left the main one, or the last commit but one.
    """

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        return run.stdout if run.returncode == 0 else ""

    bases = [git("merge-base", "HEAD", main).strip() for main in ("origin/HEAD", "origin/main", "main", "master")]
    since = since or next((base for base in bases if base not in ("", git("rev-parse", "HEAD").strip())), "HEAD~1")
    if not git("rev-parse", "--verify", f"{since}^{{commit}}"):
        raise SystemExit(f"git knows no revision {since}: name a commit, or take --all or --module")
    found: dict[Path, set[int]] = {}
    path = Path()
    for line in git("diff", "-U0", "-M", "--no-color", "--relative", since, "--", "*.py").splitlines():
        if line.startswith("+++ "):
            path = Path(line.removeprefix("+++ ").removeprefix("b/"))
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            start, length = int(match[1]), int(match[2] or 1)
            found.setdefault(path, set()).update(range(start, start + length))
    for name in git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
        found[Path(name)] = {*range(1, 1 + (root / name).read_text().count("\n"))}
    return found


# --- the command ------------------------------------------------------------------------------------------------------


def possible(project: Project, args: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Return every mutation of the modules or lines that the command names."""
    lines = None if args.all or args.module else changed_lines(project.root, args.since)
    return [
        (module, mutant)
        for module in project.library(*args.module)
        if lines is None or project.paths[module] in lines
        for mutant in candidates(project.texts[module], args.kernels)
        if lines is None or mutant.line in lines[project.paths[module]]
    ]


def drawn(project: Project, pool: Sequence[tuple[str, Mutant]], seed: int, count: int) -> list[tuple[str, Mutant]]:
    """Draw mutations by weight. Editing a function changes no other function's draws."""

    def turn(each: tuple[str, Mutant]) -> float:
        module, mutant = each
        weight = WEIGHTS.get(storey(module), 1) if module.startswith("mpcore") else 1
        key = f"{seed}/{module}:{mutant.definition}: {mutant.operator}: {mutant.shown(project.texts[module])}"
        return -(Random(key).random() ** (1 / weight))

    return sorted(pool, key=turn)[:count]


def passes(folder: Path, tests: Sequence[str], limit: float) -> tuple[bool | None, str]:
    """Run tests in a copy: whether all pass (None: the time was over), and the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--simulate", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    try:
        run = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, text=True,
                             timeout=limit)  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", run.stdout, re.MULTILINE)  # no log lines
    return run.returncode in (0, 5), (failed or [tests[0]])[0]


def judge(project: Project, folder: Path, module: str, mutant: Mutant, args: argparse.Namespace) -> tuple[str, str]:
    """Try one mutation in the copy, and mend the copy; return the verdict, and the test that failed."""
    path, source = folder / project.paths[module], project.texts[module]
    tests = args.tests or [str(project.paths[t]) for t in project.test_files(module, mutant.definition, args.files)]
    if not tests:
        return "survived", "no test reaches it"
    path.write_text(mutant.applied(source))
    try:
        good, by = passes(folder, tests, args.limit)
    finally:
        path.write_text(source)
    if good is not False:
        return ("timeout" if good is None else "survived"), ""
    return ("killed" if passes(folder, [by], args.limit)[0] else "unsure"), by


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. It reports: survivors are no failure of it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", default="", metavar="REV", help="lines that differ from this commit")
    parser.add_argument("--all", action="store_true", help="the whole library")
    parser.add_argument("--module", nargs="+", default=[], metavar="NAME", help="these modules or packages")
    parser.add_argument("--kernels", action="store_true", help="also the bodies of Triton's kernels")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--count", type=int, default=20, metavar="K")
    parser.add_argument("--files", type=int, default=4, metavar="K", help="test files for each mutation (default 4)")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="these tests instead")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for each mutation (default 600)")
    parser.add_argument("--list", action="store_true", help="show the mutations, run nothing")
    parser.add_argument("--record", metavar="FILE", type=Path, help="append each verdict to this file, as JSON lines")
    args = parser.parse_args(argv)
    project = Project(ROOT)
    pool = possible(project, args)
    chosen = drawn(project, pool, args.seed, args.count)
    print(f"{len(chosen)} of {len(pool)} possible changes")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutations-") as parent:
        folder = Path(parent) / "tree"
        if not args.list:
            shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT)
        for module, mutant in tqdm(chosen, unit="mutation", disable=args.list):
            verdict, by = ("drawn", "") if args.list else judge(project, folder, module, mutant, args)
            before, after = mutant.shown(project.texts[module])
            row = {"verdict": verdict, "module": module, "definition": mutant.definition, "operator": mutant.operator,
                   "by": by, "before": before, "after": after}  # fmt: skip
            counts[verdict] += 1
            tqdm.write(
                "{verdict:<9} {operator} in {module}:{definition} {by}\n    - {before}\n    + {after}".format(**row)
            )
            if args.record is not None:
                with args.record.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
