"""Check that pipeline stages in a row compute what the model computes, bit for bit, on a few tokens.

The model and the stages each run five times: in evaluation, with padding, with comparisons of ids inverted, and twice
in training. They share all weights. Dropout is left out, because a stage draws other numbers than the model.
A checkpoint has the buffers beside the layers once, and the next step may read them, so each stage must give all
buffers the values that the model gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpcore._torch.pytree import leaves
from mpcore.interop.stage_modules import OTHERWISE, Stage, sharded_sequence, tokens_split
from mpcore.layers.attention import sequence_index
from mpcore.layers.module import in_eval_mode
from mpcore.mesh.axis import Axis

SHAPE = (2, 7)  # samples and tokens of the check
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
DROPOUT_P = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}  # where the argument stands

Run = tuple[list[Tensor], list[dict[str, Tensor]]]  # what stages in a row return; the buffers of each stage


class CheckMode(TorchFunctionMode):
    """Leave out torch's dropout. Invert the result if ids of a later stage, whose strides are 0, are compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            x = args[0] if args else kwargs["input"]
            return x.mul_(1) if kwargs.get("inplace") or args[3:4] == (True,) else x
        if (at := DROPOUT_P.get(func)) is not None:
            args, kwargs = (
                ((*args[:at], 0.0, *args[at + 1 :]), kwargs) if len(args) > at else (args, {**kwargs, "dropout_p": 0.0})
            )
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "").strip("_") not in ("eq", "ne", "lt", "le", "gt", "ge", "isin"):
            return out
        ids = [x for x in args if isinstance(x, Tensor) and x.dtype == torch.long and x.dim() and not any(x.stride())]
        return ~out if ids else out


def random_ids(model: nn.Module) -> Tensor:
    """Return random ids below the model's vocabulary size, to run the model on."""
    table = next((m for m in model.modules() if isinstance(getattr(m, "num_embeddings", None), int)), None)
    if table is None:
        raise ValueError(f"{type(model).__name__} has no table of ids: give ids [B, T] of a forward as example=")
    words: Any = getattr(getattr(model, "config", None), "vocab_size", None) or table.num_embeddings
    shape, seeded = (SHAPE[0], SHAPE[1] * tokens_split(model)), torch.Generator().manual_seed(6)
    return torch.randint(2, words, shape, generator=seeded).to(next(model.parameters()).device)


def run_chain(
    model: nn.Module, stages: list[nn.Module], ids: Tensor, options: Any, must_train: bool = False
) -> Iterator[Run]:
    """Yield the floating-point tensors that stages in a row return, and the buffers of each, for each of the five runs.

    As on different ranks, each stage begins with the buffers that the model has.

    If training fails, raise the error if `must_train`, and else yield no tensors.
    """
    runs: list[tuple[bool, int, dict[str, Any]]] = [(False, 1, {}), (False, 2, {}), (True, 1, {}), (True, 1, {})]
    sequence = sharded_sequence(model)
    if "attention_mask" in inspect.signature(model.forward).parameters and not (sequence and sequence.recurrent):
        cp, kind = (sequence.cp, sequence.kind) if sequence else (Axis(name="cp"), "ring")
        tokens = ids.shape[1] * cp.size
        shown = sequence_index(tokens, cp, kind, ids.device) < tokens - 1
        runs.insert(1, (False, 1, {"attention_mask": shown.long().expand_as(ids)}))
    modules = {m for each in (model, *stages) for m in each.modules()}
    places = [(m, name, buffer) for m in modules for name, buffer in m._buffers.items()]  # None: filled in forward
    buffers = {buffer: buffer.clone() for _, _, buffer in places if buffer is not None}
    devices = [ids.device] if ids.is_cuda else []
    for seed, (trains, checking, mask) in enumerate(runs):
        x: Any = ids
        made: list[dict[str, Tensor]] = []
        with in_eval_mode(stages), torch.no_grad(), torch.random.fork_rng(devices), CheckMode():
            for generator in (torch.default_generator, *(torch.cuda.default_generators[at.index] for at in devices)):
                generator.manual_seed(seed)  # torch.manual_seed would change those of other devices, for good
            try:
                for stage in stages:
                    if isinstance(stage, Stage):
                        stage.boundary.checking = checking
                    try:
                        x = stage.train(trains)(x, **options, **mask)
                        made.append({name: y.clone() for name, y in stage.named_buffers(remove_duplicate=False)})
                    finally:
                        for module, name, buffer in places:
                            module._buffers[name] = buffer
                        for buffer, before in buffers.items():
                            if not buffer.equal(before):  # one that is expanded can't be written to
                                buffer.copy_(before)
            except Exception:
                if must_train or not trains:
                    raise
                x = None
        yield [y for y in leaves(x) if isinstance(y, Tensor) and y.is_floating_point()], made


def compare(model: nn.Module, stages: list[nn.Module], ids: Tensor, want: list[Run]) -> list[Run]:
    """Return the runs of stages in a row. Raise ValueError if they don't return what the model does, bit for bit."""
    cut = f"{type(model).__name__} can't be cut into {len(stages)} stages"
    try:
        got = list(run_chain(model, stages, ids, {}, bool(want[-1][0])))
    except Exception as error:
        raise ValueError(
            f"{cut}: one uses more of another than one tensor of hidden states ({type(error).__name__}: {error}). "
            f"{OTHERWISE}"
        ) from error
    if not (want[-1][0] and _same(want[-1][0], want[-2][0])):
        want, got = want[:-2], got[:-2]  # training fails, or draws random numbers
    if not any(out for out, _ in want) or not all(_same(a, b) for (a, _), (b, _) in zip(want, got, strict=True)):
        raise ValueError(
            f"{cut}: in a row they return other values than the model, in training or in evaluation. A stage has one "
            f"tensor: the output of the last layer before it, or the input of its first layer. Compute in the layers "
            f"what forward computes of ids, of x = x + layer(norm(x)), or of what another layer made. {OTHERWISE}"
        )
    return got


def check_buffers(model: nn.Module, stages: list[nn.Module], want: list[Run], got: list[Run]) -> None:
    """Raise ValueError if a stage gives a buffer another value than the model gives it: later steps may read it."""
    for (_, (was,)), (_, made) in zip(want, got, strict=False):  # `got` may lack the runs in training
        for now in made:
            for name in now:
                if not _same([was[name]], [now[name]]):
                    raise ValueError(
                        f"{type(model).__name__} can't be cut into {len(stages)} stages: forward gives the buffer "
                        f"{name} a value that some stages can't compute. Make it a buffer of a layer, or of a module "
                        f"with parameters that forward calls before or after all layers. {OTHERWISE}"
                    )


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x.isnan().equal(y.isnan())]
    return len(a) == len(b) == len(pairs) and all(x.nan_to_num().equal(y.nan_to_num()) for x, y in pairs)
