"""The comparisons of the documents: what they train, what they draw, and what they print, worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import same_color, to_hex, to_rgba
from matplotlib.figure import Figure

from examples.gpt import compare_moe, compare_precision, compare_workers
from examples.gpt.checks import model_config
from examples.gpt.compare import compare
from examples.gpt.flops import count_active_parameters, count_parameters


def drawn(draw: Callable[[Any, Path], None], runs: Any) -> Any:
    """The picture, which isn't written: its file is only asked for."""
    with mock.patch.object(Figure, "savefig", autospec=True) as save, mock.patch("matplotlib.use") as use:
        draw(runs, Path("out.png"))
    (figure, path), options = save.call_args
    assert (path, options) == (Path("out.png"), {"dpi": 120})
    use.assert_called_once_with("Agg")
    assert tuple(figure.get_size_inches()) == (10, 4)
    assert type(figure.get_layout_engine()).__name__ == "ConstrainedLayoutEngine"
    plt.close(figure)
    left, right = figure.axes
    assert left.get_position().x1 <= right.get_position().x0, "side by side"
    for axes in figure.axes:
        lines = [*axes.get_xgridlines(), *axes.get_ygridlines()]
        assert all(line.get_visible() and line.get_alpha() == 0.3 for line in lines)
    return figure


NAMES = {to_hex(name): name for name in ("C0", "C1", "C2", "gray")}


def lines_of(axes: Any) -> list[tuple]:
    """Of each line: label, colour, style, marker and its size, width, opacity, and its points."""
    found = []
    for line in axes.lines:
        label = str(line.get_label())
        marker = (line.get_marker(), line.get_markersize()) if line.get_marker() != "None" else None
        points = (np.asarray(line.get_xdata()).tolist(), np.round(np.asarray(line.get_ydata()), 9).tolist())
        found.append(
            (None if label.startswith("_") else label, NAMES[to_hex(line.get_color())], line.get_linestyle(), marker,
             line.get_linewidth(), line.get_alpha(), *points)
        )  # fmt: skip
    return found


def legend(axes: Any) -> list[str]:
    shown = axes.get_legend()
    assert shown is not None
    return [text.get_text() for text in shown.get_texts()]


def words(axes: Any) -> tuple[str, str, str]:
    return axes.get_xlabel(), axes.get_ylabel(), axes.get_title()


# --- the loop of the comparisons --------------------------------------------------------------------------------------


def compared(argv: list[str], out: Path, **options: Any) -> tuple[list, list, Any]:
    """What was trained, what was drawn and what lay in the file then, and the runs."""
    trained: list[tuple] = []
    pictures: list[tuple] = []

    def train(flags: list[str], seed: int, steps: int, every: int) -> dict:
        trained.append((flags, seed, steps, every))
        return {"n": len(trained)}

    def draw(runs: dict, path: Path) -> None:
        pictures.append((path, json.loads(path.with_suffix(".json").read_text()), json.loads(json.dumps(runs))))

    given: dict[str, Any] = {"prog": "me", "about": "why", "steps": 7, "evaluations": 3, "out": str(out)} | options
    runs = compare(argv, {"a": ["--x"], "b": []}, train, draw, **given)
    return trained, pictures, runs


def test_each_kind_is_trained_on_each_seed_and_after_each_seed_all_is_drawn(tmp_path):
    trained, pictures, runs = compared([], tmp_path / "one.png")
    assert trained == [(flags, seed, 7, 2) for seed in range(3) for flags in (["--x"], [])]
    assert runs == {"a": [{"n": 1}, {"n": 3}, {"n": 5}], "b": [{"n": 2}, {"n": 4}, {"n": 6}]}
    first = {name: found[:1] for name, found in runs.items()}
    two = {name: found[:2] for name, found in runs.items()}
    assert pictures == [(tmp_path / "one.png", shown, shown) for shown in (first, two, runs)]
    assert (tmp_path / "one.json").read_text() == json.dumps(runs) + "\n"
    trained, pictures, _ = compared(
        ["--steps", "4", "--seeds", "1", "--evaluations", "9", "--out", str(tmp_path / "b.png")], tmp_path / "c.png"
    )
    assert trained == [(["--x"], 0, 4, 1), ([], 0, 4, 1)], "a run shorter than its evaluations has one each step"
    assert [path for path, *_ in pictures] == [tmp_path / "b.png"]


