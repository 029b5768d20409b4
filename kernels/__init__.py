"""Fused operators, each in plain torch and as a Triton kernel, on local tensors; they know of no ranks.

Import a function from its module: `from mpcore.kernels.rms_norm import rms_norm`. `impl=` of a call chooses the
implementation. Without it, measurements and rules choose (`_choice.py`), and `use_kernels` overrides them.

It stands on torch alone; Triton is imported by the first launch.
"""

from ._choice import use_kernels

__all__ = ["use_kernels"]
