import json
import re
from pathlib import Path

import pytest

from examples.gpt.indexed_dataset import IndexedDataset
from examples.gpt.prepare import main, prepare
from examples.gpt.tokenizer import ByteTokenizer, load_tokenizer


def texts(prefix, tokenizer=None):
    tokenizer = tokenizer or ByteTokenizer()
    documents = list(IndexedDataset(prefix))
    assert all(document[-1] == tokenizer.end_of_document for document in documents)
    return [tokenizer.decode(document) for document in documents]


def jsonl(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / ".hidden").write_text("hidden")
    (folder / "b.txt").write_text("bé")
    (folder / "sub" / "a.py").write_text("a = 1\n")
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    (folder / "link.txt").symlink_to(folder / "b.txt")
    jsonl(folder / "c.jsonl", {"text": "one"}, "", {"text": "two", "id": 2}, {"text": ""})
    return folder


def output(tmp_path):
    return sorted(path.name for path in (tmp_path / "out").iterdir()) if (tmp_path / "out").exists() else []


def test_folders_files_and_lines_become_documents(tmp_path, inputs):
    single = tmp_path / "z.txt"
    single.write_text("\ufefflast")
    prepared = prepare([inputs, single], tmp_path / "out" / "c")
    assert texts(tmp_path / "out" / "c") == ["bé", "one", "two", "a = 1\n", "last"]
    assert prepared.documents == 5
    assert prepared.bytes == len("béonetwoa = 1\nlast".encode())
    assert prepared.tokens == prepared.bytes + 5 == IndexedDataset(tmp_path / "out" / "c").num_tokens
    assert prepared.skipped == 3
    assert [Path(where).name for where in prepared.first_skipped] == ["c.jsonl:4", "empty.txt", "picture.png"]
    assert [Path(path).name for path in prepared.files] == output(tmp_path) == ["c.bin", "c.idx"]


def test_the_command_line(tmp_path, inputs, capsys):
    arguments = ["--input", str(inputs / "b.txt"), str(inputs / "c.jsonl"), "--out", str(tmp_path / "out" / "c")]
    main(arguments)
    printed = capsys.readouterr().out
    assert "documents       3 (1 empty" in printed
    assert "tokens          12" in printed
    assert "bytes           9" in printed
    assert "tokens per byte 1.3333" in printed
    assert f"{tmp_path / 'out' / 'c.idx'} (" in printed
    assert main(arguments) == 2
    assert re.search(r"prepare: error: .*c\.bin, .*c\.idx: exists already; pass --force", capsys.readouterr().err)
    (inputs / "b.txt").write_text("changed")
    main([*arguments, "--force"])
    assert texts(tmp_path / "out" / "c")[0] == "changed"
    # The output lies inside a folder that is read again.
    main(["--input", str(tmp_path / "out"), str(inputs), "--out", str(tmp_path / "out" / "c"), "--force"])
    assert len(texts(tmp_path / "out" / "c")) == 4


def test_training_a_tokenizer(tmp_path, inputs):
    prefix = tmp_path / "out" / "c"
    (inputs / "b.txt").write_text("the cat and the hat and the bat <|endoftext|> " * 20)
    prepared = prepare([inputs], prefix, tokenizer="train", vocab_size=280)
    assert output(tmp_path) == ["c.bin", "c.idx", "c.tokenizer.json"]
    assert len(prepared.files) == 3
    trained = load_tokenizer(f"{prefix}.tokenizer.json")
    assert trained.vocab_size == 280
    found = texts(prefix, trained)
    assert found[0] == (inputs / "b.txt").read_text()
    assert found[1:] == ["one", "two", "a = 1\n"]
    assert prepared.tokens < prepared.bytes
    IndexedDataset(prefix).check_tokens(trained.vocab_size)
    # The tokenizer file alone is enough to prepare the same tokens again.
    assert prepare([inputs], tmp_path / "out" / "d", tokenizer=f"{prefix}.tokenizer.json").tokens == prepared.tokens
    assert (tmp_path / "out" / "d.bin").read_bytes() == (tmp_path / "out" / "c.bin").read_bytes()
    # It may even lie among the output that is replaced; a tokenizer that is not in use may not stay there.
    prepare([inputs], prefix, tokenizer=f"{prefix}.tokenizer.json", force=True)
    assert output(tmp_path) == ["c.bin", "c.idx", "c.tokenizer.json", "d.bin", "d.idx"]
    prepare([inputs], prefix, force=True)
    assert output(tmp_path) == ["c.bin", "c.idx", "d.bin", "d.idx"]


