"""The exponential, and the tanh of a soft cap with its slope, as kernels compute them.

Triton's own `exp` keeps results below 2^-126, which takes three instructions more. `exp2` flushes them to 0.
"""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def exp(v):
    """Return e^v."""
    return tl.exp2(v * 1.4426950408889634)


@triton.jit
def tanh_and_slope(v):
    """Return tanh and its slope: near 0 by a polynomial, beyond by an exponential, neither where it cancels."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(v))
    half = 1.0 / (1.0 + e)
    large = (1.0 - e) * half
    square = v * v
    series = square * -0.0062763877 + 0.0211162132
    series = series * square - 0.0538751371
    series = series * square + 0.1333292424
    series = series * square - 0.3333333135
    small = v + v * (square * series)
    near = square < 0.36
    tanh = tl.where(near, small, tl.where(v < 0.0, -large, large))
    return tanh, tl.where(near, 1.0 - small * small, 4.0 * e * half * half)
