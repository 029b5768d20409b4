"""Rates, seconds of collectives and profiles, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mpcore.tools.analysis.__main__ import main
from mpcore.tools.analysis.machine import NUMBERS, Machine, load_machine, save_machine
from tests.forked import Forked

PLAIN = Machine("m", peak=1000.0, hbm=10.0, memory=100.0, e_gemm=0.5)


@pytest.mark.parametrize(("dtype", "peaks", "rate"), [
    ("bfloat16", {}, 500), ("float16", {}, 500),
    ("float32", {}, 250),  # half of peak
    ("float64", {"peak_32": 60.0}, 30), ("float32", {"peak_32": 60.0, "peak_8": 7.0}, 30),
    ("float8_e4m3fn", {}, 1000),  # twice peak
    ("float8_e5m2", {"peak_8": 3000.0}, 1500),
])  # fmt: skip
def test_each_dtype_has_its_rate(dtype, peaks, rate):
    assert replace(PLAIN, **peaks).rate(dtype) == rate


LINKS = replace(
    PLAIN, node=4, node_bandwidth=200.0, node_latency=1.0, bandwidth=50.0, latency=10.0,
    all_gather=2.0, reduce_scatter=3.0, all_to_all=5.0,
)  # fmt: skip


@pytest.mark.parametrize(("kind", "size", "calls", "ranks", "seconds"), [
    # in a node: 3 steps of 1 s a call, and 3/4 of the bytes
    ("all_gather", 800, 2, range(4), 2 * (2 * 3 * 1 + 600 / 200)),
    ("reduce_scatter", 800, 2, range(4), 3 * (2 * 3 * 1 + 600 / 200)),
    ("all_to_all", 800, 2, range(4), 5 * (2 * 3 * 1 + 600 / 200)),
    ("broadcast", 800, 2, range(4), 2 * 3 * 1 + 600 / 200),
    ("all_reduce", 800, 2, range(4), 2 * (2 * 3 * 1 + 600 / 200)),  # two rounds
    # one rank per node: one link; two per node: two links; four per node: four, but no more than a node's rate
    ("all_reduce", 800, 1, (0, 4), 2 * (1 * 10 + 400 / 50)), ("broadcast", 800, 1, (0, 1, 4, 5), 3 * 10 + 600 / 100),
    ("broadcast", 800, 1, (4, 5, 6, 7, 8, 9, 10, 11), 7 * 10 + 700 / 200),
    ("broadcast", 800, 1, (2, 3, 4), 2 * 10 + 1600 / 3 / 50),  # uneven: as many links as the least node has
    ("send", 800, 3, (0, 3), 3 * 1 + 800 / 200), ("send", 800, 3, (3, 4), 3 * 10 + 800 / 50),
    ("recv", 800, 3, (3, 4), 0), ("barrier", 800, 3, range(4), 0), ("all_reduce", 800, 3, (5,), 0),
    ("all_reduce", 800, 3, (), 0),
])  # fmt: skip
def test_collectives_take_the_steps_and_the_bytes_of_a_ring(kind, size, calls, ranks, seconds):
    assert LINKS.seconds(kind, size, calls, ranks) == pytest.approx(seconds, rel=1e-12)


def entry(value: float, source: str = "measured: here", **more: float) -> dict:
    return {"value": value, "source": source, **more}


LEAST = {"peak": entry(1e12), "hbm": entry(2e12, "specification: sheet"), "memory": entry(8, "assumed: x", error=0.1)}


def test_a_profile_is_read_with_its_sources_and_errors(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"values": LEAST | {"tau": entry(0)}}))
    found = load_machine(path)
    assert (found.name, found.peak, found.hbm, found.memory, found.tau) == ("mine", 1e12, 2e12, 8, 0)
    assert found.sources["hbm"] == "specification: sheet"
    assert found.errors == {"memory": 0.1}
    assert load_machine(str(path)) == found, "by a path or its text"
    path.write_text(json.dumps({"name": "other", "values": LEAST}))
    changed = load_machine(path, memory=9.0, node=2)
    assert (changed.name, changed.memory, changed.node, changed.hbm) == ("other", 9.0, 2, 2e12)
    assert changed.sources == {
        "peak": "measured: here", "hbm": "specification: sheet",
        "memory": "given: instead of 8", "node": "given: instead of None",
    }  # fmt: skip

    for wrong in ({"node": 0}, {"memory": -1.0}, {"peak": math.nan}, {"latency": -1.0}, {"hbm": math.inf}):
        with pytest.raises(ValueError, match="of the machine mine is no finite number above 0"):
            load_machine(path, **wrong)
    path.write_text(json.dumps({"values": LEAST | {"tau": entry(math.nan)}}))
    with pytest.raises(ValueError, match="tau is nan, no finite number of at least 0"):
        load_machine(path)


def test_a_written_profile_has_every_number_with_its_source_and_error(tmp_path):
    machine = replace(PLAIN, sources={"peak": "measured: 1"}, errors={"tau": 0.25})
    save_machine(machine, tmp_path / "m.json", "about it")
    content = json.loads((tmp_path / "m.json").read_text())
    assert (content["name"], content["about"], set(content["values"])) == ("m", "about it", set(NUMBERS))
    assert content["values"]["peak"] == {"value": 1000.0, "source": "measured: 1"}
    assert content["values"]["tau"] == {"value": 1e-4, "source": "assumed: the default", "error": 0.25}
    assert replace(load_machine(tmp_path / "m.json"), sources=machine.sources) == machine


def test_the_memory_of_a_gpu_is_the_same_where_triton_is_not_installed(capsys):
    words = ["memory", "examples.gpt.plan:build", "--preset", "tiny", "--dp", "2", "--dtype", "bfloat16"]
    words += ["--machine", "h100"]
    assert main(words) == 0
    code = f"import sys; sys.modules['triton'] = None; from mpcore.__main__ import main; sys.exit(main({words}))"
    assert Forked(code).communicate(60)[0] == capsys.readouterr().out
