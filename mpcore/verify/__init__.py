"""Floor 4: is a parallel model still the same model? Any model made with mpcore, against itself on one process.

    mpcore verify package.module:build --layouts tp2,tp2sp,pp2,dp2zero3 --html verify.html

Beside `build(mesh)` the module has `batch()`, which returns a dict with "x" and "target", and if needed
`loss(output, target, mesh)` or `loss(output, target)`, a sum. Each rank imports that module anew. For pp `build(mesh)`
returns the stage of `mesh.pp.rank`, each parameter under its name in the whole model, a tied one under its first; for
sp `build` takes `sequence_parallel`.

The model runs dense in float64, then under each layout on local processes. Compared are the first values, all tensors
that the model returns ([B, ...]), the loss, every gradient and their norm, parameters and persistent buffers after one
step of SGD, and what the model returns of the same batch in eval() then. The first that departs is named, with what it
looks like. A buffer that rightly is each rank's own has `persistent=False`.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mpcore._torch.dispatch import Float64
from mpcore.verify.judge import OF_FLOAT32, Departure, Judge, Verdict
from mpcore.verify.layout import Layout, parse_layout
from mpcore.verify.pool import DIED, LATE, Pool, RankError, mesh
from mpcore.verify.run import Seen, Task, run_step

SAMPLES = 5  # of the dense model's rounding error: of one alone, that of a small tensor is at times near 0 by luck

_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')

__all__ = ["Departure", "Layout", "Verdict", "parse_layout", "verify"]


def verify(
    build: Callable[..., nn.Module],
    batch: Mapping[str, Tensor],
    layouts: Sequence[str],
    *,
    loss: Callable[..., Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    timeout: float = 120.0,
    pool: Pool | None = None,
    report: Callable[[Verdict], None] | None = None,
    virtual: int = 0,
) -> list[Verdict]:
    """Compare a model under each layout with itself on one process.

    Args:
        build: `build(mesh)` or `build(mesh, sequence_parallel=...)`: the model, or the stage of `mesh.pp`, with any
            modules; importable from other processes. A model on the meta device is materialized. It returns
            [B, ...], rows first; tensors without rows are compared if the layout doesn't cut the batch or the
            sequence. Compiled modules run without compilation.
        batch: "x", the model's input, [B, ...]; "target", what the loss takes (missing: x); other tensors [B, ...] are
            passed to every stage by name, such as the `samples` that dropout needs. With cp, tensors [B, T, ...] like x
            are sharded by the `context` of the model's attention.
        layouts: such as "tp2sp", "pp2", "dp2zero3" or "cp2": see `parse_layout`.
        loss: `loss(output, target, mesh)`, or without `mesh`: the *sum* over its tokens; None: half the sum of squares,
            for outputs that every rank holds whole.
        dtype: of the layouts' runs. Less than float64 is judged by the dense model's own rounding error in it, the
            largest of five runs whose parameters are half a rounding apart: twice that is allowed. Where float64
            differs by roundings of float32, and the dense model casts to it, both run again without these casts.
        seed: of the first values.
        timeout: seconds that a run under one layout may take; after them its verdict says where each rank stood.
        pool: the processes; None: start as many as are needed, and stop them at the end.
        report: called with each verdict as soon as it is there.
        virtual: the virtual degree of `build_mesh`: each layout is compared with one process that holds all virtual
            shards, in `dtype` (float32 or float64), and no bit may differ (docs/bitwise.md). 0: none.

    Returns:
        A verdict for each layout.

    Raises:
        ValueError: if a layout's name is invalid, timeout is not above 0, the batch is no mapping of tensors with "x",
            build or loss are none of a module's functions, or the dense model doesn't run.
    """
    if not timeout > 0:
        raise ValueError(f"timeout {timeout} must be seconds above 0")
    if not isinstance(batch, Mapping):
        raise ValueError(f'the batch is a {type(batch).__name__}, no dict such as {{"x": ..., "target": ...}}')
    if "x" not in batch:
        raise ValueError(f'the batch has {sorted(batch)}, but no "x", the model\'s input')
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} of the batch is a {type(value).__name__}, no tensor of [B, ...]")
    for what, function in (("build", build), ("loss", loss)):
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{what} can't be sent to other processes: make it a function of a module ({error})"
            ) from None
    if virtual and dtype not in (torch.float32, torch.float64):
        raise ValueError(f"virtual degree {virtual} with {dtype}: take float32 or float64")
    plans = [parse_layout(name) for name in layouts]
    most = max((plan.size for plan in plans), default=1)
    task = Task(build, batch, loss, dtype if virtual else torch.float64, seed, virtual=virtual)
    ours = pool is None
    pool = Pool(most) if pool is None else pool
    dense = parse_layout("tp1")
    try:
        try:
            (truth,) = pool(1, _run, task, dense, timeout=timeout)
            task = replace(task, dtype=dtype)
            samples = range(SAMPLES if dtype != torch.float64 and not virtual else 0)
            rounded = [pool(1, _run, replace(task, nudge=i), dense, timeout=timeout)[0] for i in samples]
        except RankError as error:
            raise ValueError(f"the dense model doesn't run:\n{error}") from None
        judge = Judge(truth, dtype, rounded, exact=virtual > 0)
        verdicts = []
        for plan in plans:
            try:
                verdict = judge(plan, pool(plan.size, _run, task, plan, timeout=timeout))
            except RankError as error:
                verdict = Verdict(plan.name, error=what_happened(str(error), timeout))
            if verdict.departure and verdict.departure.ulps < OF_FLOAT32 and dtype == torch.float64 and not virtual:
                verdict = _widened(pool, task, plan, timeout, verdict)
            verdicts.append(verdict)
            if report is not None:
                report(verdict)
        return verdicts
    finally:
        if ours:
            pool.stop()
            pool.folder.cleanup()


def _run(task: Task, layout: Layout) -> Seen:
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep}
    on = mesh(**sizes, **({"virtual": task.virtual} if task.virtual else {}))
    if not task.wide:
        return run_step(task, on, layout)
    with Float64() as mode:
        seen = run_step(task, on, layout)
    return replace(seen, casts=mode.casts)


def _widened(pool: Pool, task: Task, layout: Layout, timeout: float, found: Verdict) -> Verdict:
    """The verdict without the model's own casts to float32, which part equal numbers by a rounding of float32."""
    task = replace(task, wide=True)
    try:
        (truth,) = pool(1, _run, task, parse_layout("tp1"), timeout=timeout)
        return Judge(truth)(layout, pool(layout.size, _run, task, layout, timeout=timeout)) if truth.casts else found
    except RankError:  # such as a kernel that takes float32 alone
        return found


