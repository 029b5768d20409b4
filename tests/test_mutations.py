"""The mutator: it draws the same changes for a seed, each means something, and a copy of the tree judges them."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import lines, report
from tests.mutations.choice import Project, changed_lines, default_base, pitfalls
from tests.mutations.hand import MUTATIONS
from tests.mutations.operators import candidates, changes_something, sample
from tests.mutations.patterns import Hand, StaleError, locate
from tests.mutations.record import Record
from tests.mutations.report import Row
from tests.mutations.trial import Copy, Verdict

ROOT = Path(__file__).parents[1]
STALE_ALLOWED = 0.1

# --- operators --------------------------------------------------------------------------------------------------------

CASES = {  # operator, source of f, arguments that tell the change, how many changes there are
    "compare": ("def f(x):\n    return 0 <= x < 3", [(0,), (3,), (-1,)], 2),
    "arithmetic": ("def f(x):\n    y = (x) * 4  # ß and -\n    y -= x\n    return y + 2", [(3,)], 3),
    "boolean": ("def f(a, b, c):\n    return a and b and c", [(True, False, True), (True, True, False)], 2),
    "constant": ("def f(x):\n    return 5 * x + 0, -1, True, 0.5", [(3,)], 5),
    "default": ("def f(x=2, *, y=True, z=-1, w=None):\n    return x, y, z, w", [()], 3),
    "negated condition": ("def f(x):\n    if not x:\n        return 4\n    return 2 if x > 1 else 3", [(0,), (2,)], 2),
    "refusal dropped": ("def f(x):\n    if x < 0:\n        raise ValueError('no')\n    return x", [(-1,)], 1),
    "early return removed": ("def f(x):\n    if x:\n        return 1\n    return 2", [(1,)], 1),
    "swapped arguments": ("def f(x, y):\n    return divmod(x, y), max(x, y)", [(7, 3)], 1),
    "dropped argument": ("def f():\n    return sorted([2, 1, 3], reverse=True), dict(a=4)", [()], 2),
    "dropped statement": ("def f(x):\n y = [x]\n y.append(2)\n y[0] = 4\n y += [1]\n return y", [(1,)], 3),
    "dim": ("def f():\n    return dict(dim=-1), dict(sequence_dim=2)", [()], 2),
}  # fmt: skip


def outcome(source: str, arguments: list[tuple]) -> list:
    found: dict = {}
    exec(source, found)
    results = []
    for each in arguments:
        try:
            results.append(found["f"](*each))
        except (ValueError, TypeError) as error:
            results.append(repr(error))
    return results


@pytest.mark.parametrize("operator", CASES)
def test_each_operator_changes_what_a_function_does(operator):
    source, arguments, count = CASES[operator]
    changes = [m for m in candidates(source) if m.operator == operator]
    assert len(changes) == count
    for change in changes:
        assert changes_something(source, change)
        assert outcome(change.applied(source), arguments) != outcome(source, arguments), change.shown(source)
        before, after = change.shown(source)
        assert before != after


LEFT_OUT = '''
"""Nothing but 1 < 2 here."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    x = 1 + 1
__all__ = ["a" + "b"]
@cache(size=3)
def f(a: Literal[3], b: int = None) -> Literal[4]:
    """Of 1 and 2."""
    assert a == 5
    print(f"{a + 1}", 6)
    if isinstance(a, b):
        pass
    raise ValueError(f"{a - 1} is {7}")
@triton.jit
def kernel(p, n):
    p += 1
def __repr__(self):
    return "a" * 3
