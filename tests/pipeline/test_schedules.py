"""Schedules as data: what they hold, what they refuse, and their files."""

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from mpcore._torch.pipelining import PlannedStage
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import (
    NAMES,
    V_SHAPED,
    build_schedule,
    check_schedule,
    default_virtual_stages,
    find_schedule,
    read_csv,
    with_messages,
    write_csv,
)


def text(schedule):
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def test_schedules_of_one_stage_a_rank_action_by_action():
    assert text(build_schedule("naive", 2, 2)) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    assert text(build_schedule("gpipe", 2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert text(build_schedule("1f1b", 3, 3)) == [
        "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2",
    ]  # fmt: skip


def test_split_schedules_hold_what_their_papers_say():
    assert text(build_schedule("zb", 2, 3))[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert text(build_schedule("zbv", 1, 1)) == ["0F0 1F0 1I0 1W0 0I0 0W0"]
    assert text(build_schedule("interleaved", 2, 2, 2))[1] == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert build_schedule("dualpipev", 2, 4).splits_backward
    assert not build_schedule("1f1b", 2, 4).splits_backward


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("P", "M"), [(1, 2), (2, 4), (4, 8), (3, 6)])
def test_every_schedule_lays_its_stages_as_the_placement_says(name, P, M):
    schedule = build_schedule(name, P, M)
    V = default_virtual_stages(name)
    assert (schedule.stages, schedule.micro_batches, len(schedule.ranks)) == (P * V, M, P)
    there = list(range(P))  # looped, or up and back down, so that the two middle stages share a rank
    placement = [rank for i in range(V) for rank in (there[::-1] if name in V_SHAPED and i % 2 else there)]
    assert [schedule.rank_of[stage] for stage in range(P * V)] == placement
    assert all(len(schedule.stages_of(rank)) == V for rank in range(P))


@pytest.mark.parametrize(("args", "message"), [
    (("zigzag", 2, 4), r"'zigzag' is none of naive, gpipe, 1f1b, interleaved, bfs, zb, zbv, dualpipev"),
    (("1f1b", 4, 3), r"3 micro-batches are fewer than the pp size 4"),
    (("dualpipev", 4, 7), r"7 micro-batches are fewer than the 8 stages of pp size 4, and dualpipev needs"),
    (("interleaved", 4, 9), r"9 micro-batches on pp size 4 make 2 rounds, .* multiple of that: 8 "),
    (("zb", 4, 9), r"9 micro-batches on pp size 4 make 2 rounds"),
    (("zbv", 4, 8, 3), r"zbv has exactly 2 virtual stages a rank, not 3"),
    (("dualpipev", 4, 8, 1), r"dualpipev has exactly 2 virtual stages a rank, not 1"),
    (("1f1b", 4, 8, 2), r"1f1b has one stage a rank, not 2"), (("gpipe", 4, 0), r"gpipe over 0 micro-batches"),
    (("gpipe", 0, 4), r"gpipe over 0 ranks"), (("bfs", 2, 4, 0), r"bfs over 0 virtual stages"),
])  # fmt: skip
def test_what_cant_be_had_is_refused_with_the_numbers(args, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(*args)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_the_schedule_back_and_torch_reads_the_same(name, tmp_path):
    schedule = build_schedule(name, 3, 6)
    write_csv(schedule, tmp_path / "plan.csv")
    assert read_csv(tmp_path / "plan.csv").ranks == schedule.ranks
    assert find_schedule(str(tmp_path / "plan.csv"), 3, 6).ranks == schedule.ranks
    stages: list = [PlannedStage(3, schedule.stages) for _ in range(schedule.stages // 3)]
    theirs = PipelineScheduleMulti.__new__(PipelineScheduleMulti)
    theirs.pipeline_order, theirs._stages, theirs.pp_group_size = {}, stages, 3
    theirs._num_stages, theirs._n_microbatches = schedule.stages, 6
    theirs._load_csv(str(tmp_path / "plan.csv"))  # which also validates it, in torch's own way
    assert [list(map(str, theirs.pipeline_order[rank])) for rank in range(3)] == [
        list(map(str, actions)) for actions in schedule.ranks
    ]


@pytest.mark.parametrize("cell", ["0F", "F0", "0F0x", "0X1", "0UNSHARD", "(0F0;zz)OVERLAP_F_B", "-1F0"])
def test_a_cell_that_is_no_action_is_named_with_its_place(cell, tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text(f"0F0,0B0\n1F0,{cell}\n")
    with pytest.raises(ValueError, match=r"plan\.csv, row 1, column 1: "):
        read_csv(path)
    path.write_text("0F0,,0F1,(1F0;1B0)OVERLAP_F_B, 0B0 \n1SEND_B0,1RECV_F12\n")
    assert text(read_csv(path)) == ["0F0 0F1 1F0 1B0 0B0", "1SEND_B0 1RECV_F12"]


def test_files_that_are_none_or_for_other_numbers_are_refused(tmp_path):
    path = tmp_path / "plan.csv"
    with pytest.raises(ValueError, match=r"plan\.csv can't be read"):
        read_csv(path)
    path.write_text(",,\n")
    with pytest.raises(ValueError, match="has no action"):
        read_csv(path)
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ValueError, match=r"can't be read|is no action"):
        read_csv(path)
    write_csv(build_schedule("interleaved", 2, 4), path)
    for args, message in [
        ((3, 4), "for 2 ranks, the run has 3"),
        ((2, 6), "for 4 micro-batches, the run has 6"),
        ((2, 4, 3), "for 4 stages, the run has 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_schedule(str(path), *args)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("P", "M"), [(1, 2), (2, 4), (4, 8)])
def test_pitfall_35_messages_of_torch_pass_the_proof_with_blocking_sends(name, P, M):
    """At P=2 the next rank is the one before: all messages of a pair must be posted in one order."""
    schedule = build_schedule(name, P, M)
    lowered = with_messages(schedule)
    proof, plain = prove(lowered), prove(schedule)
    assert proof.messages == plain.messages
    assert sum(a.kind.startswith("SEND") for a in lowered.actions) == plain.messages
    assert (proof.makespan, proof.peaks) == (plain.makespan, plain.peaks)


@pytest.mark.parametrize(("name", "P", "M", "V", "fits"), [
    ("interleaved", 4, 2, 2, True), ("interleaved", 4, 1, 2, True), ("interleaved", 2, 3, 2, True),
    ("interleaved", 2, 4, 2, True), ("interleaved", 2, 5, 2, False), ("zb", 2, 7, 1, False), ("zb", 3, 2, 1, True),
    ("zb", 2, 6, 3, True), ("1f1b", 4, 4, 1, True), ("1f1b", 4, 3, 1, False), ("dualpipev", 2, 4, 2, True),
    ("dualpipev", 2, 3, 2, False), ("gpipe", 4, 1, 1, True), ("naive", 4, 1, 1, True), ("bfs", 4, 1, 3, True),
    ("zbv", 4, 1, 2, True), ("interleaved", 4, 4, 1, True), ("gpipe", 1, 1, 1, True),
])  # fmt: skip
def test_which_numbers_of_micro_batches_a_schedule_takes(name, P, M, V, fits):
    if fits:
        check_schedule(name, P, M, V)
    else:
        with pytest.raises(ValueError, match=f"^{M} micro-batches "):
            check_schedule(name, P, M, V)
