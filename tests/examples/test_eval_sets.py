"""Validation sets by name: measured alike on every layout and with every seed, recorded and drawn by their names."""

from __future__ import annotations

import json

import pytest

from examples.gpt.samples import open_eval_sets
from tests.examples.corpora import write
from tests.examples.test_pretrain import trainer

FLAGS = ["--seq-len", "8", "--global-batch", "2", "--micro-batch", "1", "--steps", "1", "--warmup", "1", "--lr", "0",
         "--dtype", "float64", "--set", "eval_samples=5", "document_masking=true"]  # fmt: skip


def corpus(prefix, byte: int) -> str:
    return write(prefix, [[(byte + number * i) % 256 for i in range(11)] + [256] for number in range(20)])


def train(sizes: dict[str, int], out: str, web: str, code: str) -> list[dict]:
    trainer(*FLAGS, f"eval_data=web={web},code={code}", "--out", out, **sizes).train()
    with open(f"{out}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def test_named_sets_are_recorded_beside_the_held_out_part_alike_on_every_layout(ranks, tmp_path):
    web, code = corpus(tmp_path / "web", 3), corpus(tmp_path / "code", 90)
    found = [
        ranks(size, train, sizes, str(tmp_path / f"{size}"), web, code)[0][-1]
        for size, sizes in ((1, {}), (2, {"dp": 2}))
    ]
    for entry in found:
        assert entry.keys() == {"step", "val_loss", "perplexity", "bits_per_byte", "val_losses"}
        assert entry["val_losses"].keys() == {"web", "code"}
        assert entry["val_loss"] == pytest.approx(found[0]["val_loss"], rel=1e-10)
        assert entry["val_losses"] == pytest.approx(found[0]["val_losses"], rel=1e-10)
    assert len({found[0]["val_loss"], *found[0]["val_losses"].values()}) == 3


@pytest.mark.parametrize(("words", "message"), [
    (["code"], "eval_data code: give NAME=PREFIX"), (["=code"], "eval_data =code: give NAME=PREFIX"),
    (["a={code}", "a={code}"], "names a twice"), (["a={web}"], "--data names it too"), (["a={web}-missing"], "missing"),
])  # fmt: skip
def test_sets_that_cannot_be_measured_are_refused(words, message, tmp_path):
    web, code = corpus(tmp_path / "web", 3), corpus(tmp_path / "code", 90)
    with pytest.raises((ValueError, OSError), match=message):
        open_eval_sets([word.format(web=web, code=code) for word in words], [web])
