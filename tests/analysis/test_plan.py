"""The command `mpcore plan`: what it asks the search, and what it prints of its answer, by numbers."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from mpcore.tools import parsers
from mpcore.tools.analysis import plan
from mpcore.tools.analysis.command import parse, sizes_of
from mpcore.tools.analysis.machine import Machine, load_machine
from mpcore.tools.analysis.plan import main, what_if
from mpcore.tools.analysis.search import Estimate, choices, meshes, useful
from mpcore.tools.analysis.seconds import Seconds
from mpcore.tools.parsers import WIDE
from tests.test_plan import BUILD
from tests.test_plan import build as build_mlp

GIB = 2**30
H100 = load_machine("h100")


def estimate(step: float, memory: float, *arguments: str, **sizes: int) -> Estimate:
    return Estimate({"tp": 1, "pp": 1, "dp": 4} | sizes, arguments, int(memory * GIB), Seconds(step), spread=0.05)


FOUND = [estimate(1.0, 40), estimate(2.0, 30, "--zero", "3", tp=2), estimate(3.0, 35, pp=2), estimate(4.0, 20, tp=4)]
LARGE = estimate(1.0, 200)


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """Each call of the search, which answers with FOUND and a layout that is too large."""
    calls: list[dict[str, Any]] = []

    def search(
        counter: Any, machine: Machine, given: Any, layouts: Any, unfused: bool = False, each: Any = None
    ) -> list:
        handler = signal.getsignal(signal.SIGTERM)
        calls.append({"counter": counter, "machine": machine, "given": list(given), "layouts": list(layouts),
                      "unfused": unfused, "each": each, "handler": handler})  # fmt: skip
        return [*FOUND, LARGE]

    monkeypatch.setattr(plan, "search", search)
    return calls


def run(capsys: Any, *words: str) -> list[str]:
    main([BUILD, "--world", "4", *words])
    return capsys.readouterr().out.splitlines()


def test_the_search_gets_every_mesh_with_every_choice(asked, capsys):
    run(capsys, "--vary", "x=1,2", "--given", "7", "--tp", "1,2", "--ep", "2", "--cp-inner", "1")
    (call,) = asked
    cuts = list(meshes(4, 8, tp=[1, 2], ep=[2], cp_inner=[1]))
    assert call["layouts"] == useful((cut, option) for option in choices(["x=1,2"]) for cut in cuts)
    assert call["given"] == ["--given", "7"]
    assert (call["machine"], call["unfused"]) == (H100, False)
    assert call["counter"].build is build_mlp
    assert (call["counter"].stands_for_gpu, call["counter"].share) == (True, True)
    assert call["each"].of == len(call["layouts"])
    assert call["handler"] is signal.default_int_handler, "SIGTERM ends the search as Ctrl-C does"
    run(capsys, "--wide", "--vary", "x=1", "--cpu", "--unfused", "--node", "1", "--memory", "90", "--machine", "h200")
    call = asked[-1]
    assert call["layouts"] == useful((cut, o) for o in choices(["x=1", *WIDE]) for cut in meshes(4, 1))
    assert (call["counter"].stands_for_gpu, call["unfused"]) == (False, True)
    assert call["machine"] == load_machine("h200", memory=90 * GIB, node=1)


@pytest.mark.parametrize(("text", "sizes"), [("1", [1]), ("2,4,8", [2, 4, 8])])
def test_sizes_are_numbers_between_commas(text, sizes):
    assert parsers.plan().parse_args(["--tp", text]).tp == sizes
    for wrong in ("0", "2,0", "-1,4"):
        with pytest.raises(SystemExit):
            parsers.plan().parse_args([f"--tp={wrong}"])


@pytest.mark.parametrize(("change", "want"), [
    ("tau=3", {"tau": 3.0}), ("tau=0", {"tau": 0.0}), ("peak=2x", {"peak": 2 * H100.peak}), ("node=4", {"node": 4}),
    ("bandwidth=0.5x", {"bandwidth": H100.bandwidth / 2}), ("node=2x", {"node": 16}), ("memory=1e9", {"memory": 1e9}),
])  # fmt: skip
def test_a_rate_is_set_or_multiplied(change, want):
    found = what_if(H100, [change])
    assert found == replace(H100, **want)
    assert isinstance(found.node, int)
    assert what_if(H100, []) == H100
    assert what_if(H100, ["tau=3", "tau=2x"]).tau == 6


@pytest.mark.parametrize(("change", "message"), [
    *((change, f"{change} isn't of the form tau=2x or tau=NUMBER")
      for change in ("tau=-1", "tau=inf", "tau=nan", "tau=", "tau", "tau=x", "tau=2y", "tau=-2x")),
    *((f"{name}=2x", f"{name!r} is none of peak") for name in ("speed", "name", "sources", "")),
])  # fmt: skip
def test_a_change_of_another_form_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        what_if(H100, [change])


def test_the_words_of_a_target_are_handed_on():
    args = parse(parsers.memory, ["a:b", "--tp", "2", "--x", "1", "--rank", "3", "--cp-inner", "2"])
    assert sizes_of(args) == {"tp": 2, "cp": 1, "pp": 1, "ep": 1, "dp": 1, "etp": None, "cp_inner": 2}
    assert (args.target, args.rank, args.arguments, args.cpu, args.plot) == ("a:b", 3, ["--x", "1"], False, None)
    words = ["a:b", "--etp", "4", "--pp", "5", "--ep", "6", "--dp", "7", "--cp", "8"]
    assert sizes_of(parse(parsers.ledger, words)) == {
        "tp": 1, "cp": 8, "pp": 5, "ep": 6, "dp": 7, "etp": 4, "cp_inner": None,
    }  # fmt: skip
    assert parse(parsers.ledger, ["a:b"]).rank == 0
    assert not hasattr(parse(parsers.ledger, ["a:b"]), "plot"), "a ledger has no picture"
    with pytest.raises(SystemExit):
        parse(parsers.memory, [])
    with pytest.raises(SystemExit):
        parse(parsers.memory, ["a:b", "--tp", "two"])
