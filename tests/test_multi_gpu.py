"""The rehearsal of `bench.multi_gpu` on two CPU ranks: right runs, a hang, a crash, and a wrong loss."""

from __future__ import annotations

import json

import pytest

from bench.multi_gpu import main


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some 10 times what the run on one rank takes, which is a minute where load is 20
def test_faults_are_told_and_a_second_call_goes_on(tmp_path):
    flags = ["--device", "cpu", "--ranks", "2", "--out", str(tmp_path), "--turns", "0", "--job-seconds", "20"]
    faults = ["--inject", "hang:ZeRO-0", "crash:ZeRO-1", "wrong:ZeRO-2"]
    assert main([*flags, "--only", "ZeRO", *faults]) == 1
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    states = {line["name"]: line["state"] for line in lines}
    assert states == {"one": "ok", "ZeRO-0": "hang", "ZeRO-1": "failed", "ZeRO-2": "wrong", "ZeRO-3": "ok"}
    assert main([*flags, "--only", "bandwidth"]) == 1, "the faults stay in the report"
    report = (tmp_path / "report.md").read_text()
    seconds = {line["name"]: line["seconds"] for line in lines}
    assert seconds["ZeRO-0"] >= max(20, 4 * seconds["one"]), "the limit grows with what a run without peers takes"
    assert "| ZeRO-0 | **hang**: killed after " in report
    assert report.count("| all_reduce |") == 2
