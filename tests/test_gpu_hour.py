"""`bench.gpu_hour`: each job's end is named, a second call goes on, and the whole is rehearsed with faults."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from bench.gpu_hour import __main__ as command
from bench.gpu_hour import jobs, report
from bench.gpu_hour.__main__ import (
    CRASH,
    EXAMPLES,
    FAILED,
    HANG,
    NAMES,
    OK,
    WRONG,
    WRONG_RESULT,
    Job,
    Results,
    main,
    run,
    run_all,
)

DEAF = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL}); "


def job(code: str, name: str = "", seconds: float = 30) -> Job:
    return Job("kind", name, (sys.executable, "-S", "-c", code, "{rows}"), seconds)


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [
        ("", OK, ""),
        ("import os; os.kill(os.getpid(), 11)", CRASH, "SIGSEGV"),
        (f"import sys; print('off by 3'); sys.exit({WRONG})", WRONG_RESULT, "off by 3"),
        ("raise OSError('no device')", FAILED, "OSError: no device"),
    ],
)
def test_what_became_of_a_job_is_said(code, state, why):
    line = run(job(code))
    assert (line["state"], line["why"]) == (state, why)


def test_a_hang_that_hears_no_signal_is_killed_with_its_children_and_keeps_its_rows(tmp_path):
    child = tmp_path / "child"
    code = (
        f"{DEAF} import os, sys; open(sys.argv[1], 'w').write('{{\"a\": 1}}\\n{{\"cut'); pid = os.fork(); "
        f"pid and open({str(child)!r}, 'w').write(str(pid)); time.sleep(60)"
    )
    began = time.monotonic()
    line = run(job(code, seconds=4))
    assert time.monotonic() - began < 20
    assert (line["state"], line["why"], line["rows"]) == (HANG, "killed after 4 s", [{"a": 1}])
    for _ in range(50):  # the kernel may take a moment to bury it
        if not Path(f"/proc/{child.read_text()}/cmdline").is_file() or not alive(int(child.read_text())):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the child of the hanging job lives")


def alive(pid: int) -> bool:
    return re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is None


def test_a_second_call_goes_on_and_a_job_that_the_budget_cut_has_its_whole_time(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LEAST", 1.0)
    count = tmp_path / "count"
    once = f"open({str(count)!r}, 'a').write('x')"
    some = [job(once, "first"), job(f"{once}; import time; time.sleep(60)", "slow", 60), job(once, "last", 20)]
    results = Results(tmp_path / "results.jsonl")
    assert not run_all(some, results, time.monotonic() + 5)  # the slow one is cut, the last can't begin
    assert [line["name"] for line in results.lines] == ["first"]
    again = Results(tmp_path / "results.jsonl")
    some[1] = job(once, "slow", 20)
    assert run_all(some, again, time.monotonic() + 30)
    assert [json.loads(text)["name"] for text in again.path.read_text().splitlines()] == ["first", "slow", "last"]
    assert count.read_text() == "x" * 4
    assert run_all(some, again, time.monotonic())  # nothing is left to do


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"job": "check", "name": "a"}\n{"job": "che')
    assert len(Results(tmp_path / "results.jsonl").lines) == 1


def test_every_kernel_that_has_a_bench_is_measured():
    assert set(jobs.kernels()) == set(NAMES)
    assert set(jobs.EXAMPLES) == set(EXAMPLES)
    assert {kernel for kernel, _ in report.GOALS} <= set(NAMES)


def test_copies_of_the_sources_differ_in_the_stages_of_their_loops_alone(tmp_path):
    changed = {count: set(jobs.sources_with_stages(count, tmp_path / str(count))) for count in (2, 3)}
    assert changed[2] | changed[3] >= {"kernels/_triton.py", "kernels/attention/tiles.py"}
    two, three = ((tmp_path / str(n) / "kernels" / "_triton.py").read_text() for n in (2, 3))
    assert two.replace("STAGES = 2", "STAGES = 3") == three != two


# --- the report -------------------------------------------------------------------------------------------------------


def timed(us: float) -> dict:
    return {"us": us, "us_p20": us, "us_p80": us, "rate": 10.0, "percent": 85.0}


STEP = {
    "shape": "a GPT",
    "providers": {
        "mpcore": {"ms": 200.0, "ms_p20": 199.0, "ms_p80": 201.0, "tokens_per_second": 80000, "mfu": 0.5},
        "torch.nn": {"ms": 300.0, "ms_p20": 290.0, "ms_p80": 310.0, "tokens_per_second": 53333, "mfu": 0.333},
    },
    "ratios": {"torch.nn": 1.5},
    "kernels": [["gemm", 120.5, 48]],
}
EXAMPLE = {"flags": "--layers 2", "tokens_per_second": 12345.6, "memory": 2**31, "mfu": 0.4321}


def lines(cuda: bool = True) -> list[dict]:
    row = {
        **{"kernel": "rms_norm", "shape": "M 8192, D 4096", "dtype": "bfloat16", "pass": "forward", "unit": "GB/s"},
        **{"providers": {"mpcore": timed(30.0), "eager": timed(60.0)}, "skipped": {"quack": "not there"}},
        "peer_ratios": {"eager": 2.0, "torch.compile": 1.0},
    }
    about = {
        "device": "Some GPU",
        "date": "2026-01-02",
        "commit": "abc",
        "torch": "2.11",
        "versions": {"triton": "3.6"},
    }
    told = [
        ("environment", "", OK, "", [{**about, "cuda": cuda}]),
        ("check", "rms_norm", OK, "", [{"pass": "forward", "error": 0.9, "repeats": True}]),
        ("check", "rope", HANG, "killed after 90 s", []),
        ("check", "swiglu", WRONG_RESULT, "off by 3", []),
        ("measure", "rms_norm", OK, "", [row]),
        ("measure", "swiglu", OK, "", [row | {"kernel": "swiglu"}]),
        ("measure", "rope", CRASH, "SIGSEGV", []),
        ("stages", "rms_norm, 2", OK, "", [row]),
        ("stages", "rms_norm, 3", OK, "", [row | {"providers": {"mpcore": timed(15.0)}}]),
        ("stages", "rope, 3", HANG, "killed after 60 s", []),
        ("step", "", OK, "", [STEP]),
        ("example", "fp8", OK, "", [EXAMPLE if cuda else {k: v for k, v in EXAMPLE.items() if k != "mfu"}]),
    ]
    keys = ("job", "name", "state", "why", "rows")
    return [dict(zip(keys, one, strict=True)) | {"seconds": 1.0} for one in told]


def test_the_report_names_each_fault_and_judges_each_goal(tmp_path):
    report.write(lines(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    for line in (
        "- **hang** check `rope`: killed after 90 s",
        "- **wrong** check `swiglu`: off by 3",
        "- **crash** measure `rope`: SIGSEGV",
        "| rope | - | **hang** | - |",
        "| rope | - | - | **crash** | - | - | - |",
        "| rms_norm | M 8192, D 4096 bfloat16 | forward | 30.0 (30.0-30.0) | 10.0 GB/s | **85 % (88)** "
        "| eager 2 (1.4), torch.compile **1 (1.03)** |",
        "| rms_norm | 30.0 | 15.0 | 2.000 |",
        "| rope | - | **hang** | - |",
        "- not compared: quack: not there",
        "| mpcore | 200.0 (199.0-201.0) | 80000 | 50.0% | 1 |",
        "| torch.nn | 300.0 (290.0-310.0) | 53333 | 33.3% | 1.5 |",
        "| `gemm` | 120.5 | 48 |",
        "| --layers 2 | 12346 | 43.2% | 2.0 |",
    ):
        assert line in text.splitlines(), line
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_benchmarks_have_each_kernel_the_step_and_the_example(tmp_path):
    report.write(lines(), tmp_path)
    (kernel, _, step, example) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert (kernel["fullname"], kernel["extra_info"]["device"]) == ("bench/gpu_hour rms_norm forward", "Some GPU")
    assert step["extra_info"]["ratios"] == {"time of torch.nn / ours": 1.5, "ms per step": 200.0, "MFU": "50.0%"}
    assert example["extra_info"]["ratios"] == {"tokens per second": 12346, "GiB": 2.0, "MFU": "43.2%"}
    report.write(lines(cuda=False), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "A rehearsal on a CPU" in text
    assert "(1.4)" not in text
    assert "| --layers 2 | 12346 | - | 2.0 |" in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_rehearsal_with_a_hang_a_crash_and_a_wrong_result(tmp_path):
    """The real command: checks in Triton's interpreter, sources copied, kernels compiled for sm_90, tests, example."""
    names = ["rms_norm", "swiglu", "rope", "adamw", "gelu"]
    faults = ["hang:rms_norm", "crash:rope", "wrong:swiglu"]
    arguments = ["--rehearse", "--out", str(tmp_path), "--kernels", *names, "--inject", *faults, "--job-seconds", "60"]
    for _ in range(3):  # in as many calls as it takes
        if main([*arguments, "--budget", "300"]) == 0:
            break
    else:
        raise AssertionError((tmp_path / "results.jsonl").read_text())
    found = {(line["job"], line["name"]): line for line in Results(tmp_path / "results.jsonl").lines}
    bad = {key: line["state"] for key, line in found.items() if line["state"] != OK}
    assert bad == {("check", "rms_norm"): HANG, ("check", "rope"): CRASH, ("check", "swiglu"): WRONG_RESULT}
    assert found["check", "rope"]["why"] == signal.Signals.SIGSEGV.name
    text = (tmp_path / "report.md").read_text()
    for name, state in (("rms_norm", HANG), ("rope", CRASH), ("swiglu", WRONG_RESULT)):
        assert f"- **{state}** check `{name}`" in text
    for name in names:
        assert len(re.findall(rf"^\| {name} \| .*us|^\| {name} \| .*float32", text, re.MULTILINE)) >= 1, name
        for count in (2, 3):
            (row,) = found["stages", f"{name}, {count}"]["rows"]
            assert os.path.basename(os.path.dirname(row["sources"])) == f"stages_{count}"
    assert "| gelu | forward | " in text
