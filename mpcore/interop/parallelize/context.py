"""Context parallelism for models of transformers: their attention exchanges keys over cp.

transformers asks a registry for the attention function and for the function that makes masks. `serve_context`
registers one of each, which compute `context_attention`, and adds a hook to the model's forward. The hook gathers the
positions and the padding mask of all tokens, so that masks are those of the full sequence. Every mask becomes runs of
keys: causal or full, a window, and documents. Packed documents, chunks and padding at the ends of a row are documents.

    user                     hook of the model                mask function               attention function
    tokens of this rank  ->  positions, all rows' mask   ->   `ContextMask`          ->   `context_attention`
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mpcore import collectives
from mpcore._torch.fake import is_fake
from mpcore.layers.attention import context_attention, document_ends, sequence_index, unshard_sequence
from mpcore.layers.attention.sequence import check_kind
from mpcore.mesh.axis import Axis

NAME = "mpcore"
TENSORS = ("input_ids", "inputs_embeds", "position_ids", "attention_mask")
UNUSED = ("position_ids", "cache_position", "use_cache", "is_causal", "sliding_window", "output_attentions")
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"}
RECURRENT = {"linear_attention", "conv", "hybrid"}  # served under sequence parallelism, where they get all tokens
WAY_OUT = "build the mesh with cp 1 for this model: tp, ZeRO and pipelines serve it"


@dataclass(eq=False)
class FullSequence:
    """The full sequence of one forward. The hook attaches it to the model's `attention_mask`."""

    length: int
    documents: Tensor | None = None  # [B, T], a number for each token, the same within a document; None: one document
    positions: Tensor | None = None  # [B, T], restarting in each document; None: 0 .. T-1


@dataclass(eq=False)
class ContextMask:
    """The mask of an attention layer over the full sequence, as `context_attention` takes it.

    `wrong` says why the mask can't be served; a layer that uses it raises.
    """

    causal: bool = False
    window: int | None = None
    cu_seqlens: Tensor | None = None
    length: int = 0
    wrong: str = ""


def check_decoder(model: nn.Module, what: str) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} has an encoder, and {what} serves a decoder alone: use tp and ZeRO")


def serve_context(model: nn.Module, cp: Axis, kind: str, documents: bool = True, tp: Axis | None = None) -> None:
    """Make the attention of a model of transformers exchange keys over cp, in place.

    Args:
        documents: whether the unsharded model keeps packed documents apart. False: the forward refuses them.
        tp: the axis over which sequence parallelism shards the tokens again; None: it doesn't.
    """
    what = f"cp {cp.size}" if cp.size > 1 else "sequence parallelism"
    way_out = WAY_OUT if cp.size > 1 else "leave 'sequence_parallel' out of the plan"
    check_kind(kind, cp)
    parameters = inspect.signature(type(model).forward).parameters
    choose: Any = getattr(model, "set_attn_implementation", None)
    config: Any = getattr(model, "config", None)
    if choose is None or config is None or not {"input_ids", "attention_mask"} <= parameters.keys():
        raise ValueError(
            f"{what} serves models of transformers that take input_ids and attention_mask, and this is a "
            f"{type(model).__name__}: build it from mpcore's layers, such as mpcore.ParallelAttention(.., cp=mesh.cp)"
        )
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    served = LAYER_TYPES if cp.size > 1 else LAYER_TYPES | RECURRENT
    other = next((at for at, each in enumerate(kinds) if each not in served), None)
    recurrent = next((each for each in kinds if each in RECURRENT), None)
    if other is not None:
        raise ValueError(
            f"layer {other} of {type(model).__name__} is of the type {kinds[other]!r}, which {what} can't serve: "
            f"{way_out}"
        )
    bare = 0 in (getattr(text, "no_rope_layers", None) or ())  # as in Llama 4
    if cp.size > 1 and bare and getattr(text, "attn_temperature_tuning", False):
        raise ValueError(
            f"{type(model).__name__} scales queries by positions that it counts within the tokens of a rank of {what}: "
            f"set attn_temperature_tuning to False, or {way_out}"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for each in (rope, *(x for x in rope.values() if isinstance(x, dict))):
        form = each.get("rope_type") or "default"
        if cp.size > 1 and ("dynamic" in form or form == "longrope"):
            raise ValueError(
                f"rope_type {form!r} of {type(model).__name__} depends on the longest sequence, which a rank of {what} "
                f"doesn't see: set rope_parameters of a fixed kind, or {WAY_OUT}"
            )
    hf = import_module("transformers")
    hf.AttentionInterface.register(NAME, attend)
    hf.AttentionMaskInterface.register(NAME, context_mask)
    choose(NAME)
    if vars(config)["_attn_implementation_internal"] != NAME:
        raise ValueError(
            f"{type(model).__name__} computes attention in its own code, not through transformers' attention "
            f"functions, which {what} needs: {way_out}"
        )
    for module in model.modules():
        if "config" in vars(module):
            module.cp, module.context = cp, kind  # type: ignore[assignment]  # read by `attend`
    vars(model)["sharded_sequence"] = ShardedSequence(cp, kind, documents, tp or Axis(name="tp"), recurrent)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)


