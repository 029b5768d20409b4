"""Which fault is shown to be stood by which test, as a table: `python -m tests.reliability [ROW ...] [--write FILE]`.

Without rows all are run. Each test of a row is a fault injected, and one survived where it passes; what a run loses by
it is what the test records as `work_lost`. With `--write`, rows that weren't run stay as the file has them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RUNS = "tests/examples/test_survival_runs.py::"
PARTS = "tests/test_survival.py::"
SAVES = "tests/test_checkpoint.py::"
FUZZ = "tests/test_checkpoint_fuzz.py::"
TRACE = "tests/test_trace.py::"
DATA = "tests/examples/test_data.py::"
COMMAND = "tests/examples/test_pretrain_command.py::"
MATCHING = f"{TRACE}test_matching_is_a_pure_function_of_the_logs"
LEAVE = "test_row_1_3_4_all_ranks_leave_within_seconds_and_name_the_first"
DAMAGED = f"{SAVES}test_what_is_damaged_is_refused_by_name_and_changes_nothing"
GOES_ON = f"{SAVES}test_pitfall_38_39_a_stopped_run_goes_on_as_if_it_had_not_been"
FULL = f"{SAVES}test_a_full_disk_is_told_on_every_rank_and_leaves_the_old_checkpoint"


class Row(NamedTuple):
    """A fault, the tests that inject it, or why none does; and what is lost where no test says."""

    fault: str
    tests: tuple[str, ...] = ()
    note: str = ""
    lost: str = "nothing"


SINCE = "steps since the last checkpoint"
ROWS = {
    1: Row("a rank is killed in a step", (f"{RUNS}{LEAVE}[kill]",
        f"{PARTS}test_row_1_3_4_when_a_rank_fails_the_others_name_it[killed]"), lost=SINCE),
    2: Row("a rank is killed under torchrun --max-restarts",
        (f"{RUNS}test_row_2_36_37_a_killed_rank_is_started_again_and_nothing_is_lost_but_steps",
        f"{PARTS}test_row_2_38_every_attempt_agrees_on_a_name_that_no_dead_one_used"), lost=SINCE),
    3: Row("an exception on one rank", (f"{RUNS}{LEAVE}[raise]",
        f"{PARTS}test_row_1_3_4_when_a_rank_fails_the_others_name_it[raises]"), lost=SINCE),
    4: Row("a rank leaves with status 0", (f"{RUNS}{LEAVE}[exit]",
        f"{PARTS}test_row_1_3_4_when_a_rank_fails_the_others_name_it[exits 0]",
        f"{PARTS}test_row_4_leaving_early_with_status_0_is_a_failure"), lost=SINCE),
    5: Row("a rank is stopped (SIGSTOP)", (f"{RUNS}test_row_5_a_stopped_rank_is_named_within_the_timeout", MATCHING),
        lost=SINCE),
    6: Row("a slow rank", (f"{RUNS}test_row_6_a_slow_rank_is_named",
        f"{PARTS}test_row_6_a_rank_that_stays_slow_is_named_on_all_ranks",
        f"{PARTS}test_row_6_uniform_load_is_no_alarm")),
    7: Row("a skipped collective", (f"{TRACE}test_every_hang_is_explained", MATCHING), lost=SINCE),
    8: Row("ranks call different collectives, or the same ones in a different order",
        (f"{TRACE}test_every_hang_is_explained", MATCHING), lost=SINCE),
    9: Row("shapes differ between ranks", ("tests/test_collectives.py",),
        "layers check shapes before they communicate; configs are compared"),
    10: Row("dtypes differ between ranks", (),
        "configs are compared before the first step (row 12); a differing flag is refused there"),
    11: Row("pipeline messages change size from step to step",
        ("tests/pipeline/test_engine.py::test_pitfall_35_lengths_and_batches_may_change_from_step_to_step",)),
    12: Row("config, code or data differ", (f"{PARTS}test_row_12_other_code_or_data_on_a_rank_is_refused_by_file",
        f"{COMMAND}test_unequal_flags_are_refused_on_every_rank_by_name")),
    13: Row("mesh or model sizes don't fit the world size",
        (f"{COMMAND}test_what_does_not_fit_is_refused_on_every_rank",
        "tests/test_mesh.py::test_sizes_that_do_not_fit_are_named")),
    14: Row("a rank is killed in a save", (f"{SAVES}test_killed_at_any_moment_a_whole_checkpoint_is_there",
        f"{SAVES}test_killed_over_an_old_checkpoint_a_whole_one_is_there"), lost=SINCE),
    15: Row("a rank is killed while a save replaces an old checkpoint",
        (f"{SAVES}test_killed_over_an_old_checkpoint_a_whole_one_is_there",),
        lost=SINCE),
    16: Row("a file is truncated, empty or missing", (DAMAGED,
        f"{FUZZ}test_row_16_17_18_any_byte_changed_or_cut_is_refused",
        f"{SAVES}test_resuming_another_run_is_refused_and_a_damaged_checkpoint_passed_over")),
    17: Row("a bit flips in a checkpoint", (DAMAGED, f"{FUZZ}test_row_16_17_18_any_byte_changed_or_cut_is_refused")),
    18: Row("the manifest is missing or truncated",
        (DAMAGED, f"{FUZZ}test_row_16_17_18_any_byte_changed_or_cut_is_refused")),
    19: Row("a malicious checkpoint", (DAMAGED,
        f"{FUZZ}test_row_19_a_manifest_of_any_content_is_refused_or_reads_what_was_saved",
        f"{FUZZ}test_row_19_a_tensor_file_of_any_header_is_refused_or_gives_what_lies_in_it")),
    20: Row("the disk is full", (FULL, f"{SAVES}test_training_goes_on_past_a_full_disk",
        f"{COMMAND}test_row_20_a_run_whose_metrics_and_pictures_are_not_written_goes_on",
        f"{PARTS}test_row_20_a_skipped_step_that_is_not_written_down_is_told")),
    21: Row("no permission to write",
        (f"{COMMAND}test_an_output_folder_that_cannot_be_made_is_refused_before_the_first_step",)),
    22: Row("a background save fails", (f"{SAVES}test_training_goes_on_past_a_full_disk",)),
    23: Row("exit while a background save is in flight", (f"{GOES_ON}",), "`--exit-step` with `--async-save`"),
    24: Row("a checkpoint is loaded with another layout",
        (f"{SAVES}test_pitfall_15_16_17_38_what_one_layout_saves_every_other_loads_bitwise",) ),
    25: Row("ranks hold different tensors under one name", (f"{SAVES}test_what_would_be_lost_silently_is_refused",)),
    26: Row("missing, extra or badly shaped tensors", (DAMAGED,
        f"{SAVES}test_another_model_is_refused_by_name_and_shape") ),
    27: Row("NaN or infinity on one rank",
        (f"{COMMAND}test_pitfall_31_an_infinite_gradient_on_one_rank_skips_the_step_on_all",
        f"{PARTS}test_row_27_skipped_steps_are_written_down_and_too_many_in_a_row_stop",
        f"{RUNS}test_row_27_numbers_that_stay_bad_stop_the_run_on_all_ranks"), lost="the skipped steps"),
    28: Row("a loss spike", (f"{PARTS}test_row_28_spikes_are_found_and_a_falling_loss_is_none",
        f"{PARTS}test_row_28_a_new_level_is_accepted_and_what_is_not_finite_is_left_out")),
    29: Row("a replica drifts", (f"{RUNS}test_row_29_a_replica_that_drifts_is_named",
        f"{PARTS}test_row_29_a_flipped_bit_in_a_replica_is_named_by_tensor_and_rank"), lost=SINCE),
    30: Row("silent corruption in a computation", (),
        "not detected: mpcore does not repeat a step to compare results. "
        "Corruption that reaches a replicated parameter is found as in row 29"),
    31: Row("SIGTERM", (f"{RUNS}test_row_31_sigterm_saves_and_every_worker_says_so",
        f"{SAVES}test_a_signal_saves_and_leaves_within_a_step")),
    32: Row("ctrl-C, once and twice", (f"{RUNS}test_row_32_the_first_interrupt_saves",
        f"{PARTS}test_row_32_a_second_interrupt_leaves_at_once_even_inside_a_call_that_waits")),
    33: Row("ranks have different amounts of data", (f"{DATA}test_the_stream_does_not_depend_on_the_number_of_ranks",),
        "each sample is computed from its global index, so no rank runs out of data before another"),
    34: Row("a corrupt or short index", (f"{DATA}test_a_damaged_index_is_refused_or_still_reads_the_same_bytes",
        f"{DATA}test_every_truncation_and_every_byte_of_the_index",
        f"{COMMAND}test_a_corpus_that_cannot_be_trained_on_is_refused")),
    35: Row("a data worker dies", (), "there are no data workers: each rank reads its memory-mapped corpus itself"),
    36: Row("the order of samples changes after a resume", (GOES_ON,)),
    37: Row("random numbers change after a resume", (GOES_ON,)),
    38: Row("a port in use, a stale store",
        (f"{PARTS}test_row_2_38_every_attempt_agrees_on_a_name_that_no_dead_one_used",), "the port is torchrun's"),
    39: Row("a rank arrives late or never", (f"{RUNS}test_row_39_a_rank_that_does_not_arrive_is_named",
        f"{PARTS}test_row_39_ranks_that_do_not_arrive_are_named_on_those_that_did")),
    40: Row("a dtype that gloo can't reduce",
        (),
        "mpcore runs no collective on FP8 tensors: gradients are summed in float32"),
}  # fmt: skip
HEAD = """# Which faults does a run survive?

