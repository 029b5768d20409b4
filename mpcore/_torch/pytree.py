"""Tensors in nested containers: tuples, lists, dicts and torch's other pytree nodes.

Checked with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def leaves(tree: Any) -> list[Any]:
    """Return everything in nested containers that is not a container itself, None included."""
    return tree_leaves(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same containers, with each tensor replaced by `function(tensor)`."""
    return tree_map_only(Tensor, function, tree)
