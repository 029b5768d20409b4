"""Where a run begins: which checkpoint it takes, what it refuses, and what it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from examples.gpt import checkpoints as resume
from examples.gpt.config import GPTConfig

SAVED = {"model": dataclasses.asdict(GPTConfig()), "corpus": {"tokens": 5}, "optimizer": "adamw", "tokenizer": "byte"}


def manifest(dtypes: tuple = ("F32",), seed: int = 0, step: int = 4, config: Any = None) -> Any:
    tensors = {f"model/{i}": SimpleNamespace(dtype=dtype) for i, dtype in enumerate(dtypes)}
    tensors["optimizer/0"] = SimpleNamespace(dtype="F64")
    return SimpleNamespace(tensors=tensors, seed=seed, step=step, config=SAVED if config is None else config)


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