# --- the hook of the model's forward ----------------------------------------------------------------------------------


@dataclass(eq=False)
class ShardedSequence:
    """Replaces positions and the padding mask of a forward by those of the full sequence."""

    cp: Axis
    kind: str
    documents: bool  # whether the unsharded model keeps packed documents apart
    tp: Axis  # of sequence parallelism; size 1: none
    recurrent: str | None  # the type of the layers that carry a state across tokens; None: there are none

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model's own forward."""
        cp, kind, tp = self.cp, self.kind, self.tp
        parameters = inspect.signature(getattr(type(model), "whole_class", type(model)).forward).parameters
        given = {**dict(zip(list(parameters)[1:], args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        _refuse_arguments(model, given, cp, tp)
        tokens = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
        rows = tokens.shape[0]
        position_ids, mask = given.get("position_ids"), given.get("attention_mask")
        lengths = _lengths(tokens, position_ids, mask, cp, kind)
        if any(length % tp.size for length in lengths):
            raise ValueError(
                f"{', '.join(map(str, lengths))} tokens on the ranks of cp are not multiples of tp {tp.size}, which "
                f"sequence parallelism needs: pad the rows, with attention_mask 0 and targets -100"
            )
        full = FullSequence(sum(lengths))
        if mask is not None:
            full.documents = _documents_of_padding(unshard_sequence(mask.bool(), cp, kind, 1, full.length))
            if position_ids is None and full.documents is not None and not bool(full.documents[:, 0].all()):
                raise ValueError(
                    "attention_mask hides the first tokens of a row, and models count positions there in two ways: "
                    "give position_ids too, or pad the ends of rows"
                )
        elif position_ids is not None:
            full.positions = unshard_sequence(position_ids.contiguous(), cp, kind, 1, full.length).expand(rows, -1)
            places = torch.arange(full.length, device=tokens.device).expand(rows, -1)
            if bool((full.positions.sort(-1).values == places).all() & (full.positions != places).any()):
                raise ValueError(
                    f"position_ids are not in the order of context {kind!r} on cp {cp.size}: shard each batch with "
                    f"mpcore.shard_sequence(batch, mesh.cp, {kind!r})"
                )
            full.documents = (torch.diff(full.positions, prepend=full.positions[:, :1] - 1) != 1).cumsum(-1)
            if not self.documents and bool(full.documents.any()):
                raise ValueError(
                    f"position_ids restart, and {type(model).__name__} doesn't keep packed documents apart in "
                    f"transformers either: give one document in each row, with attention_mask for padding"
                )
        if self.recurrent and full.documents is not None and bool((full.documents != full.documents[:, :1]).any()):
            raise ValueError(
                f"attention_mask hides tokens or position_ids restart, and layers of the type {self.recurrent!r} carry "
                f"their state across them with 'sequence_parallel': give one document in each row, padded at its end "
                f"with targets -100, and no attention_mask"
            )
        if mask is None and full.documents is not None and "use_cache" not in given and bool(full.documents.any()):
            check_cache(model)
        shown = torch.ones(rows, full.length, dtype=torch.bool, device=tokens.device)
        shown.full_sequence = full  # type: ignore[attr-defined]
        given["attention_mask"] = shown
        if tp.size > 1 and "inputs_embeds" in given:
            given["inputs_embeds"] = collectives.split(given["inputs_embeds"], tp, 1)
        elif tp.size > 1 and "inputs_embeds" in parameters:  # else some models would read T from the shape of input_ids
            given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))  # type: ignore[operator]
        if position_ids is None:
            given["position_ids"] = sequence_index(full.length, cp, kind, tokens.device)[None]
        if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given["use_cache"] = False
        return (), given


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model's `ShardedSequence`. A pipeline stage calls it itself, with the arguments of the full model."""
    return None if getattr(type(model), "whole_class", None) else vars(model)["sharded_sequence"](model, args, kwargs)


def check_cache(model: nn.Module) -> None:
    """Raise ValueError if `position_ids` that restart mean nothing to the unsharded model, which makes a cache."""
    class_name = getattr(type(model), "whole_class", type(model)).__name__
    if getattr(model.config, "use_cache", False):
        raise ValueError(
            f"position_ids restart, and {class_name} of transformers keeps such documents apart only without "
            f"a cache: set model.config.use_cache = False, on every layout"
        )


def _refuse_arguments(model: nn.Module, given: dict[str, Any], cp: Axis, tp: Axis) -> None:
    """Raise ValueError for arguments whose result would depend on the tokens of this rank alone."""
    kind = type(model).__name__
    what = f"cp {cp.size}" if cp.size > 1 else f"sequence parallelism over tp {tp.size}"
    if "labels" in given and cp.size > 1:
        raise ValueError(
            f"labels= would be shifted within the tokens of each of {cp.size} ranks of cp: leave it out, shift the "
            f"targets before shard_sequence, and compute the loss from the logits as a sum over tokens"
        )
    config: Any = model.config
    for chosen in {getattr(each, "_attn_implementation", NAME) for each in (config, config.get_text_config())} - {NAME}:
        raise ValueError(
            f"the attention of {kind} was set to {chosen!r} after {what} had set it to {NAME!r}, which exchanges keys: "
            f"leave out set_attn_implementation"
        )
    switched = {"output_router_logits": getattr(config, "output_router_logits", False)} | given
    for name in ("output_router_logits", "output_attentions", "past_key_values", "use_cache", "logits_to_keep"):
        value = switched.get(name)
        if isinstance(value, Tensor) or value:
            raise ValueError(
                f"{name} = {value!r:.40} needs all tokens, and a rank of {what} has a part of them: leave it out of "
                f"{kind}'s forward and config. To generate, load the weights into a model without {what}"
            )
    for name, value in given.items():
        if isinstance(value, Tensor) and name not in TENSORS and (name != "labels" or cp.size > 1):
            raise ValueError(f"{kind} with {what} takes the tensors {', '.join(TENSORS)}, and not {name}: {WAY_OUT}")
    for name, dims in {"attention_mask": 2, "position_ids": 2, "input_ids": 2}.items():
        value = given.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.dim() != dims):
            raise ValueError(f"{name} must be [B, T/cp] with {what}, as shard_sequence returns it")
    if "input_ids" not in given and "inputs_embeds" not in given:
        raise ValueError(f"{kind} needs input_ids or inputs_embeds [B, T/cp]")


