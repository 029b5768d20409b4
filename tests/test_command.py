"""The command `mpcore`: each of its commands, mistyped words, and what the doctor finds."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mpcore import __version__, collectives
from mpcore.__main__ import COMMANDS, main
from mpcore.kernels import _self_test
from mpcore.mesh.failure import report_failures
from mpcore.tools import doctor
from mpcore.tools.command_line import reports_errors
from mpcore.tools.doctor import check_collectives, check_kernel
from mpcore.tools.fault_tolerance import tell_launcher

ROOT = Path(__file__).parents[1]


def test_help_imports_no_torch():
    code = (
        "import contextlib, io, sys\nfrom mpcore.__main__ import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([name, '--help'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("words", [
    "verify nowhere:build", "plan nowhere:build --world 4", "memory nowhere:build", "ledger nowhere:build",
    "schedule --schedule 1f2b", "checkpoint inspect nowhere", "convert examples.gpt.hf:SPEC --from-hf nowhere --to x",
    "explain nowhere", "replay nowhere --step 1", "preflight -- nowhere:build", "doctor --prot 1",
    "doctor --port 80000", "from-config nowhere", "coordinate-check nowhere:build", "replay-workers nowhere",
])  # fmt: skip
def test_a_command_that_cannot_run_says_so_in_one_line_and_ends_with_2(words, capsys):
    try:
        status = main(words.split())
    except SystemExit as left:  # as argparse does
        status = left.code
    out, err = capsys.readouterr()
    assert status == 2
    assert not out
    assert err.startswith(f"mpcore {words.split()[0]}: error: "), err
    assert len(err.splitlines()) == 1


def test_torchrun_ends_with_what_failed(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    tell_launcher("no launcher, nothing to do")
    assert not path.exists()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    tell_launcher("rank 3 failed: ValueError: no batch")
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=1, error_file=str(path))
    assert failure.message == "rank 3 failed: ValueError: no batch"
    assert failure.timestamp > 0


def test_torchrun_prints_an_error_of_all_ranks_once_and_last(tmp_path, monkeypatch, capsys):
    failures = {}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for rank in (2, 0, 1):
        path = tmp_path / str(rank) / "error.json"
        path.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        report_failures(rank)
        sys.excepthook(ValueError, ValueError("no batch"), None)
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(path))
    told = str(ChildFailedError("train.py", dict(sorted(failures.items()))))
    assert told.count("no batch") == 1
    assert "rank 2 failed: ValueError: no batch (traceback: " in told.splitlines()[-2]
    assert capsys.readouterr().err.count("no batch") == 0
    assert "no batch" in Path(re.findall(r"traceback: (.*)\)", told)[0]).read_text(), "each rank's file has it"


def test_the_page_on_commands_lists_all():
    text = (ROOT / "docs" / "commands.md").read_text()
    assert re.findall(r"^\| `mpcore ([\w-]+)`", text, re.MULTILINE) == list(COMMANDS)


def test_without_a_command_it_lists_all_and_a_mistyped_one_gets_the_nearest(capsys):
    assert main([]) == 0
    assert re.findall(r"^  ([\w-]+) ", capsys.readouterr().out, re.MULTILINE) == list(COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpcore {__version__}\n"
    assert main(["docter"]) == 2
    assert "unknown command docter; did you mean doctor?" in capsys.readouterr().err


def test_a_command_whose_reader_has_gone_ends_without_a_word(capsys, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does, when it has read enough
    with os.fdopen(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert reports_errors("mpcore memory")(print)("a line") == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", _self_test.TESTS)
def test_the_doctor_finds_a_broken_kernel(name):
    real = _self_test.run_kernel

    def last_result_is_off(name, impl, dtype, device):
        *results, last = real(name, "reference", dtype, device)
        return [*results, last * (1 + 1e-3) + 1e-3 if impl == "triton" else last]

    with mock.patch.object(_self_test, "run_kernel", last_result_is_off):
        assert check_kernel(name, "cpu").state == "FAILED"


def wrong_reduce(x, axis):
    return collectives._Copy.apply(x, axis)


def break_reduce():
    collectives.reduce = wrong_reduce


def test_the_doctor_checks_collectives_between_two_processes_and_names_a_broken_one():
    assert {finding.state for finding in check_collectives()} == {"ok"}
    with mock.patch.object(doctor, "Pool", lambda most: real_pool(most, break_reduce, ("tests.test_command",))):
        bad = [finding.name for finding in check_collectives() if finding.state == "FAILED"]
    assert bad == ["copy over gloo", "reduce over gloo"]  # the backward of copy is reduce


real_pool = doctor.Pool
