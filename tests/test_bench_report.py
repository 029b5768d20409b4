"""The report of made-up results: tables, plots, the README's lines. The check that stands before every number."""

from __future__ import annotations

import importlib
import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_benchmark.plugin
import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from bench import machine
from bench.conftest import in_the_subset, keep
from bench.interleave import judge
from bench.kernels import protocol
from bench.kernels.protocol import BOTH, FORWARD, Kernel, NotHereError, WrongError, always, compare, compiled, imported
from bench.peers import page as peers_page
from bench.peers.measure import Result, Row, check_equal
from bench.peers.table import ROWS
from bench.peers.work import Work, count
from bench.report import BEGIN, END, main, table
from bench.tune import AS_IT_IS, Candidate, Tunable, tune

KERNELS = Path(protocol.__file__).parent
ABOUT = {"device": "Some GPU", "date": "2026-01-02", "commit": "abc"}


def timed(us: float) -> dict:
    return {
        **{"us": us, "us_p20": us - 1, "us_p80": us + 1, "rate": 4000.0, "percent": 93.0},
        **{"peak_mib": 64.0, "host_us": 20.5, "error": 1.0},
    }


def write_results(folder: Path, us: float = 31.5, date: str = "2026-01-02") -> None:
    kernel = {
        **{"kernel": "rms_norm", "shape": "M 8192, D 4096", "dtype": "bfloat16", "pass": "forward", "unit": "GB/s"},
        "providers": {"mpcore": timed(us), "eager": timed(60.0)},
        "peer_ratios": {"eager": 1.905},
        "skipped": {"quack": "ModuleNotFoundError: No module named 'quack'"},
    }
    host = {"ratios": {"ours / theirs": 0.5}, "microseconds": {"ours": 1.0, "theirs": 2.0}}
    entries = [
        {"fullname": f"bench/{name}", "extra_info": ABOUT | info}
        for name, info in (("kernels/bench_a.py::test_a", kernel), ("layers/bench_b.py::test_b", host))
    ]
    (folder / f"gpu_{date}.json").write_text(json.dumps({"benchmarks": entries}))


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"--results .*/none is no folder: benches write theirs to .*bench/results"):
        main(["--results", str(tmp_path / "none")])


def test_a_kernel_has_a_row_with_every_number_and_each_peer(tmp_path):
    write_results(tmp_path)
    text = table(tmp_path)
    assert (
        "| `rms_norm` | M 8192, D 4096 | bfloat16 | forward | 31.5 (30.5-32.5) | 4000.0 GB/s | 93.0 % | 64.0 | 20.5 "
        "| eager: **1.905** | Some GPU, 2026-01-02, abc |"
    ) in text.splitlines()
    assert "| `layers/bench_b.py::test_b` | ours / theirs: **0.5** | Some GPU, 2026-01-02, abc |" in text.splitlines()
    assert "- Not compared (rms_norm): quack: ModuleNotFoundError: No module named 'quack'" in text.splitlines()
    for line in text.splitlines():
        assert not line.startswith("| ") or line.count(" | ") in (2, 10), line


def test_a_later_result_of_the_same_machine_takes_the_place_of_an_earlier_one(tmp_path):
    write_results(tmp_path, 99.5, "2026-01-03")
    write_results(tmp_path, 31.5, "2026-01-02")
    assert "99.5" in table(tmp_path)
    assert "31.5" not in table(tmp_path)