def _lengths(tokens: Tensor, position_ids: Tensor | None, mask: Tensor | None, cp: Axis, kind: str) -> list[int]:
    """Return the number of tokens of each rank of cp. Raise on every rank if they are no shards of one sequence."""
    rows, mine = tokens.shape[:2]
    wrong = next((x for x in (position_ids, mask) if x is not None and x.shape[1] != mine), None)
    if cp.size == 1 or torch.compiler.is_compiling() or tokens.is_meta or is_fake(tokens):
        return [mine] * cp.size
    told = [mine, rows, position_ids is not None, mask is not None, wrong is not None]
    ids = tokens.long() if tokens.dim() == 2 else tokens.new_zeros(rows, mine, dtype=torch.long)
    weights = torch.arange(1, ids.numel() + 1, device=ids.device).view_as(ids) * -0x61C8864680B583EB  # modulo 2^64
    weights = (weights ^ (weights >> 31)) * -0x40A7B892E31B1A47  # other tokens seldom have the same sum
    seen = torch.stack([(ids * weights).sum(), (ids != ids[:, :1]).sum()])  # zeros are seen by later pipeline stages
    every = collectives.all_gather(torch.cat([torch.tensor(told, device=ids.device), seen])[None], cp, 0).tolist()
    lengths = [each[0] for each in every]
    if any(each[4] for each in every):
        raise ValueError(f"position_ids and attention_mask must have the shape [B, T/cp] of a rank's {mine} tokens")
    if lengths != collectives.shard_sizes(sum(lengths), cp.size):
        raise ValueError(
            f"the ranks of cp hold {', '.join(map(str, lengths))} tokens, which shard_sequence cuts from no "
            f"sequence: shard input_ids, position_ids and attention_mask with mpcore.shard_sequence"
        )
    if any(each[1:4] != every[0][1:4] for each in every):
        raise ValueError(
            "the ranks of cp are given different numbers of rows, or position_ids or attention_mask on some ranks "
            "only: give each rank its shard of the same arguments"
        )
    if every[0][6] and all(each[5:] == every[0][5:] for each in every):
        raise ValueError(
            f"the {cp.size} ranks of cp hold the same {mine} tokens: shard each batch first, with "
            f"mpcore.shard_sequence(batch, mesh.cp, {kind!r})"
        )
    return lengths