@pytest.mark.parametrize(("line", "message"), [
    ('{"text": "cut', "not JSON: Unterminated string"), ('["text"]', "must be a JSON object, but this is list"),
    ('{"body": "b", "id": 1}', "no key 'text'; keys are 'body', 'id'; choose one with --json-key"),
    ("{}", "no key 'text'; keys are none"), ('{"text": 5}', "'text' must be text, but is int"),
    ('{"text": null}', "'text' must be text, but is NoneType"),
    (r'{"text": "\ud800"}', "not UTF-8 text: surrogates not allowed"), ("[" * 100_000, "not JSON: "),
    ('{"text": ' + "1" * 5000 + "}", "not JSON: "),
], ids=lambda value: value[:12])  # fmt: skip
@pytest.mark.parametrize("tokenizer", ["byte", "train"])
def test_a_malformed_line_is_named_and_leaves_nothing(tmp_path, line, message, tokenizer):
    path = jsonl(tmp_path / "in.jsonl", {"text": "fine"}, "", line, {"text": "fine"})
    with pytest.raises(ValueError, match=r"in\.jsonl:3: ") as caught:
        prepare([path], tmp_path / "out" / "c", tokenizer=tokenizer)
    assert message in str(caught.value)
    assert output(tmp_path) == []


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.jsonl"])
def test_records_have_a_line_each_by_any_usual_name(tmp_path, name):
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in" / name, {"text": "one"}, {"text": "two"})
    prepare([tmp_path / "in"], tmp_path / "out" / "c")
    assert texts(tmp_path / "out" / "c") == ["one", "two"]


def test_records_in_a_json_file_are_not_one_document(tmp_path):
    path = tmp_path / "in.json"
    message = r"in\.json: holds records with 'text', which would be one text: in a \.jsonl file each line is a document"
    for content in (json.dumps([{"text": "one"}, {"text": "two"}], indent=1), '{"text": "one"}\n{"text": "two"}\n'):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            prepare([path], tmp_path / "out" / "c", force=True)
        prepare([path], tmp_path / "out" / "c", json_key="body", force=True)
        assert texts(tmp_path / "out" / "c") == [content]
    for content in ('{"name": "a package"}', "[]", "[1]", "{}", "[" * 100_000, "text"):
        path.write_text(content)
        prepare([path], tmp_path / "out" / "c", force=True)
        assert texts(tmp_path / "out" / "c") == [content]


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 text: .* at byte 3"):
        prepare([tmp_path / "latin.txt"], tmp_path / "out" / "c")
    with pytest.raises(ValueError, match=r"latin\.jsonl:2: not UTF-8 text"):
        prepare([tmp_path / "latin.jsonl"], tmp_path / "out" / "c")
    assert output(tmp_path) == []


def test_what_was_asked_for_is_checked_first(tmp_path, inputs):
    out = tmp_path / "out" / "c"
    with pytest.raises(ValueError, match=r"nothing\.txt: no such file or folder"):
        prepare([inputs, tmp_path / "nothing.txt"], out)
    with pytest.raises(ValueError, match="vocab_size 300 goes with tokenizer 'train', but that is 'byte'"):
        prepare([inputs], out, vocab_size=300)
    with pytest.raises(ValueError, match=r"none\.json: cannot be read"):
        prepare([inputs], out, tokenizer=str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"ends a document with <\|endoftext\|>, not 'x'"):
        prepare([inputs], out, tokenizer="train", end_of_document="x")
    with pytest.raises(ValueError, match=r"empty\.txt: 0 documents found in 1 files"):
        prepare([inputs / "empty.txt"], out)
    assert output(tmp_path) == []
    prepare([inputs], out, json_key="text")
    before = out.with_suffix(".bin").read_bytes()
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1"):
        prepare([tmp_path / "bad.jsonl"], out, force=True)
    assert out.with_suffix(".bin").read_bytes() == before
    assert output(tmp_path) == ["c.bin", "c.idx"]
