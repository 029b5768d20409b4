"""What papers say that a step sends and a layer keeps: formulas that counts are compared with."""

from __future__ import annotations


def zero_bytes(size: int, zero: int, micro_batches: int = 1) -> dict[str, int]:
    """Bytes of each kind over the data axis in a step. With one micro-batch the volume is 2 psi, for ZeRO 3 3 psi.

    Args:
        size: psi, the bytes of all parameters that are sharded together, padding included.
        zero: the stage. 2 and 3 reduce the gradients of each micro-batch, 3 gathers parameters twice for each.
        micro_batches: how many a step has.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, sections 7.1 and 7.2.
    """
    if zero not in range(4):
        raise ValueError(f"ZeRO stage {zero} is none of 0, 1, 2, 3")
    m = micro_batches
    gathered, scattered = ((0, 0), (1, 1), (1, m), (2 * m, m))[zero]
    each = {"all_reduce": 0 if zero else size, "all_gather": gathered * size, "reduce_scatter": scattered * size}
    return {kind: total for kind, total in each.items() if total}


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

    Source: Korthikanti et al. 2022, arXiv:2205.05198, equations 1, 2, 4 and 6, and table 2.
    """
    if recompute not in ("none", "core", "full"):
        raise ValueError(
            f"recompute {recompute!r} is none of 'none', 'core' and 'full', which the paper counts: a dry run "
            f"(mpcore.tools.analysis.memory) counts the others"
        )
    sbh = sequence * batch * width
    core = 0.0 if recompute == "core" else 5 * heads * sequence / width
    if recompute == "full":
        return 2.0 * sbh
    if sequence_parallel:
        return sbh * (34 + core) / tp
    return sbh * (10 + 24 / tp + core / tp)
