"""What the machine code (SASS) of a kernel says about its speed, read without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
MULTIPROCESSOR = {
    "sm_80": (167936, 65536, 2048), "sm_89": (102400, 65536, 1536), "sm_90": (233472, 65536, 2048),
    "sm_100": (233472, 65536, 2048), "sm_120": (102400, 65536, 1536),
}  # fmt: skip
"""Shared memory in bytes, registers and threads of one; each program also takes 1024 bytes of shared memory."""


class Loop(NamedTuple):
    """A loop that copies to shared memory."""

    length: int
    wait: int
    depth: float


class MachineCode(NamedTuple):
    """What `read` finds."""

    loops: list[Loop]
    local: int
    wide: float
    flight: int
    instructions: float
    special: float


class _Instruction(NamedTuple):
    address: int
    name: str
    text: str
    operands: str


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?));")


def disassemble(cubin: bytes) -> str:
    """The machine code of a compiled kernel as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout


def read(sass: str) -> MachineCode:
    """Measure what `disassemble` returned."""
    code, labels = _parse(sass)
    bodies = _innermost_loops(code, labels)
    copying = [body for body in bodies if any(i.name.startswith("LDGSTS") for i in body)]
    moving = max(bodies, key=lambda body: (_moved(body) > 0, len(body)), default=code)
    hot = moving if _moved(moving) else code
    bytes_ = max(_moved(hot), 1)
    moved, wide = _moved(code), sum(size for i in code if (size := _size(i)) >= 16)
    return MachineCode(
        [_measure(body) for body in copying], sum(i.name.startswith(("LDL", "STL")) for i in code),
        round(wide / max(moved, 1), 2), _most_in_flight(code, copying), round(len(hot) / bytes_, 2),
        round(sum(i.name.startswith("MUFU") for i in hot) / bytes_, 3),
    )  # fmt: skip


def undefined(sass: str) -> list[str]:
    """Return the instructions that compute with R1 though it holds the stack's address, which no kernel asks for."""
    return re.findall(r"(?:LOP3|SHF|FMUL|FADD|FFMA|SEL|FSEL|ISETP|FSETP|VIMNMX)\S* [^;\[]*, -?R1\b[^;]*", sass)


def overlap(sass: str) -> float | None:
    """Return the largest share of a loop's exponentials that Hopper computes while it multiplies; None: neither."""
    code, labels = _parse(sass)
    shares = []
    for body in _innermost_loops(code, labels):
        if not any(i.name.startswith("HGMMA") for i in body):
            continue
        inside, total, busy = 0, 0, False
        for i in body:
            if i.name.startswith("HGMMA"):
                busy = True
            elif i.name.startswith("WARPGROUP.DEPBAR"):
                busy = False
            elif i.name.startswith("MUFU.EX2"):
                inside, total = inside + busy, total + 1
        shares += [round(inside / total, 2)] if total else []
    return max(shares, default=None)


def programs_at_once(target: str, registers: int, warps: int, shared: int) -> int:
    """How many programs of a kernel a multiprocessor holds."""
    memory, file, threads = MULTIPROCESSOR[target]
    of_registers = file // (-(-registers // 8) * 8 * 32 * warps)
    return min(of_registers, memory // (shared + 1024), threads // (32 * warps), 32)


def _parse(sass: str) -> tuple[list[_Instruction], dict[str, int]]:
    code, labels, waiting = [], {}, []
    for line in sass.splitlines():
        if line.startswith(".L"):
            waiting.append(line.rstrip(":"))
        elif found := _LINE.search(line):
            address = int(found[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting = []
            code.append(_Instruction(address, found[3], found[2], found[4]))
    return code, labels


def _innermost_loops(code: list[_Instruction], labels: dict[str, int]) -> list[list[_Instruction]]:
    spans = []
    for i in code:
        target = re.search(r"`\((\.L\w+)\)", i.operands) if i.name.startswith("BRA") else None
        if target is not None and labels.get(target[1], i.address) < i.address:
            spans.append((labels[target[1]], i.address))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [[i for i in code if start <= i.address <= end] for start, end in inner]


def _size(i: _Instruction) -> int:
    """Bytes of global memory that a thread moves; 0 for other instructions."""
    if not i.name.startswith(("LDG.", "STG.", "LDGSTS")):
        return 0
    parts = i.name.split(".")
    named = [int(part) // 8 for part in parts if part in ("64", "128", "256")]
    return named[0] if named else 1 if {"U8", "S8"} & set(parts) else 2 if {"U16", "S16"} & set(parts) else 4


def _moved(code: list[_Instruction]) -> int:
    return sum(map(_size, code))


def _measure(body: list[_Instruction]) -> Loop:
    pending, distances, waits, position = [], [], [], 0
    first, iterations = None, 12
    for turn in range(iterations):
        for i in body:
            position += 1
            if i.name.startswith("LDGSTS") and first is None:
                first = position
            elif i.name == "LDGDEPBAR":
                pending.append(first or position)
                first = None
            elif i.name.startswith("DEPBAR") and "SB0" in i.operands:
                allowed = int(i.operands.split(",")[1].strip(), 0)
                done = pending[: max(len(pending) - allowed, 0)]
                pending = pending[len(done) :]
                if turn >= iterations // 2:
                    waits.append(allowed)
                    distances += [position - at for at in done]
    return Loop(len(body), min(waits, default=0), round(min(distances, default=0) / len(body), 2))


def _most_in_flight(code: list[_Instruction], copying: list[list[_Instruction]]) -> int:
    """Follow the code line by line: a load is in flight until an instruction reads the registers that it fills."""
    pending: dict[int, tuple[range, int]] = {}
    most = 0
    for i in code:
        loads = i.name.startswith("LDG.")
        named = [int(n) for n in re.findall(r"\bR(\d+)\b", i.operands)]
        read = named[1:] if loads else named
        for number, (filled, _) in list(pending.items()):
            if any(n in filled for n in read):
                for older in [n for n in pending if n <= number]:  # loads return in order, as far as waits can tell
                    del pending[older]
        if loads and named:
            pending[i.address] = (range(named[0], named[0] + max(_size(i) // 4, 1)), _size(i))
        most = max(most, sum(size for _, size in pending.values()))
    copied = 0
    for body in copying:
        loop = _measure(body)
        copied = max(copied, int(sum(_size(i) for i in body if i.name.startswith("LDGSTS")) * max(loop.depth, 1)))
    return most + copied


def facts(target: str, cubin: bytes, registers: int, warps: int, shared: int) -> dict[str, object]:
    """The facts of one kernel, as `golden_compile.json` holds them; `AssertionError` if it computes with garbage."""
    sass = disassemble(cubin)
    assert not undefined(sass), f"{target}: the assembler took an undefined register: {undefined(sass)[0]}"
    found, programs = read(sass), programs_at_once(target, registers, warps, shared)
    return {
        "loops": [[loop.wait, loop.depth] for loop in found.loops],
        "local": found.local,
        "programs": programs,
        "flight": found.flight * warps * 32 * programs,
        "wide": found.wide,
        "instructions": found.instructions,
        "special": found.special,
        **({} if (share := overlap(sass)) is None else {"overlap": share}),
    }
