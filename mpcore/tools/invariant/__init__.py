"""Train with the same bits on every mesh: layers, sums and steps that don't depend on the layout (docs/bitwise.md).

`invariant_mesh` gives the axes of a mesh a virtual degree, `make_invariant` changes the layers of a model to forms that
compute each virtual shard separately, and `prepare` makes a run that sums gradients over the leaves of the batch.
"""

from mpcore.tools.invariant.layers import make_invariant
from mpcore.tools.invariant.pieces import on_tokens
from mpcore.tools.invariant.run import prepare
from mpcore.tools.invariant.sums import TreeSums, invariant_mesh

__all__ = ["TreeSums", "invariant_mesh", "make_invariant", "on_tokens", "prepare"]
