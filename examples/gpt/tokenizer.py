"""Text to token ids and back: raw bytes, or a byte-pair encoding held in a Hugging Face `tokenizer.json`."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from examples.gpt.indexed_dataset import smallest_dtype
from mpcore.tools.fault_tolerance.metrics import write_whole

try:
    import tokenizers
except ImportError:
    tokenizers = None

END_OF_DOCUMENT = "<|endoftext|>"

# Most specific first: some vocabularies hold several of these and use the later ones for something else.
_END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT, "<|end_of_text|>", "<|endofdocument|>", "<eod>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, with full-width bars
    "<eos>", "</s>", "[EOS]",
)  # fmt: skip


class Tokenizer(Protocol):
    """What the data code asks of a tokenizer.

    Attributes:
        vocab_size: number of token ids; every id lies in [0, vocab_size).
        end_of_document: the id that closes each document.
        fingerprint: text that differs when the encoding differs; it names cached corpora.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...
    def count_bytes(self, ids: Sequence[int] | np.ndarray) -> int: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 as tokens, and one more that ends a document."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        """The UTF-8 bytes of a text, uint16 [bytes]. ValueError (UnicodeEncodeError) for a lone surrogate."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some tokens; the end of a document has none, and broken UTF-8 reads as U+FFFD."""
        kept = [i for i in _checked_ids(ids, self.vocab_size) if i != self.end_of_document]
        return bytes(kept).decode("utf-8", errors="replace")

    def count_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """The number of bytes of UTF-8 that tokens stand for."""
        return sum(i != self.end_of_document for i in ids)


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`.

    Args:
        path: the file.
        end_of_document: name of the token that ends a document; None looks for a usual one.

    Attributes:
        end_of_document_name: that name.

    Raises:
        ValueError: `tokenizers` is not installed, the file cannot be read, or no such token is in it.
    """

    vocab_size: int
    end_of_document: int
    end_of_document_name: str
    fingerprint: str

    def __init__(self, path: str | os.PathLike[str], end_of_document: str | None = None) -> None:
        library, self.path = _tokenizers_library(), os.fspath(path)
        try:
            with open(path, "rb") as file:
                content = file.read()
            self._tokenizer = library.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception on a malformed file
            raise ValueError(f"{os.fspath(path)}: cannot be read as a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that merely quotes "<|endoftext|>" must not end there.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        names = _END_OF_DOCUMENT_NAMES if end_of_document is None else (end_of_document,)
        found = [name for name in names if name in vocabulary]
        if not found:
            raise ValueError(
                f"{os.fspath(path)}: none of {', '.join(names)} is among the {len(vocabulary)} tokens; "
                "pass end_of_document, the name of the token that ends a document"
            )
        # Ids may have gaps, so the largest id counts, not the number of entries.
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document_name, self.end_of_document = found[0], vocabulary[found[0]]
        # A byte-pair encoding without an unknown token drops a character that it doesn't know.
        model = self._tokenizer.model
        drops = isinstance(model, library.models.BPE) and model.unk_token is None and not model.byte_fallback
        before, after = (getattr(model, n, None) or "" for n in ("continuing_subword_prefix", "end_of_word_suffix"))
        known = {token.removeprefix(before).removesuffix(after) for token in vocabulary}
        self._known = known if drops and not known.issuperset(library.pre_tokenizers.ByteLevel.alphabet()) else None
        self.fingerprint = f"{hashlib.blake2b(content, digest_size=8).hexdigest()}-{self.end_of_document}"

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, int32 [tokens], without any that the text itself does not hold. Errors as of bytes."""
        text.encode("utf-8")  # the library reports a lone surrogate as TypeError
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if self._known is not None and (lost := self._characters(text) - self._known):
                raise KeyError(f"{sorted(lost)[:8]} are in no token, and there is no unknown token")
        except Exception as error:  # the library raises bare Exception, as for a word that has no unknown token
            raise ValueError(f"{self.path} can't encode {text[:40]!r}: {error}") from error
        return np.array(ids, dtype=np.int32)

    def _characters(self, text: str) -> set[str]:
        """The characters that the model splits into tokens."""
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        return set(text if splitter is None else "".join(word for word, _ in splitter.pre_tokenize_str(text)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some tokens; special tokens, the end of a document among them, have none."""
        return self._tokenizer.decode(_checked_ids(ids, self.vocab_size), skip_special_tokens=True)

    def count_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """The number of bytes of UTF-8 that tokens stand for."""
        return len(self.decode(ids).encode())


def load_tokenizer(spec: str | os.PathLike[str], end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer "byte", or that of a `tokenizer.json`; arguments and errors as of `JsonTokenizer`."""
    if os.fspath(spec) != "byte":
        return JsonTokenizer(spec, end_of_document)
    if end_of_document is not None:
        raise ValueError(f"the byte tokenizer ends a document with id 256, not with {end_of_document!r}")
    return ByteTokenizer()


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str | os.PathLike[str]) -> JsonTokenizer:
    """Train a byte-level byte-pair encoding, and write it as a `tokenizer.json`, whole or not at all.

    Args:
        vocab_size: at least 257, the bytes and the end of a document; a small corpus may give fewer.

    Source:
        Sennrich et al. 2016, arXiv:1508.07909; on bytes: Radford et al. 2019 (GPT-2), section 2.2.
    """
    library: Any = _tokenizers_library()
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size {vocab_size} is below 257, the 256 bytes and {END_OF_DOCUMENT}; ask for at least 257"
        )
    byte_level = library.pre_tokenizers.ByteLevel
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    write_whole(Path(path), bpe.to_str(pretty=True))
    return JsonTokenizer(path, END_OF_DOCUMENT)


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encode a document, with the end-of-document id behind it: integers [tokens + 1]."""
    end = np.array([tokenizer.end_of_document], smallest_dtype(tokenizer.vocab_size))
    ids = np.asarray(tokenizer.encode(text))
    return np.concatenate([ids, end]) if ids.size else end


def _checked_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> list[int]:
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise ValueError(f"token id {i} is outside the vocabulary of {vocab_size}")
    return checked


def _tokenizers_library() -> Any:
    if tokenizers is None:
        raise ValueError("a tokenizer.json needs a package: pip install tokenizers (or use the tokenizer byte)")
    return tokenizers
