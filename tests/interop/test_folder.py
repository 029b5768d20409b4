"""Folders of Hugging Face: which tensor lies where, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mpcore.interop.hugging_face import loading
from mpcore.interop.hugging_face.folder import open_files
from mpcore.interop.hugging_face.stored import Group


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {}}, "has no weight_map of file names$"), ({}, "has no weight_map of file names$"),
        ({"weight_map": ["a"]}, "has no weight_map"), ({"weight_map": {"a": 3}}, "has no weight_map"),
        ({"weight_map": {"a": "../m.safetensors"}}, r"names '../m.safetensors', which is no safetensors file of"),
        ({"weight_map": {"a": "model.bin"}}, "names 'model.bin', which is no safetensors file of this folder$"),
        ({"weight_map": {"a": "other.safetensors"}}, "other.safetensors is missing$"),
        ({"weight_map": {"b": "one.safetensors"}}, "says that b is in one.safetensors, which does not hold it$"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_its_files(index, message, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        open_files(tmp_path)


def test_files_are_opened_with_an_index_or_as_one(tmp_path):
    with pytest.raises(ValueError, match=r"model.safetensors is missing$"):
        open_files(tmp_path)
    (tmp_path / "b.bin").write_bytes(b"")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds its weights as pickles \(a.bin\), which run code when they are read"):
        open_files(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    files, where = open_files(tmp_path)
    assert (list(files), where) == (["model.safetensors"], {"a": "model.safetensors"})
    for name in ("x", "y"):
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    names = {name: f"{name}.safetensors" for name in "yx"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    files, where = open_files(tmp_path)
    assert (list(files), where) == (["model.safetensors"], {"a": "model.safetensors"})  # transformers reads it, too
    (tmp_path / "model.safetensors").unlink()
    files, where = open_files(tmp_path)
    assert (list(files), where) == (["x.safetensors", "y.safetensors"], names)


def test_names_in_files_with_and_without_the_models_prefix(tmp_path):
    dense = SimpleNamespace(base_model_prefix="model")
    group = Group(["model.a"], {"model.a": torch.empty(1), "b": torch.empty(1)}, False)
    for where, found in (
        ({"model.a", "b"}, ("model.a", "b")), ({"a", "b"}, ("a", "b")),
        ({"model.a", "model.b"}, ("model.a", "model.b")),
        ({"a", "model.a", "b", "model.b"}, ("model.a", "b")), ({"model.model.a", "b"}, ("model.model.a", "b")),
    ):  # fmt: skip
        assert loading._keys(tmp_path, dense, group, dict.fromkeys(where, "f")) == {"model.a": found[0], "b": found[1]}
    with pytest.raises(
        ValueError, match=f"^{tmp_path} has no tensor 'b', which model.a needs: if transformers can open"
    ):
        loading._keys(tmp_path, dense, group, {"a": "f"})
