"""Evaluate a model on any layout with lm-eval-harness. Importing this module needs the package `lm-eval`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore.collectives import all_reduce, gather
from mpcore.layers.module import in_eval_mode
from mpcore.mesh.agreement import check_same, gather_objects, together
from mpcore.mesh.axis import Mesh
from mpcore.pipeline import Pipeline
from mpcore.training.run import Run


class Model(TemplateLM):
    """A language model of lm-eval-harness: `lm_eval.simple_evaluate(model=Model(run, tokenizer), tasks=..)`.

    All ranks of the mesh must call it with the same tasks. Rank 0 gets the results; others may get None. Each rank
    computes every request; ranks of dp don't divide them.

    Args:
        model: a causal model on any layout without cp, or its `Run`. It maps tokens [B, T] to logits [B, T, vocabulary]
            or an object with such `logits`, as in Hugging Face models. The logits may be sharded over tp.
        tokenizer: a tokenizer of transformers.
        mesh: the mesh of the model; a run has its own.
        vocab_size: the model's number of tokens. By default `model.config.vocab_size`.
        max_length: the largest number of tokens in an input. By default `model.config.max_position_embeddings`.
        batch_size: how many inputs go through the model at once.
        max_gen_toks: how many tokens `generate_until` adds, if the task doesn't say.

    Raises:
        ValueError: if the mesh has cp above 1, the model's config lacks a size that isn't given, or tp doesn't divide
            `max_length` under sequence parallelism. During evaluation, on every rank, if the ranks got different
            requests, the logits are not of `vocab_size` tokens, or a task asks for sampling.

    Note:
        - Inputs are padded at the right, with sequence parallelism to a multiple of tp, so the model must be causal and
          its experts must not drop tokens. Generation is greedy and has no cache.
    """

    def __init__(
        self, model: nn.Module | Run, tokenizer: Any, mesh: Mesh = Mesh(), *, vocab_size: int | None = None,
        max_length: int | None = None, batch_size: int = 8, max_gen_toks: int = 256,
    ) -> None:  # fmt: skip
        super().__init__()
        self.run: Run | None = model if isinstance(model, Run) else None
        mesh = model.mesh if isinstance(model, Run) else mesh
        self.mesh: Mesh = mesh
        if mesh.cp.size > 1:
            raise ValueError(f"lm_eval.Model needs whole sequences, and the mesh has cp {mesh.cp.size}: use cp 1")
        self.pipeline: Pipeline = (
            model.pipeline if isinstance(model, Run) else Pipeline(model, mesh, 1, lambda y, target: y.sum())
        )
        config = getattr(self.pipeline.stages[0], "config", None)
        vocab_size = vocab_size or getattr(config, "vocab_size", None)
        max_length = max_length or getattr(config, "max_position_embeddings", None)
        if not (vocab_size and max_length):
            raise ValueError(f"vocab_size is {vocab_size} and max_length {max_length}: give both")
        modules = [module for stage in self.pipeline.stages for module in stage.modules()]
        splits = any(getattr(m, "sequence_parallel", False) or "sharded_sequence" in vars(m) for m in modules)
        self.multiple: int = mesh.tp.size if any(gather_objects(splits, mesh.pp.group)) else 1
        if max_length % self.multiple:
            raise ValueError(
                f"max_length {max_length} is no multiple of tp {mesh.tp.size}, which sequence parallelism needs: give "
                f"max_length={max_length - max_length % mesh.tp.size}, or leave sequence parallelism out"
            )
        self.vocab_size = vocab_size
        self.fits: bool = False  # whether the logits are of so many tokens
        self.max_length = max_length
        self.dtype: torch.dtype = torch.promote_types(next(self.pipeline.stages[0].parameters()).dtype, torch.float32)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # type: ignore[override]
        """Return the tokens of a text."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        told: dict[str, Any] = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **told))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the sum of log-probabilities of each continuation, and whether each of its tokens is the likeliest."""
        texts = [(context + after)[-(self.max_length + 1) :] for _, context, after in requests]
        self._check(texts)
        if (longest := max((len(after) for *_, after in requests), default=0)) > self.max_length:
            raise ValueError(f"an answer has {longest} tokens, and max_length is {self.max_length}: shorten answers")
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: dict[int, tuple[float, bool]] = {}
        with self._evaluating():
            for at in range(0, len(order), self.batch_size):
                chosen = order[at : at + self.batch_size]
                for i, logits in zip(chosen, self._logits([texts[i][:-1] for i in chosen]), strict=True):
                    after = torch.tensor(requests[i][2][-len(texts[i]) + 1 :], device=logits.device)
                    here = F.log_softmax(logits[len(texts[i]) - 1 - len(after) : len(texts[i]) - 1], -1)
                    found[i] = float(here.gather(-1, after[:, None]).sum()), bool((here.argmax(-1) == after).all())
        for i, (request, *_rest) in enumerate(requests):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, found[i])
        return [found[i] for i in range(len(texts))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of `max_length` tokens."""
        windows = []
        for i, (text,) in enumerate(request.args for request in requests):
            rolled = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [(i, *make_disjoint_window(window)) for window in rolled]
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens([(None, context, after) for _, context, after in windows])
        for (i, *_), (value, _) in zip(windows, found, strict=True):
            totals[i] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context with the likeliest tokens, up to a stop sequence."""
        with self._evaluating():
            return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, told: dict[str, Any]) -> str:
        how: Any = normalize_gen_kwargs(told, self.max_gen_toks)
        if how.get("do_sample") or how.get("num_beams", 1) > 1:
            raise ValueError(f"lm_eval.Model generates greedily, and the task asks for {told}: set do_sample: false")
        stops, new = [stop for stop in how["until"] if stop], how["max_gen_toks"]
        if new >= self.max_length:
            raise ValueError(f"max_gen_toks {new} leaves no room for a context in max_length {self.max_length}")
        ids, text = self.tok_encode(context)[-(self.max_length - new) :] or [self.prefix_token_id], ""
        self._check((ids, told))
        start = len(ids)
        while len(ids) < start + new and not any(stop in text for stop in stops):
            ids.append(int(next(self._logits([ids]))[len(ids) - 1].argmax()))
            if ids[-1] == self.eot_token_id:
                break
            text = self.tokenizer.decode(ids[start:], skip_special_tokens=True)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self.run is not None:
            with self.run.evaluating():
                yield
            return
        with in_eval_mode(self.pipeline.stages), torch.no_grad():
            yield

    def _check(self, asked: Any) -> None:
        digest = hashlib.sha256(repr(asked).encode()).hexdigest()[:12]
        check_same("requests of lm-eval: every rank must evaluate the same tasks", digest, self.mesh.world)

    def _logits(self, texts: list[list[int]]) -> Iterator[Tensor]:
        """Yield the logits of each text, [T, vocabulary], the same on every rank."""
        length = max(map(len, texts))
        length += -length % self.multiple
        filled = [text + [0] * (length - len(text)) for text in texts]
        x = torch.tensor(filled, dtype=torch.int64, device=self.mesh.device)  # also where all texts are empty
        (out,) = self.pipeline.forward([x])

        def gathered() -> Tensor:
            if self.pipeline.last_rank != self.mesh.pp.rank:
                return torch.empty(*x.shape, self.vocab_size, dtype=self.dtype, device=x.device)
            logits = getattr(out, "logits", out).to(self.dtype)
            if not self.fits:
                self._check_width(logits)
            return logits if logits.shape[-1] == self.vocab_size else gather(logits, self.mesh.tp, -1, self.vocab_size)

        logits = gathered() if self.fits else together(self.mesh.world, gathered)
        self.fits = True
        yield from self.pipeline.from_last(logits)

    def _check_width(self, logits: Tensor) -> None:
        """Raise ValueError if the logits are neither shards over tp of `vocab_size` logits nor copies of them."""
        tp, sizes = self.mesh.tp, gather_objects(logits.shape[-1], self.mesh.tp.group)
        copies = {*sizes} == {self.vocab_size}
        if copies and tp.size > 1:  # or shards of this width, which differ
            copies = not (all_reduce(logits, tp) / tp.size - logits).norm() > 0.1 * logits.norm()
        if not copies and sum(sizes) != self.vocab_size:
            raise ValueError(f"the logits are of {sum(sizes)} tokens, and vocab_size is {self.vocab_size}")
