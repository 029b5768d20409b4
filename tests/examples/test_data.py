import itertools
import os
import pickle
import struct
import sysconfig

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.gpt.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from examples.gpt.prepare import default_corpus
from examples.gpt.samples import TokenSamples, permute, split_documents, split_samples
from examples.gpt.tokenizer import ByteTokenizer
from tests.examples.corpora import write

INTEGER_DTYPES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]
LENGTHS = [0, 1, 5, 0, 3, 1, 0]


def golden_index(code, lengths, pointers, boundaries, version=1, magic=b"MMIDIDX\x00\x00", modes=b""):
    """The format, spelled out by hand: nothing here comes from the code under test."""
    return (
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(boundaries))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
        + modes
    )


def pair(folder, idx, bin_content):
    (folder / "c.idx").write_bytes(idx)
    (folder / "c.bin").write_bytes(bin_content)
    return str(folder / "c")


# The file format


def test_golden_bytes_are_read(tmp_path):
    # Three sequences in two documents: a corpus of split sentences.
    idx = golden_index(8, [2, 1, 3], [0, 4, 6], [0, 2, 3])
    assert len(idx) == 34 + 3 * 4 + 3 * 8 + 3 * 8
    dataset = IndexedDataset(pair(tmp_path, idx, struct.pack("<6H", 1, 2, 3, 40000, 5, 6)))
    assert [document.tolist() for document in dataset] == [[1, 2, 3], [40000, 5, 6]]
    assert (len(dataset), dataset.num_tokens, dataset.dtype) == (2, 6, np.uint16)
    assert dataset.lengths.tolist() == [3, 3]


