"""The bytes of a model's state with each stage of ZeRO, by hand."""

from __future__ import annotations

from mpcore.tools.analysis.state import state_bytes, state_table

# Of 4 billion parameters on 8 ranks, in GB: 2 bytes of weights, 2 or 4 of gradients, 12 of the optimizer.
BY_HAND = {
    0: "8 0 8.0 8.0 / 16.0 48.0 64.0 / 72.0", 1: "8 1 8.0 8.0 / 16.0 6.0 22.0 / 30.0",
    2: "8 2 8.0 1.0 / 2.0 6.0 15.0 / 16.0", 3: "8 3 1.0 1.0 / 2.0 6.0 8.0 / 9.0",
}  # fmt: skip


def test_the_table_has_each_stage_and_number_of_ranks_in_gb():
    first, head, *lines = state_table(4e9, [1, 8]).splitlines()
    assert first.startswith("4,000,000,000 parameters")
    assert len(head.split()) == 6
    alone = "1 {} 8.0 8.0 / 16.0 48.0 64.0 / 72.0"
    assert [line.split() for line in lines] == [
        *(alone.format(stage).split() for stage in range(4)),
        *(BY_HAND[stage].split() for stage in range(4)),
    ]
    assert len({len(line) for line in [head, *lines]}) == 1, "columns are aligned"


def test_each_stage_shards_one_more_part():
    assert state_bytes(100, 0, 10) == (200, 400, 1200)
    assert state_bytes(100, 1, 10) == (200, 400, 120)
    assert state_bytes(100, 2, 10) == (200, 40, 120)
    assert state_bytes(100, 3, 10, gradients=2) == (20, 20, 120)
