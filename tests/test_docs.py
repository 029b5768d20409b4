"""The pages of docs run as they stand: in one process, and on a mesh with the same losses."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import mpcore
from docs import drawings
from examples.gpt.arguments import parse
from examples.gpt.checkpoints import other_schedule
from examples.gpt.config import PRESETS, GPTConfig
from examples.gpt.policies import lr_schedule
from mpcore.__main__ import main
from mpcore.layers.attention.heads import HeadOptions
from mpcore.layers.module import TensorParallelOptions
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import NAMES, build_schedule
from mpcore.tools.command_line import find_object
from tests.pool import Simulated
from tests.quick import some

DOCS = Path(__file__).parent.parent / "docs"


CONSOLE = re.compile(r"^\$ mpcore ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ |```)[^\n]*\n)*)", re.MULTILINE)


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run_page(name: str, **sizes: object) -> dict:
    """Run all python blocks of a page, one after the other, and return what they leave; `tp=2` is for `TP = 1`."""
    code = "\n".join(python_blocks(name))
    for size, value in sizes.items():
        code, found = re.subn(rf'^({size.upper()}) = [\w"]+', rf"\1 = {value!r}", code, flags=re.MULTILINE)
        assert found == 1, f"{name} has {found} lines {size.upper()} = .."
    held: dict = {"__name__": "docs"}
    exec(compile(code, name, "exec"), held)
    return held


def losses(folder: str, **sizes: int) -> list[float]:
    with mock.patch.object(tempfile, "tempdir", folder):  # where the page saves
        return run_page("training.md", **sizes)["piped"]


@pytest.mark.parametrize(("size", "sizes"), some((4, {"tp": 2, "pp": 2}), of=[(2, {}), (2, {"tp": 2})]), ids=str)
def test_the_page_on_training_has_the_same_losses_on_a_mesh(ranks, tmp_path, size, sizes):
    (alone,) = ranks(1, losses, str(tmp_path))
    assert alone[-1] < alone[0]
    for found in ranks(size, losses, str(tmp_path), **sizes):
        assert found == pytest.approx(alone, rel=1e-5)


def page_losses(name: str, **sizes: object) -> list[float]:
    return run_page(name, **sizes)["losses"]


@pytest.mark.parametrize(("page", "layouts"), some(
    ("context_parallel.md", [(4, {"cp": 4})]),
    ("pipelines.md", [(4, {"pp": 4, "schedule": "zbv"})]),
    ("from_nanogpt.md", [(2, {"tp": 2})]),
    ("from_fsdp2.md", [(2, {"zero": 3})]),
    ("from_deepspeed.md", [(2, {"zero": 3})]),
    ("zero.md", [(4, {"zero": 3, "replicate": 2})]),
    ("tensor_parallel.md", [(2, {"tp": 2, "sp": False})]),
    of=[("context_parallel.md", [(4, {"cp": 2})]), ("pipelines.md", [(4, {"pp": 2})]), ("zero.md", [(2, {"zero": 1})]),
        ("tensor_parallel.md", [(4, {"tp": 2})])],
))  # fmt: skip
def test_a_page_has_the_losses_of_one_process_on_every_mesh(ranks, page, layouts):
    (alone,) = ranks(1, page_losses, page)
    assert alone[-1] < alone[0]
    for size, sizes in layouts:
        for found in ranks(size, page_losses, page, **sizes):
            assert found == pytest.approx(alone, rel=1e-5)


def finetuning(folder: str, tp: int) -> tuple[list[float], list[float], torch.Tensor]:
    from accelerate.state import AcceleratorState

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    launched = {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with mock.patch.object(tempfile, "tempdir", folder), mock.patch.dict(os.environ, launched):
        held = run_page("finetuning.md", tp=tp)
        assert held["args"].world_size == size
        AcceleratorState._reset_state(reset_partial_state=True)
        return held["losses"], held["logged"], held["dense"].up.weight.detach()


def by_trainer(folder: str) -> list[float]:
    """The losses of transformers' own Trainer on the page's model, data and order."""
    with mock.patch.object(tempfile, "tempdir", folder):
        held = run_page("finetuning.md")
    torch.manual_seed(0)
    model = held["LlamaForCausalLM"](held["config"])
    plain = type("Plain", (held["Trainer"],), {"get_train_dataloader": held["RunTrainer"].get_train_dataloader})
    plain.samples = 4
    trainer = plain(model, held["args"], train_dataset=held["rows"])
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("layouts", some([(2, 2)], of=[[(2, 1), (4, 2)]]), ids=str)
def test_the_page_on_finetuning_has_the_same_losses_and_weights_on_a_mesh(ranks, tmp_path, layouts):
    """Its Trainer has the losses of transformers' own."""
    ((alone, logged, weight),) = ranks(1, finetuning, str(tmp_path), 1)
    assert alone[-1] < alone[0]
    assert logged == pytest.approx(ranks(1, by_trainer, str(tmp_path))[0], rel=1e-5)
    for size, tp in layouts:
        for found, now, merged in ranks(size, finetuning, str(tmp_path), tp):
            assert found == pytest.approx(alone, rel=1e-5)
            assert now == pytest.approx(logged, rel=1e-4)
            torch.testing.assert_close(merged, weight, rtol=1e-4, atol=1e-6)


