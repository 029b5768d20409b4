"""Turns text into a corpus: `python -m examples.gpt.prepare --input FILE_OR_DIR ... --out PREFIX`.

A plain text file is one document; a `.jsonl` or `.ndjson` file holds one document a line, under --json-key.
Folders are walked in sorted order, without hidden entries and links. The output is a pair of files in Megatron's
format. Names of special tokens that a text holds are text, split like any other; the end of a document is added,
a token at its beginning is not. A training run holds some documents out, and of a single one its end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import secrets
import shutil
import signal
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from examples.gpt.indexed_dataset import IndexedDataset, IndexedDatasetWriter, smallest_dtype
from examples.gpt.tokenizer import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    Tokenizer,
    encode_document,
    load_tokenizer,
    train_tokenizer,
)
from mpcore.mesh.secret import private_folder
from mpcore.tools.command_line import Parser, reports_errors

_SHOWN = 10  # of what is skipped, by name


@dataclass(frozen=True)
class Prepared:
    """What `prepare` wrote."""

    documents: int
    tokens: int  # with the ends of documents
    bytes: int  # of the text in UTF-8
    skipped: int  # empty documents, and files met in a folder that are not UTF-8 text
    first_skipped: tuple[str, ...]  # where the first of them lie
    files: tuple[str, ...]  # the output


@dataclass(frozen=True)
class _Source:
    path: str
    named: bool  # given by name, not met in a folder


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    json_key: str = "text",
    end_of_document: str | None = None,
    force: bool = False,
    progress: bool | None = False,
) -> Prepared:
    """Tokenize text files and write a corpus, whole or not at all: `out.bin`, `out.idx`, and `out.tokenizer.json` when
    one is trained. The arguments are the command's; `progress=None` shows a bar on a terminal only.

    Raises:
        ValueError: an input is missing or malformed, the output exists, or nothing is left to write.
    """
    out = os.fspath(out)
    paths = [os.fspath(path) for path in inputs]
    train = tokenizer == "train"
    if vocab_size is not None and not train:
        raise ValueError(f"vocab_size {vocab_size} goes with tokenizer 'train', but that is {tokenizer!r}")
    outputs = (f"{out}.bin", f"{out}.idx", f"{out}.tokenizer.json")
    existing = [p for p in outputs if os.path.exists(p) and os.path.realpath(p) != os.path.realpath(tokenizer)]
    if existing and not force:
        raise ValueError(f"{', '.join(existing)}: exists already; pass --force to replace it")
    sources = _find_sources(paths, left_out={os.path.realpath(path) for path in outputs})
    if train and end_of_document is not None:
        raise ValueError(f"a trained tokenizer ends a document with {END_OF_DOCUMENT}, not {end_of_document!r}")

    folder, name = os.path.split(out)
    os.makedirs(folder or ".", exist_ok=True)
    trained = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp.tokenizer.json")
    try:
        chosen: Tokenizer
        if train:
            reader = _Reader(sources, json_key, progress, "training the tokenizer")
            chosen = train_tokenizer((text for _, text in reader), vocab_size or 8192, trained)
        else:
            chosen = load_tokenizer(tokenizer, end_of_document)
        reader = _Reader(sources, json_key, progress, "tokenizing")
        documents = tokens = size = 0
        with IndexedDatasetWriter(out, smallest_dtype(chosen.vocab_size)) as writer:
            for where, text in reader:
                ids = encode_document(chosen, text)
                if int(ids.max()) >= chosen.vocab_size:
                    raise ValueError(f"{where}: token id {ids.max()} is outside the vocabulary of {chosen.vocab_size}")
                writer.add_document(ids)
                documents, tokens, size = documents + 1, tokens + len(ids), size + len(text.encode())
            if not documents:
                raise ValueError(f"{', '.join(paths)}: 0 documents found in {len(sources)} files")
            # Before the corpus gets its name, so that it never lies beside another corpus's tokenizer.
            if train:
                os.replace(trained, outputs[2])
            elif outputs[2] in existing:
                os.unlink(outputs[2])
    finally:
        if os.path.exists(trained):
            os.unlink(trained)
    return Prepared(documents, tokens, size, reader.skipped, tuple(reader.first), outputs if train else outputs[:2])


def _has_lines(path: str) -> bool:
    """Whether each line of a file is a record."""
    return path.lower().endswith((".jsonl", ".ndjson"))


def _find_sources(paths: Sequence[str], left_out: set[str]) -> list[_Source]:
    sources = []
    for given in paths:
        if not os.path.isdir(given):
            if not os.path.isfile(given):
                raise ValueError(f"{given}: no such file or folder")
            sources.append(_Source(given, named=True))
        for folder, subfolders, names in os.walk(given):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            visible = [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]
            sources += [
                _Source(path, named=False)
                for path in visible
                if os.path.isfile(path) and not os.path.islink(path) and os.path.realpath(path) not in left_out
            ]
    return sources


class _Reader:
    """The documents of some files as (where, text), without the empty ones, which it counts."""

    def __init__(self, sources: list[_Source], json_key: str, progress: bool | None, title: str) -> None:
        self.sources, self.json_key, self.title = sources, json_key, title
        self.hide = None if progress is None else not progress
        self.skipped, self.first = 0, list[str]()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        total = sum(os.path.getsize(source.path) for source in self.sources)
        with tqdm(total=total, unit="B", unit_scale=True, desc=self.title, disable=self.hide) as bar:
            for source in self.sources:
                for where, content in self._contents(source):
                    text = self._text(source, where, content)
                    if text:
                        yield where, text
                    else:
                        self.skipped += 1
                        if len(self.first) < _SHOWN:
                            self.first.append(where)
                    bar.update(len(content))

    def _contents(self, source: _Source) -> Iterator[tuple[str, bytes]]:
        with open(source.path, "rb") as file:
            if not _has_lines(source.path):
                content = file.read()
                if source.path.lower().endswith(".json"):
                    self._refuse_records(source.path, content)
                yield source.path, content
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{source.path}:{number}", line

    def _refuse_records(self, path: str, content: bytes) -> None:
        """Refuse what would be one document of many: an array of records, or lines that are records."""
        for part in (content, content.partition(b"\n")[0]):
            try:
                found = json.loads(part)
            except (ValueError, RecursionError):
                continue
            first = found[0] if isinstance(found, list) and found else found
            if isinstance(first, dict) and self.json_key in first:
                raise ValueError(
                    f"{path}: holds records with {self.json_key!r}, which would be one text: in a .jsonl file each "
                    f"line is a document"
                )

    def _text(self, source: _Source, where: str, content: bytes) -> str:
        try:
            if not _has_lines(source.path):
                return content.decode("utf-8-sig")
            record = json.loads(content.decode("utf-8-sig").rstrip())
        except UnicodeDecodeError as error:
            if source.named or _has_lines(source.path):
                raise ValueError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from error
            return ""
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a line must be a JSON object, but this is {type(record).__name__}")
        if self.json_key not in record:
            keys = ", ".join(map(repr, list(record)[:10])) or "none"
            raise ValueError(f"{where}: no key {self.json_key!r}; keys are {keys}; choose one with --json-key")
        text = record[self.json_key]
        if not isinstance(text, str):
            raise ValueError(f"{where}: {self.json_key!r} must be text, but is {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: not UTF-8 text: {error.reason} at character {error.start}") from error
        return text


@reports_errors("python -m examples.gpt.prepare")
def main(argv: Sequence[str] | None = None) -> None:
    """Prepare a corpus, and print what came of it. The status is 0, or 2 if it failed and said why."""
    parser = Parser(prog="python -m examples.gpt.prepare", description=__doc__)
    files = "text, a document a file; .jsonl, .ndjson; folders"
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE_OR_DIR", help=files)
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer", default="byte", help="byte, the path of a tokenizer.json, or train")
    parser.add_argument("--vocab-size", type=int, help="tokens to train (default 8192)")
    parser.add_argument("--json-key", default="text", help="key of the text in a .jsonl line (default text)")
    parser.add_argument("--end-of-document", metavar="TOKEN", help="token of tokenizer.json that ends a document")
    parser.add_argument("--force", action="store_true", help="replace existing output")
    options = parser.parse_args(argv)
    others = {name: value for name, value in vars(options).items() if name not in ("input", "out")}
    prepared = prepare(options.input, options.out, **others, progress=None)
    print(f"documents       {prepared.documents:,} ({prepared.skipped:,} empty or not text skipped)")
    if prepared.skipped:
        more = prepared.skipped - len(prepared.first_skipped)
        print(f"skipped         {', '.join(prepared.first_skipped)}{f' and {more:,} more' if more else ''}")
    print(f"tokens          {prepared.tokens:,}")
    print(f"bytes           {prepared.bytes:,}")
    print(f"tokens per byte {prepared.tokens / prepared.bytes:.4f}")
    for path in prepared.files:
        print(f"wrote           {path} ({os.path.getsize(path):,} bytes)")


if __name__ == "__main__":
    # A polite kill then takes the way of an exception, which removes what is half written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())


def default_corpus(cache_dir: str | os.PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
    """Build a corpus of Python's standard library, one document a file, or find it in the cache.

    Many processes may call this at once: each builds in its own folder, and the first to rename it wins. By default the
    cache is $XDG_CACHE_HOME/mpcore or ~/.cache/mpcore, or a temporary folder if that cannot be written.

    Raises:
        ValueError: this Python has no source files, or no folder can be written.
    """
    tokenizer = tokenizer or ByteTokenizer()
    root = sysconfig.get_paths()["stdlib"]
    files = list(_stdlib_files(root))
    if not files:
        raise ValueError(f"{root}: 0 source files of the standard library found; prepare another corpus")
    listing = "\n".join(f"{path} {os.path.getsize(os.path.join(root, path))}" for path in files)
    digest = hashlib.blake2b(f"{tokenizer.fingerprint}\n{listing}".encode(), digest_size=8).hexdigest()
    name = f"stdlib-{platform.python_version()}-{digest}"

    faults = []
    for folder in [cache_dir] if cache_dir is not None else _cache_folders():
        try:
            folder = os.fspath(private_folder() if folder is None else folder)
            os.makedirs(folder, exist_ok=True)
            # A damaged copy stays in place, for a process may be reading it; the next free name is taken.
            for attempt in itertools.count():
                home = os.path.join(folder, f"{name}-{attempt}" if attempt else name)
                prefix = os.path.join(home, "corpus")
                if not os.path.exists(home):
                    _build_corpus(home, root, files, tokenizer)
                    return prefix
                if _is_corpus(prefix, tokenizer):
                    return prefix
        except OSError as error:
            faults.append(f"{folder}: {error.strerror}")
    raise ValueError(f"the corpus cannot be kept ({'; '.join(faults)}); pass a cache_dir that can be written")


def _stdlib_files(root: str) -> Iterator[str]:
    """Relative paths of the standard library's modules, sorted, without tests and installed packages."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        relative = os.path.relpath(folder, root)
        found += [os.path.normpath(os.path.join(relative, name)) for name in names if name.endswith(".py")]
    return (path for path in sorted(found) if os.path.isfile(os.path.join(root, path)))


def _cache_folders() -> list[str | None]:
    """Return the folders to try. None: a private one among the temporary files."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [os.path.join(base, "mpcore"), None]


def _build_corpus(home: str, root: str, files: list[str], tokenizer: Tokenizer) -> None:
    """Builds the corpus in a folder of its own and renames it to home, unless another process came first."""
    building = f"{home}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    os.mkdir(building)
    try:
        sources = [_Source(os.path.join(root, path), named=False) for path in files]
        with IndexedDatasetWriter(os.path.join(building, "corpus"), smallest_dtype(tokenizer.vocab_size)) as writer:
            for _, text in _Reader(sources, "text", False, ""):
                writer.add_document(encode_document(tokenizer, text))
        IndexedDataset(writer.prefix).check_tokens(tokenizer.vocab_size)
        try:
            os.rename(building, home)
        except OSError:
            if not os.path.exists(home):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_corpus(prefix: str, tokenizer: Tokenizer) -> bool:
    try:
        IndexedDataset(prefix).check_tokens(tokenizer.vocab_size)
    except ValueError:
        return False
    return True