def test_the_help_of_a_comparison_says_what_it_is(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compared(["--help"], tmp_path / "one.png")
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("usage: me [-h]")
    assert " why " in told
    assert "--evaluations EVALUATIONS along a run" in told
    assert "--out OUT the plot; its numbers lie beside it as .json" in told


def defaults(module: Any, argv: list[str] | None, runs: Any = None) -> tuple[tuple, dict]:
    with mock.patch.object(module, "compare", return_value=runs) as called:
        module.main(argv)
    return called.call_args


# --- mixtures ---------------------------------------------------------------------------------------------------------


def mixtures(seeds: int = 2) -> dict[str, list[dict]]:
    dense = [{"tokens": [1e6, 2e6], "held_out": [2.0 + s / 5, 1.5 + s / 5], "loads": []} for s in range(seeds)]
    loads = [[[0.5, 1.5], [0.6, 1.4]], [[0.4, 1.6], [0.7, 1.3]]]
    mixed = [{"tokens": [1e6, 2e6], "held_out": [1.9, 1.4 - s / 5], "loads": loads[s]} for s in range(seeds)]
    for run in dense:
        run |= {"parameters": 2000, "active": 2000}
    for run in mixed:
        run |= {"parameters": 12345, "active": 2128}
    return {"dense": dense, "8 experts": mixed}


def test_the_picture_of_mixtures_has_each_seed_their_mean_and_the_loads():
    losses, loads = drawn(compare_moe.draw, mixtures()).axes
    seen = [1.0, 2.0]
    assert lines_of(losses) == [
        (None, "C0", "-", None, 0.8, 0.6, seen, [2.0, 1.5]),
        (None, "C0", "-", None, 0.8, 0.6, seen, [2.2, 1.7]),
        ("dense: 1.600 at the end", "C0", "-", ("o", 3), 1.5, None, seen, [2.1, 1.6]),
        (None, "C1", "-", None, 0.8, 0.6, seen, [1.9, 1.4]),
        (None, "C1", "-", None, 0.8, 0.6, seen, [1.9, 1.2]),
        ("8 experts: 1.300 at the end", "C1", "-", ("o", 3), 1.5, None, seen, [1.9, 1.3]),
    ]
    assert lines_of(loads) == [
        ("emptiest", "C1", "--", None, 1, None, seen, [0.5, 0.6]),
        ("fullest", "C1", "-", None, 1, None, seen, [1.5, 1.4]),
        (None, "C1", "--", None, 1, None, seen, [0.4, 0.7]),
        (None, "C1", "-", None, 1, None, seen, [1.6, 1.3]),
        (None, "gray", "-", None, 0.5, None, [0, 1], [1, 1]),
    ]
    assert words(losses) == ("million tokens", "held-out loss, nats a byte", "2 seeds (thin) and their mean")
    assert words(loads) == ("million tokens", "tokens of an expert over the mean", "loads, of the worse block")
    assert (losses.get_ylim()[1], loads.get_ylim()[0]) == (3, 0)
    assert losses.get_ylim()[0] > 1
    assert loads.get_ylim()[1] < 2
    assert legend(losses) == ["dense: 1.600 at the end", "8 experts: 1.300 at the end"]
    assert legend(loads) == ["emptiest", "fullest"]
    assert losses.get_gridspec().get_width_ratios() == (3, 2)
    losses, loads = drawn(compare_moe.draw, mixtures(1)).axes
    assert (len(losses.lines), len(loads.lines)) == (4, 3)


class Steps:
    """A trainer whose losses are known: at step s the held-out loss is 10 - s, and expert 0 gets s + 1 tokens."""

    made: list[Any]

    def __init__(self, args: Any, mesh: Any, experts: bool = True) -> None:
        Steps.made.append((args, mesh))
        self.config, self.args, self.mixed = model_config(args, 257), args, "8" in str(args.experts)
        self.done = 0
        self.run = SimpleNamespace(step=0)
        self.saved: list[int] = []
        self.checkpoints = SimpleNamespace(save=lambda: self.saved.append(self.done))

    def step(self) -> dict:
        self.done += 1
        counts = [[self.done] + [1] * 7, [1] * 8]
        more = {"experts": {"tokens_per_expert": counts}} if self.mixed else {}
        return {"loss": float(self.done), **more}

    def evaluate(self) -> float:
        return 10.0 - self.done


def test_a_mixture_is_measured_at_even_steps_and_at_the_last(monkeypatch, capsys):
    Steps.made = []
    meshes: list[dict] = []
    monkeypatch.setattr(compare_moe, "Trainer", Steps)
    monkeypatch.setattr(compare_moe, "build_mesh", lambda **options: meshes.append(options) or "mesh")
    found = compare_moe.train(compare_moe.MODELS["8 experts, 2 a token"], 3, 5, 2)
    (args, mesh), = Steps.made  # fmt: skip
    assert (args.steps, args.seed, args.eval_samples, mesh) == (5, 3, 128, "mesh")
    shape = (args.layers, args.d_model, args.heads, args.seq_len, args.micro_batch, args.d_ff, args.global_batch)
    assert shape == (2, 64, 4, 128, 16, 256, 16)
    assert meshes == [{"device_type": None}]
    config = model_config(args, 257)
    assert (found["parameters"], found["active"]) == (count_parameters(config), count_active_parameters(config))
    assert found["tokens"] == [step * 16 * 128 for step in (2, 4, 5)]
    assert found["held_out"] == [8.0, 6.0, 5.0]
    # Expert 0 of block 0 got 1 + 2 tokens, 3 + 4, 5; the others 2, 2, 1: means 17/8, 21/8, 12/8.
    assert np.allclose(found["loads"], [[2 * 8 / 17, 3 * 8 / 17], [2 * 8 / 21, 7 * 8 / 21], [8 / 12, 5 * 8 / 12]])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"seed 3, {' '.join(compare_moe.MODELS['8 experts, 2 a token'])}: step 2 8.0"
    dense = compare_moe.train([], 0, 2, 5)
    assert (dense["held_out"], dense["loads"]) == ([8.0], [])
    assert dense["parameters"] == dense["active"]
    assert capsys.readouterr().out == "seed 0, dense: step 2 8.0\n"


def test_the_command_of_mixtures_has_its_defaults_and_prints_both(capsys):
    (argv, kinds, train, draw), options = defaults(compare_moe, ["--steps", "1"], mixtures())
    assert (argv, kinds) == (["--steps", "1"], compare_moe.MODELS)
    assert (train, draw) == (compare_moe.train, compare_moe.draw)
    assert options == {"prog": "python -m examples.gpt.compare_moe", "about": compare_moe.__doc__, "steps": 600,
                       "evaluations": 12, "out": "docs/moe.png"}  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "dense, 2,000 of 2,000 parameters active: held-out loss 1.6000 (1.5000, 1.7000)",
        "8 experts, 2,128 of 12,345 parameters active: held-out loss 1.3000 (1.4000, 1.2000); 0.60 to 1.40 of the mean "
        "load; 0.70 to 1.30 of the mean load",
    ]
    assert defaults(compare_moe, None, {})[0][0] is None