# files that a page has the reader save
PROGRAMS = {"launch.md": ("train",), "start.md": ("first",), "verify.md": ("mine",)}


def commands() -> list:
    """Each command that a page shows with what it prints; those on 80 blocks are for `make soak`."""
    pages = [page for page in sorted(DOCS.glob("*.md")) if page.name not in PROGRAMS]
    found = [(page.name, *each) for page in pages for each in CONSOLE.findall(page.read_text())]
    assert len(found) > 1
    long = [pytest.mark.slow]
    return [
        pytest.param(*each, id=f"{each[0]} {each[1].split()[0]}", marks=long if "llama-65b" in each[1] else [])
        for each in found
    ]


@pytest.mark.parametrize(("page", "command", "printed"), commands())
def test_a_command_prints_what_its_page_shows(capsys, monkeypatch, tmp_path, page, command, printed):
    monkeypatch.chdir(tmp_path)  # where `mpcore schedule` draws
    status = main(shlex.split(command.replace("\\\n", " ")))
    said = capsys.readouterr()
    if printed.startswith("mpcore: error"):  # the page shows the first line
        assert (status, said.out) == (2, "")
        assert said.err.startswith(printed)
    else:
        assert (status, said.out) == (0, printed)


def test_the_page_on_pipelines_has_what_each_schedule_costs():
    held = drawings.rows("pipelines.md", "schedule")
    assert len(held) == len(NAMES)
    for name, stages, *costs, _ in held:
        schedule = build_schedule(name, 4, 8)
        proof = prove(schedule)
        assert schedule.stages == 4 * int(stages)
        assert costs == [f"{proof.bubble:.0%}", f"{max(proof.peaks):g}", str(proof.messages)]


def right_hand_sides() -> list[tuple[str, str]]:
    """Return the code in the tables of the pages about other libraries: each page's name and the code to write.

    The code is in the last column; on Megatron's page it is in the second, and the last column has notes.
    """
    found = []
    for page, column in ((DOCS / "megatron.md", 1), *((page, -1) for page in sorted(DOCS.glob("from_*.md")))):
        cells = [
            line.rstrip("|").split(" | ")[column] for line in page.read_text().splitlines() if line.startswith("| ")
        ]
        found += [(page.name, code) for cell in cells for code in re.findall("`([^`]+)`", cell)]
    return found


POLICIES = ("Zero", "Offload", "Recompute", "Precision", "Compile")
CALLS = (mpcore.prepare, mpcore.ColumnParallelLinear, mpcore.parallel.shard_data_parallel, GPTConfig,
         mpcore.layers.GroupedLinear, torch.optim.AdamW)  # fmt: skip
KEYWORDS = [{*kind.__annotations__} for kind in (TensorParallelOptions, HeadOptions)]
KEYWORDS += [{*inspect.signature(call).parameters} for call in CALLS]


def check_code(code: str) -> None:
    """Refuse a flag, a keyword or a name that isn't there, and arguments that a call doesn't take."""
    run = SimpleNamespace(**vars(mpcore.Run), model=None)  # a run has its model only once it is made
    known = {"mp": mpcore, "run": run, "torch": torch}
    if code.startswith("--"):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parse(code.split())
        except SystemExit:  # a flag that is only named has no value
            assert " " not in code or "No such file" in said.getvalue(), said.getvalue()
            assert re.search(r"expected (one|\d) argument|No such file", said.getvalue()), code
        return
    text = f"prepare({code})" if re.match(r"\w+=", code) else code.replace("):", "): pass")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            assert hasattr(known[node.value.id], node.attr), code
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):  # keywords of one of these
            names = {str(keyword.arg) for keyword in node.keywords}
            assert any(names <= each for each in KEYWORDS), code
            continue
        call = eval(ast.unparse(node.func), known)
        if getattr(call, "__module__", "").startswith("mpcore"):
            own = [None] if call in vars(mpcore.Run).values() else []
            inspect.signature(call).bind(*own, *node.args, **{str(k.arg): k.value for k in node.keywords})
        if getattr(call, "__name__", "") in POLICIES:
            eval(ast.unparse(node), known)  # policies refuse what they can't mean


