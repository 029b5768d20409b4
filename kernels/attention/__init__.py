"""Softmax attention of grouped query heads; the log-sum-exp of each row is a second, differentiable output.

    z = scale q k^T, or c tanh(scale q k^T / c) with a soft cap c, over the keys that a query sees
    lse = log sum e^z,  p = e^(z - lse),  output = p v

    delta = sum output doutput - dlse
    dz = p (doutput v^T - delta),  ds = dz, or dz (1 - (z / c)^2)
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T doutput           (dk and dv summed over the query heads of a group)

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the one pass; Dao, "FlashAttention-2"
(2023), section 3, for the blocks; Ainslie et al., "GQA" (2023), for groups; dlse in delta follows from dlse/dz = p.

Query i sees the keys low[i] <= j < high[i]; neither bound falls as i rises. Causal and full masks, windows, packed
documents, and a block of keys at an offset are all of this kind. Kernels skip blocks of keys that no query of a block
sees. A query that sees no key has output 0, lse -inf and gradient 0.

The backward pass reads (output, lse) and no other result of the forward pass. Merge several blocks of keys in float32
(m = logaddexp(lse1, lse2), o = e^(lse1 - m) o1 + e^(lse2 - m) o2): with the merged pair, the backward pass of each
block returns that block's terms of the whole gradient. Ring attention works this way.

Open `interface.py` first: the public functions and the autograd function. `bounds.py` turns every mask into bounds;
`reference.py` is attention in plain torch; `forward.py` and `backward.py` hold the operators, their launches and their
Triton kernels; `tiles.py` holds what these two share. The package stands on the private modules beside it.
"""

from .bounds import Bounds, check_documents, check_ends, key_bounds
from .interface import attention, attention_backward, attention_reference

__all__ = [
    "Bounds",
    "attention",
    "attention_backward",
    "attention_reference",
    "check_documents",
    "check_ends",
    "key_bounds",
]