# --- precisions -------------------------------------------------------------------------------------------------------

PRECISIONS = {
    "float32": [{"steps": [5, 10], "held_out": [2.0, 1.0], "train": [2.5, 1.5]},
                {"steps": [5, 10], "held_out": [2.4, 1.2], "train": [2.7, 1.7]}],
    "bfloat16": [{"steps": [5, 10], "held_out": [2.1, 1.1], "train": [2.6, 1.6]},
                 {"steps": [5, 10], "held_out": [2.2, 1.5], "train": [2.8, 1.8]}],
}  # fmt: skip


def test_differences_are_of_one_seed_and_the_spread_is_over_seeds():
    assert np.allclose(compare_precision.differences(PRECISIONS, "bfloat16"), [[0.1, 0.1], [-0.2, 0.3]])
    assert np.allclose(compare_precision.spread(PRECISIONS), [0.2, 0.1])
    assert compare_precision.spread({"float32": PRECISIONS["float32"][:1]}) == [0, 0]


def test_the_picture_of_precisions_has_means_differences_and_the_band_of_chance():
    losses, apart = drawn(compare_precision.draw, PRECISIONS).axes
    mean = "float32: 1.1000 at the end", "bfloat16: 1.3000 at the end"
    assert lines_of(losses) == [
        (mean[0], "C0", "-", None, 1.5, None, [5, 10], [2.2, 1.1]),
        (mean[1], "C1", "--", None, 1.5, None, [5, 10], [2.15, 1.3]),
    ]
    assert lines_of(apart) == [
        ("bfloat16", "C1", "-", None, 1, None, [5, 10], [0.1, 0.1]),
        (None, "C1", "-", None, 1, None, [5, 10], [-0.2, 0.3]),
    ]
    for axes, low, high in ((losses, [2.0, 1.0], [2.4, 1.2]), (apart, [-0.2, -0.1], [0.2, 0.1])):
        (band,) = axes.collections
        corners = {(float(x), round(float(y), 9)) for x, y in band.get_paths()[0].vertices}
        assert corners == {*zip((5.0, 10.0), low, strict=True), *zip((5.0, 10.0), high, strict=True)}
        assert same_color(band.get_facecolor()[0], to_rgba("gray", 0.25))
        assert band.get_linewidth() == 0
    assert words(losses) == ("steps", "held-out loss, nats a byte", "mean of 2 seeds")
    assert words(apart) == ("steps", "difference from float32", "each seed, beside float32's deviation")
    assert legend(losses) == ["float32 over the seeds", *mean]
    assert legend(apart) == ["float32 over the seeds", "bfloat16"]
    small = plt.rcParams["font.size"] * 0.833
    for axes, place in ((losses, 1), (apart, 3)):  # upper right, lower left
        shown = axes.get_legend()
        assert shown.get_texts()[0].get_fontsize() == pytest.approx(small)
        assert shown._loc == place