def test_what_the_pages_tell_people_from_elsewhere_to_write_exists():
    codes = [each for each in right_hand_sides() if re.match(r"--|\w+ = mp\.|mp\.|run\.|\w+=|with ", each[1])]
    assert len(codes) > 80
    for _, code in codes:
        check_code(code)
    for wrong in ("--zeros 3", "data=mp.Zeros(3)", "run.steps()", "dtat=3", "mp.Zero(4)", "mp.AdamW(model, rate=1)"):
        with pytest.raises((AssertionError, AttributeError, ValueError, TypeError, SystemExit)):
            check_code(wrong)


@pytest.mark.parametrize("name", drawings.PICTURES)
def test_a_picture_is_what_its_program_draws(name):
    assert (DOCS / name).read_text() == drawings.PICTURES[name](), "run: python -m docs.drawings"


def written(tp: int) -> list:
    return run_page("layers.md", tp=tp)["written"].tolist()


def test_the_page_on_layers_writes_the_same_tokens_on_a_mesh(ranks):
    (alone,) = ranks(1, written, 1)
    assert len({token for row in alone for token in row[5:]}) > 2
    assert ranks(2, written, 2) == [alone, alone]


def test_the_page_on_debugging_runs(capsys):
    run_page("debugging.md")
    assert "rank 3: hidden [2, 8] weight [8, 8]" in capsys.readouterr().out


@pytest.mark.parametrize("page", [
    "parallelize.md",
    "concepts.md",
    "planner.md",
    "weights.md",
    "bitwise.md",
    "own_layer.md",
    "parameter_servers.md",
    "choose.md",
])  # fmt: skip
def test_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a page writes files
    run_page(page)


@pytest.mark.parametrize(("page", "alone", "others"), [
    ("evaluation.md", "losses[0]", "losses[1:]"),
    ("less_memory.md", "losses['nothing']", "losses.values()"),
    ("moe.md", "losses", "[spread]"),
])  # fmt: skip
def test_a_page_has_the_losses_of_one_rank_in_all_its_variants(page, alone, others):
    held = run_page(page)
    expected = eval(alone, held)
    assert expected[-1] < expected[0]
    for found in eval(others, held):
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_page_on_checkpoints_goes_on_where_it_was(tmp_path):
    with mock.patch.object(tempfile, "tempdir", str(tmp_path)):
        held = run_page("checkpoints.md")
        held["FOLDER"] = str(tmp_path / "one")
        whole = mpcore.simulate(held["train"], 6)[0]
    assert held["begun"] + held["resumed"] == pytest.approx(whole, rel=1e-5)
    assert len({held["step"](held[name]) for name in ("run", "resumed_run")}) == 1  # by torch.distributed.checkpoint
    assert held["resumed_run"].step == 3
    held["step"](run := held["start"](mpcore.Mesh()))  # the run as it was saved
    assert torch.equal(held["plain"][1].weight, run.model[1].weight)


def test_the_page_on_checkpoints_trains_on_with_the_schedule_of_the_first_command():
    page = (DOCS / "checkpoints.md").read_text()
    first, second = (lr_schedule(parse(shlex.split(flags))) for flags in re.findall(r"gpt\.pretrain (--.*)", page))
    told = other_schedule(first, {**first, "lr_decay_steps": 400}, 200)
    assert first == second
    assert told is not None
    assert told.endswith("--lr-decay-steps 200 keeps it")  # "the flag that keeps the saved one"


def test_the_program_for_slurm_saves_when_a_signal_comes_and_resumes(tmp_path, monkeypatch, capsys):
    """One process gets SIGTERM in its third step, and starts again."""
    monkeypatch.chdir(tmp_path)
    held = run_page("launch.md")
    train, batch, mesh = held["train"], held["batch"], mpcore.build_mesh(device_type="cpu")
    train(mesh, 6, "whole")
    whole = capsys.readouterr().out.splitlines()

    def signalled(step: int, share: range) -> dict[str, torch.Tensor]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(step, share)

    held["batch"] = signalled
    with pytest.raises(SystemExit) as left:
        train(mesh, 6, "stopped")
    assert left.value.code == 75
    assert [path.name for path in (tmp_path / "stopped").glob("[!.]*")] == ["step-00000003"]
    train(mesh, 6, "stopped")
    assert len(whole) == 7
    told = ["saved step 3", "resumed after step 3"]
    assert capsys.readouterr().out.splitlines() == [*whole[:3], *told, *whole[3:]]


