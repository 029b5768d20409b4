"""The example's GPT on a GPU equals its run on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from examples.gpt.arguments import parse
from examples.gpt.train import Trainer
from mpcore import Mesh, simulate
from mpcore.tools.invariant import invariant_mesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COMMON = {
    **{"preset": "tiny", "layers": 2, "d-model": 64, "heads": 4, "seq-len": 64, "global-batch": 4, "micro-batch": 1},
    **{"steps": 3, "warmup": 1, "eval-every": 0},
}
LAYOUTS: dict[str, dict[str, int]] = {
    "": {}, "--tp 2": {"tp": 2}, "--tp 2 --sequence-parallel": {"tp": 2}, "--pp 2": {"pp": 2},
    "--pp 2 --schedule interleaved --virtual-stages 1": {"pp": 2}, "--cp 2": {"cp": 2},
    "--cp 2 --cp-kind ring": {"cp": 2}, "--cp 2 --cp-kind alltoall": {"cp": 2}, "--zero 0": {"dp": 2},
    "--zero 1": {"dp": 2}, "--zero 2": {"dp": 2}, "--zero 3": {"dp": 2},
    "--tp 2 --sequence-parallel --pp 2 --zero 1": {"tp": 2, "pp": 2, "dp": 2},
}  # fmt: skip
ALONE = (
    "--recompute full", "--recompute selective", "--offload optimizer", "--offload activations", "--offload parameters",
    "--offload optimizer activations parameters", "--compile", "--set", "document_masking=true",
)  # fmt: skip


def losses(mesh: Mesh, flags: tuple[str, ...], out: str) -> list[float]:
    """The loss before each of three steps: equal only if gradients and updates are."""
    common = [word for name, value in COMMON.items() for word in (f"--{name}", str(value))]
    args = parse([*common, "--set", "no_save=true", *flags, "--out", out])
    trainer = Trainer(args, invariant_mesh(mesh, args.bitwise) if args.bitwise else mesh)
    return [trainer.step()["loss"] for _ in range(3)]


def run(flags: str, out: Any, sizes: dict[str, int] | None = None, device: str = "cuda") -> list[float]:
    """The losses of the last rank."""
    return simulate(losses, tuple(flags.split()), str(out), mesh={"device_type": device}, **(sizes or {}))[-1]


@functools.cache
def on_cpu(flags: str, out: Any) -> list[float]:
    return run(flags, out, device="cpu")


def check_near(found: list[float], wanted: list[float], bound: float = 1e-4) -> None:
    assert found == pytest.approx(wanted, rel=bound)
    assert wanted[2] < wanted[0]  # it trains


@pytest.mark.parametrize("flags", LAYOUTS)
def test_a_layout_trains_as_one_process_of_the_cpu_does(flags, tmp_path):
    check_near(run(flags, tmp_path, sizes=LAYOUTS[flags]), on_cpu("", tmp_path))


@pytest.mark.parametrize("flags", ALONE)
def test_what_saves_memory_or_time_trains_as_the_cpu_does(flags, tmp_path):
    on_the_cpu = flags if flags == "--set document_masking=true" else ""
    check_near(run(flags, tmp_path), on_cpu(on_the_cpu, tmp_path))


@pytest.mark.parametrize("sizes", [{"ep": 2, "dp": 2}, {"tp": 2}], ids=str)
def test_a_mixture_of_experts_trains_as_on_the_cpu(sizes, tmp_path):
    flags = "--preset tiny-moe" + "".join(f" --{axis} {size}" for axis, size in sizes.items() if axis != "dp")
    check_near(run(flags, tmp_path, sizes), on_cpu("--preset tiny-moe", tmp_path))


@pytest.mark.parametrize("flags", ["--dtype bfloat16", "--dtype bfloat16 --set autocast=true", "--dtype float16"])
def test_sixteen_bits_train_near_the_cpus_float32(flags, tmp_path):
    check_near(run(flags, tmp_path), on_cpu("", tmp_path), 3e-3)


def test_fp8_trains_near_the_cpus_float32(tmp_path):
    check_near(
        run("--dtype bfloat16 --fp8 --d-model 128 --d-ff 256", tmp_path),
        on_cpu("--d-model 128 --d-ff 256", tmp_path),
        2e-2,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bitwise_runs_have_the_same_bits_on_every_layout(dtype, tmp_path):
    flags = f"--set bitwise=2 --dtype {dtype}"
    wanted = run(flags, tmp_path)
    for more, sizes in (("--tp 2", {"tp": 2}), ("--pp 2", {"pp": 2}), ("--zero 1", {"dp": 2}), ("--zero 3", {"dp": 2})):
        assert run(f"{flags} {more}", tmp_path, sizes) == wanted, more
