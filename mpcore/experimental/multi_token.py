"""Multi-token prediction: a chain of small blocks that predict the second, third, .. next token.

    h_k = block_k(M_k [norm(embedding(t_{i+k})), norm(h_{k-1})]),   logits of t_{i+k+1} = head(norm(h_k)),   k = 1 .. n

h_0 is the output of the model's last block, before the final norm. Embedding and head are those of the model. Depth k
keeps the causal chain: token i of h_k has seen the tokens up to i + k.

Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2, equations 21 to 25. The order in M_k is that of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mpcore.layers.linear import replicated_linear
from mpcore.layers.module import LayerOptions, ParallelLayer, TensorParallelOptions, check_names, select_options
from mpcore.layers.norm import RMSNorm


class MultiTokenPrediction(ParallelLayer):
    """The chain of n blocks that predicts n more tokens.

    The projections M_k [D, 2 D] and the norms are replicated over tp.

    Args:
        dim: D, the model width.
        blocks: n modules, called as `block(h, **block_arguments)`, such as `TransformerBlock`s. Build them with the
            axes of the model's own blocks.
        norm_eps: eps of the norms.
        options: `LayerOptions`: `tp`, `sequence_parallel`, `sequence_dim`, `init`, `device`, `dtype`.

    Example:
        >>> attention, mlp = mpcore.ParallelAttention(8, num_heads=2), mpcore.ParallelMLP(8, 16)
        >>> block = mpcore.TransformerBlock(attention, mlp, mpcore.RMSNorm(8), mpcore.RMSNorm(8))
        >>> tokens, embedding = torch.tensor([[1, 2, 3, 4]]), mpcore.VocabParallelEmbedding(5, 8)
        >>> chain = mpcore.experimental.MultiTokenPrediction(8, [block])
        >>> inputs, targets = mpcore.experimental.shift_tokens(tokens, 1)
        >>> [h.shape for h in chain(torch.randn(1, 4, 8), inputs, embedding)]
        [torch.Size([1, 4, 8])]
    """

    def __init__(
        self, dim: int, blocks: Iterable[nn.Module], *, norm_eps: float = 1e-6, **options: Unpack[LayerOptions]
    ) -> None:
        check_names(options, LayerOptions)
        super().__init__(**select_options(options, TensorParallelOptions))
        self.blocks: nn.ModuleList = nn.ModuleList(blocks)
        on: Any = {name: value for name, value in options.items() if name != "init"}
        norms = (nn.ModuleList(RMSNorm(dim, norm_eps, **on) for _ in self.blocks) for _ in range(3))
        self.embedding_norms, self.hidden_norms, self.norms = norms
        self.projections: nn.ModuleList = nn.ModuleList(
            replicated_linear(2 * dim, dim, False, **options) for _ in self.blocks
        )

    def forward(
        self, h: Tensor, inputs: Sequence[Tensor], embedding: Callable[[Tensor], Tensor], **block_arguments: Any
    ) -> list[Tensor]:
        """Return, for each depth, what the model's head reads in place of its last norm's output: n times [B, T/cp, D].

        Args:
            h: [B, T/cp, D], the output of the model's last block, before the final norm; this rank's shard with
                sequence parallelism.
            inputs: n tensors of token ids [B, T/cp], from `shift_tokens`; under cp sharded by `shard_sequence`.
            embedding: the model's own embedding; its gradient gets one more term for each depth.
            block_arguments: keyword arguments of each block, for example `cu_seqlens`.

        Raises:
            ValueError: if there are not as many inputs as blocks.
        """
        if len(inputs) != len(self.blocks):
            raise ValueError(f"{len(inputs)} inputs for {len(self.blocks)} blocks: give shift_tokens(.., depth)")
        outputs = []
        for depth, tokens in enumerate(inputs):
            h = self.advance(depth, h, tokens, embedding, **block_arguments)
            outputs.append(self.norms[depth](h))
        return outputs

    def advance(
        self, depth: int, h: Tensor, tokens: Tensor, embedding: Callable[[Tensor], Tensor], /, **block_arguments: Any
    ) -> Tensor:
        """Return the output of block `depth`, counted from 0, before its norm. The arguments are those of `forward`."""
        both = torch.cat([self.embedding_norms[depth](embedding(tokens)), self.hidden_norms[depth](h)], -1)
        return self.blocks[depth](self.projections[depth](both), **block_arguments)


class IndependentHeads(nn.Module):
    """Predict n more tokens by n blocks that all read the model's last block: h_k = norm_k(block_k(h_0)).

    Use it in place of `MultiTokenPrediction` where the predicted tokens must not depend on each other.

    Args:
        dim: D, the model width.
        blocks: n modules, called as `block(h, **block_arguments)`.
        norm_eps: eps of the norms.
        options: the options of `RMSNorm`: `tp`, `sequence_parallel`, `device`, `dtype`.

    Source: Gloeckle et al. 2024 (arXiv:2404.19737), section 2.

    Example:
        >>> attention, mlp = mpcore.ParallelAttention(8, num_heads=2), mpcore.ParallelMLP(8, 16)
        >>> block = mpcore.TransformerBlock(attention, mlp, mpcore.RMSNorm(8), mpcore.RMSNorm(8))
        >>> [h.shape for h in mpcore.experimental.IndependentHeads(8, [block])(torch.randn(1, 4, 8))]
        [torch.Size([1, 4, 8])]
    """

    def __init__(self, dim: int, blocks: Iterable[nn.Module], *, norm_eps: float = 1e-6, **options: Any) -> None:
        super().__init__()
        self.blocks: nn.ModuleList = nn.ModuleList(blocks)
        self.norms: nn.ModuleList = nn.ModuleList(RMSNorm(dim, norm_eps, **options) for _ in self.blocks)

    def forward(self, h: Tensor, **block_arguments: Any) -> list[Tensor]:
        """Return what the model's head reads for each further token: n times [B, T/cp, D].

        Args:
            h: [B, T/cp, D], the output of the model's last block, before the final norm; this rank's shard with
                sequence parallelism.
            block_arguments: keyword arguments of each block, for example `cu_seqlens`.
        """
        return [norm(block(h, **block_arguments)) for block, norm in zip(self.blocks, self.norms, strict=True)]


def shift_tokens(
    tokens: Tensor, depth: int, documents: Tensor | None = None, *, ignore_index: int = -100
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and the targets of depths 1 to n. Call this before `shard_sequence`.

    Args:
        tokens: [B, T], token ids of full sequences, the inputs of the model. The target of the model itself at token i
            is token i + 1.
        depth: n, the number of further tokens that are predicted.
        documents: [B, T], the document of each token, from `document_ids`; None: one document per row.
        ignore_index: the target where the predicted token lies beyond the end of the row or of the document.

    Returns:
        inputs: token i + k of each token i; the token itself where there is none, which no target reads.
        targets: token i + k + 1 of each token i, or `ignore_index`. Divide the loss of a depth by the same number of
            tokens as the main loss, and multiply it by lambda / n (lambda is 0.3, then 0.1 in DeepSeek-V3).

    Raises:
        ValueError: if depth is smaller than 1.

    Example:
        >>> inputs, targets = mpcore.experimental.shift_tokens(torch.tensor([[4, 5, 6, 7]]), 1)
        >>> inputs[0], targets[0]
        (tensor([[5, 6, 7, 7]]), tensor([[   6,    7, -100, -100]]))
    """
    if depth < 1:
        raise ValueError(f"depth {depth} is smaller than 1: it is the number of further tokens that are predicted")

    def later(k: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(tokens.shape[1], device=tokens.device) + k
        there, index = index < tokens.shape[1], index.clamp(max=tokens.shape[1] - 1)
        same = there if documents is None else there & (documents[:, index] == documents)
        return tokens[:, index], same.expand_as(tokens)

    shifted = [later(k) for k in range(1, depth + 2)]
    inputs = [torch.where(same, ids, tokens) for ids, same in shifted[:-1]]
    return inputs, [ids.masked_fill(~same, ignore_index) for ids, same in shifted[1:]]