def test_golden_bytes_are_written(tmp_path):
    write(tmp_path / "c", [[7, -1], [], [9]], "int32")
    assert (tmp_path / "c.idx").read_bytes() == golden_index(4, [2, 0, 1], [0, 8, 8], [0, 1, 2, 3])
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<3i", 7, -1, 9)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [5], LENGTHS], ids=str)
def test_written_documents_are_read_back(tmp_path, dtype, lengths):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    documents = [rng.integers(info.min, info.max, n, dtype, endpoint=True) for n in lengths]
    dataset = IndexedDataset(write(tmp_path / "c", documents, dtype))
    assert dataset.dtype == dtype
    assert dataset.lengths.tolist() == lengths
    assert dataset.num_tokens == sum(lengths)
    assert len(dataset) == len(lengths)
    for i, document in enumerate(documents):
        for found in (dataset[i], dataset[i - len(lengths)], pickle.loads(pickle.dumps(dataset))[i]):
            np.testing.assert_array_equal(found, document, strict=True)
            assert not found.flags.writeable or not found.size
    with pytest.raises(IndexError, match=f"document {len(lengths)} of {len(lengths)}"):
        dataset[len(lengths)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


GOOD = (4, [2, 1], [0, 8], [0, 1, 2])
FAULTS = {
    "empty": (b"", "0 bytes, but the header alone takes 34"),
    "header cut": (golden_index(*GOOD)[:33], "33 bytes, but the header alone takes 34"),
    "magic": (golden_index(*GOOD, magic=b"MMIDIDX\x00\x01"), "not a Megatron index"),
    "version": (golden_index(*GOOD, version=2), "version 2, but only version 1"),
    "dtype": (golden_index(9, *GOOD[1:]), "dtype code 9 is unknown"),
    "float64": (golden_index(6, *GOOD[1:]), "float64, but tokens must be integers"),
    "float32": (golden_index(7, *GOOD[1:]), "float32, but tokens must be integers"),
    "cut": (golden_index(*GOOD)[:-1], "take 82 bytes .* the file has 81"),
    "too long": (golden_index(*GOOD) + b"\0", "take 82 bytes .* the file has 83"),
    "no boundary": (golden_index(4, [], [], []), "0 document boundaries"),
    "first boundary": (golden_index(4, [2, 1], [0, 8], [1, 1, 2]), "run from 1 to 2"),
    "last boundary": (golden_index(4, [2, 1], [0, 8], [0, 1, 1]), "number of sequences 2, but run from 0 to 1"),
    "falling": (golden_index(4, [2, 1], [0, 8], [0, 2, 1, 2]), "fall 1 times"),
    "beyond": (golden_index(4, [2, 1], [0, 8], [0, 9, 2]), "fall 1 times"),
    "negative": (golden_index(4, [2, -1], [0, 8], [0, 1, 2]), "sequence 1 has length -1"),
    "pointer": (golden_index(4, [2, 1], [0, 4], [0, 1, 2]), "sequence 1 begins at byte 4, .* byte 8"),
    "pointer far": (golden_index(4, [2, 1], [0, 1 << 60], [0, 1, 2]), "begins at byte 1152921504606846976"),
    "lengths": (golden_index(4, [2, 9], [0, 8], [0, 1, 2]), "describes 44 bytes of int32, .* has 12: truncated"),
    "other dtype": (golden_index(8, [2, 1], [0, 4], [0, 1, 2]), "describes 6 bytes of uint16, .* has 12: too"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_index_are_named(tmp_path, fault):
    idx, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message) as caught:
        IndexedDataset(pair(tmp_path, idx, struct.pack("<3i", 1, 2, 3)))
    assert str(tmp_path / "c") in str(caught.value)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_tokens_outside_the_vocabulary_are_named(tmp_path, dtype):
    dataset = IndexedDataset(write(tmp_path / "c", [[1, 2], [], [3, 300, 4], [299]], dtype))
    dataset.check_tokens(301)
    with pytest.raises(ValueError, match=r"largest token id 300 .* vocabulary of 300, at token 1 of document 2 "):
        dataset.check_tokens(300)
    found = []
    for part in range(4):
        try:
            dataset.check_tokens(300, part, 4)
        except ValueError:
            found.append(part)
    assert found == [2], "of six tokens in four parts, the third part holds the fourth"
    negative = IndexedDataset(write(tmp_path / "n", [[1], [5, -7]], dtype))
    with pytest.raises(ValueError, match=r"n\.bin: the smallest token id -7 .* of 10, at token 1 of document 1 "):
        negative.check_tokens(10)
    IndexedDataset(write(tmp_path / "e", [], dtype)).check_tokens(1)
    with pytest.raises(ValueError, match=r"the largest token id 0 .* of 0, at token 0 of document 0 "):
        IndexedDataset(write(tmp_path / "z", [[0], [0]], dtype)).check_tokens(0)


# The writer


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_kill_at_any_moment_leaves_no_mismatched_pair(tmp_path, monkeypatch):
    """Stops the writer before each change of a name, as a kill would, without any cleaning up."""

    class Killed(BaseException):
        pass

    old, new = [[1, 2], [3]], [[4], [5, 6]]  # same sizes: nothing but the order of renaming tells them apart
    for at in itertools.count():
        folder = tmp_path / str(at)
        folder.mkdir()
        prefix = write(folder / "c", old)
        calls = itertools.count()
        dead = False

        def guarded(real, at=at, calls=calls):
            def call(*args):
                nonlocal dead
                dead = dead or next(calls) == at
                if dead:
                    raise Killed
                return real(*args)

            return call

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(os, name, guarded(getattr(os, name)))
            try:
                write(prefix, new)
            except Killed:
                pass
            else:
                break
        try:
            found = [document.tolist() for document in IndexedDataset(prefix)]
        except ValueError:
            continue
        assert found in (old, new)
    assert at == 3  # the old index goes, the data comes, the index comes
    assert [document.tolist() for document in IndexedDataset(prefix)] == new


def test_replacing_a_corpus_leaves_its_readers_alone(tmp_path):
    old = IndexedDataset(write(tmp_path / "c", [[1, 2, 3]]))
    write(tmp_path / "c", [[9]])
    assert old[0].tolist() == [1, 2, 3]
    assert IndexedDataset(tmp_path / "c")[0].tolist() == [9]


def test_the_writer_refuses_what_it_cannot_hold(tmp_path):
    for dtype in ("float32", "uint32", "bool"):
        with pytest.raises(ValueError, match=f"tokens of dtype {dtype} cannot be written; use one of uint8"):
            IndexedDatasetWriter(tmp_path / "c", dtype)
    writer = IndexedDatasetWriter(tmp_path / "c", "uint16")
    with pytest.raises(ValueError, match="inside a with block"):
        writer.add_document([1])
    with writer:
        writer.add_document([0, 65535])
        with pytest.raises(ValueError, match="document 1 has token ids 3 to 65536, but uint16 holds 0 to 65535"):
            writer.add_document([3, 65536])
        with pytest.raises(ValueError, match="token ids -1 to 3"):
            writer.add_document(np.array([3, -1]))
        for wrong in ([1.5], [[1, 2]], np.array([True])):
            with pytest.raises(ValueError, match="must be integers"):
                writer.add_document(wrong)
        with pytest.raises(ValueError, match="has 2147483648 tokens, but the format holds 2147483647"):
            writer.add_document(np.broadcast_to(np.uint16(0), 2**31))
        writer.add_document([])
    assert [document.tolist() for document in IndexedDataset(tmp_path / "c")] == [[0, 65535], []]


# The permutation


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 4097])
def test_permute_is_a_bijection(size):
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (-5, 2**70)):
        assert sorted(permute(i, size, seed=seed, epoch=epoch) for i in range(size)) == list(range(size))


