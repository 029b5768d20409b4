"""Count how much memory a rank of any layout takes, on fake tensors: nothing is allocated.

    python -m mpcore.analysis memory examples.gpt.plan:build --tp 8 --pp 4 --dp 32 --preset llama3-70b

Activations are the bytes that live between a micro-batch's forward and backward, times the micro-batches that the
schedule holds at once. Temporary tensors of one operator or one block's backward, and the allocator's loss, are extra.

Source of the formulas: Korthikanti et al. 2022, arXiv:2205.05198, section 4 and table 2.
"""

from __future__ import annotations

import sys

from mpcore.analysis.dry_run import Found, dry_run, parse, sizes_of, target

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def table(found: Found) -> str:
    """What a dry run counted, a line for each kind, in the largest unit of which the total has a tenth."""
    name = next((name for name, unit in UNITS.items() if found.total >= unit / 10), "KiB")
    unit = UNITS[name]
    rows = {
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "buffers": found.buffers,
        "activations": found.peak,
        "total": found.total,
    }
    lines = [f"{what:<12} {size / unit:>12.3f} {name}" for what, size in rows.items()]
    for i, stage in enumerate(found.stages):
        data = stage.gathered + stage.unsummed
        more = f", gathered over data {data / unit:.3f} {name}" if data else ""
        lines.append(f"stage {i}: {stage.activations / unit:.3f} {name} a micro-batch{more}")
    return "\n".join(lines)


def layer_activation_bytes(
    sequence: int,
    batch: int,
    width: int,
    heads: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes of activations of one layer of Korthikanti's GPT, in 16 bits, with dropout, its softmax kept.

    Args:
        sequence, batch, width, heads: s, b, h, a.
        tp: t.
        sequence_parallel: the layer is sequence parallel, and column-parallel linears keep their shard.
        recompute: "none"; "core", the paper's selective one, of the attention core alone; "full".

    Raises:
        ValueError: for another `recompute`, such as the library's "selective", which keeps more.
    """
    if recompute not in ("none", "core", "full"):
        raise ValueError(
            f"recompute {recompute!r} is none of 'none', 'core' and 'full', which the paper counts: a dry run "
            f"(mpcore.analysis.memory) counts the others"
        )
    sbh = sequence * batch * width
    core = 0.0 if recompute == "core" else 5 * heads * sequence / width
    if recompute == "full":
        return 2.0 * sbh
    if sequence_parallel:
        return sbh * (34 + core) / tp
    return sbh * (10 + 24 / tp + core / tp)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = parse("python -m mpcore.analysis memory", __doc__, argv)
    try:
        found = dry_run(target(args.target), args.arguments, args.rank, **sizes_of(args))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(table(found))
