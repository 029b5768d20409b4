"""The command line of `examples.gpt.pretrain`, and the files that give its flags."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from examples.gpt.presets import PRESETS
from mpcore.layers.attention.sequence import KINDS
from mpcore.layers.moe.dispatch import DISPATCHES
from mpcore.layers.moe.router import AUX_LOSSES
from mpcore.optim.schedules import SCHEDULES
from mpcore.pipeline.schedules import NAMES
from mpcore.tools.command_line import Parser

FROM_0 = ("bitwise", "experts", "shared_experts", "warmup", "twin", "eval_every", "record_tensors", "save_every",
          "max_skips", "check_replicas", "check_speed")  # fmt: skip
FROM_1 = ("tp", "pp", "cp", "ep", "dp", "etp", "replicate", "cp_inner", "virtual_stages", "workers", "local_steps",
          "fragments", "layers", "d_model", "heads", "kv_heads", "d_ff", "top_k", "expert_d_ff", "moe_every", "seq_len",
          "steps", "lr_decay_steps", "global_batch", "rampup_batch_size", "micro_batch", "eval_samples", "keep",
          "exit_step")  # fmt: skip
NOT_NEGATIVE = ("lr", "min_lr", "weight_decay", "init_std", "aux_coefficient", "router_z_loss", "bias_rate")
POSITIVE = ("timeout", "outer_lr", "routed_scale", "capacity_factor")
SHARES = ("dropout", "outer_momentum", "router_jitter", "betas")
DTYPES = {n: getattr(torch, n) for n in ("float64", "float32", "bfloat16", "float16")}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Every flag has a default; `--config` names a file that gives flags first.

    Raises:
        ValueError: as `check_ranges`.
        SystemExit: if argparse can't parse the flags.
    """
    args = _parse(argv)
    check_ranges(args)
    return args


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m examples.gpt.pretrain", description="Pretrain a GPT on any mesh.",
        examples=[
            "python -m examples.gpt.pretrain --steps 10",
            "torchrun --nproc-per-node 4 -m examples.gpt.pretrain --tp 2 --pp 2 --sequence-parallel",
        ],
    )  # fmt: skip
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="a .toml with flags, or the config.json of another run; flags on the command line win",
    )
    add = parser.add_argument_group("mesh").add_argument
    for axis, text in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        add(f"--{axis}", type=int, default=1, help=f"{text} parallel size (default 1)")
    add("--dp", type=int, help="data parallel size (default: what the others leave of the world)")
    add("--etp", type=int, help="tensor parallel size inside each expert (default: tp)")
    add(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=1,
        help="over data shard nothing, optimizer state, gradients too, parameters too (default 1)",
    )
    add("--replicate", type=int, default=1, help="groups of data ranks, such as nodes, that hold replicas (default 1)")
    add("--sequence-parallel", action="store_true", help="cut activations along the sequence between tp regions")
    add("--cp-kind", choices=KINDS, default="zigzag", help="how --cp cuts sequences and attends (default zigzag)")
    add("--cp-inner", type=int, help="ranks of a sub-group of --cp-kind two-level (default: as a node allows)")
    add("--schedule", default="1f1b", metavar="NAME|PATH.csv", help=f"of --pp: {', '.join(NAMES)} (default 1f1b)")
    add("--virtual-stages", type=int, help="stages on each pipeline rank (default: what the schedule takes)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where each process has a GPU")
    add("--bitwise", type=int, default=0, metavar="V",
        help="bit for bit the same run on every mesh whose tp and dp divide V, a power of two; replaces --micro-batch "
        "(docs/bitwise.md; default 0: off)")  # fmt: skip
    add("--trace", action="store_true", help="draw what each pipeline rank did in the last step, and its plan")
    add = parser.add_argument_group("local updates").add_argument
    add(
        "--workers",
        type=int,
        default=1,
        help="models to train, each on a mesh as above, and to merge (DiLoCo; default 1)",
    )
    add("--local-steps", type=int, help="steps that workers take on their own between two merges (default 50)")
    add("--outer-lr", type=float, help="of the merge; with 1 and momentum 0 it averages: Local SGD (default 0.7)")
    add("--outer-momentum", type=float, help="Nesterov momentum of the merge (default 0.9)")
    add("--fragments", type=int, help="merge so many parts of the model in turn (default 1)")
    add = parser.add_argument_group("model").add_argument
    add("--preset", choices=sorted(PRESETS), help="shape that the flags below change (default tiny)")
    add("--layers", type=int, help="blocks (default: the preset's, as of those below; tiny has 4)")
    add("--d-model", type=int, help="width (tiny: 128)")
    add("--heads", type=int, help="attention heads (tiny: 4)")
    add("--kv-heads", type=int, help="heads of keys and values (tiny: as many as heads)")
    add("--d-ff", type=int, help="hidden width of the MLP (tiny: 8/3 of the width, up to a multiple of 64)")
    add("--dropout", type=float, help="share of activations that training drops (tiny: 0)")
    add("--tie-embeddings", action="store_true", default=None, help="head and embedding share one table")
    add(
        "--init-std",
        type=float,
        help="standard deviation of first weights; of output projections it is divided by sqrt(2 layers) (tiny: 0.02)",
    )
    add = parser.add_argument_group("mixture of experts").add_argument
    add("--experts", type=int, help="experts in the place of each MLP; 0: none (default: the preset's)")
    add("--top-k", type=int, help="experts each token goes through")
    add("--shared-experts", type=int, help="experts' width that every token goes through besides")
    add("--expert-d-ff", type=int, help="hidden width of each expert (default: the dense MLP's)")
    add("--routed-scale", type=float, help="factor of the experts' weights; top-k: as large as a dense MLP (default 1)")
    add("--moe-every", type=int, help="every how many-th block has experts, the others a dense MLP")
    add("--balance", choices=("aux", "bias", "none"), help="of the experts' loads: by a loss, by a bias, not at all")
    add("--aux-loss", choices=AUX_LOSSES, help="scope of the loss of --balance aux (default sequence)")
    add("--aux-coefficient", type=float, help="factor of that loss (default 0.01)")
    add("--router-z-loss", type=float, help="factor of the squared log-sum-exp of the router's logits (default 0)")
    add("--bias-rate", type=float, help="step of the bias of --balance bias (default 0.001)")
    add("--router-jitter", type=float, help="noise on the router's input in training (default 0)")
    add(
        "--capacity-factor", type=float, help="what is over factor x mean load of a sequence is dropped (default: none)"
    )
    add("--dispatch", choices=DISPATCHES, help="how tokens reach experts on other ranks: all_to_all sends less")
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        nargs="+",
        metavar="[WEIGHT] PREFIX",
        help="PREFIX of .bin and .idx, as examples.gpt.prepare writes (default: Python's standard library); of "
        "several, such as 0.7 web 0.3 code, samples in these shares, or without weights by their sizes",
    )
    add(
        "--without-documents",
        metavar="FILE",
        help="train as if these documents were not in --data: a line for each, PREFIX NUMBER, as "
        "examples.gpt.which_text prints them",
    )
    add("--tokenizer", help="'byte' or a tokenizer.json (default byte)")
    add("--end-of-document", metavar="TOKEN", help="token of tokenizer.json that ends a document")
    add(
        "--document-masking",
        action="store_true",
        help="tokens attend within their own document, and positions begin anew in each; --end-of-document ends one",
    )
    add(
        "--eval-data",
        nargs="+",
        default=[],
        metavar="NAME=PREFIX",
        help="corpora that are only measured, each by its name, besides the held-out part of --data",
    )
    add("--seq-len", type=int, help="tokens a sample (default: the preset's)")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=200, help="of the whole run (default 200)")
    add("--global-batch", type=int, default=16, help="samples a step, over all ranks of all workers (16)")
    add(
        "--rampup-batch-size",
        type=int,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="begin with START samples a step, and add INCREMENT at equal distances up to --global-batch, which is "
        "reached after SAMPLES (default: --global-batch from the first step on)",
    )
    add("--micro-batch", type=int, default=2, help="samples a forward, on one rank (default 2)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (default 0.003)")
    add("--min-lr", type=float, help="lowest learning rate after warm-up (default: a tenth of --lr)")
    add("--warmup", type=int, default=20, help="steps of linear warm-up (default 20)")
    add("--lr-schedule", choices=SCHEDULES, default="cosine", help="the way down to --min-lr (default cosine)")
    add("--lr-decay-steps", type=int, help="steps until the rate reaches --min-lr, where it stays (default: --steps)")
    add("--betas", type=float, nargs=2, default=[0.9, 0.95], help="of Adam's two moments (default 0.9 0.95)")
    add(
        "--optimizer",
        choices=("adamw", "adamw-bf16", "muon"),
        default="adamw",
        help="adamw-bf16: moments in bfloat16, rounded at random; muon: for the blocks' matrices (default adamw)",
    )
    add("--weight-decay", type=float, default=0.1, help="of matrices and tables (default 0.1)")
    add("--clip", type=float, default=1.0, help="bound on the gradient norm (default 1); 0 or less: none")
    add(
        "--recompute",
        default="none",
        metavar="{none,selective,full,budget=0.5}",
        help="activations computed again in backward: norms, activations and attention cores, whole blocks, or as "
        "much as keeps a share of the bytes (default none)",
    )
    add(
        "--offload",
        nargs="+",
        choices=("none", "optimizer", "activations", "parameters"),
        default=["none"],
        help="what lies in the host's memory until it is needed; several may be given (default none)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of weights, dropout and the order of the data, not of what is held out (default 0)",
    )
    add(
        "--twin",
        type=int,
        default=0,
        metavar="N",
        help="train twin N of the run without this flag, which differs by rounding alone: the samples of each step in "
        "another order, first weights rounded another way; for mpcore compare (default 0: the run itself)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="bfloat16: weights, activations and messages in bfloat16, masters and sums of gradients in fp32; float16: "
        "fp32 weights, matrix products in float16 (default float32)",
    )
    add("--autocast", action="store_true", help="with --dtype bfloat16: fp32 weights, matrix products in bfloat16")
    add(
        "--residual-dtype",
        choices=("float32",),
        help="keep the residual stream and pipeline messages in fp32 (default: in --dtype; with autocast in fp32)",
    )
    add(
        "--fp8",
        action="store_true",
        help="the blocks' linear layers, but experts, multiply eight-bit floats, scaled in blocks of 128; all else "
        "stays in --dtype",
    )
    add(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="training steps run each block as torch.compile makes it, which takes a while at first (default backend: "
        "inductor); a schedule that splits backward computes a compiled block's twice",
    )
    add = parser.add_argument_group("results").add_argument
    add("--eval-every", type=int, default=50, help="steps between evaluations; 0: none (default 50)")
    add("--eval-samples", type=int, default=32, help="held-out samples an evaluation (default 32)")
    add(
        "--out",
        default="runs/pretrain",
        help="folder for metrics.jsonl, config.json, loss.png, checkpoints; each of several workers has a folder in it "
        "(default runs/pretrain)",
    )
    add("--log-to", nargs="+", choices=("tensorboard", "wandb"), default=[], help="besides metrics.jsonl")
    add(
        "--record-tensors",
        type=int,
        default=0,
        metavar="N",
        help="every N steps write the norms of each parameter and its gradient to OUT/tensors.jsonl, for mpcore "
        "compare; 0: never (default 0)",
    )
    add("--profile", metavar="FIRST:LAST", help="write what these steps did to OUT/profile, for ui.perfetto.dev")
    add = parser.add_argument_group("checkpoints").add_argument
    add(
        "--save-every",
        type=int,
        default=0,
        help="steps between checkpoints in OUT/checkpoints; 0: only the end (default)",
    )
    add("--no-save", action="store_true", help="write no checkpoint at the end either")
    add("--keep", type=int, help="how many of the last checkpoints stay (default: all)")
    add("--async-save", action="store_true", help="write in the background while training goes on")
    add(
        "--resume",
        default="none",
        metavar="{auto,PATH,none}",
        help="go on from a checkpoint of any layout; auto: from the newest in OUT that is whole (default none)",
    )
    add(
        "--init-from-hf",
        metavar="DIR",
        help="begin with a Hugging Face model: its shape, its weights and, where none is named, its tokenizer.json; "
        "without --seq-len, samples are as long as its max_position_embeddings",
    )
    add(
        "--init-from",
        metavar="PATH",
        help="begin with the weights of a checkpoint of any layout: its shape and, where none is named, its tokenizer; "
        "optimizer, data and step begin anew",
    )
    add(
        "--exit-step",
        type=int,
        help="save and exit with status 0 when so many steps of the whole run are done (default: --steps)",
    )
    add = parser.add_argument_group("faults").add_argument
    add("--timeout", type=float, default=600, help="seconds without progress: a hang, to be explained (default 600)")
    add("--max-skips", type=int, default=20, help="steps in a row that may be skipped for NaN or infinity (20)")
    add("--check-replicas", type=int, default=100, metavar="N", help="compare replicas every N steps; 0: never (100)")
    add("--check-speed", type=int, default=50, metavar="N", help="look for slow ranks every N steps; 0: never (50)")
    argv = sys.argv[1:] if argv is None else argv
    file = _config_of(argv)
    if file is None:
        return parser.parse_args(argv)
    name = parser.prog
    try:
        parser.prog = f"{name} --config {file}"  # who is to blame for an error
        given = flags_of_file(file)
        parser.parse_args(given)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    parser.prog = name
    return parser.parse_args([*given, *argv])


