"""The mutator: it draws the same changes for a seed, each means something, and a copy of the tree judges them."""

from __future__ import annotations

import ast
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutations import report
from tests.mutations.choice import Project, changed_lines, default_base, pitfalls
from tests.mutations.hand import MUTATIONS
from tests.mutations.lines import Lines, branch, scopes
from tests.mutations.operators import Mutant, candidates, changes_something
from tests.mutations.patterns import Hand, StaleError, locate
from tests.mutations.record import Record
from tests.mutations.report import Row
from tests.mutations.trial import Verdict, copies

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


def test_a_seed_draws_the_same_changes_however_others_change(project):
    def drawn(names: list[str], texts: dict[str, str], seed: int = 5) -> list[tuple[str, Mutant]]:
        pool = [(name, m) for name in names for m in candidates(texts[name])]
        return sorted(pool, key=lambda each: each[1].turn(seed, each[0], texts[each[0]]))

    def keys(draws: list[tuple[str, Mutant]], texts: dict[str, str]) -> list[str]:
        return [m.key(name, texts[name]) for name, m in draws if m.definition != "added"]

    modules = random.Random(0).sample(project.library(), 4)
    draws = drawn(modules, project.texts)
    more = {name: f"def added(x):\n    return x + 1\n\n\n{project.texts[name]}" for name in modules}
    assert keys(drawn(modules, more), more) == keys(draws, project.texts) != []
    assert keys(drawn(modules[1:], project.texts), project.texts) == keys(
        [each for each in draws if each[0] != modules[0]], project.texts
    )
    assert draws != drawn(modules, project.texts, 6)
    for name, mutant in draws[:9]:
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


def test_a_copy_of_the_tree_judges_a_change(tiny, tmp_path):
    source, path = TINY["mpcore/inner/total.py"], Path("mpcore/inner/total.py")
    tests = ["tests/test_total.py", "tests/test_user.py::test_twice"]
    minus, bound = (next(m for m in candidates(source) if m.operator == name) for name in ("arithmetic", "compare"))
    (tiny / "tests/test_daemon.py").write_text(  # it leaves a process in a session of its own
        "import os\ndef test_daemon():\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n        import time; time.sleep(60)\n"
        f"    while not os.path.exists({str(tmp_path / 'pid')!r}): pass\n"
    )
    with copies(tiny, 1) as (copy,):
        assert (copy.folder / "mpcore" / "kernels").is_symlink()

        def kind(changed: str, *tests: str, limit: float = 20) -> str:
            return copy.judge(path, changed, tests, limit).kind

        cases = "import pytest\nfrom mpcore.inner import add\n@pytest.mark.parametrize('x', [0, 1])\n"
        (copy.folder / "tests/test_cases.py").write_text(f"{cases}def test_add(x):\n    assert add(1, x) == 1 + x\n")
        killed = copy.judge(path, minus.applied(source), ["tests/test_cases.py::test_add"], 20)  # a test with its cases
        assert (killed.kind, killed.by) == ("killed", "tests/test_cases.py::test_add[1]")
        killed = copy.judge(path, minus.applied(source), tests, 20)
        assert (killed.kind, killed.by) == ("killed", "tests/test_total.py::test_pitfall_03_04_add")
        assert kind(bound.applied(source), *tests) == "survived"
        assert kind(source, "tests/test_other.py") == "unsure"  # which fails without a change
        assert kind(source, "tests/test_other.py", *tests) == "survived"
        assert kind(source.replace("return x + y", "import os; os._exit(0)"), *tests) == "killed"
        assert kind("def add(\n", *tests) == "killed"
        assert kind(source.replace("return x + y", "while True: pass"), *tests, limit=0.1) == "timeout"
        assert (copy.folder / path).read_text() == (tiny / path).read_text() == source
        assert copy.run(["tests/test_daemon.py"], [], 20)["end"] == "ended"
        assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
        (ended,) = copy.warm.values()
    assert ended.poll() is not None


def test_the_page_counts_what_can_be_killed(monkeypatch):
    monkeypatch.setitem(report.EQUIVALENT, ("f", "a < b", "a <= b"), "a never equals b")
    rows = [
        Row("seed 1", "compare", "f", "a < b", "a <= b", Verdict("survived")),
        Row("seed 1", "compare", "g", "a < b", "a <= b", Verdict("survived")),
        *(Row("seed 2", "constant", "h", str(i), str(i + 1), Verdict("killed", "test_h")) for i in range(3)),
        Row("seed 2", "constant", "h", "7", "8", Verdict("unsure", "test_h")),
    ]
    assert report.score(rows) == "75 % (30 to 95 %)"
    since = [*rows, Row("seed 3", "constant", "i", "1", "2", Verdict("killed", "test_i"), "survived")]
    assert (report.score(since, at_first=True), report.score(since)) == ("60 % (23 to 88 %)", "80 % (38 to 96 %)")
    assert report.table(since)[-1] == (
        "| all | 7 | 3 | 1 | 1 | 0 | 1 | 1 | 0 | 60 % (23 to 88 %) | 80 % (38 to 96 %) |"
    )
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
    path.unlink()
    record = Record(path, Project(tiny))
    record.add("mpcore.inner.total", mutant, row._replace(verdict=Verdict("survived")))
    record.add("mpcore.inner.total", mutant, row, late=True)
    assert Record(path, Project(tiny)).get("mpcore.inner.total", mutant) == row._replace(first="survived")
    (tiny / "mpcore/inner/total.py").write_text(source.replace("x > 100", "x > 99"))
    assert Record(path, Project(tiny)).get("mpcore.inner.total", mutant) is None