`python -m tests.reliability --write docs/reliability.md` wrote this page. Tests inject each fault into a training run
of the example, into a group of test processes, or into files. A fault is survived if its test passes: the run goes on,
or it stops on every rank with an error that names the cause, and the checkpoint stays whole. Rows with "none" have no
test; they say why. A test on CPUs can't inject ECC errors, NVLink errors, errors of NCCL's watchdog, or overheating.

| # | fault | times injected | survived | work lost | test | tested on |
|---|---|---|---|---|---|---|
"""


def run(numbers: list[int]) -> dict[str, tuple[bool, str]]:
    """Run the tests of these rows; for each case by its id whether it passed, and the work lost that it recorded."""
    wanted = sorted({test for number in numbers for test in ROWS[number].tests})
    if not wanted:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", f"--junitxml={report}", *wanted]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is not None:
                continue
            passed = case.find("failure") is None and case.find("error") is None
            lost = [p.get("value", "") for p in case.iter("property") if p.get("name") == "work_lost"]
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            found[name] = (passed, lost[0] if lost else "")
        return found


def line(number: int, cases: dict[str, tuple[bool, str]] | None, today: str) -> str:
    """A row of the table; `cases` None: not run."""
    row = ROWS[number]
    mine = [
        result for name, result in (cases or {}).items()
        if any(name == test or name.startswith((f"{test}[", f"{test}::")) for test in row.tests)
    ]  # fmt: skip
    lost = next((said for _, said in mine if said), row.lost)
    shown = "; ".join(dict.fromkeys(test.split("::")[-1].removeprefix("test_").split("[")[0] for test in row.tests))
    shown = "; ".join(filter(None, [shown, row.note]))
    if not row.tests:
        return f"| {number} | {row.fault} | none | | | {row.note} | |\n"
    if not mine:
        return f"| {number} | {row.fault} | not run | | | {shown} | |\n"
    survived = sum(passed for passed, _ in mine)
    return f"| {number} | {row.fault} | {len(mine)} | {survived} | {lost} | {shown} | {today} |\n"


def main(argv: list[str] | None = None) -> int:
    """The command; how many tests failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, choices=[*ROWS, []], metavar="ROW", help="default: all")
    parser.add_argument("--write", metavar="FILE", type=Path)
    args = parser.parse_args(argv)
    numbers = args.rows or list(ROWS)
    old = {}
    if args.write is not None and args.write.is_file():
        old = {int(m[1]): m[0] for m in re.finditer(r"^\| (\d+) \|.*\n", args.write.read_text(), re.MULTILINE)}
    cases, today = run(numbers), str(datetime.date.today())
    lines = [line(n, cases, today) if n in numbers else old.get(n) or line(n, None, today) for n in ROWS]
    text = HEAD + "".join(lines)
    print(text)
    if args.write is not None:
        args.write.write_text(text)
    return sum(not passed for passed, _ in cases.values())


if __name__ == "__main__":
    sys.exit(main())