def _config_of(argv: list[str]) -> Path | None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    return finder.parse_known_args(argv)[0].config


def flags_of_file(path: Path) -> list[str]:
    """Read the flags of a .toml file, whose tables are for readers alone, or of the config.json that a run wrote.

    Raises:
        ValueError: if it isn't TOML or JSON, or gives a name twice.
        OSError: if it can't be read.
    """
    text = path.read_text()
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content = json.loads(text)["run"] if path.suffix == ".json" else toml.loads(text)
    tables = [{key: value for key, value in content.items() if not isinstance(value, dict)}]
    tables += [value for value in content.values() if isinstance(value, dict)]
    names = [flag(name) for table in tables for name in table]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    flags: list[str] = []
    for name, value in zip(names, (value for table in tables for value in table.values()), strict=True):
        if value is not None and value is not False and value != [] and name != "--config":
            flags += [name] if value is True else [name, *map(str, value if isinstance(value, list) else [value])]
    return flags


def check_ranges(args: argparse.Namespace) -> None:
    """Refuse a number that no run can have, whatever its other flags and its ranks are.

    Raises:
        ValueError: with the flag, its number, and the numbers that it may have.
    """
    ranges: list[tuple[Sequence[str], Callable[[float], bool], str]] = [
        (FROM_0, lambda x: x >= 0, "smaller than 0"),
        (FROM_1, lambda x: x >= 1, "smaller than 1"),
        (NOT_NEGATIVE, lambda x: 0 <= x < math.inf, "no number from 0"),
        (POSITIVE, lambda x: 0 < x < math.inf, "no number above 0"),
        (SHARES, lambda x: 0 <= x < 1, "no number from 0 to below 1"),
        (("clip",), lambda x: not math.isnan(x), "no number; 0 bounds nothing"),
    ]
    for names, is_legal, fault in ranges:
        for name in names:
            value = getattr(args, name)
            for each in value if isinstance(value, list) else [value]:
                if each is not None and not is_legal(each):
                    raise ValueError(f"{flag(name)} {each} is {fault}")


def flag(name: str) -> str:
    """Return the flag of a name in the parsed arguments."""
    return f"--{name.replace('_', '-')}"
