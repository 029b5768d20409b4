"""Optimizers that take the same step on every layout.

`AdamW` adds float32 master weights and bfloat16 moments to torch's AdamW. `AdamW` and `Muon` take the model, and read
from its declarations (`mpcore.sharding`) how each parameter is sharded. Optimizer state is sharded like the
parameters, so `mpcore.checkpoint` can load it on any layout.

Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as torch_adamw

from mpcore.gradients.accumulate import gradient_of
from mpcore.gradients.drop import drop_gradients
from mpcore.gradients.guard import ReadsMainGradients, guard_optimizer
from mpcore.kernels.adamw import AdamWState, adamw_foreach, adamw_now
from mpcore.optim.groups import check_model, decay_groups
from mpcore.random import stream_key
from mpcore.sharding.declarations import declarations
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import data_run, is_dtensor, lies_as, local_tensor

_HALF = (torch.bfloat16, torch.float16)


class AdamW(torch.optim.Optimizer, ReadsMainGradients):
    """AdamW with float32 master weights for half-precision parameters, and optional bfloat16 moments.

    With float32 (or float64) parameters and moments, a step is bitwise equal to `torch.optim.AdamW(fused=True)`, except
    under `mpcore.tools.invariant.prepare`. bfloat16 moments are rounded stochastically. The random bits depend only on
    (seed, the parameter's full name, its step, the element's logical index), so they are the same on every layout.

    Args:
        model: the model, or this rank's pipeline stage. Shard it over data first.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        groups: parameter groups; None: `decay_groups(model, weight_decay)`, which decays matrices only.
        state_dtype: dtype of the moments: bfloat16, or None for float32 (float64 for float64 parameters).
        masters: keep a float32 master weight of each bfloat16 or float16 parameter. float16 requires it; without it,
            bfloat16 parameters are rounded stochastically. If you write to a parameter, for example to load other
            weights, the next step updates its master weight from it.
        seed: seed of the stochastic rounding.

    Raises:
        ValueError: if an argument is out of range, or a float16 parameter has no master weight.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4, dtype=torch.bfloat16)
        >>> optimizer = mpcore.AdamW(model, lr=1e-3)  # holds float32 masters
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        groups: Iterable[dict[str, Any]] | None = None,
        state_dtype: torch.dtype | None = None,
        masters: bool = True,
        seed: int = 0,
    ) -> None:
        check_model(model)
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype {state_dtype} is neither float32 nor bfloat16")
        if min(*betas, eps, float(lr), weight_decay) < 0 or max(betas) >= 1:
            raise ValueError(f"lr {lr}, betas {betas}, eps {eps} or weight_decay {weight_decay} is out of range")
        self.model = model
        self.state_dtype = state_dtype
        self.masters = masters
        self.seed = seed
        self._whole_model, self.fused = groups is None, True
        groups = decay_groups(model, weight_decay) if groups is None else list(groups)
        # `fused` tells torch and the checkpoint that step counts are on the device of their parameters.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        self._places: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._declared: dict[Tensor, tuple[str, Sharding]] = {}
        super().__init__(groups, defaults)
        guard_optimizer(self, model)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch. If a parameter is not the model's, it raises and adds nothing."""
        super().add_param_group(param_group)
        if not all(p in self._declared for p in self.param_groups[-1]["params"]):
            self._declared = {p: (name, sharding) for name, p, sharding in declarations(self.model)}
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p not in self._declared:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} in the groups is none of the model's")
            if p.dtype == torch.float16 and not self.masters:
                raise ValueError(f"{self._declared[p][0]} is float16 and vanishes without a master: masters=True")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: Tensor | float | None = None) -> Any:  # type: ignore[override]
        """Update each parameter that has a gradient in `.grad` or `.main_grad`. Return the result of `closure`.

        Args:
            closure: as in torch's optimizers.
            scale: a float or scalar tensor that multiplies the gradients, to unscale or clip them in the same pass.
        """
        if scale is not None and not isinstance(scale, Tensor):
            device = next((p.device for group in self.param_groups for p in group["params"]), None)
            scale = torch.full((), scale, dtype=torch.float64, device=device)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group, scale)
        return loss

    def set_fused(self, fused: bool) -> None:
        """Choose the step of float32 parameters: torch's fused kernel, or one with the same bits on every layout."""
        self.fused: bool = fused

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model (`drop_gradients`), or of the parameters in `groups` if they were given."""
        mine = None if self._whole_model else [p for group in self.param_groups for p in group["params"]]
        drop_gradients(self.model, mine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as in torch, but keep the state's dtype, which torch would convert to the parameter's.

        Raises:
            ValueError: before anything changes, if a state's shape is not its parameter's, for example because it comes
                from another layout. Load such state with `mpcore.checkpoint`.
        """
        loaded = []
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):  # torch compares lengths
            for index, p in zip(saved["params"], group["params"], strict=False):
                of = state_dict["state"].get(index, {})
                loaded += [(p, slot, value) for slot, value in of.items() if isinstance(value, Tensor)]
        for p, slot, value in loaded:
            if value.dim() and not lies_as(value, p):
                raise ValueError(
                    f"the {slot} of {self._declared[p][0]} has shape {tuple(local_tensor(value).shape)}, the parameter "
                    f"{tuple(local_tensor(p).shape)} here: save and load of mpcore.checkpoint go to another layout"
                )
        super().load_state_dict(state_dict)
        for p, slot, value in loaded:
            self.state[p][slot] = value.to(p.device, copy=True)

    def _step(self, group: dict[str, Any], scale: Tensor | None) -> None:
        self._adamw(group, scale)

    def _adamw(self, group: dict[str, Any], scale: Tensor | None) -> None:
        plain: list[tuple[Tensor, ...]] = []
        others: list[tuple[nn.Parameter, Tensor, dict[str, Tensor]]] = []
        for p in group["params"]:
            grad = gradient_of(p)
            if grad is None:
                continue
            state = self._state(p, "exp_avg", "exp_avg_sq")
            if local_tensor(p).numel() == 0:
                state["step"] += 1  # this rank holds no element, but the ranks that do count the step
            elif self.fused and "master" not in state and p.dtype not in _HALF and state["exp_avg"].dtype == p.dtype:
                held = (p, grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
                plain.append(tuple(map(local_tensor, held)))
            else:
                state["step"] += 1
                others.append((p, grad, state))
        if plain:
            params, grads, exp_avgs, exp_avg_sqs, steps = (list(column) for column in zip(*plain, strict=True))
            if scale is not None:
                grads = [grad * scale.to(grad.dtype) for grad in grads]
            torch_adamw(
                params, grads, exp_avgs, exp_avg_sqs, [], steps, fused=True, amsgrad=False, maximize=False,
                beta1=group["betas"][0], beta2=group["betas"][1],
                lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            )  # fmt: skip
        if others:
            now = adamw_now(torch.stack([state["step"] for *_, state in others]), group["lr"], group["betas"])
            states = []
            for (p, grad, state), row in zip(others, now.unbind(), strict=True):
                master = local_tensor(state["master"]) if "master" in state else None
                rounded = {state["exp_avg"].dtype} | ({p.dtype} if master is None else set())
                random = self._random(p) if torch.bfloat16 in rounded else {}
                held, grad, m, v = map(local_tensor, (p.detach(), grad, state["exp_avg"], state["exp_avg_sq"]))
                states.append(AdamWState(held, grad, m, v, row, master, **random))
            adamw_foreach(states, scale=scale, **{name: group[name] for name in ("betas", "eps", "weight_decay")})

    def _random(self, p: nn.Parameter) -> dict[str, Any]:
        """Return the fields of `AdamWState` that the random bits depend on, except the step."""
        name, sharding = self._declared[p]
        if p not in self._places:
            self._places[p] = logical_indices(p, sharding)
        return {"key": stream_key(self.seed, name), "place": self._places[p]}

    def _state(self, p: nn.Parameter, *slots: str) -> dict[str, Tensor]:
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            if self.masters and p.dtype in _HALF and "master" not in state:
                state["master"] = p.detach().float()
            for slot in slots:
                state[slot] = torch.zeros_like(p, dtype=self.slot_dtype(p, slot))
        return state

    def slot_dtype(self, p: Tensor, slot: str) -> torch.dtype | None:
        """Return the dtype of a parameter's momentum or moments. None: another part of the state."""
        if slot not in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            return None
        return (slot != "momentum_buffer" and self.state_dtype) or torch.promote_types(p.dtype, torch.float32)


def logical_indices(p: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor]:
    """Return int64 rows [R] and columns [C]: local element i has the logical index rows[i // C] + columns[i % C]."""
    dims = [torch.arange(size, device=p.device) for size in sharding.shape]
    for shard in sharding.shards:
        dims[shard.dim] = torch.cat([dims[shard.dim][start:end] for start, end in shard.mine or ((0, 0),)])
    if is_dtensor(p):
        start, end = data_run(p)
        dims[0] = dims[0][start:end]
    *outer, columns = dims or [torch.zeros(1, dtype=torch.int64, device=p.device)]
    rows, stride = torch.zeros(1, dtype=torch.int64, device=p.device), math.prod(sharding.shape)
    for index, size in zip(outer, sharding.shape, strict=False):
        stride //= max(size, 1)
        rows = (rows[:, None] + index * stride).flatten()
    return rows, columns