def test_one_command_draws_and_writes_between_the_markers_only(tmp_path, capsys):
    write_results(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    main(["--results", str(tmp_path)])
    assert "rms_norm" in capsys.readouterr().out
    assert "old" in readme.read_text()
    assert (tmp_path / "gpu_2026-01-02.png").read_bytes()[:4] == b"\x89PNG"
    main(["--results", str(tmp_path), "--write", str(readme)])
    assert readme.read_text() == f"before\n{BEGIN}{table(tmp_path)}{END}\nafter\n"


def test_the_bench_extra_has_the_plugin_of_every_setting():
    """And a pytest-benchmark that takes a path for its results: older ones fail after the last bench."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    extra = re.search(r"^bench = \[(.*)\]", text, re.MULTILINE).group(1)
    assert "\ntimeout = " in text
    assert "pytest-timeout" in extra
    assert float(re.search(r"pytest-benchmark>=(\d+\.?\d*)", extra).group(1)) >= 5.3


class Measured:
    """What pytest-benchmark keeps of a bench."""

    def __init__(self, name: str, has_error: bool = False) -> None:
        self.name, self.has_error = name, has_error

    def as_dict(self, include_data: bool) -> dict:
        return {"fullname": self.name, "params": {"f": len}, "stats": {"median": 1.0}, "extra_info": {}}


def test_what_was_measured_is_written_before_the_next_bench(tmp_path, monkeypatch):
    """And what an earlier run has written stays, but for what was run again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("bench.conftest.describe", lambda: ABOUT)
    file = tmp_path / "new" / "gpu_2026-01-02.json"
    for names in (["a", "b"], ["b", "c"]):
        held = SimpleNamespace(benchmarks=[])
        config = SimpleNamespace(
            option=SimpleNamespace(benchmark_json=str(file)), hook=pytest_benchmark.plugin, _benchmarksession=held
        )
        for name in names:
            held.benchmarks.append(Measured(name))
            keep(config)
            assert json.loads(file.read_text())["benchmarks"][-1]["fullname"] == name
        held.benchmarks.append(Measured("broken", has_error=True))
        keep(config)
    assert [entry["fullname"] for entry in json.loads(file.read_text())["benchmarks"]] == ["a", "b", "c"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine._commit() == ""


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def kernel(ours, peers=None) -> Kernel:
    return Kernel(
        "square",
        lambda shape, dtype, device: {"x": torch.randn(shape["n"], dtype=dtype, device=device)},
        ours,
        square,
        peers or {},
        cost=lambda shape, size: (2 * size * shape["n"], 5 * size * shape["n"]),
        shapes=[{"n": 1024}],
        toy={"n": 7},
    )


class Request(SimpleNamespace):
    """Stands for pytest's request."""

    def __init__(self) -> None:
        benchmark = SimpleNamespace(extra_info={}, group=None, pedantic=lambda call, **kwargs: call())
        super().__init__(benchmark=benchmark, getfixturevalue=lambda name: benchmark)


@pytest.mark.parametrize(
    ("ours", "which", "wrong"),
    [
        (lambda x: x * x * 1.001, FORWARD, "result 0 errs"),
        (lambda x: x.detach() * x, BOTH, "result 1 errs"),  # half the gradient
        (lambda x: (x * x)[:-1], FORWARD, "result 0 has shape"),
        (lambda x: (x * x, x), FORWARD, "2 results instead of 1"),
        (lambda x: x * x + torch.tensor(float("nan")), FORWARD, "errs by nan"),
    ],
)
def test_what_is_wrong_gets_no_number(monkeypatch, ours, which, wrong):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape, dtype = {"n": 7}, torch.float32
    compare(Request(), kernel(square), shape, dtype, which)
    for broken in (kernel(ours), kernel(square, {"peer": always(ours)})):
        request = Request()
        with pytest.raises(WrongError, match=wrong):
            compare(request, broken, shape, dtype, which)


def test_ours_has_the_dtype_of_the_reference_and_a_peer_the_rounding_of_its_own():
    inputs = {"x": torch.randn(1000)}
    rounds, loses = (lambda x: (x * x).bfloat16()), (lambda x: 1.2 * (x * x).bfloat16())
    bounds = protocol._bounds(kernel(square), inputs, FORWARD)
    for name in ("mpcore", "mpcore other"):
        with pytest.raises(WrongError, match="result 0 is bfloat16 instead of float32"):
            protocol._check(kernel(rounds), name, rounds, inputs, FORWARD, bounds)
    assert protocol._check(kernel(square), "peer", rounds, inputs, FORWARD, bounds) <= 1
    with pytest.raises(WrongError, match="result 0 errs"):
        protocol._check(kernel(square), "peer", loses, inputs, FORWARD, bounds)


def test_a_peer_that_cannot_be_imported_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = Request()
    peers = {"nobody": imported("there_is_no_such_module", "f", lambda f: f), "eager": always(square)}
    compare(request, kernel(square, peers), {"n": 7}, torch.float32, FORWARD)
    info = request.benchmark.extra_info
    assert list(info["providers"]) == ["mpcore", "eager"]  # a CPU has figures too
    assert info["providers"]["mpcore"]["us"] > 0
    assert info["skipped"]["nobody"].startswith("ModuleNotFoundError")


def test_a_target_is_judged_by_the_spread_of_its_rounds_and_never_fails():
    info = {}
    steady, noisy = [1.2, 1.21, 1.19, 1.2, 1.22], [0.9, 1.0, 1.2, 1.3, 1.4]
    assert judge(info, "time", steady, at_most=1.3) == "met"
    assert judge(info, "time", steady, at_most=1.1) == "missed"
    assert judge(info, "time", noisy, at_most=1.1) == "unclear"
    assert judge(info, "speed", steady, at_least=1.5) == "missed"
    assert judge(info, "one run", [2.0], at_least=1.5) == "met"
    assert info["targets"][1] == "missed: time is 1.200 (1.198-1.212), at most 1.1"
    assert len(info["targets"]) == 5


def test_without_full_a_gpu_measures_the_first_shape_of_each_kernel_in_its_longest_pass():
    one = replace(kernel(square), shapes=[{"n": 1}, {"n": 2}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        cases = [SimpleNamespace(params=dict(zip(("kernel", "shape", "dtype", "which"), c.values, strict=True)))
                 for c in one.cases()]  # fmt: skip
    assert [c.params["which"] for c in cases if in_the_subset(c)] == [BOTH]
    assert len(cases) == 4
    assert in_the_subset(None)
    assert in_the_subset(SimpleNamespace(params={"sequence_parallel": True}))


def fails_from_the_second_call():
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no room")
        return square(x)

    return function


class Elapsed:
    """An event of a device on which every call takes 2 ms."""

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, other: Elapsed) -> float:
        return 2.0


class OnCPU(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")) == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.fixture
def straw(monkeypatch):
    """A CUDA device of straw, so that what measures runs somewhere without one: compares, and returns the row."""
    for name, fake in {
        "is_available": lambda: True,
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
        "Event": Elapsed,
        "_sleep": lambda cycles: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 2**20,
        "max_memory_allocated": lambda: 3 * 2**20,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(protocol, "EVICT", 2)
    monkeypatch.setattr(protocol, "YARDSTICK", (2**8, 8))
    monkeypatch.setattr(protocol, "describe", lambda: ABOUT)

    def run(kernel: Kernel, shape, which) -> dict:
        request = Request()
        with OnCPU():
            compare(request, kernel, shape, torch.float32, which)
        return request.benchmark.extra_info

    return run


@pytest.mark.parametrize("which", [FORWARD, BOTH])
def test_on_cuda_a_row_has_every_number_and_who_is_left_out(straw, tmp_path, which):
    peers = {
        "right": always(square),
        "wrong": always(lambda x: 1.5 * x * x),
        "too large": always(fails_from_the_second_call()),
        "nobody": imported("there_is_no_such_module", "f", lambda f: f),
    }
    info = straw(kernel(square, peers), {"n": 1024}, which)
    assert list(info["providers"]) == ["mpcore", "right"]
    ours = info["providers"]["mpcore"]
    assert (ours["us"], ours["us_p20"], ours["us_p80"], ours["peak_mib"]) == (2000.0, 2000.0, 2000.0, 2.0)
    assert info["cost"] == (2 if which == FORWARD else 5) * 4 * 1024
    assert ours["percent"] == 100 * info["cost"] / (2 * 4 * 2**8)
    assert info["peer_ratios"] == {"right": 1.0}
    assert info["skipped"]["nobody"].startswith("ModuleNotFoundError")
    assert info["skipped"]["too large"] == "OutOfMemoryError: no room"
    assert info["skipped"]["wrong"].startswith("WrongError: result 0 errs")
    entry = {"fullname": "bench/kernels/bench_square.py::test", "extra_info": info}
    (tmp_path / "gpu_2026-01-02.json").write_text(json.dumps({"benchmarks": [entry]}))
    assert "right: **1.0**" in table(tmp_path)


def test_a_peer_that_does_not_fit_beside_the_others_is_left_out_with_the_reason(straw, monkeypatch):
    leaves, held = protocol._leaves, []

    def small(kernel, inputs, which):
        held.extend([inputs] if inputs["x"].numel() == 1024 else [])
        if len(held) == 3:
            raise torch.OutOfMemoryError("no room")
        return leaves(kernel, inputs, which)

    monkeypatch.setattr(protocol, "_leaves", small)
    wide = replace(kernel(square, {"a": always(square), "b": always(square), "c": always(square)}), check={"n": 8})
    info = straw(wide, {"n": 1024}, FORWARD)
    assert list(info["providers"]) == ["mpcore", "a", "c"]
    assert info["skipped"] == {"b": "OutOfMemoryError: no room"}


def test_a_row_of_tuning_has_what_ran_and_why_the_rest_did_not(straw):
    """A candidate stands in the module while it is checked and timed, in forward alone if it says so."""
    module = importlib.import_module("mpcore.kernels.adamw")
    block, seen = module._BLOCK, []

    def ours(x: torch.Tensor) -> torch.Tensor:
        seen.append(module._BLOCK)
        return square(x) * (1.5 if module._BLOCK == 3 else 1)

    patches = {name: Candidate(name, {"_BLOCK": n}) for n, name in ((2, "two"), (3, "three"))}
    both = Candidate("backward", {"_BLOCK": 4}, (BOTH,))
    tunable = Tunable("adamw", "", lambda module: iter([*patches.values(), both]))
    for seconds, found in ((60.0, [AS_IT_IS, "two"]), (0.0, [AS_IT_IS])):
        with OnCPU():
            row = tune(tunable, kernel(ours), {"n": 1024}, torch.float32, FORWARD, seconds)
        assert list(row["candidates"]) == found
        assert row["candidates"][AS_IT_IS] == {"us": 2000.0, "ratio": 1.0}
        assert list(row["failed"]) == [name for name in patches if name not in found]
    assert row["failed"]["three"] == "not tried in 0 seconds"
    assert set(seen) == {block, 2, 3}
    assert block == module._BLOCK


@pytest.fixture
def traced(monkeypatch):
    """Let `torch.compile` trace on the CPU and compile nothing; returns what it was asked for."""
    make, asked = torch.compile, []

    def trace(function, **how):
        made = make(function, backend="eager", **how)
        asked.append(how)

        def run(*args, **kwargs):
            with monkeypatch.context() as real, DisableTorchFunction():
                real.setattr(torch.cuda, "is_available", lambda: False)
                return made(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", trace)
    return asked


def test_a_peer_is_compiled_for_every_shape(straw, traced):
    """Of one function torch compiles eight shapes: then it raises, or runs a function that isn't whole as it is."""
    for n in range(2, 6):
        with torch._dynamo.config.patch(recompile_limit=2):
            info = straw(kernel(square, {"torch.compile": compiled(square)}), {"n": n}, FORWARD)
        assert list(info["providers"]) == ["mpcore", "torch.compile"], (n, info["skipped"])


def kernels_of(bench: str) -> list[Kernel]:
    held = list(vars(importlib.import_module(f"bench.kernels.{bench}")).values())
    return [k for one in held for k in (one if isinstance(one, list) else [one]) if isinstance(k, Kernel)]


BENCHES = [path.stem for path in sorted(KERNELS.glob("bench_*.py")) if "host" not in path.stem]


@pytest.mark.parametrize("bench", BENCHES)
def test_what_is_called_compiled_is_compiled_whole(monkeypatch, traced, bench):
    """Or else it raises, and is no peer: torch runs what it can't compile as it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for one in kernels_of(bench):
        for name, make in one.peers.items():
            try:
                with OnCPU():
                    function = make(one.toy)
            except (ImportError, NotHereError):
                continue
            assert ("compile" in name or name == "FlexAttention") == bool(traced), name
            if traced:
                assert traced.pop() == {"dynamic": False, "fullgraph": True}
                inputs = one.inputs(one.toy, torch.float32, torch.device("cpu"))
                bounds = protocol._bounds(one, inputs, FORWARD)
                protocol._check(one, name, function, inputs, FORWARD, bounds)


@pytest.mark.parametrize("bench", BENCHES)
def test_what_is_measured_lies_in_memory_as_the_bench_made_it(bench):
    for one in kernels_of(bench):
        inputs = one.inputs(one.toy, torch.bfloat16, torch.device("cpu"))
        leaves = protocol._leaves(one, inputs, BOTH)
        assert {name: x.stride() for name, x in leaves.items()} == {name: x.stride() for name, x in inputs.items()}


def peers_row(name: str, **given) -> Row:
    return Row(name, "a peer", lambda: lambda: torch.ones(2), lambda: lambda: torch.ones(2), **given)


def test_a_row_of_peers_has_the_ratio_of_each_round_and_the_verdict_of_its_spread(tmp_path):
    slow, fast, mixed = [2.0] * 5, [1.0] * 5, [0.9, 0.9, 1.0, 1.2, 1.2]
    results = [
        Result(peers_row("twice as fast"), cpu={"mpcore": fast, "a peer": slow}, wall={"mpcore": fast, "a peer": fast}),
        Result(
            peers_row("half as fast", why="it adds"),
            cpu={"mpcore": slow, "a peer": fast},
            wall={"mpcore": fast, "a peer": fast},
            work=dict.fromkeys(("mpcore", "a peer"), Work(1, 1, 2, 1, 0, 1, 0, 0, 0)),
        ),
        Result(
            peers_row("either", at_least=1.1), cpu={"mpcore": fast, "a peer": mixed}, wall={"mpcore": fast, "b": fast}
        ),
        Result(peers_row("absent"), "not installed"),
    ]
    assert [result.verdict for result in results] == ["met", "missed", "unclear", "not installed"]
    peers_page.write(tmp_path / "peers.md", results, 90.0)
    rows = [line for line in (tmp_path / "peers.md").read_text().splitlines() if "a peer" in line]
    assert [line.split("|")[3].strip() for line in rows[:4]] == [
        "**2.00** (2.00-2.00)", "**0.50** (0.50-0.50)", "**1.00** (0.90-1.20)", "not installed",
    ]  # fmt: skip
    work = "1 + 1 calls, 2 operators, 1 products, 1 copies"
    assert rows[4:] == [f"| half as fast | a peer | {work} | {work} | it adds |", "| either | a peer |  |  |  |"]
    assert (tmp_path / "peers.png").stat().st_size > 0


def test_runs_of_a_row_are_put_together():
    one, other = (
        Result(peers_row("a"), cpu={"mpcore": [1.0], "b": [x]}, wall={"mpcore": [1.0], "b": [x]}) for x in (2, 4)
    )
    one.add(other)
    assert one.runs == [2, 4]
    assert one.ratio()[1] == 3


def test_the_work_of_a_step_is_counted():
    x = torch.ones(2**18)
    work = count(lambda: (x @ x.view(-1, 1), x.clone(), torch.cat([x, x])))
    assert (work.products, work.messages, work.copies, work.copied) == (1, 0, 2, 3.0)
    assert work.operators >= 4


@pytest.mark.parametrize("theirs", [torch.full((2,), 1.1), torch.tensor([1.0, math.nan]), [torch.ones(2)] * 2])
def test_a_row_whose_sides_differ_is_an_error(theirs):
    row = peers_row("sum")
    check_equal(row, 0, torch.ones(2), torch.full((2,), 1 + 1e-6))
    with pytest.raises(ValueError, match=r"off, beyond 1e-05|shorter|longer"):
        check_equal(row, 0, torch.ones(2), theirs)


def test_rows_of_peers_are_told_apart_and_sent_to_ranks():
    assert len({(row.name, row.peer) for row in ROWS}) == len(ROWS)
    assert [pickle.loads(pickle.dumps(row)) for row in ROWS[:2]] == ROWS[:2]
