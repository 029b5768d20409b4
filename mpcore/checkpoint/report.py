"""Look into checkpoints: list the content, check for damage, compare two."""

from __future__ import annotations

import math
import os

import torch

from mpcore.checkpoint.folders import resolve
from mpcore.checkpoint.format import Manifest, read_manifest
from mpcore.checkpoint.tensor_file import Files


def inspect(path: str | os.PathLike[str]) -> Manifest:
    """Return a checkpoint's manifest. No tensor is read.

    Args:
        path: the checkpoint.

    Raises:
        ValueError: if there is no complete checkpoint at `path`.
    """
    return read_manifest(resolve(path))


def describe(path: str | os.PathLike[str], *, all_tensors: bool = False) -> str:
    """Return a description of a checkpoint's content, as text for people.

    Args:
        path: the checkpoint.
        all_tensors: whether to list each tensor of the optimizer. Default: one line for each kind of state.

    Raises:
        ValueError: if there is no complete checkpoint at `path`.
    """
    m = inspect(path)
    sizes = {name: sum(entry.size(chunk) for chunk in entry.chunks) for name, entry in m.tensors.items()}
    layout = " x ".join(f"{name} {size}" for name, size in m.mesh.items() if size > 1) or "one process"
    sample = f", next sample {m.sample}" if m.sample else ""  # 0: the training loop doesn't count samples
    lines = [
        f"{path}: step {m.step}{sample}, seed {m.seed}, written on {layout}",
        f"config {m.config}",
        f"extra {m.extra}",
        f"{len(m.files)} files, {sum(record.bytes for record in m.files.values()):,} bytes",
    ]
    for kind in ("model/", "optimizer/"):
        names = [name for name in m.tensors if name.startswith(kind)]
        lines.append(f"{kind[:-1]}: {len(names)} tensors, {sum(sizes[name] for name in names):,} bytes")
    slots: dict[str, list[str]] = {}
    width = max((len(name) for name in m.tensors if all_tensors or name.startswith("model/")), default=0)
    for name, entry in m.tensors.items():
        if name.startswith("optimizer/") and not all_tensors:
            slots.setdefault(name.split("/")[1], []).append(name)
            continue
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        lines.append(f"  {name:{width}}  {entry.dtype:5} {shape:>16}  chunks: {len(entry.chunks)}")
    for slot, names in slots.items():
        dtypes = ", ".join(sorted({m.tensors[name].dtype for name in names}))
        size = sum(sizes[name] for name in names)
        lines.append(f"  optimizer/{slot}: {len(names)} tensors of {dtypes}, {size:,} bytes (--all lists them)")
    return "\n".join(lines)


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte of a checkpoint and return a list of the damage.

    Args:
        path: the checkpoint.

    Returns:
        One line per damaged tensor or file, with the tensor's name, its key and the file. Empty: no damage.

    Raises:
        ValueError: if the manifest is missing or damaged.
    """
    folder = resolve(path)
    manifest = read_manifest(folder)
    chunks = [(name, entry, chunk) for name, entry in manifest.tensors.items() for chunk in entry.chunks]
    files = Files(folder, manifest)
    return files.problems(chunks) + files.problems_beside()


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], *, rtol: float = 0.0) -> list[str]:
    """Return a list of the differences between two checkpoints. Layouts may differ: the logical tensors are compared.

    Two full tensors are in memory at a time.

    Args:
        a, b: the paths of the checkpoints.
        rtol: ignore differences up to `rtol` times the largest magnitude in the tensor of `a`. 0: compare bit for bit.

    Returns:
        One line per difference. Empty: the checkpoints are equal. "2e-07 of the largest value" means that an `rtol`
        above 2e-07 ignores the difference.

    Raises:
        ValueError: if one of them is damaged or is no complete checkpoint.

    Example:
        >>> from tempfile import mkdtemp
        >>> from mpcore import Mesh
        >>> from mpcore.checkpoint import diff, save
        >>> folder, model = mkdtemp(), torch.nn.Linear(2, 2)
        >>> _ = save(f"{folder}/a", model, mesh=Mesh(), step=1)
        >>> _ = save(f"{folder}/b", model, mesh=Mesh(), step=1)
        >>> diff(f"{folder}/a", f"{folder}/b")
        []
    """
    for path in (a, b):
        for problem in verify(path):
            raise ValueError(problem)
    one, other = (Files(resolve(path), inspect(path)) for path in (a, b))
    lines = []
    for name in ("step", "sample", "seed", "config", "extra", "optimizer", "beside"):
        left, right = getattr(one.manifest, name), getattr(other.manifest, name)
        if left != right:
            lines.append(f"{name}: {left} and {right}")
    for name in one.manifest.tensors | other.manifest.tensors:
        left, right = one.manifest.tensors.get(name), other.manifest.tensors.get(name)
        if left is None or right is None:
            lines.append(f"{name}: only in {b if left is None else a}")
        elif (left.shape, left.dtype) != (right.shape, right.dtype):
            lines.append(f"{name}: {left.dtype} {left.shape} and {right.dtype} {right.shape}")
        else:
            x, y = one.assemble(name), other.assemble(name)
            bits = x.reshape(-1).view(torch.uint8) != y.reshape(-1).view(torch.uint8)
            if bits.any():
                count = int(bits.view(x.numel(), -1).any(1).sum())
                wide = torch.complex128 if x.is_complex() else torch.float64
                most, largest = float((x.to(wide) - y.to(wide)).abs().max()), float(x.to(wide).abs().max())
                if not (rtol and most <= rtol * largest):  # NaN differs
                    line = f"{name}: {count:,} of {x.numel():,} elements differ, by {most:.3g} at most"
                    is_finite = largest > 0 and math.isfinite(most / largest)
                    lines.append(f"{line}, {most / largest:.2g} of the largest value" if is_finite else line)
    return lines
