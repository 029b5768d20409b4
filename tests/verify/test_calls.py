"""What `verify` asks of its ranks, and what it says of ranks that failed: on ranks that answer at once."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import mpcore
from mpcore.tools import verify as front
from mpcore.tools.verify import DIED, LATE, RankError, verify, what_happened
from mpcore.tools.verify.hugging_face import HuggingFaceModel
from mpcore.tools.verify.run import RankRecord, Task

VALUES = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
TRUTH = RankRecord(0, 0, 0, 0, initial=VALUES, gradients=VALUES, updated=VALUES, output={}, evaluated={}, rows=2)
BATCH = {"x": torch.ones(2, 2)}


def build(mesh: mpcore.Mesh) -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


class Answers:
    """A pool that answers at once: by each call's number of ranks, its task and its layout."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, []

    def __call__(self, size: int, check: Any, task: Task, layout: Any, timeout: float) -> list[RankRecord]:
        self.calls.append((size, check, task, layout.name, timeout))
        found = self.answer(task, layout)
        if isinstance(found, Exception):
            raise found
        return [replace(copy.deepcopy(found), tp=rank if layout.tp > 1 else 0) for rank in range(size)]


def off(by: float) -> RankRecord:
    found = copy.deepcopy(TRUTH)
    found.gradients["w"][1] += by
    return found


def test_one_process_runs_in_float64_and_each_layout_once():
    pool, told = Answers(lambda task, layout: TRUTH), []
    options = {"loss": max, "seed": 7, "timeout": 3.0, "pool": pool, "report": told.append}
    verdicts = verify(build, BATCH, ["tp2", "tp3"], **options)  # type: ignore[arg-type]
    task = Task(build, BATCH, max, torch.float64, 7)
    assert [(size, *rest) for size, _, *rest in pool.calls] == [
        (size, task, name, 3.0) for size, name in ((1, "tp1"), (2, "tp2"), (3, "tp3"))
    ]
    assert told == verdicts
    assert [(v.layout, v.equal) for v in verdicts] == [("tp2", True), ("tp3", True)]


def test_below_float64_five_runs_measure_the_models_own_rounding():
    pool = Answers(lambda task, layout: off(task.nudge * 1e-7 if layout.tp == 1 else 0.7e-6))
    (verdict,) = verify(build, BATCH, ["tp2"], dtype=torch.float32, pool=pool)  # type: ignore[arg-type]
    assert [(task.dtype, task.nudge) for _, _, task, _, _ in pool.calls] == [
        (torch.float64, 0), *((torch.float32, i) for i in range(5)), (torch.float32, 0),
    ]  # fmt: skip
    assert verdict.equal, "twice the largest of the five, 4e-7"
    pool.answer = lambda task, layout: off(task.nudge * 1e-7 if layout.tp == 1 else 1.2e-6)
    (verdict,) = verify(build, BATCH, ["tp2"], dtype=torch.float32, pool=pool)  # type: ignore[arg-type]
    assert not verdict.equal
    assert verdict.worst["gradient"] == pytest.approx(1.2e-6 / 2 / 2.0**-23)


@pytest.mark.parametrize(("casts", "wide", "by", "equal"), [
    (1, 0.0, 1e-7, True), (1, 1e-7, 1e-7, False), (0, 0.0, 1e-7, False), (1, None, 1e-7, False),
    (1, 0.0, 3.7e-6, True), (1, 0.0, 3.9e-6, False),
])  # fmt: skip
def test_a_rounding_of_float32_is_tried_again_without_the_models_casts(casts, wide, by, equal):
    """In a value of 2, 2^33 units in the last place are 2^33 x 2^-52 x 2 = 3.8e-6."""

    def answer(task: Task, layout: Any) -> RankRecord | Exception:
        if task.wide and wide is None:
            return RankError("no kernel")
        here = layout.tp == 1
        return replace(off(0.0 if here else (wide if task.wide else by) or 0.0), casts=casts * task.wide)

    pool = Answers(answer)
    (verdict,) = verify(build, BATCH, ["tp2"], pool=pool, timeout=4.0)  # type: ignore[arg-type]
    assert verdict.equal is equal
    again = [(size, task.wide, name, timeout) for size, _, task, name, timeout in pool.calls[2:]]
    first, second = (1, True, "tp1", 4.0), (2, True, "tp2", 4.0)
    assert again == ([] if by > 3.8e-6 else [first, second] if casts and wide is not None else [first])
    for other in ({"dtype": torch.float32}, {"virtual": 4}):
        pool.calls.clear()
        verify(build, BATCH, ["tp2"], pool=pool, **other)  # type: ignore[arg-type]
        assert not any(task.wide for _, _, task, _, _ in pool.calls)


