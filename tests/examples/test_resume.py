"""Where a run begins: which checkpoint it takes, what it refuses, and what it says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from examples.gpt import checkpoints as resume
from examples.gpt.arguments import parse
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.config import GPTConfig
from mpcore import Mesh

SAVED = {"model": dataclasses.asdict(GPTConfig()), "corpus": {"tokens": 5}, "optimizer": "adamw", "tokenizer": "byte"}


def manifest(dtypes: tuple = ("F32",), seed: int = 0, step: int = 4, config: Any = None) -> Any:
    tensors = {f"model/{i}": SimpleNamespace(dtype=dtype) for i, dtype in enumerate(dtypes)}
    tensors["optimizer/0"] = SimpleNamespace(dtype="F64")
    return SimpleNamespace(tensors=tensors, seed=seed, step=step, config=SAVED if config is None else config)


def test_two_configurations_differ_field_by_field():
    there, here = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": 5}, {"new": 6, "a": 1, "b": {"c": 3, "d": [1]}}
    assert resume.differing(there, here) == [
        "new is not set there, 6 here", "b.c is 2 there, 3 here", "gone is 5 there, not set here"
    ]  # fmt: skip
    assert resume.differing({"a": {"b": 1}}, {"a": None}) == ["a is {'b': 1} there, not set here"]
    assert resume.differing(there, there) == []


def refused(config: Any = None, about: Any = None, seed: int = 0, begun: bool = False, saved_seed: int = 0) -> str:
    with mock.patch.object(resume, "inspect", return_value=manifest(seed=saved_seed, config=config)):
        return str(resume.other_run(Path("there"), about or SAVED, seed, "float32", begun) or "")


def test_a_checkpoint_of_another_run_is_refused_by_its_fields():
    assert refused() == ""
    way = "--init-from there with another --out begins a new one from its weights"
    assert refused(seed=3) == f"there is of another run: seed is 0 there, 3 here. {way}"
    assert refused(saved_seed=3).startswith("there is of another run: seed is 3 there, 0 here.")
    other = {**SAVED, "optimizer": "muon", "model": {**SAVED["model"], "layers": 5}}  # type: ignore[dict-item]
    said = refused(about=other)
    begun = "If it began with --init-from, give that again: the shape comes from there."
    assert said == (
        "there is of another run: model.layers is 4 there, 5 here; optimizer is 'adamw' there, 'muon' here. "
        f"{begun} {way}"
    )
    assert begun not in refused(about=other, begun=True)
    assert begun not in refused(seed=3)
    older = {"model": {"layers": 4}, "corpus": {"tokens": 5}, "optimizer": "adamw"}
    assert refused(config=older) == "", "fields that came later have their defaults, and the tokenizer is this run's"
    with mock.patch.object(resume, "inspect", return_value=manifest(("F64",), seed=5)):
        found = str(resume.other_run(Path("there"), SAVED, 0, "float32", False))
    assert found.startswith("there has float64 weights"), "the dtype is told first"
    for error in (ValueError("damaged"), OSError("gone")):
        with mock.patch.object(resume, "inspect", side_effect=error):
            assert resume.other_run(Path("there"), SAVED, 1, "float32", False) is None


def opened(out: Path, flags: str = "", first: int = 0, found: tuple = (), lead: bool = True) -> list[dict]:
    made: Any = Checkpoints.__new__(Checkpoints)
    made.args, made.out, made.path, made.first_step = parse(flags.split()), out, out / "checkpoints", first
    made.mesh, made.console = Mesh(), SimpleNamespace(lead=lead)
    made.setup = SimpleNamespace(config=GPTConfig())
    made.own = lambda: list(found)
    with made.folder() as records:
        assert (out / ".lock").exists() == lead
        return records


def test_a_folder_gets_the_configuration_and_the_records_of_earlier_steps(tmp_path):
    out = tmp_path / "a" / "b"
    assert opened(out, "--lr 0.5") == []
    written = json.loads((out / "config.json").read_text())
    assert written == {"model": dataclasses.asdict(GPTConfig()), "run": vars(parse(["--lr", "0.5"]))}
    assert (out / "config.json").read_text().startswith('{\n  "model": {\n    "vocab_size": 257')
    assert sorted(path.name for path in out.iterdir()) == [".lock", "checkpoints", "config.json", "metrics.jsonl"]
    assert list((out / "checkpoints").iterdir()) == []
    (out / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    assert opened(out, first=2) == [{"step": 0}, {"step": 1}]
    assert (out / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    other = tmp_path / "c"
    opened(other, "--set no_save=true")
    assert not (other / "checkpoints").exists()
    (tmp_path / "d" / "checkpoints").mkdir(parents=True)
    assert opened(tmp_path / "d", lead=False) == []
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["checkpoints"]
