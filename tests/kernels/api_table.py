"""Make the table of functions in `docs/kernels.md`, from the docstrings and signatures of the kernels' modules."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

KERNELS = Path(__file__).parents[2] / "kernels"
PAGE = KERNELS.parent / "docs" / "kernels.md"
MODULES = sorted(
    {path.stem for path in KERNELS.glob("[a-z]*.py")} | {path.parent.name for path in KERNELS.glob("*/__init__.py")}
)
# The inputs that each has a gradient for.
GRADIENTS = {
    "adamw_foreach": "", "attention": "query key value", "attention_backward": "", "cross_entropy_stats": "",
    "cross_entropy_backward": "", "dropout_add": "x residual", "fp8_matmul": "", "geglu": "x",
    "grouped_linear": "x weight", "layer_norm": "x weight bias residual", "linear_cross_entropy": "x weight",
    "linear_cross_entropy_rows": "x weight", "linear_log_prob": "x weight", "moe_rows": "", "moe_permute": "x",
    "moe_unpermute": "y weight", "quantize_fp8": "", "relu_squared": "x", "rms_norm": "x weight residual",
    "rope": "q k q_weight k_weight", "rope_qkv": "qkv q_weight k_weight", "swiglu": "x", "attention_merge": "",
    "route": "x weight", "top_k": "",
}  # fmt: skip


def functions() -> Iterator[tuple[ModuleType, Callable]]:
    """All that can run by a kernel."""
    for name in MODULES:
        module = importlib.import_module(f"mpcore.kernels.{name}")
        for function in vars(module).values():
            own = inspect.isfunction(function) and f"{function.__module__}.".startswith(f"{module.__name__}.")
            if own and not function.__name__.startswith("_") and "impl" in options(function):
                yield module, function


def options(function: Callable) -> list[str]:
    """What a call may leave out, `**options: Unpack[...]` one by one."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        listed = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if listed:
            names += inspect.getmodule(function).__dict__[listed[1]].__annotations__
        elif parameter.default is not parameter.empty:
            names.append(parameter.name)
    return names


def table() -> str:
    """The page, as Markdown."""
    head, border, _ = PAGE.read_text().partition("|---|---|---|---|---|")  # written by hand, as far as the border
    lines, above = [head + border], None
    for module, function in functions():
        about = f"`{module.__name__.rpartition('.')[2]}`", inspect.getdoc(module).split("\n")[0]
        cells = [
            *(about if module is not above else ("", "")),
            f"`{function.__name__}`: {inspect.getdoc(function).split(chr(10))[0]}",
            ", ".join(f"`{name}`" for name in GRADIENTS[function.__name__].split()) or "-",
            ", ".join(f"`{name}`" for name in options(function) if name != "impl") or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        above = module
    return "\n".join(lines) + "\n"
