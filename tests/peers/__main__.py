"""The table of peers' properties on docs/proofs.md, from the tests here: python -m tests.peers --write.

A test that names its area in `AREAS` holds; the conventions are the rows of docs/megatron.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

from mpcore.command_line import Parser

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
MARKS = "<!-- peers -->", "<!-- /peers -->"
AREAS = {  # words in names of tests, and in what conventions say
    "collectives, loss, layout": ("mappings", "ranks_are_numbered", "a_vocabulary"),
    "learning rate, batch size": ("rate", "ramp", "warm_up", "warm-up", "skipped step"),
    "mixture of experts": ("router", "routing", "routed", "group", "balance_loss", "balance loss"),
    "optimizer, clipping, loss scale": ("decay", "clipping", "loss_scale", "averaged"),
    "layers, attention, labels": ("mask", "labels", "activations", "as_many_parameters", "layer(x)", "gelu"),
    "checkpoints, data": ("checkpoints", "blend"),
}
# Megatron-LM's tests/unit_tests: what mpcore does not have, why, and in which area.
NOT_IN_MPCORE = {
    "`a2a_overlap`, `1f1b_combined`": (
        "mixture of experts",
        "experts' all-to-alls are not overlapped with another micro-batch",
    ),
    "`inference`": ("layers, attention, labels", "mpcore trains; it has no inference server"),
    "`ssm`, `models/test_mamba_model.py`": ("layers, attention, labels", "mpcore has no state-space layer"),
    "`models/test_bert_model.py`, `models/test_t5_model.py`": (
        "layers, attention, labels",
        "use transformers' models with `parallelize`",
    ),
    "`tensor_parallel/test_random.py`": (
        "collectives, loss, layout",
        "random numbers have no state: each depends only on its seed and index",
    ),
    "`test_parallel_state.py`: setters of sizes, `order`": (
        "collectives, loss, layout",
        "mpcore has no global state, and one order of ranks",
    ),
    "`test_parallel_state.py`: encoders with a tp of their own": (
        "collectives, loss, layout",
        "all stages have the same tp",
    ),
    "`transformer/moe`: tokens dropped within a whole micro-batch": (
        "mixture of experts",
        "the capacity is per sequence, on every layout",
    ),
    "`fusions`, Transformer Engine, CUDA graphs of a layer": (
        "layers, attention, labels",
        "mpcore uses Triton kernels, and graphs of `torch.compile`",
    ),
    "`dist_checkpointing`: formats, strategies, metadata of torch's": (
        "checkpoints, data",
        "mpcore has one format, which stores logical tensors",
    ),
}


def properties() -> dict[str, list[str]]:
    """The tests of peers by area.

    Raises:
        ValueError: if a test has no area.
    """
    found: dict[str, list[str]] = {area: [] for area in AREAS}
    for path in sorted(HERE.glob("test_*.py")):
        if path.name == "test_table.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                area = next((area for area, words in AREAS.items() if any(w in node.name for w in words)), None)
                if area is None:
                    raise ValueError(f"{path.name}: {node.name} has no area: add a word of its name to AREAS")
                found[area].append(node.name)
    return found


def conventions() -> list[tuple[str, str]]:
    """Megatron's word and ours, from docs/megatron.md."""
    section = (DOCS / "megatron.md").read_text().partition("## Conventions")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [(row[0], row[1]) for row in rows[2:]]


def area_of(text: str) -> str:
    """The area of a convention.

    Raises:
        ValueError: if no area has a word of it.
    """
    found = [area for area, words in AREAS.items() if any(word in text for word in words)]
    if not found:
        raise ValueError(f"{text} has no area: add a word of it to AREAS")
    return found[-1]


def table() -> str:
    """The text between the marks."""
    lines = [
        "| area | properties that hold | that differ by convention | not in mpcore | tests that hold |",
        "|---|---|---|---|---|",
    ]
    differ = Counter(area_of(theirs) for theirs, _ in conventions())
    missing = Counter(area for area, _ in NOT_IN_MPCORE.values())
    for area, names in properties().items():
        told = ", ".join(f"`{name[5:]}`" for name in names)
        lines.append(f"| {area} | {len(names)} | {differ[area]} | {missing[area]} | {told} |")
    lines += ["", f"{len(conventions())} differ by convention, as listed on [the page on Megatron](megatron.md):", ""]
    lines += [f"- Megatron: {theirs}. Here: {ours}." for theirs, ours in conventions()]
    lines += ["", "Not in mpcore:", "", *(f"- {what}: {why}." for what, (_, why) in NOT_IN_MPCORE.items())]
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table."""
    return re.sub(f"({MARKS[0]}\n).*(\n{MARKS[1]})", lambda found: found[1] + table() + found[2], page, flags=re.DOTALL)


def main() -> int:
    """The command."""
    parser = Parser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/proofs.md")
    page = DOCS / "proofs.md"
    if parser.parse_args().write:
        page.write_text(written(page.read_text()))
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
