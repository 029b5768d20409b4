"""What a run reads, shows and leaves: a file of flags, lines and records, dashboards, a profile, what to do next."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from examples.gpt import console, generate
from examples.gpt.dashboards import numbers
from examples.gpt.pretrain import main
from mpcore.__main__ import main as mpcore
from tests.examples.test_flags import arguments


def run(flags: str, out: Path) -> list[dict]:
    """Train four steps, and return the records."""
    assert main(arguments(flags, out)) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_validation_loss_is_perplexity_and_bits_a_byte_too(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "bytes_of_token", lambda trainer: 2.5)
    (*_, last) = run("--eval-every 4 --set no_save=true", tmp_path)
    assert last["perplexity"] == pytest.approx(math.exp(last["val_loss"]), rel=1e-12)
    assert last["bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2) / 2.5, rel=1e-12)


def test_the_profile_has_the_steps_that_were_asked_for(tmp_path):
    run("--eval-every 0 --set no_save=true --set profile=1:2", tmp_path)
    (file,) = (tmp_path / "profile").iterdir()
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    products = sum(name == "aten::mm" for name in names)
    run("--eval-every 0 --set no_save=true --set profile=3:3", tmp_path)
    (file,) = (tmp_path / "profile").iterdir()
    one = sum(event["name"] == "aten::mm" for event in json.loads(file.read_text())["traceEvents"])
    assert products == 2 * one > 0


def tensorboard_of(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder)).Reload()
    return {
        (name, event.step): float(make_ndarray(event.tensor_proto))
        for name in events.Tags()["tensors"]
        for event in events.Tensors(name)
    }


def test_metrics_tensorboard_and_wandb_have_the_same_numbers(tmp_path):
    wandb = mock.MagicMock(__spec__=object())
    flags = "--eval-every 2 --set no_save=true --set log_to=tensorboard,wandb --experts 4 --set moe.d_ff=8"
    with mock.patch.dict(sys.modules, wandb=wandb):
        records = run(flags, tmp_path)
    nested = {"loss": 2.5, "experts": {"dropped": [0, 1], "of": None}, "word": "a"}
    assert list(numbers(nested)) == [("loss", 2.5), ("experts/dropped/0", 0), ("experts/dropped/1", 1)]
    expected = {(name, entry["step"]): value for entry in records for name, value in numbers(entry) if name != "step"}
    assert ("experts/dropped/0", 3) in expected
    assert ("val_loss", 3) in expected
    assert tensorboard_of(tmp_path / "tensorboard") == expected
    calls = wandb.init.return_value.log.call_args_list
    assert {(name, each.kwargs["step"]): value for each in calls for name, value in each.args[0].items()} == expected


def test_a_dashboard_without_its_package_is_refused(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *at: None if name == "wandb" else find(name, *at))
    with pytest.raises(SystemExit, match="log_to wandb needs the package wandb"):
        main(arguments("--set log_to=wandb", tmp_path))


def test_a_run_saves_its_end_and_says_how_to_go_on(tmp_path, capsys):
    run("--eval-every 0", tmp_path)
    said = dict(line.split(":  ", 1) for line in capsys.readouterr().out.splitlines() if ":  " in line)
    python, dash_m, module, *words = shlex.split(said["generate"])
    assert python == "python" or Path(python).samefile(sys.executable)
    assert (dash_m, module) == ("-m", "examples.gpt.generate")
    assert generate.main([*words, "--new-tokens", "3"]) == 0
    told = shlex.split(said["export"])
    assert told[:3] == [python, "-m", "mpcore"]
    assert mpcore(told[3:]) == 0
    assert (tmp_path / "hugging_face" / "config.json").is_file()
    assert "--resume auto" in said["train on"]
    capsys.readouterr()
    assert main(arguments("--eval-every 0 --steps 6 --resume auto", tmp_path)) == 0
    assert "resumed after step 4" in capsys.readouterr().out
