"""Count the parameters of a GPT, and the floating-point operations of training it on one token."""

from __future__ import annotations

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import GroupedLinear
from mpcore.sharding import owners


def count_parameters(config: GPTConfig) -> int:
    """Count the logical parameters of the whole model."""
    return sum(p.numel() for p in GPT(config, device="meta").parameters() if p.requires_grad)


def count_active_parameters(config: GPTConfig) -> int:
    """Count the logical parameters that one token uses: of the experts, only the `top_k` that the router chooses."""
    if config.moe is None:
        return count_parameters(config)
    held = owners(GPT(config, device="meta"))
    trained = [(p.numel(), module) for _, module, _, p in held if p.requires_grad]
    return round(sum(n * (m.used_share if isinstance(m, GroupedLinear) else 1) for n, m in trained))


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
