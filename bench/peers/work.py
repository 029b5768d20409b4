"""Count what one step does: calls of Python and C, operators of torch, messages, and the bytes that copies write."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mpcore._torch.dispatch import OpOverload, TorchDispatchMode
from mpcore.checkpoint import tensor_file

COPIES = {"copy_", "_to_copy", "clone", "cat", "_chunk_cat", "chunk_cat", "split_with_sizes_copy", "_foreach_copy_"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True)
class Work:
    """One step of one side on rank 0.

    Attributes:
        python, c: calls of functions written in Python, and of others.
        operators: of torch, views among them.
        products: the operators that are matrix products.
        messages: collectives that began.
        copies: operators that do nothing but copy.
        copied: MiB that these wrote.
        verified: MiB of a checkpoint whose checksum was computed.
        verified_ms: the processor time that took, in all threads.
    """

    python: int
    c: int
    operators: int
    products: int
    messages: int
    copies: int
    copied: float
    verified: float
    verified_ms: float

    def told(self) -> str:
        """In words."""
        text = f"{self.python:,} + {self.c:,} calls"
        if self.operators:
            text += f", {self.operators:,} operators"
        for count, what in ((self.products, "products"), (self.messages, "messages")):
            text += f", {count:,} {what}" if count else ""
        if self.copies:
            text += f", {self.copies:,} copies" + (f" of {self.copied:.1f} MiB" if self.copied >= 0.1 else "")
        return text + (f", checksums of {self.verified:.0f} MiB in {self.verified_ms:.1f} ms" if self.verified else "")


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.all = self.products = self.messages = self.copies = 0
        self.copied = 0.0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # such as DTensor, which calls operators on its shards
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.all += 1
        self.products += name in PRODUCTS
        self.messages += func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor"
        if name in COPIES and func.namespace in ("aten", "fsdp"):
            written = out if isinstance(out, Tensor) else (kwargs or {}).get("out", args[0])
            parts = [written] if isinstance(written, Tensor) else written
            self.copies += 1
            self.copied += sum(x.numel() * x.element_size() for x in parts) / 2**20
        return out


def count(step: Callable[[], object]) -> Work:
    """Run a step twice: once under cProfile, once counting operators and the bytes of checksums."""
    profile = cProfile.Profile()
    profile.runcall(step)
    calls: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    c = sum(entry[1] for place, entry in calls.items() if place[0] == "~")
    verified, found = list[tuple[int, float]](), tensor_file.checksum

    def checksum(data: memoryview) -> int:
        began = time.thread_time()
        value = found(data)
        verified.append((data.nbytes, time.thread_time() - began))
        return value

    with mock.patch.object(tensor_file, "checksum", checksum), _Operators() as seen:
        step()
    python = sum(entry[1] for entry in calls.values()) - c
    checked = sum(size for size, _ in verified) / 2**20, 1e3 * sum(seconds for _, seconds in verified)
    return Work(python, c, seen.all, seen.products, seen.messages, seen.copies, seen.copied, *checked)
