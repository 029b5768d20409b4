"""What a run prints, records, draws, times and checks after each step, worked out by hand from known numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from examples.gpt.arguments import parse
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.policies import Ramp, learning_rate, long_warmup, lr_schedule
from mpcore import Axis, Mesh
from mpcore.tools.fault_tolerance import faults as faults

FIRST, SECOND = Mesh(), Mesh(world=Axis(2, 1), job=Axis(2, 1))


@pytest.mark.parametrize(("flags", "warning"), [
    ("--steps 21", ""), ("--steps 20", "--warmup 20 is not below --steps 20: "),
    ("--steps 24 --lr-decay-steps 16", "--warmup 20 is not below --lr-decay-steps 16: "),
    ("--steps 16 --lr-decay-steps 24", ""),
])  # fmt: skip
def test_a_warm_up_that_is_not_shorter_than_the_schedule_is_named(flags, warning):
    args = parse(flags.split())
    assert long_warmup(args).startswith(warning)
    assert bool(long_warmup(args)) == bool(warning)
    if warning:
        rates = [learning_rate(lr_schedule(args), step) for step in (18, 19, 20, 21)]
        assert rates == pytest.approx([0.95 * args.lr, args.lr, args.lr, 0.1 * args.lr])


def checkpoints_of(flags: str = "") -> Any:
    made: Any = Checkpoints.__new__(Checkpoints)
    made.args, made.setup = parse(flags.split()), SimpleNamespace(ramp=Ramp(8, 8))
    made.first_step, made.first_sample, made.run = 0, 0, SimpleNamespace(step=0)
    return made


@pytest.mark.parametrize(("flags", "due"), [
    ("--steps 6", [5]), ("--steps 6 --set no_save=true", []), ("--steps 6 --save-every 2", [1, 3, 5]),
    ("--steps 5 --save-every 2", [1, 3, 4]), ("--steps 6 --save-every 1", [0, 1, 2, 3, 4, 5]),
    ("--steps 6 --save-every 0", [5]),
])  # fmt: skip
def test_checkpoints_are_due_as_often_as_asked_and_at_the_end(flags, due):
    made = checkpoints_of(flags)
    assert [step for step in range(made.args.steps) if made.is_due(step)] == due


def test_samples_of_a_step_follow_those_before():
    made = checkpoints_of()
    assert [made.samples(step) for step in (0, 3)] == [range(8), range(24, 32)]
    made.first_step, made.first_sample = 2, 5
    assert (made.sample(2), made.samples(4)) == (5, range(21, 29))
