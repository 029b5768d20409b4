"""Generate text on any layout. Every rank calls, and every rank gets the same text.

As a command, from a checkpoint of any layout in one process: `python -m examples.gpt.generate --checkpoint PATH`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.gpt.hf import open_checkpoint, tokenizer_of_checkpoint
from examples.gpt.model import GPT
from examples.gpt.tokenizer import Tokenizer, load_tokenizer
from mpcore import Mesh, sequence_index, shard_sequence
from mpcore.checkpoint import load
from mpcore.checkpoint.format import DTYPES
from mpcore.collectives import all_reduce, gather
from mpcore.layers import materialize
from mpcore.layers.module import in_eval_mode
from mpcore.parallel.sync import drops_parameters, gathered
from mpcore.pipeline import Pipeline
from mpcore.random import generator
from mpcore.tools.command_line import Parser, reports_errors

if TYPE_CHECKING:
    from examples.gpt.train import Trainer


@torch.no_grad()
def generate(
    model: GPT, pipeline: Pipeline, mesh: Mesh, tokenizer: Tokenizer, prompt: str, *, new_tokens: int = 120,
    temperature: float = 0.8, seed: int = 0, draft: bool = False,
) -> str:  # fmt: skip
    """Continue a prompt, token by token.

    Args:
        model: this rank's stage, in eval mode for the call.
        pipeline: runs the stages.
        tokenizer: that of the training. An id that it doesn't have is not drawn.
        prompt: the beginning of the text; an empty prompt begins a new document.
        new_tokens: how many tokens to add at most; the end of a document ends the text.
        temperature: divides the logits; 0 takes the likeliest token.
        seed: seeds the draws.
        draft: let `MultiTokenPrediction` guess tokens that the next forward checks. The text is the same.

    Returns:
        The prompt and what follows, the same on every rank.

    Raises:
        ValueError: if `draft` is given and the temperature isn't 0, the model has no such layers, or cp has more ranks.
    """
    if draft and (temperature or not model.config.mtp or mesh.cp.size > 1):
        raise ValueError(
            f"draft with temperature {temperature}, mtp {model.config.mtp} and cp {mesh.cp.size}: it needs temperature "
            f"0, a model that was trained with mtp of 1 or more, and cp 1"
        )
    draws = generator(seed, "generate")
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.end_of_document]
    with in_eval_mode([model]), gathered(stage for stage in pipeline.stages if not drops_parameters(stage)):
        if draft:
            return tokenizer.decode(_speculate(model, pipeline, mesh, ids, new_tokens, tokenizer))
        for _ in range(new_tokens):
            window = ids[-model.config.seq_len :]
            x, mask = _batch(window, model, mesh)
            (y,) = pipeline.forward([x], mask=mask)
            logits = _last_logits(y, len(window) - 1, model, mesh)
            logits = pipeline.from_last(logits)[: tokenizer.vocab_size]  # a padded table has more rows than tokens
            ids.append(_draw(logits.cpu(), temperature, draws))
            if ids[-1] == tokenizer.end_of_document:
                break
    return tokenizer.decode(ids)


def _batch(window: Sequence[int], model: GPT, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return the padded tokens [1, T/cp], and True where there is no padding."""
    x = torch.tensor([window], device=mesh.device)
    # Attention ignores the padding behind the last token. The mask keeps it from the experts, too.
    more = -len(window) % (mesh.cp.size * (mesh.tp.size if model.sequence_parallel else 1))
    batch = {"x": F.pad(x, (0, more)), "mask": F.pad(torch.ones_like(x, dtype=torch.bool), (0, more))}
    batch = shard_sequence(batch, mesh.cp, model.context)
    return batch["x"], batch["mask"]


