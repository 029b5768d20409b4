"""What `verify` asks of its ranks, and what it says of ranks that failed: on ranks that answer at once."""

from __future__ import annotations

import functools

import pytest
import torch

import mpcore
from mpcore.tools import verify as front
from mpcore.tools.verify import DIED, LATE, what_happened
from mpcore.tools.verify.hugging_face import HuggingFaceModel


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
