"""Fused operators, each in plain torch and as a Triton kernel, on local tensors; they know of no ranks.

Import a function from its module: `from mpcore.kernels.rms_norm import rms_norm`. `impl=` of a call chooses the
implementation. Without it, a rule chooses (`_choice.py`), and `use_kernels` overrides them.

`rms_norm_reference` and its like are plain torch under torch's own autograd, and compute in float32, or in float64 for
float64 inputs. The first launch imports Triton.
"""

from ._choice import use_kernels

__all__ = ["use_kernels"]