def test_a_layout_that_failed_is_told_and_the_others_run():
    error = RankError("--- rank 1 of 2\nTraceback\n  File\nValueError: too small")
    pool = Answers(lambda task, layout: error if layout.name == "tp2" else TRUTH)
    verdicts = verify(build, BATCH, ["tp2", "tp3"], pool=pool)  # type: ignore[arg-type]
    assert [(v.layout, v.error, v.equal) for v in verdicts] == [
        ("tp2", "ValueError: too small", False),
        ("tp3", "", True),
    ]


def ranks(*texts: str, of: int = 0) -> str:
    return "\n".join(f"--- rank {i} of {of or len(texts)}\n{text}" for i, text in enumerate(texts) if text)


TOLD = [
    (ranks("Trace\n  x\nValueError: a", "RuntimeError: b"), "ValueError: a"),
    (ranks("RuntimeError: b", "Trace\n  x\nValueError: a"), "ValueError: a"),
    (ranks("RuntimeError: b", "KeyError: c"), "KeyError: c"),
    (ranks("ValueError: a", "ValueError: b"), "ValueError: a"), (ranks(LATE, "RuntimeError: b"), "RuntimeError: b"),
    (ranks(DIED, DIED), DIED), (ranks("", f"{DIED} (SIGKILL)", "RuntimeError: closed"), f"rank 1: {DIED} (SIGKILL)"),
    (ranks("RuntimeError: closed", f"{DIED} (SIGSEGV)", f"{DIED} (SIGKILL)"), f"rank 1: {DIED} (SIGSEGV)"),
    (f"{DIED} (SIGKILL)", f"{DIED} (SIGKILL)"), (ranks(LATE), "not done in time: rank 0 in torch"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told"), TOLD)
def test_the_cause_is_a_rank_that_failed_and_none_that_waited_for_it(text, told):
    assert what_happened(text) == told


def test_a_config_is_made_small_with_the_kinds_of_its_layers(tmp_path):
    hf = pytest.importorskip("transformers")
    kinds = ["sliding_attention", "full_attention"] * 3
    sizes = {"vocab_size": 41, "hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 20}
    hf.Qwen2Config(**sizes, num_hidden_layers=6, layer_types=kinds).save_pretrained(tmp_path)
    config = HuggingFaceModel(str(tmp_path)).config()
    assert (config.num_hidden_layers, config.layer_types) == (4, kinds[:4])


def test_of_a_traceback_the_calls_in_files_of_the_user_are_shown():
    own = f'  File "{__file__}", line 3, in build\n    torch.ones(-1)\n    ~~~^^^\n'
    libraries = [f'  File "{module.__file__}", line 9, in inner\n    code\n' for module in (mpcore, torch, functools)]
    gone = '  File "/no/such/file.py", line 1, in f\n    x\n'
    text = f"--- rank 0 of 1\nTraceback\n{libraries[0]}{own}{libraries[1]}{gone}{libraries[2]}{own}ValueError: a\n"
    assert front._useful(text, 1.0) == f"ValueError: a\n{own}{own}".rstrip()
    without = f"--- rank 0 of 1\nTraceback\n{libraries[0]}ValueError: a\n"
    assert front._useful(without, 1.0) == f"ValueError: a\n{without}".rstrip()