def test_permute_is_frozen():
    """A change of these numbers changes the data order of every run that resumes."""
    assert [permute(i, 10, seed=0, epoch=0) for i in range(10)] == [7, 1, 5, 4, 3, 8, 2, 6, 9, 0]
    _, validation = split_documents(40, 0.1, 0)
    assert validation.tolist() == [2, 16, 18, 19, 34, 37]


# Samples


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.default_rng(0)
    lengths = [3, 0, 1, 40, 0, 0, 7, 1, 1, 25, 0]
    documents = [rng.integers(0, 60000, n, np.uint16) for n in lengths]
    return IndexedDataset(write(tmp_path_factory.mktemp("corpus") / "c", documents))


def test_samples_say_what_is_wrong(corpus):
    with pytest.raises(ValueError, match=r"11 documents hold 78 tokens, .* seq_len 78 takes 79; use a smaller"):
        TokenSamples(corpus, 78, seed=0)
    assert len(TokenSamples(corpus, 77, seed=0)) == 1
    with pytest.raises(ValueError, match="0 documents hold 0 tokens"):
        TokenSamples(corpus, 5, seed=0, documents=[])
    with pytest.raises(ValueError, match="documents 0 to 11 are asked for, but there are 11"):
        TokenSamples(corpus, 5, seed=0, documents=[0, 11])
    with pytest.raises(ValueError, match="documents -1 to 3"):
        TokenSamples(corpus, 5, seed=0, documents=[3, -1])
    with pytest.raises(ValueError, match="seq_len 0 is below 1"):
        TokenSamples(corpus, 0, seed=0)
    with pytest.raises(ValueError, match="sample index -1 is below 0"):
        TokenSamples(corpus, 5, seed=0).sample(-1)


# Training and validation documents


@given(n=st.integers(1, 400), held_out=st.floats(0, 0.99), seed=st.integers())
@settings(max_examples=100)
def test_a_split_is_a_partition(n, held_out, seed):
    train, validation = split_documents(n, held_out, seed)
    assert sorted([*train, *validation]) == list(range(n))
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(validation) > 0)
    assert len(train) >= 1
    assert len(validation) >= 1 or n == 1 or held_out == 0
    for again, first in zip(split_documents(n, held_out, seed), (train, validation), strict=True):
        np.testing.assert_array_equal(again, first, strict=True)


def test_a_split_holds_its_fraction_and_growth_moves_no_document():
    small, large = split_documents(5000, 0.05, seed=1)[1], split_documents(20_000, 0.05, seed=1)[1]
    assert abs(len(large) - 1000) < 5 * np.sqrt(950)
    np.testing.assert_array_equal(small, large[large < 5000])
    assert set(large) != set(split_documents(20_000, 0.05, seed=2)[1])
    # More held out keeps what was held out.
    assert set(large) < set(split_documents(20_000, 0.1, seed=1)[1])
    assert len(split_documents(100, 0)[1]) == 0


