"""Read and check the data, the tokenizer, the configuration and the schedule, before the model is built."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.gpt.arguments import check, find_carried, find_tokenizer, flag, model_config, plan_stages
from examples.gpt.blend import Corpora, parse_sources
from examples.gpt.config import GPTConfig
from examples.gpt.default_corpus import default_corpus
from examples.gpt.resume import other_dtype
from examples.gpt.samples import Samples
from examples.gpt.tokenizer import Tokenizer
from mpcore import Mesh
from mpcore.checkpoint import inspect
from mpcore.fault_tolerance.versions import code_versions
from mpcore.interop.hugging_face import Carried
from mpcore.mesh import check_same, raising_together
from mpcore.pipeline.schedules import Schedule


@dataclass(frozen=True)
class Setup:
    """The parts of a run that exist before its model.

    Attributes:
        tokenizer, carried: the tokenizer, and the files that are saved beside each checkpoint.
        config: the model's configuration.
        corpus: the facts of the data, by flag.
        train, held_out: the samples; without evaluation `held_out` is None.
        micro_batches: their number in a step, on each rank.
        plan, blocks: the pipeline schedule, and the blocks of each stage.
    """

    tokenizer: Tokenizer
    carried: Carried
    config: GPTConfig
    corpus: dict[str, Any]
    train: Samples
    held_out: Samples | None
    micro_batches: int
    plan: Schedule
    blocks: list[range]


def set_up(args: argparse.Namespace, mesh: Mesh) -> Setup:
    """Read and check the files and sizes that the flags name.

    Raises:
        ValueError: on every rank, if something can't be read, doesn't fit, or differs between ranks.
    """
    check_same("code", code_versions(Path(__file__).parent))
    with raising_together((ValueError, OSError)):
        tokenizer = find_tokenizer(args)
        carried = find_carried(args, tokenizer)
        prefixes, weights = parse_sources(args.data or [default_corpus(tokenizer=tokenizer)])
        refused = other_dtype(args.init_from, inspect(args.init_from), args.dtype) if args.init_from else None
        if refused is not None:
            raise refused
        data = Corpora(prefixes, weights)
        config = model_config(args, tokenizer.vocab_size)
        micro_batches = check(args, config, mesh)
        plan, blocks = plan_stages(args, config, mesh.pp.size, micro_batches)
        data.check_tokens(config.vocab_size, mesh.job.rank, mesh.job.size)
        train, held_out = data.split(config.seq_len, seed=args.seed, evaluate=args.eval_every > 0)
        made = Setup(tokenizer, carried, config, data.about, train, held_out, micro_batches, plan, blocks)
    check_same("configuration", {**{flag(name): value for name, value in vars(args).items()}, **made.corpus})
    check_same("data", data.files)
    return made


def about(setup: Setup, optimizer: str) -> dict[str, Any]:
    """Return what must not change between a checkpoint and the run that resumes from it."""
    return {
        "model": dataclasses.asdict(setup.config),
        "corpus": setup.corpus,
        "optimizer": optimizer,
        "tokenizer": setup.tokenizer.fingerprint,
    }
