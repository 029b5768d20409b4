"""Plan the fine-tuning of a model of transformers from the config.json of its folder; no weights are needed.

    mpcore memory --hf FOLDER --dp 16 --zero 3 --dtype bfloat16 --recompute full --seq-len 4096

The model is laid out as in `examples.finetune_hf`: by the tensor-parallel plan that it carries, in stages of
`pipeline_stages`, and sharded over data by ZeRO.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore.interop.cut import pipeline_stages
from mpcore.interop.hugging_face.config import read_json
from mpcore.interop.hugging_face.folder import check_counts
from mpcore.interop.hugging_face.loading import auto_config
from mpcore.interop.hugging_face.stored import transformers_module
from mpcore.interop.lora import add_lora
from mpcore.interop.parallelize import parallelize
from mpcore.layers.overlap import overlap_stages
from mpcore.mesh.axis import Mesh
from mpcore.tools.analysis.work import Work
from mpcore.tools.command_line import Parser
from mpcore.training.policies import Precision, Recompute, Zero
from mpcore.training.prepare import lay_out


def build(mesh: Mesh, arguments: list[str]) -> Work:
    """Return the work of the mesh's rank, for flags as text.

    Raises:
        ValueError: if the folder has no config.json of a model of transformers, the model has no such layout, or fewer
            learned positions than tokens.
    """
    args = _parse(arguments)
    if mesh.cp.size > 1:
        raise ValueError(f"--hf doesn't count sequences that are sharded over cp, and cp is {mesh.cp.size}: take cp 1")
    if args.micro_batch < 1 or args.seq_len < 1:
        raise ValueError(f"--micro-batch {args.micro_batch} and --seq-len {args.seq_len} must be at least 1")
    step = args.micro_batch * mesh.dp.size
    samples = step * mesh.pp.size if args.global_batch is None else args.global_batch
    if samples % step:
        raise ValueError(f"--global-batch {samples} is not a multiple of micro-batch x dp = {step}")
    model = _model(args.hf)
    _check_positions(model, args.seq_len)
    parallelize(model, tp=mesh.tp, ep=mesh.ep, etp=mesh.etp, check=False)
    if args.lora:
        add_lora(model, rank=args.lora)
    model.read_values = lambda *_: 0  # as of from_pretrained(defer=True): the cut is tested on a small copy
    stages, blocks, plan = pipeline_stages(model, mesh, micro_batches=samples // step, schedule=args.schedule)
    if args.overlap:
        overlap_stages(stages, mesh, args.overlap)
    for stage in stages:
        vars(stage).pop("read_values", None)
    precision = Precision(args.dtype)
    lay_out(stages, mesh, list(blocks.values()), seed=0, initialize=False, data=Zero(args.zero), precision=precision,
            recompute=Recompute(args.recompute), compile=None)  # fmt: skip
    shape, width = (args.micro_batch, args.seq_len), model.config.get_text_config().hidden_size

    def inputs(i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if plan.stages_of(mesh.pp.rank)[i] == 0:
            return (torch.empty(shape, dtype=torch.long),), {}
        return (torch.empty((*shape, width), dtype=precision.param_dtype),), {}

    def loss(output: Any) -> Tensor:
        logits = output.get("logits", torch.empty(0))
        if logits.shape[:-1] != shape:
            raise ValueError(f"{type(model).__name__} returns no logits of tokens: take a language model")
        logits = logits.flatten(0, 1).float()
        return F.cross_entropy(logits, torch.empty(len(logits), dtype=torch.long), reduction="sum")

    return Work(stages, plan, inputs, loss, autocast=precision.autocast_dtype)


def _model(folder: Path) -> Any:
    """Return the model of a folder's config.json on the meta device, in training mode."""
    transformers = transformers_module()
    values = read_json(folder / "config.json")
    check_counts(folder / "config.json", values, {})
    config, names = auto_config(folder), values.get("architectures") or [""]
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{folder}/config.json names the architectures {names}, no model class of transformers")
    config.use_cache = False
    with torch.device("meta"):
        model: Any = kind(config)
    return model.train()


def _check_positions(model: Any, tokens: int) -> None:
    """Raise ValueError if a sequence is longer than a learned table of positions, which fake ids don't notice."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    for name, module in model.named_modules():
        table = isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
        if table and most <= module.num_embeddings <= most + 2:  # OPT's has two rows more
            padding = -1 if module.padding_idx is None else module.padding_idx  # RoBERTa counts from the next row
            n = min(most, module.num_embeddings - 1 - padding)
            if tokens > n:
                raise ValueError(f"--seq-len {tokens} is more than the {n} positions of {name}: give {n} or fewer")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="mpcore plan --hf", description="flags of a model of transformers", examples=[])
    parser.add_argument("--hf", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a sample (4096)")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples of a micro-batch (1)")
    parser.add_argument("--global-batch", type=int, help="samples of a step (default: pp micro-batches a rank)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--zero", type=int, default=1, choices=range(4), help="stage of ZeRO (1)")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--overlap", type=int, default=0, metavar="N", help="hide messages of tp of N elements or more")
    parser.add_argument("--schedule", default="1f1b", help="the pipeline schedule (1f1b)")
    return parser.parse_args(arguments)
