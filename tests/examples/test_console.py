"""The warm-up that a run warns of."""

from __future__ import annotations

import pytest

from examples.gpt.arguments import parse
from examples.gpt.policies import learning_rate, long_warmup, lr_schedule
from mpcore.tools.fault_tolerance import faults as faults


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
