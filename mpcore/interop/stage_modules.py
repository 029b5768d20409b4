"""Modules that a pipeline stage has in place of other stages' modules, and the forward of a stage (`cut`)."""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from mpcore._torch.fake import is_fake
from mpcore._torch.pytree import leaves
from mpcore.interop.parallelize.context import ShardedSequence, check_cache
from mpcore.interop.parallelize.generation import REFUSED_SAVE, resize_token_embeddings

BATCH, TOKENS = -1, -2  # in a shape: as many as there are samples, and tokens
OTHERWISE = "Build the mesh with pp 1, or write the stages yourself"
MEDIA = ("pixel_", "image_", "video_", "audio_", "input_features")  # arguments of images, videos and sound


class EndOfStageError(Exception):
    """End the forward of a stage after its last layer."""


class Boundary:
    """Hold what a stage receives and what it sends, while its forward runs. A deep copy is the same object."""

    def __init__(self, sends_inputs: bool) -> None:
        self.sends_inputs = sends_inputs  # the input of the next stage's first layer, not the last layer's output
        self.clear()

    def clear(self) -> None:
        self.received: Tensor | None = None
        self.sent: Tensor | None = None
        self.used = False  # whether a layer got `received`
        self.versions: list[tuple[Tensor, int]] = []  # of tensors that may not change in place
        self.checking = 0  # above 0 in `stage_check`: stand-ins return NaN; 2: comparisons of ids turn around

    def keep_output(self, layer: nn.Module, args: Any, out: Any) -> None:
        self.sent = self.fixed(first_tensor(out))

    def fixed(self, x: Tensor | None) -> Tensor | None:
        """Return a tensor that two stages have, and have `Stage` raise if it is changed in place."""
        if x is not None and not x.is_inference():
            self.versions.append((x, x._version))
        return x

    def write_input(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Write `received` to the layer's input, so that forward, which may add this tensor later, has the values."""
        x, received = first_tensor((args, kwargs)), self.received
        if x is None or received is None or (x.shape, x.dtype) != (received.shape, received.dtype):
            mine, other = ("nothing" if y is None else f"{tuple(y.shape)} in {y.dtype}" for y in (x, received))
            raise ValueError(f"forward gives {type(layer).__name__} {mine}, and the stage received {other}")
        check_checkpoint(inspect.unwrap(checkpoint))
        x.copy_(received)
        self.used = True

    def __deepcopy__(self, memo: dict[Any, Any]) -> Boundary:
        return self


class PassedLayer(nn.Module):
    """Replace a layer of another stage: return the input. Attributes such as the layer's attention type are copied.

    The last one before the stage's layers returns what the stage received. The first one after them ends the forward.
    """

    def __init__(self, layer: nn.Module, returned: int, place: str, boundary: Boundary) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(layer).items() if isinstance(v, str | int | float | None) and k[0] != "_"}
        vars(self).update({**plain, "training": layer.training})
        self.returned, self.place, self.boundary = returned, place, boundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, boundary = first_tensor((args, kwargs)), self.boundary
        if self.place == "after":
            boundary.sent = x if boundary.sends_inputs else boundary.sent
            raise EndOfStageError
        if self.place == "before" and boundary.received is not None and boundary.sends_inputs:
            x = torch.full_like(boundary.received, math.nan if boundary.checking else 0.0)  # for `write_input`
        elif self.place == "before" and boundary.received is not None:
            if not torch.is_grad_enabled():
                check_checkpoint(CheckpointFunction.forward)  # with use_reentrant=True
            x, boundary.used = boundary.fixed(boundary.received), True
        return (x, *(None,) * (self.returned - 1)) if self.returned else x


def first_tensor(tree: Any) -> Tensor | None:
    return next((x for x in leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()), None)


def check_checkpoint(function: Any) -> None:
    """Raise ValueError if `function` of torch.utils.checkpoint calls the layer: it holds the input that forward has."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    if frame is not None:
        raise ValueError(
            "forward calls a layer in torch.utils.checkpoint, which holds another input than the pipeline stage: pass "
            "recompute= to prepare instead, or use_reentrant=False if forward adds the layer's input to nothing"
        )


class Blank(nn.Module):
    """Replace a module before the layers: return zeros of the right shape, which no layer uses (NaN in the check).

    If forward reads a weight of the module, such as `position.weight[:T]`, it reads zeros that use no memory.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...] | None, boundary: Boundary, module: nn.Module, device: Any
    ) -> None:
        super().__init__()
        self.name, self.shape, self.boundary = name, shape, boundary  # no shape: the module was never called
        for leaf, x in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            self.__dict__[leaf] = x.new_zeros((), device=device if x.is_meta else x.device).expand(x.shape)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        received = self.boundary.received
        if self.shape is None or received is None:
            raise ValueError(
                f"{self.name} is called now, was not called when the model was cut, and is on the first of the "
                f"pipeline stages alone: leave out the argument that it is for. {OTHERWISE}"
            )
        sizes = {BATCH: received.shape[0], TOKENS: received.shape[1]}
        shape = [sizes.get(size, size) for size in self.shape]
        return received.new_full(shape, math.nan if self.boundary.checking else 0.0)


