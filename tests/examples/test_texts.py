"""Which text a step read, and the corpora of a run: by records, losses and documents that are known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from examples.gpt import setup, which_text
from examples.gpt.arguments import parse
from examples.gpt.blend import Blend, Corpora, counts_of_period, open_eval_sets, read_without
from examples.gpt.indexed_dataset import IndexedDatasetWriter
from examples.gpt.samples import Piece, TokenSamples
from examples.gpt.which_text import Found, Text, main
from mpcore import Mesh


def write(prefix: Path, *documents: Any) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    return str(prefix)


# --- which text -------------------------------------------------------------------------------------------------------


def record(step: int, loss: float | None = 1.0) -> dict:
    """Of two samples of five tokens a step."""
    return {"step": step, "loss": loss, "samples": [2 * step, 2 * step + 1], "tokens": 10 * (step + 1)}


def run_of(folder: Path, records: list[dict], flags: str = "") -> Path:
    """A run on twelve documents of which each is one letter nine times, and an end."""
    folder.mkdir()
    data = write(folder / "c", *([97 + i] * 9 + [256] for i in range(12)))
    args = vars(parse(["--data", data, *flags.split()]))
    (folder / "config.json").write_text(json.dumps({"run": args}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return folder


def test_a_line_names_the_document_and_where_it_was_read():
    piece = Piece("web", 7, 3, 5)
    assert str(Found(2, 9, piece, "a\nb", None)) == "web 7  # step 2, sample 9, tokens 3 to 7: 'a\\nb'"
    assert str(Found(2, 9, piece, "x", 1.23456)) == "web 7  # step 2, sample 9, loss 1.235, tokens 3 to 7: 'x'"


def test_a_run_has_the_samples_that_its_records_say(tmp_path):
    entries = [record(3), {"step": 3, "val_loss": 2.0}, record(4), record(5)]
    text = Text(run_of(tmp_path / "run", entries, "--seed 3 --eval-every 0"))
    assert text.seq_len == 5
    assert [entry["step"] for entry in text.records] == [3, 4, 5]
    assert text.samples_of(4) == range(8, 10)
    with pytest.raises(ValueError, match=r"^step 9 has no record: there are steps 3 to 5$"):
        text.samples_of(9)
    want = Corpora([str(tmp_path / "run" / "c")], None).split(5, seed=3, evaluate=False)[0]
    assert [text.samples.sample(i).tolist() for i in range(8)] == [want.sample(i).tolist() for i in range(8)]
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "val_loss": 1}\n')
    with pytest.raises(ValueError, match="has no step with its samples"):
        Text(tmp_path / "run")


def test_spikes_and_skipped_steps_are_listed(tmp_path):
    losses = [1.0 + 0.01 * (i % 2) for i in range(60)] + [9.0, None, 1.0]
    text = Text(run_of(tmp_path / "run", [record(i, loss) for i, loss in enumerate(losses)]))
    assert text.spikes() == [60, 61]


def test_each_piece_of_a_sample_has_its_text_and_the_loss_of_its_tokens(tmp_path, monkeypatch):
    text = Text(run_of(tmp_path / "run", [record(0), record(1)], "--eval-every 0"))
    plain = text.find([0, 1], None)
    assert (plain[0].step, plain[0].sample) == (0, 0)
    assert {each.sample for each in plain if each.step == 1} == {2, 3}
    letters = [each.text for each in plain]
    for each in plain:
        letter, ended = chr(97 + each.piece.document), each.piece.first + each.piece.count == 10
        assert each.text == letter * (each.piece.count - ended)
        assert each.loss is None
    assert len(set(letters)) > 1

    class Model(torch.nn.Module):
        """Position t has the loss t + 1 on whatever comes next."""

        def __init__(self, seq_len: int = 5) -> None:
            super().__init__()
            self.config = SimpleNamespace(seq_len=seq_len)
            self.asked: list[dict] = []

        def forward(self, tokens: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
            assert not self.training
            self.asked.append(more)
            logits = torch.full((1, tokens.shape[1], 257), 0.0)
            for t in range(tokens.shape[1]):  # log softmax is -(t + 1) everywhere but at 200, which no text has
                rest = 256 * math.exp(-(t + 1.0))
                logits[0, t, :] = -(t + 1.0)
                logits[0, t, 200] = math.log(max(1 - rest, 1e-30)) if rest < 1 else 0.0
            return logits

    model = Model()
    monkeypatch.setattr(which_text, "load_model", lambda path: model)
    ranked = text.find([0, 1], Path("ckpt"))
    own = {}
    for sample in range(4):
        tokens, targets = text.samples.batch([sample])
        losses = torch.nn.functional.cross_entropy(model(tokens)[0].double(), targets[0], reduction="none")
        at = 0
        for piece in text.samples.pieces(sample):
            mine = losses[max(at - 1, 0) : at + piece.count - 1]
            own[sample, piece] = float(mine.mean()) if len(mine) else None
            at += piece.count
    assert {(each.sample, each.piece): each.loss for each in ranked} == pytest.approx(own)
    order = [each.loss or 0.0 for each in ranked]
    assert order == sorted(order, reverse=True)
    assert all(not asked for asked in model.asked)
    text.args.document_masking = True
    model.asked.clear()
    text.find([0], Path("ckpt"))
    assert [set(asked) for asked in model.asked] == [{"documents"}] * 2
    assert model.asked[0]["documents"].shape == (1, 5)
    monkeypatch.setattr(which_text, "load_model", lambda path: Model(seq_len=4))
    with pytest.raises(ValueError, match=r"^ckpt reads 4 tokens, and a sample has 5$"):
        text.find([0], Path("ckpt"))


def test_pieces_without_a_loss_come_last(tmp_path, monkeypatch):
    text = Text(run_of(tmp_path / "run", [record(0), record(1)], "--eval-every 0"))
    losses = iter([0.5, None, 2.0, 0.25])
    monkeypatch.setattr(text, "_of_sample", lambda *of: [Found(0, 0, Piece("web", 0, 0, 1), "", next(losses))])
    monkeypatch.setattr(which_text, "load_model", lambda path: mock.Mock(**{"eval.return_value.config.seq_len": 5}))
    assert [each.loss for each in text.find([0, 1], Path("ckpt"))] == [2.0, 0.5, 0.25, None]


def test_a_long_piece_shows_its_beginning(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    data = write(folder / "c", [97] * 2000 + [256])
    (folder / "config.json").write_text(json.dumps({"run": vars(parse(["--data", data, "--eval-every", "0"]))}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 1.0, "samples": [0, 0], "tokens": 100}) + "\n")
    assert [each.text for each in Text(folder).find([0], None)] == ["a" * 60]


def test_the_command_lists_so_many_lines(tmp_path, capsys):
    run = run_of(tmp_path / "run", [record(i) for i in range(4)], "--eval-every 0")
    found = [str(each) for each in Text(run).find([1, 2], None)]
    assert main([str(run), "--steps", "1", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == found
    assert main([str(run), "--steps", "1", "2", "--most", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [*found[:2], f"# and {len(found) - 2} more: --most"]
    assert main([str(run), "--steps", "1", "2", "--most", str(len(found))]) == 0
    assert "more" not in capsys.readouterr().out
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "# no step was a spike or skipped: --steps names others"
    assert main([str(run), "--checkpoint", str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err
    with mock.patch.multiple(which_text, Text=mock.DEFAULT, open_checkpoint=mock.DEFAULT) as parts:
        text = parts["Text"].return_value
        text.spikes.return_value, text.find.return_value = [7], list(range(25))
        assert main(["there", "--checkpoint", "ckpt"]) == 0
        parts["open_checkpoint"].assert_called_once_with(Path("ckpt"))
        text.find.assert_called_once_with([7], Path("ckpt"))
        assert capsys.readouterr().out.splitlines() == [*map(str, range(20)), "# and 5 more: --most"]
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for said in ("python -m examples.gpt.which_text [-h]", "RUN the folder of a run", "default: all spikes and skipped",
                 "rank the documents by their loss", "how many lines (default 20)", "List the documents behind steps",
                 "examples: python -m examples.gpt.which_text runs/one"):  # fmt: skip
        assert said in told


# --- corpora ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1], [10_000]),
        ([1, 1], [5000, 5000]),
        ([1, 1, 1], [3334, 3333, 3333]),  # the first of equal remainders
        ([2, 2, 2], [3334, 3333, 3333]),
        ([1, 2, 4], [1429, 2857, 5714]),  # 1428.57, 2857.14, 5714.29
        ([1, 9999], [1, 9999]),
        ([1] * 7, [1429] * 4 + [1428] * 3),
        ([1, 2, 4] * 9, [159, 318, 635] + [159, 317, 635] * 8),  # 158.73, 317.46, 634.92: one is left
        ([0.7, 0.3], [7000, 3000]),
    ],
)
def test_shares_are_rounded_by_the_largest_remainders(weights, counts):
    assert counts_of_period(weights) == counts


def test_a_share_below_one_sample_of_a_period_is_refused():
    assert counts_of_period([1.1, 9998.9])[0] == 1
    with pytest.raises(ValueError, match=r"^weight 0.4 of 10000 in all is below 1 in 10,000: give it more, or leave"):
        counts_of_period([0.4, 9999.6])


def test_a_blend_has_parts_of_one_length(tmp_path):
    data = Corpora([write(tmp_path / "a", list(range(50)))], None).datasets[0]
    two, three = (TokenSamples(data, length, seed=0) for length in (2, 3))
    with pytest.raises(ValueError, match=r"^2 parts have samples of \[2, 3\] tokens: all must have the same$"):
        Blend([two, three], None, seed=0)
    with pytest.raises(ValueError, match=r"^0 parts have samples of \[\] tokens"):
        Blend([], None, seed=0)
    with pytest.raises(ValueError, match=r"^3 weights for 2 corpora$"):
        Blend([two, two], [1, 2, 3], seed=0)
    blend = Blend([two, three.__class__(data, 2, seed=1)], None, seed=0)
    assert (blend.seq_len, len(blend), blend.period, blend.counts) == (2, 48, 48, [24, 24])
    with pytest.raises(ValueError, match=r"^sample index -1 is below 0$"):
        blend.place(-1)
    part, own = blend.place(60)
    assert blend.sample(60).tolist() == blend.parts[part].sample(own).tolist()
    assert blend.pieces(60) == blend.parts[part].pieces(own)


def test_documents_are_left_out_by_prefix_and_number(tmp_path):
    file = tmp_path / "drop"
    file.write_text("web 3 # bad\n\n# none\ncode 4\n  web 5\n")
    assert read_without(str(file), ["web", "code"]) == {"web": [3, 5], "code": [4]}
    assert read_without(None, ["web"]) == {}
    file.write_text("7\nweb 8\n")
    assert read_without(str(file), ["web"]) == {"web": [7, 8]}
    for content, line in (("7", 1), ("web 1\nother 2", 2), ("web x", 1), ("web 1 2", 1), ("web -1", 1)):
        file.write_text(content)
        message = f", line {line}: .* is not PREFIX NUMBER, with a PREFIX of --data: web, code$"
        with pytest.raises(ValueError, match=message):
            read_without(str(file), ["web", "code"])


def test_the_facts_of_corpora_are_their_documents_tokens_and_shares(tmp_path):
    one, two = write(tmp_path / "a", [1, 2], [3, 4, 5]), write(tmp_path / "b", [6] * 7)
    assert Corpora([one], None).about == {"documents": 2, "tokens": 5}
    assert Corpora([one], [1.0]).about == {"documents": 2, "tokens": 5}
    assert Corpora([one, two], None).about == {"documents": 3, "tokens": 12, "blend": [[5, "once"], [7, "once"]]}
    assert Corpora([one, two], [1, 3]).about["blend"] == [[5, 2500], [7, 7500]]
    without = Corpora([one, two], None, {one: [1, 1]})
    assert without.about == {"documents": 2, "tokens": 9, "blend": [[2, "once"], [7, "once"]], "without": {one: [1]}}
    assert len(Corpora([one], None).files) == 2
    with pytest.raises(ValueError, match=r"a.idx has no document: there is nothing to train on"):
        Corpora([one], None, {one: [0, 1]})
    with pytest.raises(ValueError, match="largest token id 6"):
        Corpora([one, two], None).check_tokens(6, 0, 1)
    Corpora([one, two], None).check_tokens(7, 0, 1)


def test_parts_of_several_corpora_name_the_one_that_is_too_short(tmp_path):
    long = write(tmp_path / "long", *([i] * 20 for i in range(60)))
    short = write(tmp_path / "short", [1, 2, 3])
    train, held_out = Corpora([long, long], [1, 3]).split(4, seed=5, evaluate=True)
    assert isinstance(train, Blend)
    assert isinstance(held_out, Blend)
    assert (train.seed, held_out.seed, train.counts, held_out.counts) == (5, 0, [2500, 7500], [2500, 7500])
    with pytest.raises(ValueError, match=r"^\S+short: the training part: 1 document holds"):
        Corpora([long, short], None).split(4, seed=0, evaluate=False)
    with pytest.raises(ValueError, match=r"^the training part: 1 document holds"):
        Corpora([short], None).split(4, seed=0, evaluate=False)
    few = write(tmp_path / "few", *([i] * 2 for i in range(40)))
    train, held_out = Corpora([long, few], None).split(8, seed=0, evaluate=False)
    assert isinstance(train, Blend)
    assert held_out is None, "what is held out of one is too short"
    with pytest.raises(ValueError, match=r"^\S+short: 1 document holds 3 tokens"):
        Corpora([short], None).whole(4)
    every = Corpora([long], None).whole(4)
    assert (len(every), every.seq_len) == (1199 // 4, 4)
    assert every.sample(0).tolist() == TokenSamples(Corpora([long], None).datasets[0], 4, seed=0).sample(0).tolist()


def test_validation_sets_have_names_and_are_not_trained_on(tmp_path):
    one, two = write(tmp_path / "a", [1, 2, 3]), write(tmp_path / "b", [4, 5])
    found = open_eval_sets([f"x={one}", f"y={two}"], [])
    assert {name: corpora.about["tokens"] for name, corpora in found.items()} == {"x": 3, "y": 2}
    assert open_eval_sets([], [one]) == {}
    for words, message in (
        ([one], f"--eval-data {one}: give NAME=PREFIX"),
        ([f"={one}"], "give NAME=PREFIX"),
        (["x="], "give NAME=PREFIX"),
        ([f"x={one}", f"x={two}"], "--eval-data names x twice"),
        ([f"x={tmp_path}/./b"], "is trained on: --data names it too"),
    ):
        with pytest.raises(ValueError, match=message):
            open_eval_sets(words, [two])


def test_a_run_is_set_up_from_its_data(tmp_path):
    data = write(tmp_path / "c", *([i % 250] * 40 for i in range(60)))
    more = write(tmp_path / "d", [1] * 90)
    flags = ["--data", data, "--seq-len", "16", "--seed", "4", "--eval-data", f"more={more}"]
    checked: list[tuple] = []
    with mock.patch.object(setup, "check_same", side_effect=lambda what, value: checked.append((what, value))):
        made = setup.set_up(parse(flags), Mesh())
    assert made.corpus == {"documents": 60, "tokens": 2400}
    want = Corpora([data], None).split(16, seed=4, evaluate=True)
    assert made.held_out is not None
    assert want[1] is not None
    for found, wanted in ((made.train, want[0]), (made.held_out, want[1])):
        assert found.sample(0).tolist() == wanted.sample(0).tolist()
    assert (list(made.eval_sets), len(made.eval_sets["more"])) == (["more"], 89 // 16)
    assert [what for what, _ in checked] == ["code", "configuration", "data", "data"]
    assert checked[1][1]["--seq-len"] == 16
    assert checked[1][1]["tokens"] == 2400
    small = write(tmp_path / "e", [300] * 90)
    for words in (["--data", small], [*flags[:-1], f"more={small}"]):
        with pytest.raises(ValueError, match="largest token id 300 is outside the vocabulary of 257"):
            setup.set_up(parse(words), Mesh())