def _documents_of_padding(mask: Tensor) -> Tensor | None:
    """Return documents that keep real tokens from padding at the ends of rows; None if there is no padding."""
    steps = torch.diff(mask.int(), prepend=torch.zeros_like(mask[:, :1], dtype=torch.int32))
    if bool(mask.all()):
        return None
    if bool(((steps == 1).sum(-1) > 1).any()):
        raise ValueError(
            "attention_mask hides tokens between others in a row, and cp serves padding at the ends of a row only: "
            "move the padding there, or build the mesh with cp 1"
        )
    return mask.int()


# --- the two functions of transformers' registries --------------------------------------------------------------------


def context_mask(*, mask_function: Any, attention_mask: Tensor | None = None, **_: Any) -> ContextMask:
    """Make the `ContextMask` of a layer. transformers calls it with the arguments of `sdpa_mask`."""
    shown = getattr(attention_mask, "_base", None)  # of a view, such as attention_mask.view(rows, -1)
    shown = attention_mask if shown is None else shown
    full: FullSequence | None = getattr(shown, "full_sequence", None)
    if full is None or attention_mask is None or shown is None or attention_mask.shape != shown.shape:
        return ContextMask(wrong="another than that of the forward's attention_mask")
    causal, window, documents = False, None, full.documents
    for part in _parts(mask_function):
        held, name = inspect.getclosurevars(part).nonlocals, getattr(part, "__qualname__", "")
        if part.__module__ != "transformers.masking_utils":
            return ContextMask(wrong=f"{part.__module__}.{name}")
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay.<locals>.inner_mask":
            window = held["sliding_window"]
        elif name == "chunked_overlay.<locals>.inner_mask":
            places = full.positions
            if places is None:
                places = torch.arange(full.length, device=attention_mask.device)[None]
            chunks = (places - held["left_padding"].to(places.device)[:, None]) // held["chunk_size"]
            documents = chunks if documents is None else documents * (full.length + 1) + chunks
        elif name != "bidirectional_mask_function":
            return ContextMask(wrong=name)
    if window is not None and not causal:
        return ContextMask(wrong=f"a window of {window} tokens on both sides")
    ends = None if documents is None else document_ends(documents.expand(attention_mask.shape[0], -1).cpu()).unique()
    return ContextMask(causal, window, ends, full.length)


def _parts(mask_function: Any) -> Iterator[Any]:
    if getattr(mask_function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        for part in inspect.getclosurevars(mask_function).nonlocals["mask_functions"]:
            yield from _parts(part)
    else:
        yield mask_function


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: ContextMask | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute a layer's attention over the full sequence. An attention function of transformers.

    [B, H, T/cp, K], [B, Hkv, T/cp, K], [B, Hkv, T/cp, V], sinks `s_aux` [H] -> [B, T/cp, H, V], and no weights.
    """
    kind, cp = type(module).__name__, getattr(module, "cp", None)
    if cp is None:
        raise ValueError(f"{kind} has the config of a model that parallelize changed: give each model its own config")
    if not isinstance(attention_mask, ContextMask):
        raise ValueError(f"{kind} gives its attention a mask of its own, or none, which cp {cp.size} can't follow")
    if attention_mask.wrong:
        raise ValueError(f"the mask of {kind} is {attention_mask.wrong}, which cp {cp.size} can't follow")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"{kind} attends from {query.shape[2]} tokens to {key.shape[2]}: cp {cp.size} can't follow")
    if dropout:
        raise ValueError(f"{kind} has attention dropout {dropout}, and cp {cp.size} has none: set attention_dropout=0")
    extra = [name for name, x in others.items() if x is not None and x is not False and name not in UNUSED]
    if extra:
        raise ValueError(f"{kind} gives its attention {', '.join(extra)}, which cp {cp.size} can't follow")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    y = context_attention(
        q, k, v, module.context, cp, causal=attention_mask.causal, window=attention_mask.window,  # type: ignore[arg-type]
        cu_seqlens=attention_mask.cu_seqlens, length=attention_mask.length, scale=scaling, softcap=softcap, sinks=s_aux,
    )  # fmt: skip
    return y, None