def what_happened(text: str, timeout: float = 0.0) -> str:
    """Return the cause in one line, of what the ranks that failed said; `timeout`: the seconds that they had, or 0."""
    errors = [line for line in text.splitlines() if line and not line.startswith((" ", "---"))]
    killed = [line for line in errors if line.startswith(f"{DIED} (")]  # whose peers say that a connection broke
    if killed:
        return killed[0]
    said = [line for line in errors if line not in (DIED, LATE)]  # of one rank, for which others wait
    if said:
        return functools.reduce(lambda a, b: a if a.startswith("ValueError") else b, said)
    if LATE not in errors:
        return errors[-1]
    _, *late = re.split(r"^--- rank (\d+) of .*\n", text, flags=re.MULTILINE)
    stand = "; ".join(f"rank {rank} in {_stands(stacks)}" for rank, stacks in zip(late[::2], late[1::2], strict=True))
    return f"not done after {timeout:g} seconds: {stand}" if timeout else f"not done in time: {stand}"


def _stands(stacks: str) -> str:
    """Where a late rank is, by its stacks: in the model's own code, else in ours."""
    stack = next((part for part in stacks.split("most recent call first") if " in _work\n" in part), stacks)
    calls = [(Path(file), f"{file}:{line}, {name}") for file, line, name in _FRAME.findall(stack)]
    verify, torchs = Path(__file__).parent, Path(torch.__file__).parent
    calls = [call for call in calls if not call[0].is_relative_to(torchs)]
    model = itertools.takewhile(lambda call: not call[0].is_relative_to(verify), calls)
    own = [call for call in model if not call[0].is_relative_to(verify.parent)]
    return next((where for _, where in own or calls), "torch")
