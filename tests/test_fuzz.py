"""Random inputs of functions: each result equals its definition, or is an error message."""

from __future__ import annotations

import pytest

from tests import fuzz_functions


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
