"""Count the parameters of a GPT, and the floating-point operations of training it on one token."""

from __future__ import annotations

from functools import lru_cache

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import GroupedLinear
from mpcore.sharding import owners


@lru_cache(maxsize=16)
def parameter_shares(config: GPTConfig) -> tuple[int, int, int, float]:
    """Count the logical parameters of the blocks without their experts, of the experts, and of all else; and the share
    of the experts that a token uses."""
    model, shares = GPT(config, device="meta"), {1.0}
    counts = dict.fromkeys(("blocks", "experts", "ends"), 0)
    for name, module, _, p in owners(model):
        if isinstance(module, GroupedLinear):
            shares.add(module.used_share)
        kind = "experts" if isinstance(module, GroupedLinear) else "blocks" if name.startswith("blocks.") else "ends"
        counts[kind] += p.numel() if p.requires_grad else 0
    return counts["blocks"], counts["experts"], counts["ends"], min(shares)


def count_parameters(config: GPTConfig) -> int:
    """Count the logical parameters of the whole model."""
    return sum(parameter_shares(config)[:3])


def count_active_parameters(config: GPTConfig) -> int:
    """Count the logical parameters that one token uses: of the experts, only the `top_k` that the router chooses."""
    blocks, experts, ends, used = parameter_shares(config)
    return round(blocks + experts * used + ends)


def flops_of_token(config: GPTConfig) -> int:
    """Count the FLOPs of one token's forward and backward: 6 for each parameter of a matrix product, and attention's.

    Embedding tables take part in no product, except a tied table, which is the head too. Attention counts all tokens of
    the window or the sequence. By convention this includes tokens that the causal mask hides.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    c = config
    looked_up = (0 if c.tie_embeddings else c.vocab_size) + (c.seq_len if c.positions == "learned" else 0)
    if c.latent is None:
        widths = 2 * c.head_width  # of a head's scores and values
    else:
        widths = c.latent.qk_nope_head_dim + c.latent.qk_rope_head_dim + c.latent.v_head_dim
    seen = min(c.window or c.seq_len, c.seq_len)
    return 6 * (count_active_parameters(c) - looked_up * c.d_model + c.layers * c.heads * widths * seen)
