"""Check that a parallel model is still the same model: compare any model made with mpcore with itself on one process.

    mpcore verify package.module:build --layouts tp2,tp2sp,pp2,dp2zero3 --plot verify.png

The module `package.module` must have:

- `build(mesh)`, which returns the model. For pp it returns the stage of `mesh.pp.rank`. Each parameter has its name in
  the unsharded model, a tied parameter its first name. For sp, `build` needs an argument `sequence_parallel`.
- `batch`, called without arguments, which returns a dict with "x" and "target".
- If needed, `loss(output, target, mesh)` or `loss(output, target)`. It returns a sum, not a mean.

Each rank imports the module in a process of its own.

The model runs unsharded, on one process, in float64, then under each layout on local processes. These are compared: the
initial values, all tensors that the model returns ([B, ...]), the loss, every gradient and the gradient norm, the
parameters and persistent buffers after one step of SGD, and the output for the same batch in eval() after the step. The
result names the first tensor that differs and a likely cause. A buffer that each rank may fill differently needs
`persistent=False`.
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
from mpcore.tools.invariant import invariant_mesh
from mpcore.tools.verify.judge import OF_FLOAT32, Judge, Mismatch, Verdict
from mpcore.tools.verify.layout import Layout, parse_layout
from mpcore.tools.verify.pool import DIED, LATE, Pool, RankError, mesh
from mpcore.tools.verify.run import RankRecord, Task, run_step

SAMPLES = 5  # runs that measure the unsharded model's rounding error: in one run a small tensor's may be 0 by chance
SAME = "make all ranks call the same collectives, and make their process groups in the same order"

_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
_CALL = re.compile(r'^  File "(.+)", line \d+, in .+\n(?:    .*\n)*', re.MULTILINE)  # of a traceback

__all__ = ["Layout", "Mismatch", "Verdict", "parse_layout", "verify"]


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
    """Compare a model under each layout with the same model on one process.

    Args:
        build: `build(mesh)` or `build(mesh, sequence_parallel=...)`. It returns the model, or the stage of `mesh.pp`;
            any modules are allowed. It must be importable from other processes. A model on the meta device is
            materialized. The model returns tensors [B, ...], rows first. Tensors without rows are compared only if the
            layout splits neither batch nor sequence. Compiled functions run uncompiled.
        batch: "x": the model's input, [B, ...]. "target": the loss's second argument; if missing, x. Other tensors [B,
            ...] are passed to every stage by name, such as the `samples` that dropout needs. With cp, tensors [B, T,
            ...] with the same T as x are sharded along T as the `context` of the model's attention says.
        layouts: the layouts, such as "tp2sp", "pp2", "dp2zero3" or "cp2" (see `parse_layout`).
        loss: `loss(output, target, mesh)` or `loss(output, target)`. It returns the *sum* over its tokens. None: half
            the sum of squares, for outputs that every rank has in full.
        dtype: the dtype of the layouts' runs. For a dtype below float64 the tolerance is twice the unsharded model's
            own rounding error in that dtype: the largest of five runs whose parameters differ by half a rounding. If a
            float64 run differs only by float32 roundings because the model casts to float32, both runs are repeated
            without these casts.
        timeout: the seconds that one layout's run may take. After them the verdict says where each rank is.
        pool: the processes to use. None: start as many as needed, and end them afterwards.
        report: called with each verdict as soon as it is known. None: not called.
        virtual: the virtual degree for `invariant_mesh`. Each layout is then compared with one process that holds all
            virtual shards, in `dtype` (float32 or float64), and no bit may differ (docs/bitwise.md). 0: none.

    Returns:
        One verdict per layout. If the model refuses a layout, its verdict has the error.

    Raises:
        ValueError: if a layout's name is invalid, `timeout` is not above 0, the batch is no mapping of tensors with
            "x", `build` or `loss` is no function of a module, or one process can't run the model.
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
    alone = parse_layout("tp1")
    try:
        try:
            (truth,) = pool(1, _run, task, alone, timeout=timeout)
            task = replace(task, dtype=dtype)
            samples = range(SAMPLES if dtype != torch.float64 and not virtual else 0)
            rounded = [pool(1, _run, replace(task, nudge=i), alone, timeout=timeout)[0] for i in samples]
        except RankError as error:
            raise ValueError(f"one process can't run the model: {_useful(str(error), timeout)}") from None
        judge = Judge(truth, dtype, rounded, exact=virtual > 0)
        verdicts = []
        for plan in plans:
            try:
                verdict = judge(plan, pool(plan.size, _run, task, plan, timeout=timeout))
            except RankError as error:
                verdict = Verdict(plan.name, error=what_happened(str(error), timeout))
            if verdict.mismatch and verdict.mismatch.ulps < OF_FLOAT32 and dtype == torch.float64 and not virtual:
                verdict = _widened(pool, task, plan, timeout, verdict)
            verdicts.append(verdict)
            if report is not None:
                report(verdict)
        return verdicts
    finally:
        if ours:
            pool.stop()
            pool.folder.cleanup()