def test_one_seed_has_a_band_and_four_kinds_have_four_styles():
    one = dict.fromkeys(("float32", "b", "c", "d"), PRECISIONS["float32"][:1])
    losses, apart = drawn(compare_precision.draw, one).axes
    assert [line.get_linestyle() for line in losses.lines] == ["-", "--", ":", "-."]
    assert [line.get_color() for line in losses.lines] == ["C0", "C1", "C2", "C3"]
    assert [line.get_label() for line in apart.lines] == ["b", "c", "d"]


def test_a_precision_has_its_losses_since_the_last_evaluation(monkeypatch, capsys):
    Steps.made = []
    monkeypatch.setattr(compare_precision, "Trainer", Steps)
    now = iter([100.0, 107.0])
    monkeypatch.setattr(compare_precision.time, "perf_counter", lambda: next(now))
    found = compare_precision.train(["--dtype", "bfloat16"], 4, 5, 2)
    ((args, mesh),) = Steps.made
    assert (args.dtype, args.steps, args.seed, args.eval_samples, args.device) == ("bfloat16", 5, 4, 64, "cpu")
    assert (args.warmup, args.lr, args.global_batch, mesh.world.size) == (50, 3e-3, 8, 1)
    assert found == {"steps": [2, 4, 5], "train": [1.5, 3.5, 5.0], "held_out": [8.0, 6.0, 5.0], "seconds": 7.0}
    assert capsys.readouterr().out == "seed 4, --dtype bfloat16: 5.0000 after 7 s\n"


def test_the_command_of_precisions_has_its_defaults_and_prints_each(capsys):
    (argv, kinds, train, draw), options = defaults(compare_precision, ["--seeds", "1"], PRECISIONS)
    assert (argv, kinds) == (["--seeds", "1"], compare_precision.KINDS)
    assert (train, draw) == (compare_precision.train, compare_precision.draw)
    assert options == {"prog": "python -m examples.gpt.compare_precision", "about": compare_precision.__doc__,
                       "steps": 500, "evaluations": 10, "out": "docs/precision.png"}  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "float32's deviation over the seeds at the end: 0.1000",
        "float32: held-out loss 1.1000; less float32 of the same seed +0.0000, +0.0000; train 1.5000, 1.7000",
        "bfloat16: held-out loss 1.3000; less float32 of the same seed +0.1000, +0.3000; train 1.6000, 1.8000",
    ]


