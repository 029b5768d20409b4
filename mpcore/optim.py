"""Floor 4: optimizers whose step no layout changes, groups for weight decay, learning rates as functions of the step.

`AdamW` is torch's where that suffices, and adds float32 masters and bfloat16 moments. `Muon` orthogonalises whole
logical matrices, however they are cut. Both take the model, and read from its declarations (`mpcore.sharding`) where
each local tensor lies. Their state lies as the parameters do, so `mpcore.checkpoint` moves it to any layout.

Sources: Loshchilov and Hutter 2019 (arXiv:1711.05101); Jordan et al. 2024, "Muon: an optimizer for hidden layers in
neural networks"; Liu et al. 2025, "Muon is scalable for LLM training" (arXiv:2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim.adamw import adamw as torch_adamw

from mpcore.collectives import all_reduce, start_all_gather, wait
from mpcore.gradients import drop_gradients, gradient_of
from mpcore.kernels.adamw import adamw, adamw_now
from mpcore.layers.embedding import ColumnParallelEmbedding, PositionEmbedding, VocabParallelEmbedding
from mpcore.mesh import Axis, Mesh, check_mesh
from mpcore.random import stream_key
from mpcore.sharding import Sharding, data_run, declarations, full_tensor, is_dtensor, lies_as, local_tensor

_HALF = (torch.bfloat16, torch.float16)


def decay_groups(
    model: nn.Module, weight_decay: float, exclude: Iterable[nn.Parameter | nn.Module] = ()
) -> list[dict[str, Any]]:
    """Two parameter groups for any optimizer: matrices decay, vectors (biases, gains of norms) and scalars don't.

    Both are there even if empty, so that all pipeline stages have the same groups.

    Args:
        model: the model, or this rank's stage of it; sharded over data before. Frozen parameters are in neither group:
            thaw them before, or give them to `add_param_group` when they are.
        weight_decay: of the matrices.
        exclude: parameters, or modules with all of theirs, that belong to other groups.

    Raises:
        TypeError: if something else is excluded, such as a name.
    """
    left = _excluded(exclude)
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in left]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"it takes the model, which says where its parameters lie, not {type(model).__name__}")


def _excluded(exclude: Iterable[nn.Parameter | nn.Module]) -> set[int]:
    found = set()
    for each in exclude:
        if not isinstance(each, Tensor | nn.Module):
            raise TypeError(f"exclude holds {each!r}, neither a parameter nor a module: model.get_submodule finds it")
        found |= {id(p) for p in (each.parameters() if isinstance(each, nn.Module) else (each,))}
    return found


class AdamW(torch.optim.Optimizer):
    """AdamW with float32 masters of half-precision parameters and, by choice, bfloat16 moments.

    Where parameters and moments are float32 (or float64), a step is bitwise that of `torch.optim.AdamW(fused=True)`.
    Otherwise `mpcore.kernels.adamw` does it: bfloat16 moments are rounded at random, by bits that depend on (seed, the
    parameter's full name, its step, the element's logical index), so they are the same on every layout.

    Args:
        model: the model, or this rank's stage of it; sharded over data before.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        groups: parameter groups; None: `decay_groups(model, weight_decay)`.
        state_dtype: of the moments; None: float32 (float64 for float64 parameters), or bfloat16.
        masters: keep a float32 master of each bfloat16 or float16 parameter. Without, bfloat16 parameters are rounded
            at random too; float16 ones need it.
        seed: of the rounding.

    Raises:
        ValueError: for another state_dtype, or a float16 parameter without a master.
    """

    reads_main_gradients = True

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
        _check_model(model)
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype {state_dtype} is neither float32 nor bfloat16")
        if min(*betas, eps, float(lr), weight_decay) < 0 or max(betas) >= 1:
            raise ValueError(f"lr {lr}, betas {betas}, eps {eps} or weight_decay {weight_decay} is out of range")
        self.model, self.state_dtype, self.masters, self.seed = model, state_dtype, masters, seed
        self._whole_model = groups is None
        groups = decay_groups(model, weight_decay) if groups is None else list(groups)
        # `fused` says, to torch and to the checkpoint, that step counts live beside their parameters.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        self._places: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._declared: dict[Tensor, tuple[str, Sharding]] = {}
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, of parameters that the model has by now, such as a layer that is thawed.

        Raises:
            ValueError: if one is none of the model's, or float16 without a master; nothing is added then.
        """
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
        """One step of every parameter that has a gradient, in `.grad` or in `.main_grad`.

        Args:
            closure: as of torch's optimizers.
            scale: a number that gradients are multiplied by, to unscale and clip without another pass: a scalar on the
                device, for which nobody waits, or a float.
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, main ones and those that data parallelism hasn't summed yet included.

        Those of all of the model's parameters, also of what was frozen when the optimizer was made; with `groups` of
        what is in them. They are None afterwards, whatever `set_to_none` says.
        """
        mine = None if self._whole_model else [p for group in self.param_groups for p in group["params"]]
        drop_gradients(self.model, mine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its dtype, which torch would change to the parameter's.

        Raises:
            ValueError: with nothing changed, if a state doesn't lie as its parameter: another layout's, which
                `mpcore.checkpoint` moves.
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
                state["step"] += 1  # as on the ranks that hold some of it
            elif "master" not in state and p.dtype not in _HALF and state["exp_avg"].dtype == p.dtype:
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
            options = {name: group[name] for name in ("betas", "eps", "weight_decay")}
            for (p, grad, state), row in zip(others, now.unbind(), strict=True):
                master = local_tensor(state["master"]) if "master" in state else None
                rounded = {state["exp_avg"].dtype} | ({p.dtype} if master is None else set())
                random = self._random(p) if torch.bfloat16 in rounded else {}
                held, grad, m, v = map(local_tensor, (p.detach(), grad, state["exp_avg"], state["exp_avg_sq"]))
                adamw(held, grad, m, v, row, master=master, scale=scale, **random, **options)

    def _random(self, p: nn.Parameter) -> dict[str, Any]:
        """What the random bits of a parameter's elements depend on, besides the step."""
        name, sharding = self._declared[p]
        if p not in self._places:
            self._places[p] = logical_indices(p, sharding)
        return {"key": stream_key(self.seed, name), "place": self._places[p]}

    def _state(self, p: nn.Parameter, *slots: str) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            wide = torch.promote_types(p.dtype, torch.float32)
            if self.masters and p.dtype in _HALF:
                state["master"] = p.detach().to(wide)
            for slot in slots:
                moments = slot == "momentum_buffer" or self.state_dtype is None
                state[slot] = torch.zeros_like(p, dtype=wide if moments else self.state_dtype)
        return state


class Muon(AdamW):
    """Muon for the matrices of hidden layers, AdamW for all else; on any layout the step of the unsharded model.

    Newton-Schulz needs the whole matrix: its momentum is gathered over the axes that it is declared to be cut over, and
    over data where `fully_shard` cut it. Where several ranks then hold the same, each orthogonalises another matrix and
    they exchange the results. What is one parameter but several matrices is done matrix by matrix: the blocks that a
    layer declares (Q, K and V; gate and up), the last two dimensions of more than two.

    Embeddings, convolutions, vectors and what `exclude` names are AdamW's: the head should be named there, and tables
    that are bare parameters, such as a class token or positions.

    Args:
        model: the model, or this rank's stage of it; sharded over data before.
        lr, weight_decay: of both kinds; with `adjust_lr_fn="match_rms_adamw"` those that suit AdamW suit Muon.
        mesh: the mesh the model lies on; the work is shared over its tp and data axes.
        exclude: modules whose parameters are AdamW's, or parameters.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as of `torch.optim.Muon`, but the last is
            `"match_rms_adamw"` (Liu et al. 2025, section 2.2) unless it is said to be `"original"`.
        ns_dtype: in which Newton-Schulz computes; None: float32 (float64 for float64), where layouts agree to rounding.
            bfloat16 is fast on a GPU and, as Jordan et al. found, enough; but it turns a last bit into a third digit.
        betas, eps, state_dtype, masters, seed: as of `AdamW`; state_dtype is not of the momentum, which is float32.

    Raises:
        ValueError: as `AdamW`, or for an unknown adjust_lr_fn.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        mesh: Mesh = Mesh(),
        exclude: Iterable[nn.Parameter | nn.Module] = (),
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **others: Any,
    ) -> None:
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn {adjust_lr_fn!r} is neither 'match_rms_adamw' nor 'original'")
        check_mesh(mesh)
        _check_model(model)
        no_matrices = (nn.Embedding, VocabParallelEmbedding, ColumnParallelEmbedding, PositionEmbedding, _ConvNd)
        named = _excluded([*(m for m in model.modules() if isinstance(m, no_matrices)), *exclude])
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1 and id(p) not in named]
        options = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients}
        options |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        groups = [
            {"params": matrices, "weight_decay": weight_decay, "muon": True, **options},
            *({**group, "muon": False} for group in decay_groups(model, weight_decay, matrices)),
        ]
        self.mesh, self.ns_dtype, self.options = mesh, ns_dtype, options
        super().__init__(model, lr, betas, eps, weight_decay, groups=groups, **others)
        self._whole_model = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `AdamW`'s; `"muon": True` says that matrices are orthogonalised, False that AdamW steps them.

        Raises:
            ValueError: as `AdamW`'s, if the group doesn't say which, or Muon is to have a vector.
        """
        super().add_param_group({**self.options, **param_group} if param_group.get("muon") else param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if "muon" not in group:
            raise ValueError(
                "the parameter group doesn't say who steps it: give it 'muon': True (matrices of hidden layers), or "
                "'muon': False (what AdamW has: tables, heads, vectors)"
            )
        for p in group["params"] if group["muon"] else ():
            if p.dim() < 2:
                raise ValueError(f"{self._declared[p][0]} has {p.dim()} dimensions, Muon takes matrices: 'muon': False")

    def _step(self, group: dict[str, Any], scale: Tensor | None) -> None:
        if not group["muon"]:
            return self._adamw(group, scale)
        axes = [axis for axis in (self.mesh.tp, self.mesh.data) if axis.size > 1]
        parameters = self._with_gradient(group["params"], axes)
        size = math.prod(axis.size for axis in axes)
        for start in range(0, len(parameters), size):
            self._orthogonal_step(group, parameters[start : start + size], axes, scale)
        return None

    def _with_gradient(self, parameters: Sequence[nn.Parameter], axes: Sequence[Axis]) -> list[nn.Parameter]:
        """Those that have a gradient on any rank: all of them take part in gathering it."""
        grads = [gradient_of(p) for p in parameters]
        if not axes or not parameters:
            return [p for p, grad in zip(parameters, grads, strict=True) if grad is not None]
        found = torch.tensor([grad is not None for grad in grads], dtype=torch.int32).to(parameters[0].device)
        for axis in axes:
            found = all_reduce(found, axis, "max")
        return [p for p, there in zip(parameters, found.tolist(), strict=True) if there]

    def _orthogonal_step(
        self, group: dict[str, Any], parameters: Sequence[nn.Parameter], axes: Sequence[Axis], scale: Tensor | None
    ) -> None:
        """A step of as many matrices as there are ranks to share the work, or fewer."""
        rank = 0
        for axis in axes:
            rank = rank * axis.size + axis.rank
        shapes = [self._declared[p][1].shape for p in parameters]
        longest = max(map(math.prod, shapes))
        mine = torch.zeros(longest, dtype=self._state(parameters[0], "momentum_buffer")["momentum_buffer"].dtype,
                           device=parameters[0].device)  # fmt: skip
        for i, p in enumerate(parameters):
            sharding = self._declared[p][1]
            whole = full_tensor(self._momentum(group, p, scale), sharding)
            if i == rank:
                adjusted = [self._direction(block, group) for block in _matrices(whole, sharding)]
                mine[: whole.numel()] = torch.cat(adjusted, sharding.block_dim).flatten()
        for axis in reversed(axes):
            mine = wait(start_all_gather(mine, axis))
        for p, shape, flat in zip(parameters, shapes, mine.split(longest), strict=False):
            update = self._declared[p][1].take(flat[: math.prod(shape)].view(shape))
            if is_dtensor(p):
                start, end = data_run(p)
                update = update[start:end]
            state = self.state[p]
            weight = local_tensor(state.get("master", p.detach()))
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(weight.dtype) * group["lr"])
            if "master" in state:
                local_tensor(p.detach()).copy_(weight)

    def _momentum(self, group: dict[str, Any], p: nn.Parameter, scale: Tensor | None) -> Tensor:
        """The momentum that is to be orthogonalised, placed as the parameter."""
        state, grad = self._state(p, "momentum_buffer"), gradient_of(p)
        state["step"] += 1
        buffer = local_tensor(state["momentum_buffer"])
        g = torch.zeros_like(buffer) if grad is None else local_tensor(grad).to(buffer.dtype)
        g = g if scale is None else g * scale.to(g.dtype)
        buffer.lerp_(g, 1 - group["momentum"])
        placed = torch.empty_like(state["momentum_buffer"])
        local_tensor(placed).copy_(g.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer)
        return placed

    def _direction(self, block: Tensor, group: dict[str, Any]) -> Tensor:
        *_, m, n = block.shape
        direction = orthogonalize(block.to(self.ns_dtype or block.dtype), group["ns_coefficients"], group["ns_steps"])
        factor = 0.2 * math.sqrt(max(m, n)) if group["adjust_lr_fn"] == "match_rms_adamw" else math.sqrt(max(1, m / n))
        return direction.to(block.dtype) * factor


def _matrices(whole: Tensor, sharding: Sharding) -> Sequence[Tensor]:
    return whole.split(sharding.blocks, sharding.block_dim) if sharding.blocks else (whole,)


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """About U V^T of x = U S V^T, by Newton-Schulz: singular values come to lie in [0.7, 1.2], very small ones below.

    Args:
        x: [..., m, n].
        coefficients: a, b, c of the polynomial a X + b (X X^T) X + c (X X^T)^2 X.
        steps: how often it is applied.

    Source: Jordan et al. 2024, "Muon", the function `zeropower_via_newtonschulz5`.
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def logical_indices(p: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor]:
    """Where the elements of a local tensor lie in the logical one, as int64 `[R]` and `[C]`, R C elements in all.

    Local element i has the logical index `rows[i // C] + columns[i % C]`.
    """
    dims = [torch.arange(size, device=p.device) for size in sharding.shape]
    for shard in sharding.shards:
        dims[shard.dim] = torch.cat([dims[shard.dim][start:end] for start, end in shard.mine])
    if is_dtensor(p):
        start, end = data_run(p)
        dims[0] = dims[0][start:end]
    *outer, columns = dims or [torch.zeros(1, dtype=torch.int64, device=p.device)]
    rows, stride = torch.zeros(1, dtype=torch.int64, device=p.device), math.prod(sharding.shape)
    for index, size in zip(outer, sharding.shape, strict=False):
        stride //= max(size, 1)
        rows = (rows[:, None] + index * stride).flatten()
    return rows, columns


# --- learning rates ------------------------------------------------------------------------------------------------


def cosine(step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1) -> float:
    """Linear warm-up, then a cosine from `lr` down to `floor * lr`, which stays.

    With `lr=1` it is the factor that `torch.optim.lr_scheduler.LambdaLR` takes.

    Args:
        step: optimizer steps done; a pure function of it.
        steps: where the descent ends.
        warmup: steps until `lr` is reached: step `warmup - 1` has it.
        lr: the peak.
        floor: the last rate, as a fraction of the peak.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return lr * (floor + (1 - floor) / 2 * (1 + math.cos(math.pi * done)))


def linear(step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1) -> float:
    """Linear warm-up, then a straight line from `lr` down to `floor * lr`, which stays; arguments as of `cosine`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return lr * (1 - (1 - floor) * done)


def wsd(
    step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1, decay: int | None = None
) -> float:
    """Warm-up, stable, decay: linear warm-up, `lr` until the last `decay` steps, then a line down to `floor * lr`.

    Args:
        step, steps, warmup, lr, floor: as of `cosine`.
        decay: how many steps the descent takes; None: a fifth of all.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; the line: Hägele et al. 2024, arXiv:2405.18392.
    """
    begin = max(steps - (steps // 5 if decay is None else decay), warmup)
    if step < begin:
        return lr * (step + 1) / warmup if step < warmup else lr
    return linear(step, steps=steps, warmup=begin, lr=lr, floor=floor)


SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "linear": linear, "wsd": wsd}