def _speculate(
    model: GPT, pipeline: Pipeline, mesh: Mesh, ids: list[int], new_tokens: int, tokenizer: Tokenizer
) -> list[int]:
    """Append the likeliest tokens. Each forward checks the guesses of the forward before, and makes new ones.

    The right guesses are printed. Where the text is as long as the model's samples, nothing is guessed.
    """
    length, end, guesses = model.config.seq_len, len(ids) + new_tokens, list[int]()
    asked = right = forwards = 0
    while len(ids) < end and (forwards == 0 or ids[-1] != tokenizer.end_of_document):
        guesses = guesses[: min(length - len(ids), end - len(ids) - 1)] if len(ids) < length else []
        window = ids[-length:]
        x, mask = _batch([*window, *guesses], model, mesh)
        about = torch.tensor([len(window), len(guesses), tokenizer.vocab_size], device=x.device)
        (y,) = pipeline.forward([x], mask=mask, drafting=torch.cat([about, x[0]]))
        y = y if model.last else x.new_zeros(2 + len(guesses) + model.config.mtp)
        found = pipeline.from_last(y).tolist()
        forwards, asked, right = forwards + 1, asked + len(guesses), right + found[0]
        for token in found[1 : found[0] + 2]:
            ids.append(token)
            if token == tokenizer.end_of_document:
                break
        guesses = found[len(guesses) + 2 :]
    if mesh.job.rank == 0:
        print(f"{right} of {asked} guesses are right; {forwards} forwards for {len(ids) - end + new_tokens} tokens",
              file=sys.stderr)  # fmt: skip
    return ids


def sample_text(trainer: Trainer) -> str:
    """Generate a sample of text. A tokenizer that fails, on all ranks alike, doesn't fail the finished run."""
    run, tokenizer = trainer.run, trainer.setup.tokenizer
    try:
        with run.evaluating():
            return generate(trainer.stages[-1], run.pipeline, run.mesh, tokenizer, "def ", seed=trainer.args.seed)
    except RuntimeError:  # perhaps on this rank alone, and the others wait for it
        raise
    except Exception as error:  # the tokenizers library raises no narrower class
        return f"none: {error}"


def _last_logits(y: Tensor, index: int, model: GPT, mesh: Mesh) -> Tensor:
    vocab = model.config.vocab_size
    if not model.last:
        return torch.zeros(vocab, dtype=torch.float64, device=y.device)
    here = sequence_index(y.shape[1] * mesh.cp.size, mesh.cp, model.context, y.device) == index
    logits = all_reduce(y[0, here].double().sum(0), mesh.cp)  # one rank of cp has the token, the others add 0
    return gather(logits, mesh.tp, 0, vocab)


def _draw(logits: Tensor, temperature: float, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=draws))


def load_model(path: str | Path, mesh: Mesh = Mesh()) -> GPT:
    """Load the model of a checkpoint of any layout; the ranks of `mesh.tp` each load their shards.

    Raises:
        ValueError, OSError: if it can't be read.
    """
    manifest, _, config = open_checkpoint(path)
    model = GPT(config, mesh, device="meta", dtype=DTYPES[manifest.tensors["model/norm.weight"].dtype])
    materialize(model, 0, mesh.device)
    load(path, model, mesh=mesh)
    return model


def add_checkpoint_flags(parser: Parser) -> None:
    """Add the flags of a command that reads a checkpoint."""
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="of any layout")
    parser.add_argument("--tokenizer", help="'byte' or a tokenizer.json (default: the checkpoint's own, else byte)")
    parser.add_argument("--end-of-document", metavar="TOKEN", help="token of tokenizer.json that ends a document")


def find_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer that the flags name, or raise ValueError where it has more tokens than the model."""
    config = open_checkpoint(args.checkpoint)[2]
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_of_checkpoint(args.checkpoint), args.end_of_document)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}")
    return tokenizer


@reports_errors("python -m examples.gpt.generate")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if the checkpoint or the tokenizer can't be read."""
    parser = Parser(prog="python -m examples.gpt.generate", description="Sample from a checkpoint.")
    add_checkpoint_flags(parser)
    parser.add_argument("--prompt", default="", help="what the text begins with (default: a new document)")
    parser.add_argument("--new-tokens", type=int, default=120, help="at the most (default 120)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--seed", type=int, default=0)
    text = "guess tokens with the layers of --set mtp, at temperature 0"
    parser.add_argument("--draft", action="store_true", help=text)
    args = parser.parse_args(argv)
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature} is no number from 0")
    if args.new_tokens < 0:
        raise ValueError(f"--new-tokens {args.new_tokens} is smaller than 0")
    tokenizer = find_tokenizer(args)
    model = load_model(args.checkpoint)
    pipeline = Pipeline(model, Mesh(), 1, lambda y, target: y.sum())
    options = {name: getattr(args, name) for name in ("new_tokens", "temperature", "seed", "draft")}
    print(generate(model, pipeline, Mesh(), tokenizer, args.prompt, **options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
