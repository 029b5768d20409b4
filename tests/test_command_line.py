"""Words of command lines that are wrong, errors in one line, and objects by name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpcore.tools.command_line import Parser, did_you_mean, find_object, reports_errors


@pytest.mark.parametrize(("word", "known", "said"), [
    ("--zer", ["--tp", "--zero"], "; did you mean --zero?"), ("--zer", ["--tp", "--pp"], ""), ("", ["a"], ""),
    ("word", [], ""),
    ("--vocab-size", ["--local-steps"], ""),  # alike in their dashes
    ("llama3-8c", ["llama3-70b", "llama3-8b"], "; did you mean llama3-8b?"),
    ("llama3-9b", ["llama3-70b", "llama3-8b"], ""),  # another size is no slip
    ("llama-8b", ["llama3-8b"], "; did you mean llama3-8b?"),  # a number more may be one
    ("tests", ["test", "tests_", "tess"], "; did you mean tests_?"),
])  # fmt: skip
def test_the_nearest_word_is_named_if_it_has_the_same_numbers(word, known, said):
    assert did_you_mean(word, known) == said
    assert did_you_mean(word, iter(known)) == said


@pytest.mark.parametrize("error", [ValueError("no good"), FileNotFoundError("no good"), KeyError("no good")])
def test_errors_are_a_line_and_a_status_of_2_and_others_keep_their_traceback(error, capsys):
    def run() -> int:
        raise error

    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            reports_errors("it")(run)()
        assert reports_errors("it", ImportError, KeyError)(run)() == 2
        assert capsys.readouterr().err == "it: error: 'no good'\n"
    else:
        assert reports_errors("it")(run)() == 2
        assert capsys.readouterr() == ("", "it: error: no good\n")


def test_the_current_folder_is_searched_first(tmp_path, monkeypatch):
    (tmp_path / "own_module_of_a_test.py").write_text("x = 5\n_hidden = 6\ndef build(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    importlib.invalidate_caches()
    try:
        assert find_object("own_module_of_a_test:x") == 5
        assert sys.path[0] == ""
        assert find_object("own_module_of_a_test:_hidden") == 6
        assert sys.path.count("") == 1
        for name, message in (
            ("own_module_of_a_test:buil", "has no buil: write package.module:name; did you mean build?"),
            ("own_module_of_a_test:", "has no name after the colon: write package.module:name"),
            ("own_module_of_a_test", "has no name after the colon: write package.module:name"),
            ("own_module_of_a_test:hidden", r"has no hidden: write package.module:name$"),
        ):
            with pytest.raises(ValueError, match=message):
                find_object(name)
    finally:
        sys.modules.pop("own_module_of_a_test", None)


def parser(**told: Any) -> Parser:
    made = Parser(prog="mpcore it", **told)
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--kind", choices=["one", "two"])
    made.add_argument("--many", choices=[1, 2], type=int)
    return made


def test_flags_are_parsed_in_full(capsys):
    assert vars(parser().parse_args(["--layers", "5"])) == {"layers": 5, "kind": None, "many": None}
    known, rest = parser().parse_known_args(["--lay", "5", "word"])
    assert (known.layers, rest) == (3, ["--lay", "5", "word"])


@pytest.mark.parametrize(("words", "message"), [
    (["--layer", "5"], "unknown --layer; did you mean --layers?"),
    (["--layer=5"], "unknown --layer=5; did you mean --layers?"), (["--nothing-like-it"], "unknown --nothing-like-it"),
    (["--kind", "tow"], "argument --kind: 'tow' is none of one, two; did you mean two?"),
    (["--many", "3"], "argument --many: 3 is none of 1, 2"), (["--layers"], "argument --layers: expected one argument"),
])  # fmt: skip
def test_a_wrong_word_ends_with_2_and_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as status:
        parser().parse_args(words)
    assert status.value.code == 2
    assert capsys.readouterr() == ("", f"mpcore it: error: {message} (mpcore it --help lists the flags)\n")


def test_the_installed_command_finds_the_program_of_this_folder(tmp_path):
    script = Path(sys.executable).with_name("mpcore")
    done = subprocess.run(
        [script, "documents", tmp_path], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"{tmp_path / 'config.json'} isn't there" in done.stderr