# --- workers ----------------------------------------------------------------------------------------------------------


def workers() -> dict[str, dict[str, list[dict]]]:
    def run(*held_out: float, reduced: int) -> dict:
        return {"tokens": [1e6, 3e6], "held_out": [*held_out], "reduced": [1, reduced], "agreement": []}

    return {
        "from scratch": {
            "data parallel": [run(2.5, 2.0, reduced=10_000_000), run(2.0, 1.0, reduced=7)],
            "DiLoCo": [run(2.6, 2.125, reduced=250_000)],
        },
        "after 3 steps": {"data parallel": [run(1.9, 1.5, reduced=500_000)]},
    }


def test_the_picture_of_workers_has_the_first_seed_and_its_megabytes():
    left, right = drawn(compare_workers.draw, workers()).axes
    style = ("-", ("o", 3), 1, None)
    assert lines_of(left) == [
        ("data parallel: 40.0 MB", "C0", *style, [1, 3], [2.5, 2.0]),
        ("DiLoCo: 1.0 MB", "C1", *style, [1, 3], [2.6, 2.125]),
    ]
    assert lines_of(right) == [("data parallel: 2.0 MB", "C0", *style, [1, 3], [1.9, 1.5])]
    assert words(left) == ("million tokens", "held-out loss, nats a byte", "from scratch")
    assert words(right) == ("million tokens", "", "after 3 steps")
    assert left.get_ylim()[1] == 3
    assert 1 < left.get_ylim()[0] < 2
    assert right.get_ylim()[1] < 2
    for axes in (left, right):
        assert len(legend(axes)) == len(axes.lines)
        assert axes.get_legend().get_title().get_text() == "summed over the ranks, by each"
        assert axes.get_legend().get_texts()[0].get_fontsize() == pytest.approx(plt.rcParams["font.size"] * 0.833)


class Merging(Steps):
    """Merges after each second step."""

    def __init__(self, args: Any, mesh: Any) -> None:
        super().__init__(args, mesh)
        self.done = self.run.step = 3 if args.resume != "none" else 0
        Merging.last = self

    def step(self) -> dict:
        self.done += 1
        merged = self.args.workers > 1 and self.done % 2 == 0
        return {"merge": SimpleNamespace(agreement=self.done / 10)} if merged else {}


@pytest.fixture
def world(monkeypatch):
    """A world of 4 ranks, of which this is the first, and the meshes that are asked for."""
    Steps.made, meshes = [], []
    monkeypatch.setattr(compare_workers, "Trainer", Merging)
    monkeypatch.setattr(compare_workers, "count_parameters", lambda config: 1000)
    monkeypatch.setattr(compare_workers, "build_mesh", lambda **options: meshes.append(options) or "mesh")
    fake = SimpleNamespace(rank=0, ended=0, sent=0)
    monkeypatch.setattr(compare_workers, "dist", SimpleNamespace(
        get_world_size=lambda: 4, get_rank=lambda: fake.rank,
        broadcast_object_list=lambda folder: setattr(fake, "sent", fake.sent + 1),
        destroy_process_group=lambda: setattr(fake, "ended", fake.ended + 1),
    ))  # fmt: skip
    fake.meshes = meshes
    return fake


