"""What the kernels compile to, for GPUs that are not there: registers, spills, shared memory and wide accesses.

`python tests/kernels/compile_table.py` writes `golden_compile.json`, which `test_compile.py` holds the kernels to, the
same as tables in `docs/records`, and what there is to call in `docs/kernels.md`. It compiles the cases whose source has
changed since, or with "all" every case. So a change of a kernel shows its cost in review.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import api_table
import machine_code
import torch
import traffic
import triton
import triton.language as tl
from fake_gpu import TARGETS, Launch, fake_gpu
from torch.overrides import TorchFunctionMode

from mpcore.kernels import _dispatch, use_kernels
from mpcore.kernels._rows import sum_partials

sys.path.insert(0, str(Path(__file__).parents[2]))  # of bench, for the command
from bench.cases import KERNELS
from bench.protocol import BOTH, as_tuple

GOLDEN = Path(__file__).with_name("golden_compile.json")
TABLE = api_table.PAGE.parent / "records" / "2026-11-28_compiled_kernels.md"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ROWS = 64  # the rows are counted at run time; any number compiles to the same code
DOCUMENTED_ROWS = 8192  # of the benches
ops = torch.ops.mpcore
empty = torch.empty
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"fp32": F32, "bf16": BF16, "fp16": F16}


class Undrawn(TorchFunctionMode):
    """Leave memory as it is in place of drawing numbers: nothing reads them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.randn, torch.rand):
            return torch.empty(*args, **{name: x for name, x in kwargs.items() if name != "generator"})
        return torch.zeros(args[1], dtype=torch.int64) if func is torch.randint else func(*args, **kwargs)