def test_the_page_on_launching_shows_the_script_of_the_examples():
    assert (
        f"```sh\n{(DOCS.parent / 'examples/slurm/train.sbatch').read_text()}```\n" in (DOCS / "launch.md").read_text()
    )


def test_the_program_that_sends_weights_to_a_sampler_runs_on_two_ranks(tmp_path, monkeypatch):
    (tmp_path / "rl.py").write_text(python_blocks("rl.md")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    mpcore.simulate(find_object("rl:main"), ranks=2)


# --- pages whose reader saves files -------------------------------------------------------------------------------


@pytest.fixture
def saved(request, tmp_path, monkeypatch):
    """The files of a page in the working folder, and ranks as threads for `mpcore verify`."""
    page = request.param
    blocks = python_blocks(page)
    if page != "start.md":
        (tmp_path / f"{PROGRAMS[page][0]}.py").write_text("\n".join(blocks))
    else:
        first, look = blocks
        (tmp_path / "first.py").write_text(first)
        (tmp_path / "look.py").write_text(look)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("mpcore.tools.verify.Pool", lambda most: SimulatedPool())
    yield page
    for name in PROGRAMS[page]:
        sys.modules.pop(name, None)


class SimulatedPool(Simulated):
    folder = mock.Mock()

    def stop(self) -> None:
        """Nothing was started."""


def rounded(text: str) -> str:
    """A printed table without the digits that another machine rounds otherwise."""
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d+)?(e\+\d+)?", "N", re.sub(r"\b[pd]p\d|zero\d", "N", text)))


@pytest.mark.parametrize("saved", PROGRAMS, indirect=True)
def test_mpcore_verify_prints_what_a_page_shows(saved, capsys):
    found = CONSOLE.findall((DOCS / saved).read_text())
    assert found
    for command, printed in found:
        differs = "DIFFERS" in printed
        assert main(shlex.split(command)) == int(differs)
        assert rounded(capsys.readouterr().out) == rounded(printed)


@pytest.mark.parametrize("saved", ["verify.md"], indirect=True)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_page_on_verify_compares_with_the_plain_model(saved, tp):
    assert all(0 <= off < 1e-12 for off in mpcore.simulate(find_object("mine:compare"), tp=tp))


@pytest.mark.parametrize("saved", ["verify.md"], indirect=True)
def test_the_page_on_verify_shows_which_weights_have_other_initial_values(saved, capsys):
    shown = re.search(r"```text\n(embedding.*?)```", (DOCS / saved).read_text(), re.DOTALL)
    assert shown is not None
    torch.manual_seed(0)
    find_object("mine:print_deviations")(mpcore.Mesh())
    for found, line in zip(capsys.readouterr().out.splitlines(), shown[1].splitlines(), strict=True):
        for one, other in zip(found.split(), line.split(), strict=True):
            assert one == other or float(one) == pytest.approx(float(other), rel=0.4)


@pytest.mark.parametrize("saved", ["start.md"], indirect=True)
def test_the_first_hour_trains_and_resumes(saved, capsys):
    text = (DOCS / saved).read_text()
    shown = [list(map(float, losses.split())) for losses in re.findall(r"^step \d: (.*)", text, re.MULTILINE)]
    run_file("look.py")
    assert capsys.readouterr().out.startswith(f"rank 0: step 5: {shown[0][0]}")
    first = find_object("first:train")
    assert first(mpcore.build_mesh()) == pytest.approx(shown[0], abs=1e-4)
    begun = mpcore.simulate(first, 3, 5, "checkpoints", tp=2, dp=2)[0]
    resumed = mpcore.simulate(first, 1, 8, "checkpoints", dp=2)[0]
    for found, expected in zip((begun, begun, begun, resumed), shown, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert all(f"`{name}`" in text for name in PRESETS)


def run_file(name: str) -> None:
    exec(compile(Path(name).read_text(), name, "exec"), {"__name__": "look"})


def merged() -> tuple[int, bool, dict]:
    held = run_page("local_updates.md")
    return held["run"].step, held["updates"].merged is not None, held["run"].model.state_dict()


def test_the_page_on_local_updates_ends_with_workers_that_agree(ranks):
    (*one, first), (*two, second) = ranks(2, merged)
    assert one == two == [10, True]
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)


def test_every_file_that_a_page_names_exists():
    root = DOCS.parent
    for page in set(DOCS.glob("*.md")) - {DOCS / "decisions.md"}:  # which is history
        for path in re.findall(r"`((?:mpcore|examples|tests|bench|kernels)/[\w/]+\.\w+)`", page.read_text()):
            assert (root / path).exists(), f"{page.name} names {path}"