def test_workers_sum_parameters_at_merges_and_data_parallelism_sums_gradients(world, capsys):
    found = compare_workers.train(["--local-steps", "2"], 5, 6, 4, "out")
    ((args, mesh),) = Steps.made
    assert (args.workers, args.dp, args.zero, args.local_steps, mesh) == (4, None, 1, 2, "mesh")
    assert (args.steps, args.seed, args.eval_samples, args.out, args.resume) == (6, 5, 128, "out", "none")
    assert world.meshes == [{"dp": None, "worlds": 4, "device_type": None}]
    tokens = [step * args.global_batch * 128 for step in (4, 6)]
    assert found == {"tokens": tokens, "held_out": [6.0, 4.0], "reduced": [2000, 3000], "agreement": [0.2, 0.4, 0.6]}
    assert Merging.last.saved == []
    assert capsys.readouterr().out == "seed 5, --local-steps 2, from 0: 4.0\n"

    found = compare_workers.train([], 0, 6, 4, "out")
    args = Steps.made[-1][0]
    assert (args.workers, args.dp, args.zero) == (1, 4, 0)
    assert world.meshes[-1] == {"dp": 4, "worlds": 1, "device_type": None}
    assert (found["reduced"], found["agreement"]) == ([4000, 6000], [])
    assert Merging.last.saved == [3], "after half of the steps"
    assert capsys.readouterr().out == "seed 0, data parallel, from 0: 4.0\n"

    found = compare_workers.train([], 0, 6, 1, "out", 3)
    assert Steps.made[-1][0].resume == "out/checkpoints/step-00000003"
    assert found["held_out"] == [6.0, 5.0, 4.0], "of the steps that are left"
    assert Merging.last.saved == []
    assert found["reduced"] == [1000, 2000, 3000]
    world.rank = 1
    capsys.readouterr()
    compare_workers.train([], 0, 2, 1, "out")
    assert capsys.readouterr().out == ""


def test_the_command_of_workers_trains_all_kinds_from_both_starts(world, tmp_path, monkeypatch, capsys):
    asked: list[tuple] = []

    def train(flags: list[str], seed: int, steps: int, every: int, out: str, begin: int) -> dict:
        asked.append((flags, seed, steps, every, begin))
        assert (world.rank > 0) == (out is None) or Path(out).is_dir()
        return {"held_out": [1.0 + seed / 8], "reduced": [1_000_000]}

    pictures: list[tuple] = []
    monkeypatch.setattr(compare_workers, "train", train)
    monkeypatch.setattr(compare_workers, "draw", lambda runs, out: pictures.append((runs, out)))
    monkeypatch.setattr(compare_workers, "KINDS", {"data parallel": [], "DiLoCo": ["--local-steps", "10"]})
    monkeypatch.setattr(compare_workers.tempfile, "tempdir", str(tmp_path))
    out = tmp_path / "w.png"
    compare_workers.main(["--out", str(out)])
    kinds = ([], ["--local-steps", "10"])
    assert asked == [(flags, seed, 600, 50, begin) for seed in (0, 1) for begin in (0, 300) for flags in kinds]
    ((runs, path),) = pictures
    each = [{"held_out": [1.0], "reduced": [1_000_000]}, {"held_out": [1.125], "reduced": [1_000_000]}]
    kept = {"data parallel": each, "DiLoCo": each}
    assert (runs, path) == ({"from scratch": kept, "after 300 steps of data parallelism": kept}, out)
    assert out.with_suffix(".json").read_text() == json.dumps(runs) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["w.json"], "the checkpoints are removed"
    assert capsys.readouterr().out.splitlines()[:2] == [
        "from scratch, data parallel: held-out loss 1.000, 1.125; 4.0 MB summed",
        "from scratch, DiLoCo: held-out loss 1.000, 1.125; 4.0 MB summed",
    ]
    assert (world.meshes, world.ended, world.sent) == ([{}], 1, 2)
    asked.clear()
    compare_workers.main(["--steps", "5", "--seeds", "1", "--evaluations", "9", "--out", str(out)])
    assert asked == [(flags, 0, 5, 1, begin) for begin in (0, 2) for flags in kinds]
    out.with_suffix(".json").unlink()
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    compare_workers.main(["--steps", "1", "--seeds", "1"])
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["local_updates.json"]
    pictures.clear()
    world.rank = 1
    compare_workers.main(["--steps", "5", "--seeds", "1", "--out", str(tmp_path / "other.png")])
    assert pictures == []
    assert [path.name for path in tmp_path.iterdir()] == ["docs"], "the first rank alone writes"


def test_the_help_of_workers_says_what_it_is(world, capsys):
    with pytest.raises(SystemExit):
        compare_workers.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("usage: python -m examples.gpt.compare_workers [-h]")
    assert "Compare local updates with data parallelism" in told
    assert "--evaluations EVALUATIONS along a run --out OUT the plot; its numbers lie beside it as .json" in told
    assert (world.meshes, world.ended) == ([], 0)