def test_a_split_refuses_nonsense():
    with pytest.raises(ValueError, match="num_documents 0 is below 1"):
        split_documents(0)
    for held_out in (1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="held_out"):
            split_documents(5, held_out)


@given(tokens=st.integers(12, 400), seq_len=st.integers(1, 5), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_of_a_single_document_the_end_is_held_out(tokens, seq_len, seed):
    text = np.arange(tokens)
    train, held_out = split_samples(_Lists([text]), seq_len, seed=seed)
    assert held_out is not None
    assert held_out.num_tokens == max(tokens // 20, seq_len + 1)
    end = tokens - held_out.num_tokens
    for samples, first, last in ((train, 0, end), (held_out, end, tokens)):
        read = {int(token) for i in range(len(samples)) for token in samples.sample(i)}
        assert read == set(range(first, last - (last - first - 1) % seq_len)), "windows from its first token"


def test_too_little_text_says_of_which_part_and_the_way_out():
    short = _Lists([np.zeros(2, int)] * 300)
    with pytest.raises(ValueError, match=r"^the training part: 28\d documents hold 5\d\d tokens, .* seq_len 600 takes"):
        split_samples(short, 600, seed=0, evaluate=False)
    held = r"^the held-out part: 1\d documents hold \d\d tokens, but .* takes 33; use a smaller seq_len or more text"
    with pytest.raises(ValueError, match=held + r", or --eval-every 0, which needs no held-out part$"):
        split_samples(short, 32, seed=0)
    assert split_samples(short, 32, seed=0, evaluate=False)[1] is None
    one = _Lists([np.zeros(50, int)])
    with pytest.raises(ValueError, match=r"^the training part: 1 document holds 17 tokens, .*, or --eval-every 0"):
        split_samples(one, 32, seed=0)
    train, held_out = split_samples(one, 32, seed=0, evaluate=False)
    assert (train.num_tokens, held_out) == (50, None)


class _Lists:
    """Documents in memory."""

    def __init__(self, documents: list[np.ndarray]) -> None:
        self.documents, self.lengths = documents, np.array([len(document) for document in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[index]


# The default corpus


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    root = tmp_path / "stdlib"
    texts = {
        "b.py": "bb = 1\n", "a/z.py": "z\n", "a/test/t.py": "skipped", "tests/t.py": "skipped",
        "idlelib/idle_test/t.py": "skipped", "lib2to3/tests/t.py": "skipped", "site-packages/p.py": "skipped",
        "a/__pycache__/z.py": "skipped", "a/notes.txt": "skipped", "empty.py": "", "c.py": "café\n",
    }  # fmt: skip
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "latin.py").write_bytes(b"# caf\xe9")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_default_corpus_holds_the_sources_in_order(small_stdlib, tmp_path):
    prefix = default_corpus(tmp_path / "cache")
    byte = ByteTokenizer()
    documents = list(IndexedDataset(prefix))
    assert [byte.decode(document) for document in documents] == ["z\n", "bb = 1\n", "café\n"]
    assert all(document[-1] == byte.end_of_document for document in documents)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert default_corpus(tmp_path / "cache") == prefix
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before
    assert len(files(tmp_path / "cache")) == 1
    # Another listing or another tokenizer is another corpus.
    (small_stdlib / "d.py").write_text("d\n")
    other = default_corpus(tmp_path / "cache")
    byte.fingerprint = "other"
    assert len({prefix, other, default_corpus(tmp_path / "cache", byte)}) == 3


@pytest.mark.parametrize("damage", ["cut", "no index", "tokens", "empty folder"])
def test_a_damaged_cache_is_not_used(small_stdlib, tmp_path, damage):
    prefix = default_corpus(tmp_path)
    good = [document.tolist() for document in IndexedDataset(prefix)]
    if damage == "cut":
        os.truncate(f"{prefix}.bin", 3)
    elif damage == "tokens":
        with open(f"{prefix}.bin", "r+b") as file:
            file.write(b"\xff\xff")
    else:
        os.unlink(f"{prefix}.idx")
        if damage == "empty folder":
            os.unlink(f"{prefix}.bin")
    again = default_corpus(tmp_path)
    assert [document.tolist() for document in IndexedDataset(again)] == good
    assert default_corpus(tmp_path) == again
