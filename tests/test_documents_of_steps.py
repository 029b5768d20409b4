"""From a spike to the documents behind it, and a run without them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.gpt.arguments import parse
from examples.gpt.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from examples.gpt.pretrain import Trainer
from examples.gpt.samples import Corpora, read_without, split_documents
from mpcore import Mesh
from mpcore.sharding import full_state_dict
from mpcore.tools import documents as which_text
from tests.examples.test_flags import TINY
from tests.pool import mesh

END = 256
PROGRAM = "examples.gpt.pretrain"


def write(prefix: Path, documents: list[np.ndarray]) -> str:
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def texts(count: int, corrupt: tuple[int, ...] = (), length: int = 48) -> list[np.ndarray]:
    """Documents that count up from a letter, and among them some of random bytes."""
    draws = np.random.default_rng(3)
    found = [97 + (np.arange(length) + draws.integers(26)) % 26 for _ in range(count)]
    for number in corrupt:
        found.insert(number, draws.integers(128, 256, length))
    return [np.append(document, END) for document in found]


def test_documents_that_are_left_out_are_not_there(tmp_path):
    prefix = write(tmp_path / "c", [np.array([1, 2]), np.array([9, 9, 9]), np.array([3])])
    (tmp_path / "drop").write_text("1  # bad\n")
    dropped = read_without(str(tmp_path / "drop"), [prefix])
    assert dropped == {prefix: [1]}
    data = Corpora([prefix], None, dropped)
    assert [data.datasets[0][i].tolist() for i in range(2)] == [[1, 2], [3]]
    assert data.about == {"documents": 2, "tokens": 3, "without": {prefix: [1]}}
    for parts in (1, 2, 3, 6):
        for part in range(parts):
            data.check_tokens(4, part, parts)  # 9 is not read
    with pytest.raises(ValueError, match="largest token id 3 is outside"):
        data.check_tokens(3, 0, 1)
    with pytest.raises(ValueError, match=r"has no document 3: it has 3, counted from 0"):
        IndexedDataset(prefix, [3])


def finish(flags: list[str], sizes: dict[str, int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of four steps, and the last weights."""
    t = Trainer(parse([*TINY.split(), *flags]), mesh(**sizes) if sizes else Mesh())
    return [t.step()["loss"] for _ in range(4)], full_state_dict(t.model)


def same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_a_run_without_documents_is_bitwise_one_that_never_had_them(tmp_path, ranks):
    corrupt = (3, 40, 41)
    clean, mixed = write(tmp_path / "clean", texts(60)), write(tmp_path / "mixed", texts(60, corrupt))
    (tmp_path / "drop").write_text("".join(f"{mixed} {number}\n" for number in corrupt))
    without = ["--data", mixed, "--set", f"without_documents={tmp_path / 'drop'}"]
    same(finish(without, {}), finish(["--data", clean], {}))
    assert finish(["--data", mixed], {})[0] != finish(without, {})[0]
    for found, expected in zip(
        ranks(2, finish, without, {"dp": 2}), ranks(2, finish, ["--data", clean], {"dp": 2}), strict=True
    ):
        same(found, expected)


def spot(out: str, flags: list[str], sizes: dict[str, int]) -> bool:
    """Train to the end; the records are rank 0's."""
    return Trainer(parse([*flags, "--out", out]), mesh(**sizes) if sizes else Mesh()).train()


def named_from_spikes(run: Path, corrupt: tuple[int, ...]) -> set[int]:
    """The documents of the largest loss in each spike. They are planted ones."""
    (checkpoint,) = (run / "checkpoints").glob("[!.]*")
    text, named = which_text.Text(run, PROGRAM), set()
    for step in text.spikes():
        worst = text.find([step], checkpoint)[0]
        assert worst.piece.document in corrupt
        assert worst.text.count("\ufffd") > 5
        named.add(worst.piece.document)
    return named


LEARNING = [
    *TINY.split(), "--seq-len", "24", "--lr", "0.02", "--warmup", "10", "--eval-every", "0", "--dtype", "float32",
]  # fmt: skip


def test_planted_documents_are_named_from_their_spikes(tmp_path, capsys):
    corrupt = tuple(range(60, 900, 90))
    data = write(tmp_path / "c", texts(900, corrupt))
    spot(str(tmp_path / "run"), [*LEARNING, "--data", data, "--steps", "400"], {})
    named = named_from_spikes(tmp_path / "run", corrupt)
    assert len(named) >= 2
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("[!.]*")
    capsys.readouterr()
    assert which_text.main([str(tmp_path / "run"), "--checkpoint", str(checkpoint), "--most", "1"]) == 0
    (tmp_path / "drop").write_text(capsys.readouterr().out)
    assert set(read_without(str(tmp_path / "drop"), [data])[data]) <= named


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"dp": 4}, {"tp": 2, "pp": 2}], ids=str)
def test_ten_corrupt_documents_of_ten_thousand_are_named_on_four_layouts(tmp_path, sizes, request):
    """Two epochs: what was read while the model knew nothing is read again."""
    corrupt = tuple(range(500, 10_000, 1_000))
    data, out = write(tmp_path / "c", texts(10_000 - len(corrupt), corrupt)), tmp_path / "run"
    flags = [*LEARNING, "--data", data, "--global-batch", "16", "--micro-batch", "4", "--steps", "2400"]
    if sizes:
        request.getfixturevalue("ranks")(math.prod(sizes.values()), spot, str(out), flags, sizes, timeout=1800)
    else:
        spot(str(out), flags, sizes)
    assert named_from_spikes(out, corrupt) == set(corrupt) & set(split_documents(10_000)[0].tolist())


def record(step: int, loss: float | None = 1.0) -> dict:
    """Of two samples of five tokens a step."""
    return {"step": step, "loss": loss, "samples": [2 * step, 2 * step + 1], "tokens": 10 * (step + 1)}


def run_of(folder: Path, records: list[dict], flags: str = "") -> Path:
    """A run on twelve documents of which each is one letter nine times, and an end."""
    folder.mkdir()
    data = write(folder / "c", [np.array([97 + i] * 9 + [256]) for i in range(12)])
    args = vars(parse(["--data", data, *flags.split()]))
    (folder / "config.json").write_text(json.dumps({"run": args}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return folder


def test_a_run_has_the_samples_that_its_records_say(tmp_path):
    entries = [record(3), {"step": 3, "val_loss": 2.0}, record(4), record(5)]
    text = which_text.Text(run_of(tmp_path / "run", entries, "--seed 3 --eval-every 0"), PROGRAM)
    assert text.seq_len == 5
    assert [entry["step"] for entry in text.records] == [3, 4, 5]
    assert text.samples_of(4) == range(8, 10)
    with pytest.raises(ValueError, match=r"^step 9 has no record: there are steps 3 to 5$"):
        text.samples_of(9)
    want = Corpora([str(tmp_path / "run" / "c")], None).split(5, seed=3, evaluate=False)[0]
    assert [text.samples.sample(i).tolist() for i in range(8)] == [want.sample(i).tolist() for i in range(8)]
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "val_loss": 1}\n')
    with pytest.raises(ValueError, match="has no step with its samples"):
        which_text.Text(tmp_path / "run", PROGRAM)
