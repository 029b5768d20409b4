"""The parsers of all commands. They import no torch, so that `mpcore COMMAND --help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mpcore.tools.command_line import Parser

PORT = 29500  # torchrun's
AXES = ("tp", "pp", "cp", "ep", "dp", "etp", "cp_inner")
PICTURES = (".png", ".svg", ".pdf")
WIDE = ("micro-batch=1,2,4", "recompute=none,selective,full", "zero=1,2,3", "schedule=1f1b,interleaved",
        "sequence-parallel=on")  # fmt: skip
"""What `mpcore plan --wide` varies: the flags of `examples.gpt`."""
OVERLAP = ("--overlap", "4194304")
"""The flags that `--wide` adds for the rows of the table with tp above 1."""
PROFILES = Path(__file__).parent / "analysis" / "profiles"


def documents() -> Parser:
    parser = Parser(
        prog="mpcore documents",
        description="List the documents behind steps of a run, in lines that the field without_documents reads.",
        examples=[
            "mpcore documents runs/one",
            "mpcore documents runs/one --steps 812 --checkpoint runs/one/checkpoints/step-00000800",
        ],
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--steps", type=int, nargs="+", help="default: all spikes and skipped steps")
    parser.add_argument("--checkpoint", type=Path, help="rank the documents by their loss under these weights")
    text = "module that trained it (default %(default)s)"
    parser.add_argument("--program", default="examples.gpt.pretrain", help=text)
    parser.add_argument("--most", type=int, default=20, help="how many lines (default 20)")
    return parser


def from_config() -> Parser:
    parser = Parser(
        prog="mpcore from-config",
        description="Write a run.toml for examples.gpt from a file of Megatron-LM (.sh, model_config.yaml), torchtitan "
        "(.toml), nanotron (.yaml), gpt-neox (.yml) or DeepSpeed (.json); list what differs. The status is 0, or 1 if "
        "a setting that changes the result is not available: the file is written, and the last list says what to do.",
        examples=["mpcore from-config train.sh", "mpcore from-config llama3_8b.toml --out runs/llama3.toml"],
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the settings of the other trainer")
    parser.add_argument("--out", type=Path, default=Path("run.toml"), help="the file to write (default run.toml)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    return parser


def coordinate_check() -> Parser:
    """Return the parser of `mpcore coordinate-check`."""
    parser = Parser(
        prog="mpcore coordinate-check",
        description="Train a model at several widths for a few steps, and check that its activations keep their size: "
        "what muP promises. Each layout must have the activations of one process.",
        examples=[
            "mpcore coordinate-check examples.mup:train --widths 32,64,128,256 --layouts tp2,dp2 --out mup.svg",
            "mpcore coordinate-check examples.mup:standard",
        ],
    )
    parser.add_argument("train", metavar="TRAIN", help="package.module:function, called as train(width, mesh)")
    parser.add_argument("--widths", type=_sizes, default=[64, 128, 256], help="default 64,128,256")
    parser.add_argument("--layouts", type=_names, default=[], help="such as tp2,pp2: also try these axes")
    parser.add_argument("--steps", type=int, default=4, help="steps to train (default 4)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative difference of layouts (default 1e-3)")
    parser.add_argument("--out", type=Path, help="draw a plot, such as mup.svg")
    return parser


def explain() -> Parser:
    parser = Parser(
        prog="mpcore explain",
        description="Say why a run hung: which rank is at fault, and where each rank is.",
        examples=["mpcore explain runs/gpt/hang", "mpcore explain /shared/run/hang"],
    )
    parser.add_argument("folder", metavar="FOLDER", help="where a watchdog left the ranks' logs, such as OUT/hang")
    return parser


def doctor() -> Parser:
    parser = Parser(
        prog="mpcore doctor",
        description="Check each kernel against its reference, each collective between two processes against its "
        "definition, and what a launch needs; print the versions and back ends, which belong in every bug report.",
        examples=["mpcore doctor", "TRITON_INTERPRET=1 mpcore doctor --port 29600"],
    )
    parser.add_argument("--port", type=_port, default=PORT, help=f"the port that a launch meets at ({PORT})")
    return parser


def schedule() -> Parser:
    parser = Parser(
        prog="mpcore schedule",
        description="Prove a pipeline's schedule, and draw it: time goes to the right, a row is a rank.",
        examples=[
            "mpcore schedule --schedule zbv --stages 4 --microbatches 8 --out plan.png",
            "mpcore schedule --schedule mine.csv --forward 1 --input 1.1 --weight 0.9 --message 0.1",
        ],
    )
    plan = parser.add_argument_group("the schedule")
    plan.add_argument(
        "--schedule", default="1f1b", help="its name, such as 1f1b, zbv or dualpipev, or the path of a .csv"
    )
    plan.add_argument("--stages", type=int, default=4, help="pipeline ranks (default 4)")
    plan.add_argument("--microbatches", type=int, default=8, help="micro-batches a step (default 8)")
    plan.add_argument("--virtual-stages", type=int, help="stages each rank holds (default: what the schedule takes)")
    times = parser.add_argument_group("times of a stage's parts, in any unit")
    times.add_argument("--forward", type=float, default=1.0, help="time of F (default 1)")
    times.add_argument("--input", type=float, default=1.0, help="time of I; B takes I + W (default 1)")
    times.add_argument("--weight", type=float, default=1.0, help="time of W (default 1)")
    times.add_argument("--message", type=float, default=0.0, help="time a message takes (default 0)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", default="pipeline.png", help="the picture (default pipeline.png); .json: Chrome trace")
    return parser


def checkpoint() -> Parser:
    parser = Parser(
        prog="mpcore checkpoint",
        description="Look into checkpoints, and convert them.",
        examples=[
            "mpcore checkpoint inspect runs/gpt/checkpoints/step-00000120",
            "mpcore checkpoint diff runs/a/checkpoints/step-00000120 runs/b/checkpoints/step-00000120",
            "mpcore checkpoint convert dcp/step-1000 checkpoints/step-00001000 --config runs/gpt/config.json",
        ],
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {"inspect": "print what is inside", "verify": "read and check every byte"}.items():
        one = commands.add_parser(name, help=text)
        one.add_argument("path", nargs="+")
        if name == "inspect":
            one.add_argument("--all", action="store_true", help="list each tensor of the optimizer too")
    two = commands.add_parser("diff", help="compare two bit for bit, whatever layouts wrote them")
    two.add_argument(
        "--rtol", type=float, default=0.0, help="ignore differences up to this share of a tensor's largest value"
    )
    two.add_argument("a")
    two.add_argument("b")
    other = commands.add_parser("convert", help="a folder of torch.distributed.checkpoint to a checkpoint, or back")
    other.add_argument("source", help="a folder with .metadata, or a checkpoint of any layout")
    other.add_argument("target", help="the folder to make of it")
    other.add_argument("--config", metavar="PATH", help="config.json of a run, whose model --init-from then builds")
    return parser


def verify() -> Parser:
    parser = Parser(
        prog="mpcore verify",
        description="Compare a model under each layout with itself on one process: what it returns in training and in "
        "eval(), loss, gradients, and parameters and persistent buffers after a step. Write build as a def at module "
        "level, which other processes import. The module also has batch, called without arguments: it returns a dict "
        'with "x" and "target". And if '
        "needed loss(output, target, mesh), a sum. For pp build(mesh) returns the "
        "stage of mesh.pp.rank, for sp it takes sequence_parallel.",
        examples=[
            "mpcore verify mine:build --layouts tp2,tp2sp,pp2,dp2zero3 --plot verify.png",
            "mpcore verify --hf path/to/model --layouts tp2,tp3,pp2,tp2pp2,dp2zero3 --set hidden_size=96",
        ],
    )
    parser.add_argument(
        "model", nargs="?", metavar="package.module:build", help="build(mesh) or build(mesh, sequence_parallel)"
    )
    parser.add_argument(
        "--hf", metavar="PATH", help="instead of build: the folder or config.json of a Hugging Face model"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a field of the config of --hf"
    )
    run = parser.add_argument_group("what runs")
    run.add_argument("--layouts", default="tp2,dp2", help="such as tp2,tp2sp,pp2,dp2zero3 (default tp2,dp2)")
    kinds = ("float64", "float32", "bf16", "fp16")
    run.add_argument("--dtype", choices=kinds, default="float64", help="of the layouts' runs (default float64)")
    run.add_argument("--seed", type=int, default=0, help="of the first values (default 0)")
    run.add_argument("--timeout", type=float, default=120.0, help="seconds of a run under a layout (default 120)")
    text = "require equal bits, with this virtual degree (docs/bitwise.md); also pass --dtype float32"
    run.add_argument("--bitwise", type=int, default=0, metavar="V", help=text)
    output = parser.add_argument_group("output")
    output.add_argument("--plot", metavar="PATH", help="draw each gradient's difference, as .png, .svg or .pdf")
    return parser


def replay() -> Parser:
    parser = Parser(
        prog="mpcore replay",
        description="Replay steps of a run as all of its ranks in this process, and name the first operator whose "
        "output isn't finite.",
        examples=["mpcore replay runs/gpt --step 120", "mpcore replay runs/mine --step 7 --program mine.train"],
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="folder of a run, with config.json and checkpoints")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, as in metrics.jsonl")
    parser.add_argument(
        "--program", default="examples.gpt.pretrain", metavar="MODULE",
        help="the module that trained it, with parse, mesh_arguments and Trainer (default: %(default)s)",
    )  # fmt: skip
    return parser


def replay_workers() -> Parser:
    """Return the parser of `mpcore replay-workers`."""
    parser = Parser(
        prog="mpcore replay-workers",
        description="Train a run of workers that were jobs of their own again in this process, in the order of its "
        "journal, and compare the hashes of all updates and anchors. Or draw who trained, waited and died.",
        examples=["mpcore replay-workers runs/worker-0", "mpcore replay-workers runs/worker-0 --picture run.png"],
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a worker that led the run, or of its replica")
    parser.add_argument(
        "--program", default="examples.gpt.pretrain", metavar="MODULE",
        help="the module that trained it, with parse, mesh_arguments and Trainer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"draw the journal, as {' or '.join(PICTURES)}")
    return parser


def preflight() -> Parser:
    parser = Parser(
        prog="mpcore preflight",
        usage="mpcore preflight [--memory GB] [--timeout S] [--json] -- COMMAND",
        description="Try on this machine what a large run will do. COMMAND is the run's own, with its launcher's words "
        "if it has any: a toy with its divisions, ties, schedule, dtype and options is trained on up to 8 local "
        "processes and on one, saved and loaded on another layout, stopped and resumed, and killed; memory and bytes "
        "are planned in full size, and all data is opened. Or a model, package.module:build --layouts tp2,dp2.",
        examples=[
            "mpcore preflight -- torchrun --nproc-per-node 8 -m examples.gpt.pretrain --tp 4 --pp 2",
            "mpcore preflight -- package.module:build --layouts tp2,tp2sp,dp2zero3",
        ],
    )
    parser.add_argument("--memory", type=float, metavar="GB", help="of a GPU, in 10^9 bytes (default: of this one)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each toy (default 120)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def memory(argv: Sequence[str] = ()) -> Parser:
    text = "Count the memory that a rank of any layout needs, on fake tensors: nothing is allocated."
    parser = _of_rank("mpcore memory", text, argv)
    text = f"draw the same parts for each pipeline rank, as {' or '.join(PICTURES)}"
    parser.add_argument("--plot", "--out", metavar="FILE", help=text)
    text = f"{', '.join(profile_names())}, or the path of a profile: say whether it fits, and draw the GPU's memory"
    parser.add_argument("--machine", metavar="NAME", help=text)
    return parser


def ledger(argv: Sequence[str] = ()) -> Parser:
    text = "Count what a step sends: the collectives and messages of each kind over each axis, and their bytes."
    return _of_rank("mpcore ledger", text, argv)


def _of_rank(prog: str, about: str, argv: Sequence[str]) -> Parser:
    """Return a parser of a target, the mesh and the rank."""
    example = f"{prog} examples.gpt.plan:build --tp 8 --pp 4 --dp 32 --preset llama3-70b --global-batch 1024"
    plot = [f"{example} --out memory.png"] if prog == "mpcore memory" else []
    parser = Parser(prog=prog, description=about, examples=[example, *plot])
    text = "module:function, called as function(mesh, arguments), which returns a Work; flags not listed here are its "
    _add_target(parser, argv, f"{text}arguments")
    for name in ("tp", "cp", "pp", "ep", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"size of the {name} axis (default 1)")
    parser.add_argument("--etp", type=int, help="tensor parallel size inside each expert (default: tp)")
    parser.add_argument("--cp-inner", type=int, help="ranks of a sub-group of cp, for two-level (default: none)")
    parser.add_argument("--rank", type=int, default=0, help="the rank to plan (default 0)")
    parser.add_argument("--cpu", action="store_true", help="count the operators of a CPU instead of a GPU's kernels")
    return parser


def _add_target(parser: Parser, argv: Sequence[str], about: str, nargs: str | None = None) -> None:
    """Add the flag --hf, and the target unless this flag is in `argv`: its place could take the value of another."""
    parser.add_argument("--hf", metavar="FOLDER", help="a config.json of transformers, not a target")
    if any(word.partition("=")[0] == "--hf" for word in argv):
        parser.set_defaults(target="mpcore.tools.analysis.hugging_face:build")
    else:
        parser.add_argument("target", help=about, nargs=nargs)


def plan(argv: Sequence[str] = ()) -> Parser:
    example = "mpcore plan examples.gpt.plan:build --world 16 --preset llama3-8b --dtype bfloat16 --wide"
    parser = Parser(
        prog="mpcore plan", usage="mpcore plan TARGET --world N [FLAGS] [FLAGS OF THE TARGET]",
        description="Find the layouts of a model that fit a machine, and estimate how long a step of each takes there.",
        examples=[example, "mpcore plan --hf llama-3-8b --world 16 --seq-len 4096 --zero 3"],
    )  # fmt: skip
    add = parser.add_argument
    text = "module:function, called as function(mesh, arguments), which returns a Work; flags not listed here are its "
    own = "arguments. Those of examples.gpt.plan:build: python -m examples.gpt.pretrain --help lists them, and "
    _add_target(parser, argv, f"{text}{own}--vocab-size N, --stage-blocks N,N,.., --even-stages", nargs="?")
    add("--world", type=int, help="ranks, one a GPU")
    add("--machine", default="h100", help=f"{', '.join(profile_names())}, or the path of a profile (h100)")
    add("--memory", type=float, help="GiB of a GPU (default: the machine's)")
    add("--node", type=int, help="ranks of a node; tp stays in one (default: the machine's)")
    for name in AXES:
        texts = {"etp": "sizes to try; else that of tp", "cp_inner": "sizes of sub-groups of cp to try; else none"}
        other = "sizes to try (default: 1)" if name in ("cp", "ep") else "sizes to try (default: all that fit)"
        add(f"--{name.replace('_', '-')}", type=_sizes, metavar="N,N", help=texts.get(name, other))
    add("--vary", action="append", default=[], metavar="FLAG=V,V", help="values of a flag to try; also on, off")
    add("--wide", action="store_true", help=f"vary flags of examples.gpt: {' '.join(WIDE)}; overlap of rows shown")
    add("--top", type=_positive, default=20, help="lines to print (20)")
    add("--explain", type=int, metavar="ROW", help="print only where the time and the memory of a row go")
    add("--unfused", action="store_true", help="attention is written out: its scores are in memory")
    add("--cpu", action="store_true", help="count the operators of a CPU instead of a GPU's kernels")
    add("--out", type=Path, help=f"draw the layouts that fit, as {' or '.join(PICTURES)}")
    return parser


def parse_target(parser: Callable[[Sequence[str]], Parser], argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. All flags that the parser doesn't know are for the target, and returned as `arguments`."""
    argv = sys.argv[1:] if argv is None else argv
    args, args.arguments = parser(argv).parse_known_args(argv)
    args.arguments += [] if args.hf is None else ["--hf", args.hf]
    return args


