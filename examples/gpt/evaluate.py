"""Evaluate a checkpoint of any layout on tasks of lm-eval-harness (`pip install lm-eval`).

`torchrun --nproc-per-node 2 -m examples.gpt.evaluate --checkpoint PATH --tasks lambada_openai`: the processes shard the
model over tp, and give the numbers of one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.gpt.generate import add_checkpoint_flags, find_tokenizer, load_model
from examples.gpt.tokenizer import Tokenizer
from mpcore import Mesh, build_mesh
from mpcore.mesh import read_launch
from mpcore.tools.command_line import Parser, reports_errors

try:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from mpcore.interop.lm_eval import Model
except ImportError as problem:
    raise SystemExit(
        "python -m examples.gpt.evaluate: error: lm-eval-harness is missing: pip install lm-eval"
    ) from problem


class HarnessTokenizer:
    """The example's tokenizer with the methods that lm-eval-harness calls on a tokenizer of transformers."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, tokenizer.end_of_document

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the token ids of a text."""
        return self.tokenizer.encode(text).tolist()

    def decode(self, ids: int | Sequence[int], **_: Any) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode([ids] if isinstance(ids, int) else ids)


def evaluate(path: str | Path, tokenizer: Tokenizer, tasks: list[Any], mesh: Mesh, **options: Any) -> dict[str, Any]:
    """Return lm-eval-harness's report of a checkpoint, which `mesh.tp` shards; all its ranks call it.

    `tasks` and `options` are arguments of `simple_evaluate`.
    """
    model = load_model(path, mesh)
    sizes = {"vocab_size": model.config.vocab_size, "max_length": model.config.seq_len}
    harnessed = Model(model, HarnessTokenizer(tokenizer), mesh, **sizes)
    return simple_evaluate(harnessed, tasks=tasks, **options)  # type: ignore[call-arg, return-value]


@reports_errors("python -m examples.gpt.evaluate")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if the checkpoint or the tokenizer is missing."""
    parser = Parser(prog="python -m examples.gpt.evaluate", description="Evaluate a checkpoint with lm-eval-harness.")
    add_checkpoint_flags(parser)
    parser.add_argument("--tasks", required=True, help="names of lm-eval-harness, such as lambada_openai,hellaswag")
    parser.add_argument("--include-path", metavar="DIR", help="a folder with YAML files of your own tasks")
    parser.add_argument("--limit", type=int, help="documents of each task (default: all)")
    parser.add_argument("--device", help="such as cpu (default: GPUs if there are any)")
    args = parser.parse_args(argv)
    tokenizer = find_tokenizer(args)
    mesh = build_mesh(tp=read_launch(os.environ).world_size, device_type=args.device)
    tasks = args.tasks.split(",")
    manager = TaskManager(include_path=args.include_path)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"lm-eval-harness has no task {unknown[0]}: lm_eval ls tasks lists them")
    report = evaluate(args.checkpoint, tokenizer, tasks, mesh, limit=args.limit, task_manager=manager)
    if mesh.job.rank == 0:
        print(make_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
