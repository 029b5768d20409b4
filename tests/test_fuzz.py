"""Flags drawn at random: what `python -m tests.fuzz` tries by the hundred, a few of them."""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mpcore.tools.preflight import FAILED, OK, Result
from tests import fuzz, fuzz_functions, preflight_trial
from tests.fuzz import COMMON, commands, draw, judge, main, shrink, spoil, words_of

SMALL = [*COMMON, "--layers", "1", "--d-model", "16", "--seq-len", "12", "--global-batch", "4"]


@pytest.fixture(autouse=True)
def forgets_what_one_process_computes():
    yield
    fuzz.dense.cache_clear()


def test_a_legal_case_is_equal_and_an_illegal_one_refused_in_words(capsys):
    assert judge(2, [*SMALL, "--tp", "2"]) == ("equal", "")
    kind, why = judge(2, [*SMALL, "--tp", "2", "--heads", "1"])
    assert (kind, why) == ("refused", "--heads 1 is smaller than the tp size 2")
    kind, why = judge(1, [*SMALL, "--layers", "two"])
    assert kind == "refused"
    assert "--layers: invalid int value: 'two'" in why
    assert main(["--illegal", "--cases", "3", "--seed", "3"]) == 0
    assert " 0 failed" in capsys.readouterr().out


def test_a_rank_that_computes_something_else_fails_and_the_command_is_shrunk(monkeypatch):
    words = [*SMALL, "--tp", "2", "--kv-heads", "2"]
    real = fuzz.train
    monkeypatch.setattr(
        fuzz, "train", lambda args, twin=0: {**(found := real(args, twin)), "numbers": [
            x * (1 if args.tp == 1 else 1 + 1e-6) for x in found["numbers"]]},
    )  # fmt: skip
    kind, why = judge(2, words)
    assert kind == "failed"
    assert "number 0 is off by 1e-06" in why
    monkeypatch.setattr(
        fuzz, "judge", lambda world, words: ("failed" if {"--tp", "--kv-heads"} <= {*words} else "equal", "")
    )
    assert shrink(2, words) == ["--tp", "2", "--kv-heads", "2"]


def test_other_errors_than_refusals_are_failures(monkeypatch):
    def broken(*_: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(fuzz, "train", broken)
    assert judge(1, []) == ("failed", "IndexError: list index out of range")


def test_a_limit_is_of_processor_time():
    with fuzz.limited(0.05):
        time.sleep(0.2)
    with pytest.raises(TimeoutError, match="not done after"), fuzz.limited(0.05):
        sum(iter(lambda: 0, 1))
    with pytest.raises(TimeoutError, match="it stands still"), fuzz.limited(0.05):
        time.sleep(5)


@pytest.mark.parametrize(("far", "kind"), [(5e-7, "equal"), (1e-4, "failed"), (float("nan"), "failed")])
def test_a_case_may_be_as_far_off_as_roundings_that_its_model_blows_up(monkeypatch, far, kind):
    def trained(args: argparse.Namespace, twin: int = 0) -> dict[str, Any]:
        return {"numbers": [2 * (1 + (far if args.tp == 2 else 1e-8 * twin))], "state": {}}

    monkeypatch.setattr(fuzz, "train", trained)
    assert judge(2, [*SMALL, "--tp", "2"])[0] == kind


def test_what_one_process_refuses_all_ranks_must_refuse_with_the_same_words(monkeypatch):
    words = [*SMALL, "--tp", "2", "--heads", "1"]
    assert judge(2, words, ranks_refuse=False) == judge(2, words)
    monkeypatch.setattr(fuzz, "refusal", lambda world, args: "something else is wrong")
    assert judge(2, words)[0] == "failed"
    assert judge(2, [*SMALL, "--tp", "2"]) == (
        "failed",
        "the ranks train what one process refuses: something else is wrong",
    )


def test_cases_depend_on_their_seed_alone():
    assert draw(5) == draw(5) != draw(6)
    world, words = draw(5)
    assert 1 <= world <= 8
    assert spoil(5, words) == spoil(5, words) != words
    assert words_of(commands(words)) == words


def test_the_trial_of_preflight_goes_on_after_its_record(monkeypatch, tmp_path, capsys):
    tried: list[str] = []

    def checks(program: str, flags: list[str], *_: object) -> Any:
        tried.append(" ".join(flags[:-2]))
        return SimpleNamespace(checks=lambda: [None])

    def results(_: object) -> list[Result]:
        if len(tried) % 3 == 1:
            return [Result("flags", FAILED, "they don't fit")]
        return [Result("flags", OK, ""), Result("data", FAILED if len(tried) == 5 else OK, "an alarm")]

    monkeypatch.setattr(preflight_trial, "Preflight", checks)
    monkeypatch.setattr(preflight_trial, "run_checks", results)
    record = tmp_path / "record.json"
    assert preflight_trial.main(["--valid", "2", "--seed", "7", "--record", str(record)]) == 0
    assert preflight_trial.main(["--valid", "2", "--seed", "0", "--record", str(record)]) == 1
    assert tried == [" ".join(preflight_trial.draw(seed)) for seed in range(7, 13)]
    found = json.loads(record.read_text())
    assert (found["next_seed"], found["refused"], found["alarms"], len(found["seconds"])) == (13, 2, [11], 4)
    assert "1 alarms in 4 valid commands; 2 others don't fit" in capsys.readouterr().out


@pytest.mark.parametrize("kind", fuzz_functions.KINDS)
def test_cases_of_functions_hold(kind):
    for seed in range(4 if kind == "plan" else 20):
        assert fuzz_functions.run(kind, seed)[0] != "failed"


def test_a_function_that_is_wrong_fails_its_cases(monkeypatch, capsys):
    monkeypatch.setattr(fuzz_functions, "partition", lambda *_, **__: [range(1)])
    assert fuzz_functions.main(["--kind", "partition", "ramp", "--cases", "5"]) == 1
    assert "10 cases, 5 failed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_cases_of_functions():
    assert fuzz_functions.main(["--cases", "800", "--seed", "50000"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--illegal"]], ids=["legal", "illegal"])
@pytest.mark.timeout(1800)
def test_two_hundred_cases(more):
    assert main(["--cases", "200", "--seed", "20000", *more]) == 0
