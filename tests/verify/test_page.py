"""The table and the picture of `mpcore verify`, and its command line."""

from __future__ import annotations

import math
import types

import pytest
import torch

from mpcore.tools.verify import __main__ as command
from mpcore.tools.verify.judge import STAGES, Mismatch, Verdict
from mpcore.tools.verify.page import draw, result

RIGHT = Verdict("tp2", dict.fromkeys(STAGES, 0.0) | {"gradient": 12.345}, {"w": 1.5, "b": 0.0})
WRONG = Verdict("dp2zero3x", {"loss": math.inf}, {"b": 7e15, "w": 2e4}, Mismatch("gradient", "b", 7e15, "a < b"))
FAILED = Verdict("cp2", error="lost & gone")
ALL = [RIGHT, WRONG, FAILED]


def test_a_result_is_one_of_three_words():
    assert [result(verdict) for verdict in ALL] == ["equal", "DIFFERS", "FAILED"]


def test_the_picture_is_drawn(tmp_path):
    draw(ALL, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


MODEL = "tests.verify_models:Encoder"


def test_the_functions_of_a_module_are_found_by_their_names(monkeypatch):
    module = types.ModuleType("told")
    module.__dict__.update(build=len, other=sum, batch=lambda: {"x": 1})
    monkeypatch.setitem(command.sys.modules, "told", module)
    assert command.find("told") == (len, {"x": 1}, None)
    assert command.find("told:other") == (sum, {"x": 1}, None)
    module.__dict__["loss"] = max
    assert command.find("told:build") == (len, {"x": 1}, max)


def test_a_command_with_two_models_or_none_is_refused(capsys):
    for wrong in ([], [MODEL, "--hf", "there"], [MODEL, "--set", "a=1"]):
        assert command.main(wrong) == 2
        assert "give either package.module:build, or --hf PATH, and --set with --hf alone" in capsys.readouterr().err


def test_the_loss_of_tokens_is_the_sum_of_their_cross_entropies():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    target = torch.tensor([[0, 4, 2], [1, 1, 3]])
    want = sum(-logits[b, t, target[b, t]] + logits[b, t].exp().sum().log() for b in range(2) for t in range(3))
    assert command.token_loss({"logits": logits}, target, None).item() == pytest.approx(float(want))  # type: ignore[arg-type]
