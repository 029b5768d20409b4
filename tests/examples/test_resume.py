"""Where a run begins: which checkpoint it takes, what it refuses, and what it says."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from examples.gpt import checkpoints as module
from examples.gpt import checkpoints as resume
from examples.gpt.arguments import parse
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.policies import Ramp, lr_schedule
from mpcore import Axis, Mesh

SAVED = {"model": dataclasses.asdict(GPTConfig()), "corpus": {"tokens": 5}, "optimizer": "adamw", "tokenizer": "byte"}


def manifest(dtypes: tuple = ("F32",), seed: int = 0, step: int = 4, config: Any = None) -> Any:
    tensors = {f"model/{i}": SimpleNamespace(dtype=dtype) for i, dtype in enumerate(dtypes)}
    tensors["optimizer/0"] = SimpleNamespace(dtype="F64")
    return SimpleNamespace(tensors=tensors, seed=seed, step=step, config=SAVED if config is None else config)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "dtype", "refused"),
    [
        (("F32",), "float32", ""),
        (("F32",), "bfloat16", ""),
        (("F64",), "float64", ""),
        (("BF16",), "float64", ""),  # an import in half precision is cast
        (("F64", "F32"), "float64", ""),
        (("F32",), "float64", "there has float32 weights: --dtype float32 goes on from it, not float64"),
        (("F32", "F64"), "float32", "there has float64 weights: --dtype float64 goes on from it, not float32"),
        (("F64",), "bfloat16", "there has float64 weights: --dtype float64 goes on from it, not bfloat16"),
    ],
)
def test_weights_go_on_in_their_own_width(dtypes, dtype, refused):
    found = resume.other_dtype("there", manifest(dtypes), dtype)
    assert str(found or "") == refused


def test_two_configurations_differ_field_by_field():
    there, here = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": 5}, {"new": 6, "a": 1, "b": {"c": 3, "d": [1]}}
    assert resume.differing(there, here) == [
        "new is not set there, 6 here", "b.c is 2 there, 3 here", "gone is 5 there, not set here"
    ]  # fmt: skip
    assert resume.differing({"a": {"b": 1}}, {"a": None}) == ["a is {'b': 1} there, not set here"]
    assert resume.differing(there, there) == []


def refused(config: Any = None, about: Any = None, seed: int = 0, begun: bool = False, saved_seed: int = 0) -> str:
    with mock.patch.object(resume, "inspect", return_value=manifest(seed=saved_seed, config=config)):
        return str(resume.other_run(Path("there"), about or SAVED, seed, "float32", begun) or "")


def test_a_checkpoint_of_another_run_is_refused_by_its_fields():
    assert refused() == ""
    way = "--init-from there with another --out begins a new one from its weights"
    assert refused(seed=3) == f"there is of another run: seed is 0 there, 3 here. {way}"
    assert refused(saved_seed=3).startswith("there is of another run: seed is 3 there, 0 here.")
    other = {**SAVED, "optimizer": "muon", "model": {**SAVED["model"], "layers": 5}}  # type: ignore[dict-item]
    said = refused(about=other)
    begun = "If it began with --init-from, give that again: the shape comes from there."
    assert said == (
        "there is of another run: model.layers is 4 there, 5 here; optimizer is 'adamw' there, 'muon' here. "
        f"{begun} {way}"
    )
    assert begun not in refused(about=other, begun=True)
    assert begun not in refused(seed=3)
    older = {"model": {"layers": 4}, "corpus": {"tokens": 5}, "optimizer": "adamw"}
    assert refused(config=older) == "", "fields that came later have their defaults, and the tokenizer is this run's"
    with mock.patch.object(resume, "inspect", return_value=manifest(("F64",), seed=5)):
        found = str(resume.other_run(Path("there"), SAVED, 0, "float32", False))
    assert found.startswith("there has float64 weights"), "the dtype is told first"
    for error in (ValueError("damaged"), OSError("gone")):
        with mock.patch.object(resume, "inspect", side_effect=error):
            assert resume.other_run(Path("there"), SAVED, 1, "float32", False) is None


def test_a_checkpoint_before_others_is_not_gone_on_from():
    steps = {"old": 4, "new": 8}

    def read(path: Path) -> Any:
        return SimpleNamespace(step=steps[str(path)])

    with mock.patch.object(resume, "read_manifest", read):
        assert resume.left_behind(Path("old"), None) is None
        assert resume.left_behind(Path("old"), Path("old")) is None
        assert resume.left_behind(Path("new"), Path("old")) is None
        said = str(resume.left_behind(Path("old"), Path("new")))
    assert said.startswith("--resume old leaves behind what was trained after it, up to new, from which restarts")
    for error in (ValueError, OSError):
        with mock.patch.object(resume, "read_manifest", side_effect=error):
            assert resume.left_behind(Path("old"), Path("new")) is None


@pytest.mark.parametrize(
    ("missing", "unexpected", "strict"),
    [
        ([], [], False),
        ([f"mlp.{resume.ROUTER_BIAS}"], [], False),
        ([f"mlp.{resume.ROUTER_STATISTICS}"], [f"mlp.{resume.ROUTER_STATISTICS}"], False),
        ([f"mlp.{resume.ROUTER_BIAS}", "head.weight"], [], True),
        ([], ["head.weight"], True),
        ([], [f"mlp.{resume.ROUTER_BIAS}"], True),
    ],
)
def test_weights_may_lack_what_routers_keep_and_nothing_else(missing, unexpected, strict):
    loads: list[dict] = []

    def load(path: str, model: Any, **how: Any) -> Any:
        loads.append({"path": path, "model": model, **how})
        return SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)

    with mock.patch.object(resume, "load", load):
        resume.init_from("there", "model", "mesh")  # type: ignore[arg-type]
    first = {"path": "there", "model": "model", "mesh": "mesh", "cast": True, "strict": False}
    assert loads == [first, *([{k: v for k, v in first.items() if k != "strict"}] * strict)]


# --- which checkpoint -------------------------------------------------------------------------------------------------


class Merges:
    """Workers that merge every ten steps."""

    @staticmethod
    def merges_until(step: int) -> int:
        return step // 10


def begun(
    flags: str,
    folders: dict[str, list[int]] | None = None,
    mesh: Mesh = Mesh(),
    damaged: tuple = (),
    restarted: bool = False,
    others: Callable[[str], Any] | None = None,
    out: str = "out",
    samples: dict[int, int] | None = None,
    unmerged: tuple = (),
    extra: Any = MappingProxyType({}),
) -> Any:
    """What a run without a model begins with. `folders` has the steps of the checkpoints in each, newest first."""
    folders = folders or {}
    made: Any = Checkpoints.__new__(Checkpoints)
    made.args, made.mesh = parse([*flags.split(), "--out", "out"]), mesh
    made.out, made.path = Path(out), Path(out) / "checkpoints"
    made.about, made.first_step, made.first_sample = {"about": 1}, 0, 0
    made.console = SimpleNamespace(lead=True)
    made.setup = SimpleNamespace(config=GPTConfig(), ramp=Ramp(16, 16))
    made.said = []

    def load(path: Path) -> Any:
        assert len(made.said) < 20, "a checkpoint that is damaged must not be tried again"
        made.said.append(str(path))
        step = int(path.name.removeprefix("step-"))
        if str(path) in damaged:
            raise ValueError(f"{path} is damaged")
        return SimpleNamespace(step=step, sample=(samples or {}).get(step, 16 * step), extra=extra)

    def begin() -> None:
        before = made.said[-1:]
        made.said.append("merges")
        if set(before) & set(unmerged):
            raise ValueError("cannot merge")

    made.run = SimpleNamespace(load=load, parameters=lambda: nullcontext("model"))
    made.updates = SimpleNamespace(begin=begin, optimizer=Merges()) if mesh.worlds.size > 1 or unmerged else None

    def listed(path: Path, mesh: Any = None) -> list[Path]:
        return [path.parent / f"step-{step}" for step in folders.get(str(path.parent), [])]

    def gather(own: set, group: Any = None) -> list:
        return [own, *[{1} for _ in range(mesh.worlds.size - 1)]]

    with mock.patch.multiple(
        module, checkpoints=listed, was_restarted=lambda: restarted,
        read_manifest=lambda path: SimpleNamespace(step=int(path.name.removeprefix("step-"))),
        other_run=lambda path, about, *of: others(" ".join(map(str, (path, *of)))) if others else None,
        latest=lambda path, mesh: made.said.append(f"newest in {path}"), left_behind=lambda path, newest: None,
        init_from=lambda *of: made.said.append(("init", *of)),
        all_reduce=lambda x, axis, op: x, gather_objects=gather,
    ):  # fmt: skip
        made.begin()
    return made


def test_a_run_begins_anew_or_with_a_model():
    made = begun("", {"out": [8]})
    assert (made.said, made.first_step, made.first_sample) == ([], 0, 0)
    assert begun("--init-from there").said == [("init", "there", "model", Mesh())]
    assert begun("--resume auto --init-from there").said == [("init", "there", "model", Mesh())]


def test_a_learned_bias_that_stays_is_told(capsys):
    for moe, flags, told in (
        (MoEConfig(bias=True), "--init-from there", True), (MoEConfig(bias=True), "", False),
        (MoEConfig(bias=True, bias_rate=0.5), "--init-from there", False), (MoEConfig(), "--init-from there", False),
    ):  # fmt: skip
        with mock.patch.object(module, "GPTConfig", create=True):
            real = Checkpoints._resume

            def given(self: Any, moe: MoEConfig = moe, real: Any = real) -> bool:
                self.setup.config = GPTConfig(moe=moe)
                return real(self)

            with mock.patch.object(Checkpoints, "_resume", given):
                begun(flags)
        said = "the experts' bias of there stays as it is: moe.bias_rate moves it\n"
        assert capsys.readouterr().out == said * told


def test_a_run_goes_on_from_the_newest_or_the_named_checkpoint(capsys):
    made = begun("--resume auto", {"out": [8, 4]})
    assert (made.said, made.first_step, made.first_sample) == (["out/step-8"], 8, 128)
    assert capsys.readouterr().out == "resumed after step 8, from sample 128\n"
    made = begun("--resume elsewhere/step-3", {"out": [8]})
    assert made.said == ["newest in out/checkpoints", "elsewhere/step-3"]
    assert capsys.readouterr().out == "resumed after step 3, from sample 48 of elsewhere/step-3\n"
    made = begun("--resume auto --global-batch 8", {"out": [8]}, samples={8: 100})
    assert (made.first_step, made.first_sample) == (8, 100), "a batch of another size began later"


def test_a_resumed_run_tells_of_another_learning_rate_schedule(capsys):
    saved = "--steps 8 --warmup 2 --lr 0.1"

    def said(flags: str, saved: str = saved) -> str:
        begun(f"--resume auto {flags}", {"out": [8]}, extra={"lr_schedule": lr_schedule(parse(saved.split()))})
        return "".join(capsys.readouterr().out.splitlines(keepends=True)[1:])

    assert said(saved) == said(f"{saved} --lr-decay-steps 8") == said(f"{saved} --steps 99 --lr-decay-steps 8") == ""
    assert said(f"{saved} --steps 14") == (
        "the learning rate after 8 steps is 0.055 with --lr-decay-steps 14; the saved run's schedule gives 0.01: "
        "--lr-decay-steps 8 keeps it\n"
    )
    assert said(f"{saved} --set min_lr=0.1", f"{saved} --warmup 3") == (
        "the learning rate after 8 steps is 0.1 with min_lr 0.1 --warmup 2; the saved run's schedule gives 0.01: "
        "no min_lr --warmup 3 keeps it\n"
    )
    assert said("--steps 20 --warmup 8 --lr 0.1", "--steps 14 --warmup 8 --lr 0.1").startswith(
        "the learning rate after 9 steps is 0.0985 with --lr-decay-steps 20; the saved run's schedule gives 0.094: "
    ), "the first step whose rates differ"
    assert said(f"{saved} --warmup 3") == "", "no later step differs"
    begun("--resume auto", {"out": [8]})  # a checkpoint of an earlier version has no schedule
    assert "learning rate" not in capsys.readouterr().out


def test_damaged_checkpoints_are_passed_over_and_told(capsys):
    made = begun("--resume auto", {"out": [8, 4]}, damaged=("out/step-8",))
    assert (made.said, made.first_step) == (["out/step-8", "out/step-4"], 4)
    assert capsys.readouterr().err == "passed over: out/step-8 is damaged\n"
    with pytest.raises(ValueError, match=r"^out/step-8 is damaged$"):
        begun("--resume auto", {"out": [8, 4]}, damaged=("out/step-8", "out/step-4"))
    assert capsys.readouterr().err.splitlines() == ["passed over: out/step-8 is damaged"] * 2
    with pytest.raises(ValueError, match=r"^there/step-3 is damaged$"):
        begun("--resume there/step-3", {"out": [8]}, damaged=("there/step-3",))
    assert capsys.readouterr().err == ""
    made = begun("--resume auto", {"out": [8, 4]}, unmerged=("out/step-8",))
    assert made.first_step == 4


def test_a_checkpoint_of_another_run_ends_the_run():
    asked: list[str] = []

    def others(of: str) -> Any:
        asked.append(of)
        return ValueError("another run")

    with pytest.raises(ValueError, match=r"^another run$"):
        begun("--resume auto --seed 7 --dtype bfloat16", {"out": [8]}, others=others)
    with pytest.raises(ValueError, match=r"^another run$"):
        begun("--resume auto --init-from x", {"out": [8]}, others=others)
    assert asked == ["out/step-8 7 bfloat16 False", "out/step-8 0 float32 True"]


@pytest.mark.parametrize(
    ("flags", "restarted", "first"),
    [
        ("--save-every 2", True, 8),
        ("--save-every 2", False, 0),
        ("", True, 0),
        ("--save-every 2 --resume there/step-3", True, 8),
        ("--save-every 2 --resume there/step-3", False, 3),
        ("--resume there/step-3", True, 3),
    ],
)
def test_a_run_that_the_launcher_restarts_goes_on_from_its_own_last_save(flags, restarted, first):
    assert begun(flags, {"out": [8]}, restarted=restarted).first_step == first


def test_a_restart_before_the_first_save_begins_as_before():
    assert begun("--save-every 2 --resume there/step-3", restarted=True).first_step == 3
    assert begun("--save-every 2", restarted=True).first_step == 0


WORKER = Mesh(worlds=Axis(2, 1), job=Axis(2, 1))


def test_workers_take_their_own_or_the_first_workers_checkpoint(capsys):
    """The other workers have a checkpoint after one merge: of steps 10 to 19."""
    made = begun("--resume auto --workers 2", {"out/worker-1": [25, 14, 12], "out/worker-0": [15]}, WORKER,
                 out="out/worker-1")  # fmt: skip
    assert (made.said[0], made.first_step) == ("out/worker-1/step-14", 14)
    assert capsys.readouterr().out == "worker 1 resumed after step 14, from sample 224\n"
    made = begun("--resume auto --workers 2", {"out/worker-1": [25], "out/worker-0": [15]}, WORKER, out="out/worker-1")
    assert made.said[0] == "out/worker-0/step-15"
    assert capsys.readouterr().out.endswith(" of out/worker-0/step-15\n")
    made = begun("--resume auto --workers 2", {"out/worker-1": [25]}, WORKER, out="out/worker-1")
    assert (made.said, made.first_step) == (["merges"], 0)
    assert capsys.readouterr().err == "out/worker-1/step-25 is passed over: the workers have none in common\n"


def test_without_workers_the_newest_of_all_folders_goes_on():
    assert begun("--resume auto", {"out": [3], "out/worker-0": [7, 2]}).first_step == 7
    assert begun("--resume auto", {"out": [9, 3], "out/worker-0": [7]}).first_step == 9
    assert begun("--resume auto", {"out/worker-0": [7]}).first_step == 7


# --- the folder -------------------------------------------------------------------------------------------------------


def opened(out: Path, flags: str = "", first: int = 0, found: tuple = (), lead: bool = True) -> list[dict]:
    made: Any = Checkpoints.__new__(Checkpoints)
    made.args, made.out, made.path, made.first_step = parse(flags.split()), out, out / "checkpoints", first
    made.mesh, made.console = Mesh(), SimpleNamespace(lead=lead)
    made.setup = SimpleNamespace(config=GPTConfig())
    made.own = lambda: list(found)
    with made.folder() as records:
        assert (out / ".lock").exists() == lead
        return records


def test_a_folder_gets_the_configuration_and_the_records_of_earlier_steps(tmp_path):
    out = tmp_path / "a" / "b"
    assert opened(out, "--lr 0.5") == []
    written = json.loads((out / "config.json").read_text())
    assert written == {"model": dataclasses.asdict(GPTConfig()), "run": vars(parse(["--lr", "0.5"]))}
    assert (out / "config.json").read_text().startswith('{\n  "model": {\n    "vocab_size": 257')
    assert sorted(path.name for path in out.iterdir()) == [".lock", "checkpoints", "config.json", "metrics.jsonl"]
    assert list((out / "checkpoints").iterdir()) == []
    (out / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    (out / "tensors.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    assert opened(out, first=2) == [{"step": 0}, {"step": 1}]
    assert (out / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    assert (out / "tensors.jsonl").read_text() == '{"step": 0}\n'
    other = tmp_path / "c"
    opened(other, "--set no_save=true")
    assert not (other / "checkpoints").exists()
    (tmp_path / "d" / "checkpoints").mkdir(parents=True)
    assert opened(tmp_path / "d", lead=False) == []
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["checkpoints"]


def test_a_folder_with_another_run_is_refused(tmp_path):
    there = (Path("out/step-8"),)
    message = "out/step-8 is there: --resume auto goes on from it, another --out begins anew"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        opened(tmp_path, found=there)
    opened(tmp_path, "--resume auto", found=there)
    opened(tmp_path, first=8, found=there)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=re.escape(f"--out {tmp_path / 'file'} can't be written: ")):
        opened(tmp_path / "file")
