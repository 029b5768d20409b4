"""`bench.tune` without a GPU: candidates reach the launch and compile, and what is printed of what was timed."""

from __future__ import annotations

import importlib
import json

import pytest
from compile_table import cases_of
from fake_gpu import fake_gpu

from bench.kernels.protocol import WrongError
from bench.tune import AS_IT_IS, TUNABLE, Candidate, in_place, kernels_of, line, main, summary

CASES = cases_of("sm_90")
CASE = {
    "rms_norm": "rms_norm D=1000 bf16",
    "layer_norm": "layer_norm D=1000 bf16",
    "activation": "swiglu F=1000 fp32",
    "dropout_add": "dropout_add D=1000 fp32 bias from feature 2",
    "rope": "rope 32+8 heads of 128 bf16",
    "cross_entropy": "cross_entropy V=50257 bf16",
    "attention": "attention K=64 bf16",
    "adamw": "adamw fp32",
    "moe_permute": "moe_permute D=2000 K=2 E=8 fp32",
    "quantize_fp8": "quantize_fp8 K=4096 bf16",
}
QUICK = ("rms_norm", "adamw")


def launched(case: str) -> list[tuple]:
    with fake_gpu("sm_90") as launches:
        CASES[case]()
    return [(one.name, one.grid, one.kernel.metadata.num_warps, one.kernel.hash) for one in launches]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TUNABLE])
def test_candidates_are_launched_in_the_place_of_what_is_there(name):
    """Some of them: each is a compilation or two."""
    module = importlib.import_module(f"mpcore.kernels.{TUNABLE[name].module}")
    before = launched(CASE[name])
    candidates = list(TUNABLE[name].candidates(module))
    assert len({c.name for c in candidates}) == len(candidates)
    tried = candidates[:: max(len(candidates) // 6, 1)] if name not in QUICK else candidates[:1]
    same = []
    for candidate in tried:
        with in_place(module, candidate):
            changed = launched(CASE[name])
        assert [one[0] for one in changed] == [one[0] for one in before], candidate.name
        same += [candidate.name] if changed == before else []
    assert len(same) <= len(tried) // 3, same  # what this one shape makes no difference to, or what is there already
    assert launched(CASE[name]) == before


def test_a_choice_is_put_back_after_an_error():
    module = importlib.import_module("mpcore.kernels.adamw")
    before = module._BLOCK
    with pytest.raises(ZeroDivisionError), in_place(module, Candidate("", {"_BLOCK": 0})):
        _ = 1 // module._BLOCK
    assert before == module._BLOCK


@pytest.mark.parametrize("name", TUNABLE)
def test_each_kernel_is_tuned_on_the_shapes_of_its_bench(name):
    assert CASE[name] in CASES
    assert all(kernel.shapes for kernel in kernels_of(TUNABLE[name]))
    assert kernels_of(TUNABLE[name])


ROWS = [
    {"kernel": "k", "shape": f"D {d}", "dtype": "bfloat16", "pass": "forward", "failed": {},
     "candidates": {"a": {"us": 8.0, "ratio": a}, AS_IT_IS: {"us": 10.0, "ratio": 1.0}, **more}}
    for d, a, more in ((1, 0.5, {"b": {"us": 6.0, "ratio": 0.6}}), (2, 0.8, {}))
]  # fmt: skip


def test_the_fastest_is_named_and_what_ran_on_all_shapes_sums_up():
    assert line(ROWS[0]) == "| k | D 1 bfloat16 | forward | 10.0 | a (0.500); b (0.600) |"
    assert summary(ROWS) == "k forward: a, 0.632 of the time over 2 shapes"


def test_a_row_that_raises_costs_no_other(monkeypatch, tmp_path, capsys):
    def timed(tunable, kernel, shape, dtype, which, seconds):
        if kernel.name == "rms_norm" and shape["D"] != 4096:
            raise WrongError("result 0 errs")
        return {**ROWS[0], "kernel": kernel.name, "shape": str(shape["D"]), "pass": which}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("bench.tune.describe", dict)
    monkeypatch.setattr("bench.tune.tune", timed)
    out = tmp_path / "new" / "tuned.json"
    with pytest.raises(SystemExit, match="8 could not be timed as they are"):
        main(["rms_norm", "--out", str(out)])
    told = capsys.readouterr()
    assert "| rms_norm | 4096 bfloat16 | forward+backward | 10.0 | a (0.500); b (0.600) |" in told.out.splitlines()
    assert "rms_norm M 8192, D 16384 forward: WrongError: result 0 errs" in told.err.splitlines()
    assert len(json.loads(out.read_text())["rows"]) == 2 + 4


@pytest.mark.parametrize(("flags", "message"), [(["nothing"], "'nothing' is none of rms_norm"), ([], "no GPU here")])
def test_what_cannot_be_tuned_is_refused(flags, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        main(flags)