def launch(case: str, kernel: str, more: Callable[[], dict[str, Any]], without: str, sizes: dict[str, int]) -> None:
    """Run both passes of a row of `bench.cases` by Triton, of the dtype and the sizes in the name of the case."""
    written = {name: int(size) for name, size in re.findall(r"(\w)=(\d+)", case)}
    shape = {"M": ROWS, "B": 2, "T": ROWS // 2, "n": 4096, **sizes, **written}
    dtype = next(DTYPES[word] for word in case.split() if word in DTYPES)
    row = KERNELS[kernel]
    with Undrawn():
        inputs = {name: x for name, x in (row.inputs(shape, dtype, "cpu") | more()).items() if name != without}
    wanted = [x.requires_grad_() for x in row.differentiable(inputs)] if BOTH in row.passes else []
    with mock.patch.object(_dispatch, "INTERPRETING", True), use_kernels("triton"):
        outputs = as_tuple(row.ours(**inputs))
        if wanted:
            torch.autograd.grad(outputs, wanted, [torch.empty_like(y) for y in outputs])


def row(kernel: str, more: Callable[[], dict[str, Any]] = dict, without: str = "", **sizes: int) -> Any:
    """A row of `bench.cases` with these sizes: with `more` inputs or other ones, and `without` one of them."""
    return lambda case: functools.partial(launch, case, kernel, more, without, sizes)


def all_of_cross_entropy(softcap: float = 0.0) -> Any:
    """With sums of logits, the entropy, and gradients of log-probabilities and entropy too."""

    def run(case: str) -> None:
        size, dtype = re.findall(r"V=(\d+) (\w+)", case)[0]
        logits = torch.empty(ROWS, int(size), dtype=DTYPES[dtype])
        target, of_row = torch.zeros(ROWS, dtype=torch.int64), torch.empty(ROWS)
        stats = ops.cross_entropy_stats(logits, target, 0, -100, softcap, True, True)
        ops.cross_entropy_backward(logits, target, stats, *[of_row] * 3, 0, -100, 1.0, 0.0, 0.0, softcap)

    return lambda case: functools.partial(run, case)


def column_sum(case: str) -> Callable[[], None]:
    return lambda: sum_partials(empty(2, 264, 4096), empty(4096, dtype=BF16), empty(4096, dtype=BF16))


def moe_permute(case: str) -> Callable[[], None]:
    """Rows, permuting, and its inverse both ways; the gradient of permuting is the inverse without weights."""

    def run() -> None:
        D, K, E = map(int, re.findall(r"=(\d+)", case))
        x, weight = torch.empty(ROWS, D, dtype=DTYPES[case.split()[-1]]), torch.empty(ROWS, K)
        row, _ = ops.moe_rows(torch.zeros(ROWS, K, dtype=torch.int64), E)
        y = ops.moe_permute(x, row, ROWS * K)
        ops.moe_unpermute(y, row, weight)
        ops.moe_unpermute_backward(x, y, row, weight)

    return run


def adamw(without: str = "", **more: Any) -> Any:
    """With a scale of gradients; moments in half precision where a key and places round them at random."""

    def state() -> dict[str, Any]:
        half = {name: empty(4096, dtype=BF16) for name in ("exp_avg", "exp_avg_sq")}
        return {"scale": empty(())} | (half | {"place": (empty(64, dtype=torch.int64),) * 2, **more} if more else {})

    return row("adamw", state, without)


def gains(K: int, **tables: int) -> Callable[[], dict[str, Any]]:
    """Gains of the norms of queries and keys, and tables of partial rotation."""
    return lambda: (
        {"q_weight": empty(K), "k_weight": empty(K)} | {name: empty(ROWS // 2, half) for name, half in tables.items()}
    )


HEADS = {"T": 512, "H": 8, "Hkv": 2}
CASES: dict[str, Callable[[], None]] = {case: make(case) for case, make in {
    "column sum": column_sum, "rms_norm D=1000 bf16": row("rms_norm"), "rms_norm D=4096 bf16": row("rms_norm"),
    "rms_norm D=4096 bf16 residual": row("add_rms_norm"), "rms_norm D=5120 bf16": row("rms_norm"),
    "rms_norm D=8192 fp32 residual": row("add_rms_norm"), "rms_norm D=16384 bf16 residual": row("add_rms_norm"),
    "layer_norm D=1000 bf16": row("layer_norm"), "layer_norm D=4096 bf16": row("layer_norm"),
    "layer_norm D=5120 bf16 residual": row("layer_norm", lambda: {"residual": empty(ROWS, 5120, dtype=BF16)}),
    "layer_norm D=8192 fp32 residual": row("layer_norm", lambda: {"residual": empty(ROWS, 8192)}),
    "layer_norm D=12288 bf16 residual": row("layer_norm", lambda: {"residual": empty(ROWS, 12288, dtype=BF16)}),
    "swiglu F=14336 bf16": row("swiglu"), "swiglu F=1000 fp32": row("swiglu"), "geglu F=16384 bf16": row("geglu"),
    "exact geglu F=16384 bf16": row("geglu", lambda: {"approximate": "none"}),
    "relu_squared F=16384 bf16": row("relu_squared"), "cross_entropy V=128256 bf16": row("cross_entropy"),
    "cross_entropy V=128256 bf16 all options": all_of_cross_entropy(30.0),
    "cross_entropy V=50257 bf16": row("cross_entropy"), "cross_entropy V=50257 fp32 outputs": all_of_cross_entropy(),
    "cross_entropy V=16032 fp32": row("cross_entropy"), "adamw fp32": adamw("master"), "adamw bf16 master": adamw(),
    "adamw bf16 master bf16 moments": adamw(key=2**40 + 1),
    "adamw bf16 bf16 moments": adamw("master", key=2**40 + 1),
    "dropout_add D=4096 bf16 backward": row("dropout_add"),
    "dropout_add D=1000 fp32 from feature 2 forward": lambda case: lambda: ops.dropout_add(
        empty(2, 32, 1000), empty(2, 32, 1000), F32, torch.arange(2), None, 0.1, 7, 2, 1),
    "rope 32+8 heads of 128 bf16": row("rope", H=32, Hkv=8, K=128),
    "rope 32+8 heads of 128 bf16 interleaved": row("rope", lambda: {"interleaved": True}, H=32, Hkv=8, K=128),
    "rope 32+8 heads of 128 bf16 norm": row("rope", gains(128), H=32, Hkv=8, K=128),
    "rope 12+12 heads of 64 bf16 norm interleaved": row(
        "rope", lambda: gains(64)() | {"interleaved": True}, H=12, Hkv=12, K=64),
    "rope 25+1 heads of 80 fp32 partial 32 norm": row("rope", gains(80, cos=16, sin=16), H=25, Hkv=1, K=80),
    "attention K=64 bf16": row("attention", **HEADS), "attention K=80 fp16": row("attention", **HEADS),
    "attention K=128 bf16": row("attention", **HEADS),
    "attention K=128 bf16 bounds": row("attention", lambda: {"bounds": (empty(512, dtype=torch.int32),) * 2}, **HEADS),
    "attention K=128 bf16 softcap": row("attention", lambda: {"softcap": 30.0}, **HEADS),
    "attention K=256 bf16": row("attention", **HEADS), "attention K=32 bf16": row("attention", **HEADS),
    "attention K=192 V=128 bf16": row("attention", lambda: {"value": empty(2, 512, 2, 128, dtype=BF16)}, **HEADS),
    "attention K=64 fp32": row("attention", **HEADS), "moe_permute D=4096 K=8 E=64 bf16": moe_permute,
    "moe_permute D=2000 K=2 E=8 fp32": moe_permute, "top_k E=256 K=8 fp32": row("top_k"),
    "top_k E=60 K=4 bf16": row("top_k", without="bias"),
    "route D=2048 E=128 K=8 bf16": row("route"), "route D=2048 E=256 K=8 bf16": row("route"),
    "route D=2048 E=512 K=8 bf16": row("route"),
    "route D=1000 E=60 K=4 fp32": row("route", lambda: {"bias": empty(60), "score": "sigmoid"}),
    "attention_merge H=8 K=128 bf16": row("attention_merge"), "attention_merge H=5 K=80 fp32": row("attention_merge"),
}.items()}  # fmt: skip
# For what multiplies e4m3.
FP8_TARGETS = ("sm_90", "sm_100")
FP8_CASES: dict[str, Callable[[], None]] = {case: make(case) for case, make in {
    "quantize_fp8 K=4096 bf16": row("quantize_fp8"),
    "quantize_fp8 K=4096 bf16 both ways": row("quantize_fp8 both ways"),
    "quantize_fp8 K=4096 fp32 square both ways": row("quantize_fp8 both ways", lambda: {"square": True}),
}.items()}  # fmt: skip
# Scalar registers, which go to lanes of vector registers: at every tile that was tried.
SPILLS = {("gfx942", "attention K=128 bf16 softcap"): {"forward_kernel"}}
if triton.__version__.startswith("3.6."):  # 8 to 16 bytes a thread
    SPILLS |= {
        ("sm_80", "adamw bf16 master"): {"adamw_kernel"},
        ("sm_90", "adamw bf16 master"): {"adamw_kernel"},
        ("sm_100", "rms_norm D=16384 bf16 residual"): {"backward_kernel"},
        ("sm_80", "moe_permute D=2000 K=2 E=8 fp32"): {"scatter_kernel"},
        ("sm_90", "attention K=128 bf16"): {"backward_keys_kernel"},
        ("sm_100", "attention K=80 fp16"): {"backward_keys_kernel"},
        ("sm_100", "attention K=128 bf16"): {"backward_queries_kernel"},
        ("sm_100", "attention K=128 bf16 softcap"): {"backward_keys_kernel"},
    }

# The tiles that wgmma takes spill.
MMA_SYNC = {"attention K=256 bf16": {"backward_keys_kernel"}}
MMA_SYNC |= {f"route D=2048 E={E} K=8 bf16": {"choice_kernel"} for E in (256, 512)}  # 64 tokens would spill
IN_TURN = {"attention K=256 bf16": {"forward_kernel"}}
# Three stages don't fit into 163 KiB of shared memory.
TWO_STAGES = {("sm_80", f"{norm} D=8192 fp32 residual") for norm in ("rms_norm", "layer_norm")}
Facts = dict[str, Any]


def cases_of(target: str) -> dict[str, Callable[[], None]]:
    """The cases that are compiled for a target: where memory is small only those whose tiles depend on it."""
    if target in ("sm_89", "sm_120"):
        return {case: run for case, run in CASES.items() if case.startswith(("attention", "route"))}
    return CASES | (FP8_CASES if target in FP8_TARGETS else {})


def source_of(target: str, case: str) -> str:
    """Return a hash of all that Triton would compile for a case: code, types, constants and options.

    Nothing is compiled: the launch path ends where Triton asks its hook whether to compile. The same code gives the
    same machine code by the same Triton, wherever its file has it.
    """
    found = [target]

    def note(*, fn: Any, compile: dict[str, Any], **unused: Any) -> bool:
        constants = {str(place): _code_of(value) for place, value in compile["constants"].items()}
        options = {name: compile[name] for name in ("signature", "configs", "num_warps", "num_ctas", "num_stages")}
        found.append(f"{_code_of(fn.jit_function)} {constants} {options}")
        return True

    launched = fake_gpu(target, record=False, device=f"uncompiled {target}")
    with launched, mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note):
        cases_of(target)[case]()
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _code_of(value: Any) -> Any:
    """Return the code of a kernel and of the kernels that it calls, without docstrings; other values as they are."""
    if not isinstance(value, triton.JITFunction):
        return value
    function = ast.parse(value._src).body[0]
    if ast.get_docstring(function) is not None:
        del function.body[0]
    names = sorted({node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & value.__globals__.keys())
    used = [value.__globals__[name] for name in names]
    return [ast.dump(function), *(_code_of(x) for x in used if isinstance(x, (triton.JITFunction, tl.constexpr)))]


def compile_case(target: str, case: str) -> dict[str, Facts]:
    """Launch `case` on a fake `target`; returns what each of its kernels compiled to."""
    with fake_gpu(target) as launches:
        cases_of(target)[case]()
    shared = "_sum_partials_kernel" if case != "column sum" else None  # every backward ends in it; once is enough
    return {launch.name.strip("_"): facts(target, launch) for launch in launches if launch.name != shared}


def facts(target: str, launch: Launch) -> Facts:
    metadata = launch.kernel.metadata
    amd = target.startswith("gfx")
    found = _amd_facts(launch) if amd else _nvidia_facts(launch)
    known = {"warps": metadata.num_warps, **found, "shared": metadata.shared}
    if not amd:
        resources = known["registers"], metadata.num_warps, metadata.shared
        stages = re.findall(r"tt.num_stages = (\d+)", launch.kernel.asm["ttir"])
        known |= {"stages": max(map(int, stages), default=metadata.num_stages)}
        known |= machine_code.facts(target, launch.kernel.asm["cubin"], *resources)
    return known


def check(target: str, case: str, kernel: str, found: Facts) -> None:
    """Raise `AssertionError` where a kernel spills, or a loop waits for copies that it has only just begun.

    Bars: half an iteration of work between a copy and the wait for it. Instructions and special functions a byte are
    held to what `golden_compile.json` says; whether they bind depends on the caches, which code doesn't show.
    """
    spills = kernel in SPILLS.get((target, case), ())
    assert spills or not (found["spills"] or found["local"]), f"{target}, {case}: {kernel} spills"
    if target == "sm_90" and "matrix" in found and kernel not in MMA_SYNC.get(case, ()):
        assert found.get("wgmma") == found["matrix"], f"{case}: {kernel} multiplies by Ampere's instructions"
        side_by_side = found.get("overlap", 1) >= 0.4 or kernel in IN_TURN.get(case, ())
        assert side_by_side, f"{case}: {kernel} multiplies nothing beside its exponentials"
    for wait, depth in found["loops"] if (target, case) not in TWO_STAGES else ():
        assert depth >= 0.5, f"{target}, {case}: a loop of {kernel} overlaps {depth} iterations (wait {wait})"


def _nvidia_facts(launch: Launch) -> Facts:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(launch.kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    ptx = launch.kernel.asm["ptx"]
    access = {kind: [] for kind in ("ld", "st")}
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\b", ptx):
        access[kind].append(int(vector or 1) * int(bits) // 8)
    access["ld"] += [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared[^;]*\], (\w+)", ptx)]
    return {
        **_matrix(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", ptx),
        **({"wgmma": count} if (count := len(re.findall(r"\bwgmma\.mma_async\b", ptx))) else {}),
        "registers": int(registers),
        "spills": int(stack),  # spilled registers live on the stack, and nothing else of ours does
        "wide_loads": _wide(access["ld"]),
        "wide_stores": _wide(access["st"]),
    }


def _amd_facts(launch: Launch) -> Facts:
    code = launch.kernel.asm["amdgcn"]
    count = {name: int(n) for name, n in re.findall(r"\.([sv]gpr_(?:spill_)?count): +(\d+)", code)}
    width = {"byte": 1, "ubyte": 1, "ushort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    access = {kind: [] for kind in ("load", "store")}
    for kind, unit in re.findall(r"\b(?:global|buffer|flat)_(load|store)_(\w+?)(?:_d16\w*)?\b", code):
        access[kind].append(width[unit])
    return {
        **_matrix(r"\bv_mfma_", code),
        "registers": count["vgpr_count"],
        "spills": count["vgpr_spill_count"] + count["sgpr_spill_count"],
        "wide_loads": _wide(access["load"]),
        "wide_stores": _wide(access["store"]),
    }


def _matrix(name: str, code: str) -> Facts:
    """Matrix instructions, of kernels that multiply matrices."""
    count = len(re.findall(name, code))
    return {"matrix": count} if count else {}


def _wide(sizes: list[int]) -> str:
    return f"{sum(size >= 16 for size in sizes)}/{len(sizes)}"


def write(what: str = "changed") -> None:
    """Compile the cases whose source is another than the golden file's, or "all"."""
    known = json.loads(GOLDEN.read_text())
    sources = {target: {case: source_of(target, case) for case in cases_of(target)} for target in TARGETS}
    new = what == "all" or known["triton"] != triton.__version__
    document: dict[str, Any] = {"triton": triton.__version__, "sources": sources, "moved": all_moved(), "targets": {}}
    for target, cases in sources.items():
        document["targets"][target] = {
            case: compile_case(target, case)
            if new or known["sources"].get(target, {}).get(case) != source
            else known["targets"][target][case]
            for case, source in cases.items()
        }
    GOLDEN.write_text(json.dumps(document, indent=1) + "\n")
    written = TABLE.read_text()
    TABLE.write_text(table(document) + written[written.index("\n\n## Fused operations") :])
    api_table.PAGE.write_text(api_table.table())


def table(document: dict[str, Any]) -> str:
    """Return the golden facts as Markdown, one row a kernel and one column a target."""
    targets = document["targets"]
    lines = [
        "# Compiled kernels",
        "",
        "`python tests/kernels/compile_table.py` wrote this table; `tests/kernels/test_compile.py` compares it",
        f"with the kernels. Triton {document['triton']} compiled them without a GPU. Each cell: registers per",
        "thread / spilled registers, bytes of shared memory, 16-byte loads of all loads, 16-byte stores of all",
        "stores. Copies to shared memory count as loads. Kernels that multiply matrices also show their tensor",
        "core instructions (`mma`).",
        "",
        "| case | kernel | warps | " + " | ".join(targets) + " |",
        "|---" * (3 + len(targets)) + "|",
    ]
    for case in cases_of("sm_90"):
        for kernel, first in targets["sm_90"][case].items():
            cells = [_cell(targets[target].get(case, {}).get(kernel)) for target in targets]
            lines.append(f"| {case} | `{kernel}` | {first['warps']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_overlap(targets["sm_90"], document["moved"]), ""])


def all_moved() -> dict[str, dict[str, float]]:
    """Return the bytes over the floor of every memory-bound kernel, by case, at the documented number of rows."""
    with mock.patch.object(sys.modules[__name__], "ROWS", DOCUMENTED_ROWS):
        return {case: traffic.moved(run) for case, run in (CASES | FP8_CASES).items()}


def _overlap(cases: dict[str, dict[str, Facts]], moved: dict[str, dict[str, float]]) -> list[str]:
    """What the machine code for sm_90 says about speed, one row per kernel."""
    lines = [
        "",
        "## Machine code",
        "",
        "The same command wrote this table, from the SASS for sm_90 (`tests/kernels/machine_code.py`).",
        "",
        "- Bytes: what the operator's launches read and write, divided by the size of its inputs and outputs, at 8192",
        "  rows and on 132 multiprocessors (`tests/kernels/traffic.py`). Tests fail above 1.05. `-`: not memory-bound.",
        "- Stages, wait, depth: of loops that copy to shared memory. Wait: groups of copies that a wait leaves in",
        "  flight. Depth: iterations from a copy to its wait; tests fail below 0.5.",
        "- Programs: how many run on one multiprocessor at once. Flight: the most bytes of their loads in flight.",
        "- Wide: share of bytes that are loaded or stored 16 at a time.",
        "- Instr., special: instructions and special functions (exponentials, roots) per byte, in the longest loop; or",
        "  without a loop in the whole kernel.",
        "",
        "| case | kernel | bytes | stages | wait | depth | registers | shared | programs | flight | wide | instr."
        " | special |",
        "|---" * 13 + "|",
    ]
    for case, kernels in cases.items():
        for kernel, c in kernels.items():
            loops = c["loops"]
            depth = [str(c["stages"]), *(str(min(of)) for of in zip(*loops, strict=True))] if loops else ["-"] * 3
            cells = [c[k] for k in ("registers", "shared", "programs", "flight", "wide", "instructions", "special")]
            bytes_ = str(moved[case].get(kernel, "-"))
            lines.append(f"| {case} | `{kernel}` | " + " | ".join([bytes_, *depth, *map(str, cells)]) + " |")
    return lines


def _cell(c: Facts | None) -> str:
    if c is None:
        return "-"
    text = f"{c['registers']}/{c['spills']}, {c['shared']}, ld {c['wide_loads']}, st {c['wide_stores']}"
    return text + (f", mma {c['matrix']}" if "matrix" in c else "")


if __name__ == "__main__":
    sys.exit(write(*sys.argv[1:]))
