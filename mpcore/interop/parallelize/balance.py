"""The balance loss of transformers' mixtures of experts, over the tokens of all data ranks.

Source: Fedus et al. 2021, Switch Transformers (arXiv:2101.03961), equations 4 to 6, as transformers'
`load_balancing_loss_func` computes them: over the tokens of all layers together.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.mesh.axis import Axis


class BalanceLoss:
    """Forward hooks: make `aux_loss` this rank's share of the balance loss of all data ranks' tokens.

    The sum of the shares over `data` is the balance loss of the global batch, and so are their gradients. All ranks of
    `data` sum in each forward, or in none. Within `generate`, which reads no balance loss, they do nothing: ranks of
    `data` may generate alone.

    Args:
        data: the axis whose ranks have different tokens. None: unknown, and a balance loss is rejected.
        asked: `output_router_logits` of the config on all ranks of `data`.
    """

    def __init__(self, model: nn.Module, ep: Axis, data: Axis | None, asked: bool) -> None:
        self.ep = ep
        self.data = data
        self.asked = asked
        self.checked: bool = False
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self, with_kwargs=True)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError for a forward in which the other ranks of `data` may sum, and this one not, or reverse."""
        asked = _asks(model, args, kwargs)
        ranks = self.data.size if self.data is not None else 1
        if ranks > 1 and asked != self.asked and not vars(model).get("is_generating"):
            raise ValueError(
                f"output_router_logits is {asked} in this forward, and was {self.asked} in the config of all "
                f"{ranks} data ranks, which sum the balance loss together: set it in the config, on all of "
                f"them, before parallelize or by from_pretrained(.., output_router_logits={asked})"
            )

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        config: Any = getattr(model, "config", None)
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs)
        returns = getattr(out, "aux_loss", None) is not None
        if not returns and isinstance(out, tuple):
            returns = _asks(model, args, kwargs)
        if not returns or vars(model).get("is_generating"):
            return out
        if self.data is None:
            raise ValueError(
                f"aux_loss balances the experts for the tokens of one of {self.ep.size} ranks of ep, and the sum over "
                f"ranks is not the balance loss of all their tokens: pass data=mesh.data to parallelize, or set "
                f"output_router_logits=False"
            )
        if isinstance(out, tuple) or out.loss is not None:
            what = "return_dict=False returns" if isinstance(out, tuple) else "labels= adds to the loss"
            raise ValueError(
                f"{what} the balance loss of the tokens of one of {self.data.size} data ranks: leave it out, and add "
                f"aux_loss of the output to your loss"
            )
        top_k = getattr(model, "num_experts_per_tok", None) or config.get_text_config().num_experts_per_tok
        counts, sums, rows = _sums(out.router_logits, top_k, given.arguments.get("attention_mask"))
        experts = len(counts)
        if not self.checked:
            own = experts * (counts / rows * (sums / rows)).sum()
            if not torch.allclose(own, out.aux_loss.to(own.dtype), rtol=1e-3, equal_nan=True):
                raise ValueError(
                    f"{type(model).__name__} returns aux_loss {out.aux_loss.item():.6g}, and the balance loss of its "
                    f"router_logits is {own.item():.6g}, so {self.data.size} data ranks can't share it: set "
                    f"output_router_logits=False"
                )
            self.checked = True
        both = all_reduce(torch.cat([counts, rows[None]]), self.data)
        out.aux_loss = experts * (both[:-1] / both[-1] * (sums / both[-1])).sum()
        return out


def _asks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a forward is asked for the balance loss, by an argument or the config."""
    asked = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get("output_router_logits")
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False) if asked is None else asked)


def _sums(logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the choices of each expert [E], the sums of their probabilities [E], and the number of tokens []."""
    ones = torch.ones(len(logits[0]), device=logits[0].device)
    weights = ones if mask is None else mask.reshape(-1).to(torch.float32)
    counts = sums = torch.zeros(logits[0].shape[-1], device=weights.device)
    for each in logits:
        p = each.softmax(-1).to(weights.device)
        counts = counts.scatter_add(0, p.topk(top_k).indices.flatten(), weights.repeat_interleave(top_k))
        sums = sums + (p.float() * weights[:, None]).sum(0)
    return counts, sums, weights.sum() * len(logits)
