"""Folders of Hugging Face: which tensor lies where, which files are written, what goes along, what is refused."""

from __future__ import annotations

import json
import zlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpcore.interop.hugging_face import loading, writing
from mpcore.interop.hugging_face.extra_files import ExtraFiles, carried_by_hf, tokenizer_files
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


def write(tmp_path, limit, **sizes):
    likes = {key: torch.empty(n, device="meta") for key, n in sizes.items()}
    order = []
    writing.write_weights(tmp_path, likes, lambda key: order.append(key) or torch.full((sizes[key],), 1.0), limit)
    assert order == list(sizes)
    return {path.name: sorted(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))}


def test_files_have_a_limited_size(tmp_path):
    for name, limit, found in (
        ("one", 40, {"model.safetensors": ["a", "b", "c"]}),
        ("full", 24, {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}),
        ("each", 1, {f"model-0000{i}-of-00003.safetensors": [key] for i, key in enumerate("abc", 1)}),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        assert write(tmp_path / name, limit, a=2, b=4, c=4) == found
        index = tmp_path / name / "model.safetensors.index.json"
        assert index.exists() == (len(found) > 1)
        if index.exists():
            where = {key: file for file, keys in found.items() for key in keys}
            assert json.loads(index.read_text()) == {"metadata": {"total_size": 40}, "weight_map": where}
    assert writing.SHARD_BYTES == 5_000_000_000


def test_what_goes_along_with_a_model(tmp_path):
    values = {"model_type": "x", "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None, "hidden_size": 3}
    (tmp_path / "tokenizer.json").write_bytes(b"tok")
    (tmp_path / "merges.txt").write_bytes(b"m")
    (tmp_path / "README.md").write_bytes(b"r")
    found = carried_by_hf(tmp_path, values)
    assert found == ExtraFiles(
        {"model_type": "x", "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None},
        {"tokenizer.json": b"tok", "merges.txt": b"m"},
    )
    sums = {"tokenizer.json": zlib.crc32(b"tok"), "merges.txt": zlib.crc32(b"m")}
    assert found.extra == {"hugging_face": {"config": found.config, "files": sums}}
    assert found.beside == {"hugging_face/tokenizer.json": b"tok", "hugging_face/merges.txt": b"m"}
    assert ExtraFiles().extra == {}
    assert ExtraFiles({"a": 1}).extra == {"hugging_face": {"config": {"a": 1}, "files": {}}}
    assert ExtraFiles({}, {"merges.txt": b""}).extra == {"hugging_face": {"config": {}, "files": {"merges.txt": 0}}}
    assert tokenizer_files(tmp_path) == found.files
    (tmp_path / "t").write_bytes(b'{"model": {}}')
    assert tokenizer_files(tmp_path / "t") == {"tokenizer.json": b'{"model": {}}'}
    (tmp_path / "tekken.json").write_bytes(b'{"config": {}, "vocab": []}')
    for name in ("merges.txt", "tekken.json"):  # of other kinds of tokenizers
        with pytest.raises(ValueError, match=name):
            tokenizer_files(tmp_path / name)
    for path in (tmp_path / "none", tmp_path / "README"):
        with pytest.raises(
            ValueError, match=f"^{path} is no tokenizer.json, and no folder with one of tokenizer.json, "
        ):
            tokenizer_files(path)


@pytest.mark.parametrize(
    ("config", "files", "given", "found"),
    [
        ({"eos_token_id": 7}, {"tokenizer.json": b"t"}, (b"t", 9, "<e>"),
         ({"eos_token_id": 7}, {"tokenizer.json": b"t"})),
        ({"a": 1}, {"tokenizer.json": b"t"}, (b"t", 9), ({"bos_token_id": None, "eos_token_id": 9, "a": 1},
                                                        {"tokenizer.json": b"t"})),
        ({"bos_token_id": 3}, {"tokenizer.json": b"t"}, (b"t", 9), ({"bos_token_id": 3, "eos_token_id": 9},
                                                                  {"tokenizer.json": b"t"})),
        ({"eos_token_id": 7}, {"tokenizer.json": b"t"}, (b"u", 9), ({"bos_token_id": None, "eos_token_id": 9}, {})),
        ({"eos_token_id": 7}, {"tokenizer.json": b"t"}, (None, 9, "<e>"),
         ({"bos_token_id": None, "eos_token_id": 9}, {})),
        ({"eos_token_id": 7}, {}, (None, 9), ({"eos_token_id": 7}, {})),
        ({}, {}, (None, 9), ({"bos_token_id": None, "eos_token_id": 9}, {})),
    ],
)  # fmt: skip
def test_a_model_that_trains_with_a_tokenizer_keeps_its_own_alone(config, files, given, found):
    assert ExtraFiles(config, files).with_tokenizer(*given) == ExtraFiles(*found)


def test_another_tokenizer_is_named_as_transformers_reads_it():
    made = ExtraFiles({"eos_token_id": 7}, {"tokenizer.json": b"t", "merges.txt": b"m"}).with_tokenizer(b"u", 9, "<e>")
    assert made.config == {"bos_token_id": None, "eos_token_id": 9}
    assert made.files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert made.files["tokenizer.json"] == b"u"
    assert json.loads(made.files["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"
    }  # fmt: skip


def test_names_in_files_with_and_without_the_models_prefix(tmp_path):
    dense = SimpleNamespace(base_model_prefix="model")
    group = Group(["model.a"], {"model.a": torch.empty(1), "b": torch.empty(1)}, False)
    for where, found in (
        ({"model.a", "b"}, ("model.a", "b")), ({"a", "b"}, ("a", "b")),
        ({"model.a", "model.b"}, ("model.a", "model.b")),
        ({"a", "model.a", "b", "model.b"}, ("model.a", "b")), ({"model.model.a", "b"}, ("model.model.a", "b")),
    ):  # fmt: skip
        keys = loading._keys(tmp_path, dense, group, dict.fromkeys(where, "f"))
        assert keys == {"model.a": found[0], "b": found[1]}
    with pytest.raises(
        ValueError, match=f"^{tmp_path} has no tensor 'b', which model.a needs: if transformers can open"
    ):
        loading._keys(tmp_path, dense, group, {"a": "f"})