# --- which tests run a line -------------------------------------------------------------------------------------------


USES = """LIMIT = 3


class Kept:
    size: int = 2

    def get(
        self, x=0
    ):
        if x > LIMIT:
            y = x
            return y
        return self.size


def other():
    return 4
"""


@pytest.mark.parametrize(
    ("line", "first"), [(11, [11]), (10, [10]), (8, [10, 11, 12, 13]), (1, [10]), (5, [13]), (17, [17])]
)
def test_the_lines_whose_tests_may_see_a_change(line, first):
    found = next(filter(None, scopes(ast.parse(USES), line)))
    assert found == first
    assert sorted(list(scopes(ast.parse(USES), line))[-1]) == [10, 11, 12, 13, 17]


def test_tests_that_enter_the_body_of_an_if_are_those_of_its_lines():
    assert branch(ast.parse(USES), 10) == [11, 12]
    assert branch(ast.parse(USES), 11) == branch(ast.parse(USES), 13) == []


def test_coverage_names_the_fastest_tests_of_a_line_one_case_of_each_function_first(tiny, tmp_path, monkeypatch):
    source = TINY["mpcore/inner/total.py"]
    (tiny / "tests/test_more.py").write_text(
        "import os, threading, pytest\nfrom mpcore.inner import add\n\n"
        "@pytest.mark.parametrize('x', [1, 200])\ndef test_add(x):\n    add(x, x)\n\n"
        "def test_in_a_thread():\n    thread = threading.Thread(target=add, args=(1, 1))\n"
        "    thread.start()\n    thread.join()\n\n"
        "def test_red():\n    add(200, 0)\n    assert False\n\ndef test_end():\n    os._exit(0)\n\n"
        "def test_after():\n    add(200, 1)\n\n"
        "def test_in_a_process():\n    import subprocess, sys\n"
        "    code = 'import os; from mpcore.inner import add; add(200, 1); os._exit(0)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    found = Lines(tmp_path / "lines")
    with copies(tiny, 1) as (copy,):
        assert found.record(copy, "tests/test_more.py", 20, words=()) == "5 tests, died ended"
        (tiny / "tests/test_total.py").rename(copy.folder / "tests/test_more.py")
        again = Lines(shutil.copytree(tmp_path / "lines", tmp_path / "again"))
        again.record(copy, "tests/test_more.py", 20, words=())
        assert {*again.of_file("mpcore/inner/total.py")[5]} == {"tests/test_more.py::test_pitfall_03_04_add"}
    found = Lines(tmp_path / "lines")
    seconds = found.seconds["tests/test_more.py"]
    one, many, thread, after, process = seconds
    assert [name.partition("::")[2] for name in seconds] == [
        "test_add[1]", "test_add[200]", "test_in_a_thread", "test_after", "test_in_a_process",
    ]  # fmt: skip
    project = Project(tiny)

    def of(operator: str, budget: float = 9.0) -> list[str]:
        mutant = next(m for m in candidates(source) if m.operator == operator)
        return found.tests(project, "mpcore.inner.total", mutant, budget)

    for test, cost in zip(seconds, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True):
        found.known[test] = cost
    assert of("arithmetic") == [one, thread]
    assert of("early return removed") == [many, after, process]
    assert of("compare") == [many, after, process, thread, one]
    assert of("default", 0.45) == [one, thread]
    monkeypatch.setattr("tests.mutations.lines.NEAR", 0)
    found.known = {"tests/test_far.py::test_a": 0.1, "tests/inner/test_near.py::test_b": 0.2}  # beside mpcore/inner
    found.of_file = lambda path: {number: list(found.known) for number in range(1, 9)}
    assert of("arithmetic") == ["tests/inner/test_near.py::test_b", "tests/test_far.py::test_a"]
    found.known = {
        f"tests/test_far.py::test_a[{case}]": cost for case, cost in (("0", 0.1), ("1", 0.2), ("return", 0.3))
    }
    first, other, named = found.known
    assert of("arithmetic") == [named, first, other]  # the line is `return x + y`
