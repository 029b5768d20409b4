import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.gpt.tokenizer import ByteTokenizer, load_tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log, and the cat on the dog", "naïve café, 猫と犬"]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def trained_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.json"
    train_tokenizer(TEXTS * 20, 290, path)
    return path


@pytest.fixture(scope="module")
def trained(trained_path):
    return load_tokenizer(trained_path)


@given(any_text)
def test_bytes_round_trip(text):
    byte = ByteTokenizer()
    ids = byte.encode(text)
    assert ids.tolist() == list(text.encode())
    assert byte.decode(ids) == byte.decode([*ids.tolist(), byte.end_of_document]) == text


@given(text=any_text)
@settings(max_examples=50)
def test_trained_tokenizer_round_trips_any_text(trained, text):
    ids = trained.encode(text)
    assert ids.dtype == np.int32
    assert trained.decode(ids) == trained.decode([*ids, trained.end_of_document]) == text
    assert trained.end_of_document not in ids


def test_training_learns_merges_and_is_repeatable(trained, trained_path, tmp_path):
    assert trained.vocab_size == 290
    assert len(trained.encode("the cat")) < len("the cat")
    again = train_tokenizer(iter(TEXTS * 20), 290, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == trained_path.read_bytes()
    assert again.fingerprint == trained.fingerprint != ByteTokenizer().fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["again.json"]


def test_a_document_that_quotes_the_end_of_document_does_not_end_there(trained):
    text = "a <|endoftext|> b"
    assert trained.end_of_document not in trained.encode(text)
    assert trained.decode(trained.encode(text)) == text


def _write(path, vocabulary, added=()):
    content = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    content["added_tokens"] = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for name, i in added
    ]
    content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["padding"] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                          "pad_type_id": 0, "pad_token": "a"}  # fmt: skip
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_finds_the_end_of_document(tmp_path, name):
    path = _write(tmp_path / "tokenizer.json", {"a": 0, "b": 1, name: 9}, [(name, 9)])
    found = load_tokenizer(str(path))
    assert found.end_of_document == 9
    # Ids 2 to 8 are a gap: the embedding needs rows up to 9 all the same.
    assert found.vocab_size == 10
    # The file's own truncation to 2 tokens must not cut documents, and its padding to 8 must not lengthen them.
    assert found.encode("ababa").tolist() == [0, 1, 0, 1, 0]


def test_an_unusual_end_of_document_is_asked_for_and_taken_by_name(tmp_path):
    path = _write(tmp_path / "tokenizer.json", {"a": 0, "b": 1})
    with pytest.raises(ValueError, match="end_of_document"):
        load_tokenizer(path)
    assert load_tokenizer(path, end_of_document="b").end_of_document == 1
    with pytest.raises(ValueError, match="none of zzz"):
        load_tokenizer(path, end_of_document="zzz")
    with pytest.raises(ValueError, match="among the 0 tokens"):
        load_tokenizer(_write(tmp_path / "empty.json", {}))
    assert load_tokenizer(path, "a").fingerprint != load_tokenizer(path, "b").fingerprint


def test_pitfall_69_a_character_that_a_tokenizer_would_drop_is_named(tmp_path):
    found = load_tokenizer(_write(tmp_path / "tokenizer.json", {"a": 0, "b": 1, "</s>": 2}))
    assert found.encode("abba").tolist() == [0, 1, 1, 0]
    for text in ("abca", "ab\n"):
        with pytest.raises(ValueError, match=r"tokenizer.json can't encode .* in no token"):
            found.encode(text)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    (tmp_path / "tekken.json").write_text(
        '{"config": {"version": "v3"}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}'
    )
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15")  # of SentencePiece
    for name in ("broken.json", "binary.json", "missing.json", "tekken.json", "tokenizer.model"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read"):
            load_tokenizer(tmp_path / name)
    with pytest.raises(ValueError, match="id 256"):
        load_tokenizer("byte", end_of_document="</s>")


def test_ids_outside_the_vocabulary_are_refused(trained):
    for tokenizer in (ByteTokenizer(), trained):
        for wrong in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary"):
                tokenizer.decode([0, wrong])
        with pytest.raises(ValueError, match="surrogates not allowed"):
            tokenizer.encode("\ud800")
