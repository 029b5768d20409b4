"""Bars for the machine code of every kernel, and that the lint sees a loop that overlaps nothing."""

import compile_table
import machine_code
import pytest
from test_compile import GOLDEN

NVIDIA = [target for target in GOLDEN["targets"] if target.startswith("sm_")]


@pytest.mark.parametrize("target", NVIDIA)
def test_every_loop_overlaps_its_copies_and_nothing_lives_in_local_memory(target):
    for case, kernels in GOLDEN["targets"][target].items():
        for name, facts in kernels.items():
            compile_table.check(target, case, name, facts)


def body(wait, *, early):
    """A loop of 20 instructions with one copy, right after the wait if `early`, otherwise at the end."""
    copy = ["LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]", "LDGDEPBAR"]
    work = ["FADD R5, R5, R6"] * 16
    lines = [f"DEPBAR.LE SB0, {wait:#x}", *(copy + work if early else work + copy), "@!P0 BRA `(.L_x_1)"]
    return ".L_x_1:\n" + "\n".join(f"  /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    ("wait", "early", "least", "most"), [(0, False, 0, 0.2), (0, True, 0.8, 1), (1, False, 1, 1.2), (2, False, 2, 2.2)]
)
def test_depth_is_the_distance_from_a_copy_to_its_wait(wait, early, least, most):
    (loop,) = machine_code.read(body(wait, early=early)).loops
    assert (loop.length, loop.wait) == (20, wait)
    assert least <= loop.depth <= most


def test_a_loop_at_the_end_of_whose_body_the_copies_stand_is_refused():
    facts = {"spills": 0, "local": 0, "loops": [[0, 0.02]]}
    with pytest.raises(AssertionError, match="overlaps"):
        compile_table.check("sm_90", "rms_norm", "backward_kernel", facts)


def test_a_value_of_the_stack_pointer_is_found_and_bytes_that_are_dropped_are_not():
    right = ["F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R66, R67, R66, R1", "PRMT R44, R84, 0x3340, R1", "LDL R5, [R1]"]
    wrong = ["LOP3.LUT R90, R1.reuse, 0xffff, RZ, 0xc0, !PT", "SHF.R.U32.HI R4, RZ, 0x8, R1"]
    for lines, found in ((right, []), (right + wrong, wrong)):
        sass = "\n".join(f"/*{16 * i:04x}*/ {x};" for i, x in enumerate(lines))
        assert machine_code.undefined(sass) == found


def test_programs_at_once_are_limited_by_registers_shared_memory_and_threads():
    assert machine_code.programs_at_once("sm_90", 120, 8, 1000) == 2
    assert machine_code.programs_at_once("sm_90", 32, 4, 100_000) == 2
    assert machine_code.programs_at_once("sm_90", 32, 16, 0) == 4