class Elsewhere(nn.Module):
    """Replace a module after the layers: end the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise EndOfStageError


class Stage(nn.Module):
    """Make forward accept what the previous stage sent instead of ids. A mixin in front of the model's class."""

    boundary: Boundary
    options: dict[str, Any]
    ends: tuple[str, str]  # the names of its first and last layer; "" if it is the model's first or last

    def forward(self, x: Tensor, **arguments: Any) -> Any:
        positions, sequence = arguments.get("position_ids"), sharded_sequence(self)
        for name, given in arguments.items() if getattr(self, "config", None) is not None else ():
            if name.startswith(MEDIA):
                raise ValueError(
                    f"{name} {tuple(given.shape)} needs modules and ids of several pipeline stages, which pass on one "
                    f"tensor of hidden states: leave {name} out, or build the mesh with pp 1"
                )
        check_outputs(self, arguments)
        if sequence is None and "use_cache" in self.options and _restart(positions, arguments):
            check_cache(self)
        args, arguments, boundary, (first, last) = (x,), {**self.options, **arguments}, self.boundary, self.ends
        hooks = ExitStack()  # a block of `with`: torch.compile takes the hooks of a layer for fixed elsewhere
        if first:
            ids = x.new_zeros((), dtype=torch.long).expand(x.shape[0], x.shape[1] * tokens_split(self))
            args = (ids if boundary.checking > 1 and sequence is None else ids.clone(),)
            boundary.received = x
        if first and boundary.sends_inputs:  # before the hooks of data parallelism: it needs forward's own tensor
            hook = self.get_submodule(first).register_forward_pre_hook
            hooks.enter_context(hook(boundary.write_input, prepend=True, with_kwargs=True))
        if last and not boundary.sends_inputs:  # after all hooks: it sees what forward sees
            hooks.enter_context(self.get_submodule(last).register_forward_hook(boundary.keep_output))
        out: Any = None
        try:
            with hooks:
                if sequence is not None:
                    args, arguments = sequence(self, args, arguments)
                out = super().forward(*args, **arguments)
        except EndOfStageError:
            pass
        finally:
            used, sent, changed = boundary.used, boundary.sent, any(x._version != at for x, at in boundary.versions)
            boundary.clear()
        if (first and not used) or (last and sent is None):
            skipped = f"the forward of a pipeline stage skipped the layer {last or 'before ' + first}, whose output"
            raise ValueError(f"{skipped} goes from stage to stage: call each layer, as with layerdrop 0. {OTHERWISE}")
        if changed:
            raise ValueError("forward or a layer changes in place what goes from stage to stage: write x = x + y")
        return sent if last else out

    def generate(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "generate needs all layers, and a pipeline stage has some of them: write the weights with save_pretrained, "
            "and load them on a mesh with pp 1"
        )

    def save_pretrained(self, *_: Any, **__: Any) -> Any:
        raise ValueError(REFUSED_SAVE)

    resize_token_embeddings = resize_token_embeddings


def make_stage(model: nn.Module, boundary: Boundary, options: dict[str, Any], ends: tuple[str, str]) -> None:
    """Turn a copy of a model that has the layers of one stage into this stage, in place."""
    model.__class__ = type(f"PipelineStage{type(model).__name__}", (Stage, type(model)), {"whole_class": type(model)})
    model.boundary, model.options, model.ends = boundary, options, ends  # type: ignore[assignment]


def check_outputs(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise ValueError if forward would return something of each layer."""
    config: Any = getattr(model, "config", None)
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if arguments.get(name, getattr(config, name, False)) is True:
            raise ValueError(
                f"{name} is True for {type(model).__name__}, and a pipeline stage has some of the layers: leave it out "
                f"of the call and of model.config, or build the mesh with pp 1"
            )


def sharded_sequence(model: nn.Module) -> ShardedSequence | None:
    return vars(model).get("sharded_sequence")


def tokens_split(model: nn.Module) -> int:
    """Return over how many ranks sequence parallelism shards the tokens between layers."""
    sequence = sharded_sequence(model)
    return 1 if sequence is None else sequence.tp.size


def _restart(positions: Any, arguments: dict[str, Any]) -> bool:
    """Return whether positions restart where nothing else says what a token sees."""
    if not isinstance(positions, Tensor) or arguments.keys() & {"attention_mask", "use_cache"}:
        return False
    unknown = torch.compiler.is_compiling() or positions.is_meta or is_fake(positions)
    return not unknown and bool((torch.diff(positions) != 1).any())
