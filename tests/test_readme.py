"""README is held to its word: its program, its commands, its names and its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpcore as mp
from mpcore.__main__ import COMMANDS
from tests.test_docs import check_code

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(PRINTED,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)


def test_its_program_prints_what_it_shows(capsys):
    exec(PROGRAM, {"__name__": "readme"})
    assert capsys.readouterr().out == PRINTED


def train_as_a_process(tp: int) -> list[float]:
    held: dict = {"__name__": "readme"}
    exec(PROGRAM.partition("\nfor sizes")[0], held)
    return held["train"](mp.build_mesh(tp=tp))


@pytest.mark.parametrize(("size", "tp"), [(2, 2), (4, 2)])
def test_its_program_has_the_same_losses_as_a_process_for_each_rank(ranks, size, tp):
    shown = [float(loss) for loss in PRINTED.splitlines()[0].split()[1:]]
    for losses in ranks(size, train_as_a_process, tp):
        assert losses == pytest.approx(shown, abs=1e-4)


def words(column: int) -> list[str]:
    table = README.partition("| what you want |")[2].partition("\n\n")[0].splitlines()[2:]
    return [code for line in table for code in re.findall("`([^`]+)`", line.strip("|").split(" | ")[column])]


def test_what_it_tells_to_write_exists():
    told = words(1)
    assert len(told) >= 15
    for code in told:
        if code.startswith("mpcore "):
            assert code.split()[1] in COMMANDS
        elif code.startswith("sbatch "):
            assert code in (ROOT / "docs" / "launch.md").read_text()
        elif not code.startswith("srun"):
            check_code(code)


def test_its_make_targets_exist():
    targets = set(re.findall(r"\bmake (\w+)", README))
    assert {"pretrain", "test", "docs"} <= targets
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


NOTICED = "records/2026-11-26_mutations.md"


@pytest.mark.parametrize(("claim", "page", "source"), [
    (r"Of (\d+) Hugging Face causal models, (\d+)", "families.md", r"\| causal \|(?:[^|]+\|){5} (\d+) of (\d+) \|"),
    (r"noticed (\d+) of (\d+):", "records/2026-11-26_mutations.md",
     r"\| all \| \d+ \| (\d+) \| (\d+) \| (\d+) \| \d+ \|\n"),
    (r"(\d+) kinds of faults", "records/2026-11-21_reliability.md", None),
])  # fmt: skip
def test_its_numbers_are_those_of_the_pages(claim, page, source):
    (said,) = re.findall(claim, README)
    text = (ROOT / "docs" / page).read_text()
    if page.endswith("_reliability.md"):
        assert int(said) == len(re.findall(r"^\| \d+ \|", text, re.MULTILINE))
        return
    found = [int(number) for number in re.search(source, text).groups()]
    noticed = page == NOTICED  # killed at first, killed since and survived there, noticed of all here
    assert [int(number) for number in said] == ([found[0] + found[1], sum(found)] if noticed else found[::-1])


def test_every_test_that_is_named_exists():
    proofs = (ROOT / "docs" / "proofs.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", proofs)
    assert len(named) > 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_file_that_is_linked_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```|`[^`\n]+`(?!\])", "", page.read_text(), flags=re.DOTALL)  # in code, f[i](x) is a call
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
