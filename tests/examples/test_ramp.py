"""A growing batch: the sizes are Megatron's, and a run that goes on elsewhere in the middle of it loses no sample."""

from __future__ import annotations

import pytest

from examples.gpt.arguments import parse
from examples.gpt.policies import read_ramp
from tests.examples.test_pretrain import trainer

FLAGS = ["--global-batch", "8", "--micro-batch", "1", "--steps", "7", "--dtype", "float64", "--seq-len", "8",
         "--set", "rampup_batch_size=2,2,12", "--resume", "auto"]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), [
    ("8,2,9", "the start 8 is not below --global-batch 8"),
    ("2,4,9", "from 2 to --global-batch 8 are 6 samples, no multiple of the increment 4"),
    ("3,1,9", "the start 3 is not a multiple of workers x dp x micro-batch = 2: 4 is"),
    ("2,3,9", "the increment 3 is not a multiple of workers x dp x micro-batch = 2: 4 is"),
    ("2,2,9 --workers 2", "with --workers 2: workers take steps of one size"),
    ("2,2,9 --schedule plan.csv", "with --schedule plan.csv: a file is for one number of micro-batches"),
])  # fmt: skip
def test_a_ramp_that_cannot_be_is_refused_with_its_numbers(flags, message):
    ramp, *more = flags.split(maxsplit=1)
    args = parse(["--global-batch", "8", "--set", f"rampup_batch_size={ramp}", *" ".join(more).split()])
    with pytest.raises(ValueError, match=message):
        read_ramp(args, 2)


def train(sizes: dict[str, int], out: str, until: int) -> tuple[list[float], int]:
    t = trainer(*FLAGS, "--out", out, **sizes)
    losses = [t.step()["loss"] for _ in range(t.run.step, until)]
    t.checkpoints.save()
    return losses, t.checkpoints.sample(until)


def check_few(out: str) -> None:
    """The schedule needs two micro-batches, the first step has one."""
    with pytest.raises(ValueError, match="1 micro-batches are fewer than the pp size 2"):
        trainer(*FLAGS, "--out", out, "--micro-batch", "2", pp=2)


def test_in_the_middle_of_a_ramp_any_layout_goes_on_with_the_same_losses(ranks, tmp_path):
    ((want, samples),) = ranks(1, train, {}, str(tmp_path / "one"), 7)
    assert samples == sum((2, 2, 4, 6, 8, 8, 8))
    layouts = [({"dp": 2}, 3), ({"pp": 2}, 5), ({"tp": 2}, 7)]  # the size changes on both of the first two
    parts = [ranks(2, train, sizes, str(tmp_path / "two"), until) for sizes, until in layouts]
    for found in zip(*parts, strict=True):
        assert [loss for losses, _ in found for loss in losses] == pytest.approx(want, rel=1e-10)
        assert found[-1][1] == samples
    ranks(2, check_few, str(tmp_path / "few"))