def _sizes(text: str) -> list[int]:
    return [_positive(size) for size in text.split(",")]


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is smaller than 1")
    return int(text)


def _port(text: str) -> int:
    if not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is no port from 1 to 65535")
    return int(text)


def _names(text: str) -> list[str]:
    return text.split(",")


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def convert() -> Parser:
    parser = Parser(
        prog="mpcore convert",
        description="Convert models between Hugging Face and checkpoints.",
        examples=[
            "mpcore convert examples.gpt.hf:SPEC --from-hf llama/ --to checkpoints/step-00000000",
            "mpcore convert examples.gpt.hf:SPEC --from checkpoints/step-00000120 --to-hf out/ --tokenizer llama/",
        ],
    )
    parser.add_argument("spec", metavar="package.module:SPEC", help="the ModelSpec, such as examples.gpt.hf:SPEC")
    read = parser.add_argument_group("import")
    write = parser.add_argument_group("export")
    read.add_argument("--from-hf", metavar="DIR", help="a folder with config.json and safetensors files")
    read.add_argument("--to", metavar="CKPT", help="the checkpoint to make of it")
    write.add_argument("--from", metavar="CKPT", dest="source", help="a checkpoint, of any layout")
    write.add_argument("--to-hf", metavar="DIR", help="the folder to make of it")
    read.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    text = "a tokenizer.json, or a folder whose tokenizer files go along"
    write.add_argument("--tokenizer", metavar="PATH", help=text)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast to it (default: no cast)")
    return parser