'''


def test_text_types_and_kernels_are_left_alone():
    assert [m.operator for m in candidates(LEFT_OUT)] == ["negated condition"]  # of the isinstance
    inside = {m.operator for m in candidates(LEFT_OUT, kernels=True) if m.definition == "kernel"}
    assert inside == {"arithmetic", "constant", "dropped statement"}


@pytest.fixture(scope="module")
def project() -> Project:
    return Project(ROOT)


def test_a_seed_draws_the_same_changes_of_the_library_each_time(project):
    modules = random.Random(0).sample(project.library(), 4)
    pool = [(name, m) for name in modules for m in candidates(project.texts[name])]
    drawn = sample(pool, 5, 9)
    assert drawn == sample([(name, m) for name in modules for m in candidates(project.texts[name])], 5, 9)
    assert drawn != sample(pool, 6, 9)
    for name, mutant in drawn:
        assert changes_something(project.texts[name], mutant), mutant
        assert mutant.definition == "" or mutant.definition.split(".")[-1] in project.texts[name]


# --- hand-written mutations -------------------------------------------------------------------------------------------


def test_hand_written_mutations_have_their_places(project):
    """Rewording a line is no reason to fail: only a list that nobody keeps is."""
    stale = []
    for hand in MUTATIONS:
        try:
            module, mutant = locate(project, hand)
        except StaleError as error:
            stale.append(f"{hand.what}: {error}")
        else:
            changed = mutant.applied(project.texts[module])
            assert changed != project.texts[module]
            ast.parse(changed)
    assert len(stale) <= STALE_ALLOWED * len(MUTATIONS), "\n".join(stale)
    assert len({hand.what for hand in MUTATIONS}) == len(MUTATIONS) > 50


TOTAL = """def add(x, y=0):
    '''Add.'''
    if x > 100:
        return 100
    return x + y
"""
USER = """from mpcore.inner import add


class Twice:
    def __call__(self, x):
        return add(x, x)
"""
TINY = {
    "mpcore/__init__.py": "",
    "mpcore/inner/__init__.py": "from .total import add\n",
    "mpcore/inner/total.py": TOTAL,
    "mpcore/user.py": USER,
    "tests/__init__.py": "",
    "tests/test_total.py": "from mpcore.inner import add\ndef test_pitfall_03_04_add():\n    assert add(1, 2) == 3\n",
    "tests/test_user.py": "from mpcore.user import Twice\ndef test_twice():\n    assert Twice()(2) == 4\n",
    "tests/test_other.py": "def test_red():\n    assert False\n",
    "kernels_/fast.py": "def fast():\n    return 1\n",
}


@pytest.fixture
def tiny(tmp_path) -> Path:
    for name, text in TINY.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    (tmp_path / "tree" / "mpcore" / "kernels").symlink_to("../kernels_")
    return tmp_path / "tree"


def test_patterns_match_the_tree_and_not_the_text(tiny):
    project = Project(tiny)

    def change(definition: str, pattern: str, replacement: str) -> str:
        module, mutant = locate(project, Hand("", "", definition, pattern, replacement, "", ""))
        return " -> ".join(mutant.shown(project.texts[module]))

    assert change("add", "(x   +   y)", "x - y") == "return x + y -> return (x - y)"
    assert change("Twice.__call__", "add(ANY_1, ANY_1)", "add(ANY_1, 0)") == "return add(x, x) -> return (add(x, 0))"
    assert change("mpcore.user", "add(...)", "0") == "return add(x, x) -> return 0"
    assert change("total.add", "if ANY: ...", "pass").endswith("-> pass")
    for definition, pattern, words in (
        ("add", "x * y", "0 times"),
        ("add", "ANY_1 + ANY_1", "0 times"),
        ("mpcore.inner", "x", "2 times"),
        ("gone", "x", "no definition"),
    ):
        with pytest.raises(StaleError, match=words):
            change(definition, pattern, "0")


# --- the choice of tests, and what changed ----------------------------------------------------------------------------


def test_the_nearest_tests_come_first(tiny, project):
    small = Project(tiny)
    assert small.library() == ["mpcore", "mpcore.user", "mpcore.inner", "mpcore.inner.total", "mpcore.kernels.fast"]
    assert small.test_files("mpcore.inner.total", "add", 5) == ["tests.test_total", "tests.test_user"]
    assert small.test_files("mpcore.user", "Twice", 5) == ["tests.test_user"]
    assert small.named_tests("4", "mpcore.user", "Twice") == ["tests/test_total.py::test_pitfall_03_04_add"]
    assert pitfalls("test_pitfall_03_14_of_20_steps") == {"03", "3", "14"}
    unreached = [name for name in project.library() if not project.test_files(name, "", 4)]
    assert len(unreached) <= 0.1 * len(project.library()), unreached


def test_only_changed_lines_are_drawn_and_a_moved_file_has_none(tiny):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tiny, check=True, stdout=-3)

    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-qm", "all")
    git("mv", "mpcore/inner/total.py", "mpcore/moved.py")
    (tiny / "mpcore/user.py").write_text(TINY["mpcore/user.py"].replace("x, x", "x, x + 1"))
    (tiny / "mpcore/new.py").write_text("x = 1\ny = 2\n")
    assert changed_lines(tiny, "HEAD") == {Path("mpcore/user.py"): {6}, Path("mpcore/new.py"): {1, 2}}
    assert default_base(tiny) == "HEAD~1"
    with pytest.raises(ValueError, match="git knows no revision gone"):
        changed_lines(tiny, "gone")


# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_copy_of_the_tree_judges_a_change(tiny, tmp_path):
    source, path = TINY["mpcore/inner/total.py"], Path("mpcore/inner/total.py")
    copy = Copy(tiny, tmp_path / "copy")
    assert (copy.folder / "mpcore" / "kernels").is_symlink()
    tests = ["tests/test_total.py", "tests/test_user.py"]
    minus, bound = (next(m for m in candidates(source) if m.operator == name) for name in ("arithmetic", "compare"))
    killed = copy.judge(path, minus.applied(source), tests, 60)
    assert (killed.kind, killed.by) == ("killed", "tests/test_total.py::test_pitfall_03_04_add")
    assert copy.judge(path, bound.applied(source), tests, 60).kind == "survived"
    copy.passes["tests/test_other.py::test_red"] = False  # as its run without a change says
    assert copy.judge(path, source, ["tests/test_other.py"], 60).kind == "unsure"
    asleep = "import time\ntime.sleep(60)\n" + source
    assert copy.judge(path, asleep, tests, 0.5).kind == "timeout"
    assert (copy.folder / path).read_text() == (tiny / path).read_text() == source


def test_the_page_counts_what_can_be_killed(monkeypatch):
    monkeypatch.setitem(report.EQUIVALENT, ("f", "a < b", "a <= b"), "a never equals b")
    rows = [
        Row("seed 1", "compare", "f", "a < b", "a <= b", Verdict("survived")),
        Row("seed 1", "compare", "g", "a < b", "a <= b", Verdict("survived")),
        *(Row("seed 2", "constant", "h", str(i), str(i + 1), Verdict("killed", "test_h")) for i in range(3)),
        Row("seed 2", "constant", "h", "7", "8", Verdict("unsure", "test_h")),
    ]
    assert report.score(rows) == "75 % (30 to 95 %)"
    text = report.page("", {"drawn": report.section("drawn", "Drawn", "command", "today", rows)})
    assert "- equivalent, compare (`f`): `a < b` → `a <= b`. a never equals b." in text
    assert "- survived, compare (`g`): `a < b` → `a <= b`. not looked at yet." in text
    again = report.page(text, {"hand": report.section("hand", "By hand", "command", "today", rows[2:])})
    assert "(`g`)" in again
    assert report.page(again, {}) == again
    assert report.interval(0, 0) == (0.0, 1.0)
    low, high = report.interval(20, 20)
    assert 0.8 < low < high <= 1.0


def test_the_page_is_short_and_this_packages():
    text = (ROOT / "docs" / "mutations.md").read_text()
    assert text.startswith(report.HEAD)
    assert len(text.splitlines()) < 120
    assert "<!-- drawn -->" in text


def test_a_verdict_is_kept_until_its_definition_changes(tiny, tmp_path):
    path = tmp_path / "drawn.json"
    source = TINY["mpcore/inner/total.py"]
    mutant = next(m for m in candidates(source) if m.operator == "arithmetic")
    row = Row("seed 1", mutant.operator, mutant.definition, *mutant.shown(source), Verdict("killed", "test_x", 2.0))
    record = Record(path, Project(tiny))
    assert record.get("mpcore.inner.total", mutant) is None
    record.add("mpcore.inner.total", mutant, row)
    (tiny / "mpcore/inner/total.py").write_text(source + "\n\ndef more():\n    return 0\n")
    assert Record(path, Project(tiny)).get("mpcore.inner.total", mutant) == row
    (tiny / "mpcore/inner/total.py").write_text(source.replace("x > 100", "x > 99"))
    assert Record(path, Project(tiny)).get("mpcore.inner.total", mutant) is None


# --- which tests run a line -------------------------------------------------------------------------------------------


def test_a_line_names_its_fastest_tests_one_case_of_each_function_first(tmp_path, project):
    module, definition = "mpcore.layers.rope", "RotaryEmbedding.__init__"
    first, place = lines.first_line(project, module, definition), f"{project.paths[module]}:{definition}"
    case = "tests/layers/test_rope.py::test_tables_are_huggingfaces"
    other = "tests/layers/test_mlp.py::test_dense_is_the_formula"
    (tmp_path / "tests").write_text(f"1\t{case}[a]\t0.1\n2\t{case}[b]\t0.2\n3\t{other}\t0.3\n4\tgone.py::test_x\t0\n")
    (tmp_path / "7.lines").write_text("".join(f"{number}\t{place}\t5\n" for number in (1, 2, 3, 4, 9)))
    (tmp_path / "8.lines").write_text(f"3\t{place}\t9\n")
    found = lines.Lines(tmp_path / "lines.json")
    assert found.add(tmp_path) == 4

    def of(line: int, seconds: float = 9.0, name: str = definition) -> list[str]:
        return found.of(project, module, name, first + line, seconds)

    assert of(5) == of(8) == [f"{case}[a]", other, f"{case}[b]"]
    assert of(5, seconds=0.45) == [f"{case}[a]", other]
    assert of(9) == [other]
    assert of(5, name="rope_frequencies") == []


def test_each_line_that_a_test_runs_is_written_once(tmp_path):
    (tmp_path / "mpcore").mkdir()
    (tmp_path / "mpcore" / "sum.py").write_text(
        "def f(n):\n    total = 0\n    for i in range(n):\n        total += i\n    return total\n\n\nclass A:\n"
        "    def g(self):\n        return f(0)\n"
    )
    (tmp_path / "running").write_bytes(bytes(8))
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\nfrom tests.mutations import lines\n"
        f"import importlib.util\nfolder = Path({str(tmp_path)!r})\nnumber = lines.running(folder)\n"
        "spec = importlib.util.spec_from_file_location('sum', folder / 'mpcore' / 'sum.py')\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "lines.follow(str(folder), folder)\nnumber[0] = 1\nmodule.f(3)\nnumber[0] = 2\nmodule.A().g()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    (file,) = tmp_path.glob("*.lines")
    f = [f"{{}}\tmpcore/sum.py:f\t{at}" for at in (1, 2, 3, 4)]
    assert file.read_text().splitlines() == [
        *(each.format(1) for each in f), "2\tmpcore/sum.py:A.g\t1", *(f[i].format(2) for i in (0, 1, 3)),
    ]  # fmt: skip