def _run(task: Task, layout: Layout) -> RankRecord:
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep}
    on = mesh(**sizes)
    on = invariant_mesh(on, task.virtual) if task.virtual else on
    if not task.wide:
        return run_step(task, on, layout)
    with Float64() as mode:
        seen = run_step(task, on, layout)
    return replace(seen, casts=mode.casts)


def _widened(pool: Pool, task: Task, layout: Layout, timeout: float, found: Verdict) -> Verdict:
    """Return the verdict of runs without the model's own casts to float32.

    Such a cast can turn a float64 rounding difference into a float32 one.
    """
    task = replace(task, wide=True)
    try:
        (truth,) = pool(1, _run, task, parse_layout("tp1"), timeout=timeout)
        return Judge(truth)(layout, pool(layout.size, _run, task, layout, timeout=timeout)) if truth.casts else found
    except RankError:  # such as a kernel that supports only float32
        return found


def _useful(text: str, timeout: float) -> str:
    """Return the cause in one line, and the calls of the user's own code, without those of libraries."""
    libraries = [Path(__file__).parents[2], Path(torch.__file__).parent, Path(functools.__file__).parent]
    calls = [(Path(call[1]), call[0]) for call in _CALL.finditer(text)]
    own = [said for file, said in calls if file.exists() and not any(file.is_relative_to(each) for each in libraries)]
    return "\n".join([what_happened(text, timeout), "".join(own) or text]).rstrip()


def what_happened(text: str, timeout: float = 0.0) -> str:
    """Return the cause of a failure in one line, from the message of a `RankError`."""
    errors = [line for line in text.splitlines() if line and not line.startswith((" ", "---"))]
    killed = [line for line in errors if line.startswith(f"{DIED} (")]  # the others only lost a connection
    if killed:
        rank = re.search(rf"^--- rank (\d+) of .*\n{re.escape(killed[0])}", text, re.MULTILINE)
        aborted = f". Gloo aborts if messages differ in size: {SAME}" if "SIGABRT" in killed[0] else ""
        return f"rank {rank[1]}: {killed[0]}{aborted}" if rank else killed[0]
    said = [line for line in errors if line not in (DIED, LATE)]  # the others wait for these ranks
    if said:
        return functools.reduce(lambda a, b: a if a.startswith("ValueError") else b, said)
    if LATE not in errors:
        return errors[-1]
    _, *late = re.split(r"^--- rank (\d+) of (\d+)\n", text, flags=re.MULTILINE)
    stand = "; ".join(f"rank {rank} in {_stands(stacks)}" for rank, stacks in zip(late[::3], late[2::3], strict=True))
    done = [str(rank) for rank in range(int(late[1])) if str(rank) not in late[::3]]
    stand += f"; rank {', '.join(done)} had finished" if done else ""
    told = f"not done after {timeout:g} seconds: {stand}" if timeout else f"not done in time: {stand}"
    return f"{told}. If no rank is slow, {SAME}" if len(late) > 3 else told


def _stands(stacks: str) -> str:
    """Return where a late rank is, from its stacks: the line in the model's own code, or else in mpcore."""
    stack = next((part for part in stacks.split("most recent call first") if " in _work\n" in part), stacks)
    calls = [(Path(file), f"{file}:{line}, {name}") for file, line, name in _FRAME.findall(stack)]
    verify, torchs = Path(__file__).parent, Path(torch.__file__).parent
    calls = [call for call in calls if not call[0].is_relative_to(torchs)]
    model = itertools.takewhile(lambda call: not call[0].is_relative_to(verify), calls)
    own = [call for call in model if not call[0].is_relative_to(verify.parents[1])]
    return next((where for _, where in own or calls), "torch")
