"""Read and check the data, the tokenizer, the configuration and the schedule, before the model is built."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.gpt.arguments import flag
from examples.gpt.blend import Corpora, open_eval_sets, parse_sources, read_without
from examples.gpt.checks import check, find_carried, find_tokenizer, model_config, plan_stages
from examples.gpt.config import GPTConfig
from examples.gpt.dashboards import check_installed
from examples.gpt.default_corpus import default_corpus
from examples.gpt.ramp import Ramp, read_ramp
from examples.gpt.resume import other_dtype
from examples.gpt.samples import Samples
from examples.gpt.tokenizer import Tokenizer
from mpcore import Mesh
from mpcore.checkpoint import inspect
from mpcore.interop.hugging_face import Carried
from mpcore.mesh import check_same, raising_together
from mpcore.pipeline.schedules import Schedule, find_schedule
from mpcore.tools.fault_tolerance.versions import code_versions


@dataclass(frozen=True)
class Setup:
    """The parts of a run that exist before its model.

    Attributes:
        tokenizer, carried: the tokenizer, and the files that are saved beside each checkpoint.
        config: the model's configuration.
        corpus: the facts of the data, by flag.
        train, held_out: the samples; without evaluation `held_out` is None.
        eval_sets: the samples of each validation set, by its name.
        ramp: the samples of each step.
        micro_batches: their number in a step of the whole batch, on each rank.
        plan, blocks: the pipeline schedule, and the blocks of each stage.
    """

    tokenizer: Tokenizer
    carried: Carried
    config: GPTConfig
    corpus: dict[str, Any]
    train: Samples
    held_out: Samples | None
    eval_sets: dict[str, Samples]
    ramp: Ramp
    micro_batches: int
    plan: Schedule
    blocks: list[range]


def read_model(args: argparse.Namespace, mesh: Mesh, config: GPTConfig | None = None) -> dict[str, Any]:
    """Read the tokenizer, the configuration and the schedule, and check that they fit each other and the mesh.

    Args:
        args, mesh: the run's.
        config: the model, in place of the one that the flags name.

    Returns:
        The fields of `Setup` that don't depend on the data.

    Raises:
        ValueError: if something can't be read, or doesn't fit.
    """
    check_installed(args.log_to)
    tokenizer = find_tokenizer(args)
    carried = find_carried(args, tokenizer)
    refused = other_dtype(args.init_from, inspect(args.init_from), args.dtype) if args.init_from else None
    if refused is not None:
        raise refused
    config = config or model_config(args, tokenizer.vocab_size)
    micro_batches = check(args, config, mesh)
    plan, blocks = plan_stages(args, config, mesh.pp.size, micro_batches)
    ramp = read_ramp(args, args.global_batch // micro_batches)
    for size in ramp.sizes:
        find_schedule(args.schedule, mesh.pp.size, size * micro_batches // args.global_batch, args.virtual_stages)
    return {"tokenizer": tokenizer, "carried": carried, "config": config, "ramp": ramp,
            "micro_batches": micro_batches, "plan": plan, "blocks": blocks}  # fmt: skip


def open_data(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[Corpora, dict[str, Corpora]]:
    """Open the corpora of `--data`, and those of `--eval-data` by name."""
    prefixes, weights = parse_sources(args.data or [default_corpus(tokenizer=tokenizer)])
    without = read_without(args.without_documents, prefixes)
    return Corpora(prefixes, weights, without), open_eval_sets(args.eval_data, prefixes)


def set_up(args: argparse.Namespace, mesh: Mesh, config: GPTConfig | None = None) -> Setup:
    """Read and check the files and sizes that the flags name; `config` replaces the model that they name.

    Raises:
        ValueError: on every rank, if something can't be read, doesn't fit, or differs between ranks.
    """
    check_same("code", code_versions(Path(__file__).parent))
    with raising_together((ValueError, OSError)):
        model = read_model(args, mesh, config)
        data, eval_data = open_data(args, model["tokenizer"])
        for corpora in (data, *eval_data.values()):
            corpora.check_tokens(model["config"].vocab_size, mesh.job.rank, mesh.job.size)
        train, held_out = data.split(model["config"].seq_len, seed=args.seed, evaluate=args.eval_every > 0)
        sets = {name: corpora.whole(model["config"].seq_len) for name, corpora in eval_data.items()}
        made = Setup(corpus=data.about, train=train, held_out=held_out, eval_sets=sets, **model)
    check_same("configuration", {**{flag(name): value for name, value in vars(args).items()}, **made.corpus})
    for corpora in (data, *eval_data.values()):
        check_same("data", corpora.files)
    return made


def about(setup: Setup, optimizer: str) -> dict[str, Any]:
    """Return what must not change between a checkpoint and the run that resumes from it."""
    return {
        "model": dataclasses.asdict(setup.config),
        "corpus": setup.corpus,
        "optimizer": optimizer,
        "tokenizer": setup.tokenizer.fingerprint,
    }
