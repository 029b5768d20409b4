"""`mpcore COMMAND ...`, also `python -m mpcore COMMAND ...`: every command of the library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from mpcore.tools import parsers
from mpcore.tools.command_line import STATUS, did_you_mean, search_current_folder

COMMANDS = {
    "verify": ("mpcore.tools.verify.__main__", "compare your model under each layout with itself on one process"),
    "preflight": ("mpcore.tools.preflight", "try on this machine what a large run will do on many GPUs"),
    "plan": ("mpcore.tools.analysis.__main__", "list the layouts that fit a machine, the fastest first"),
    "memory": ("mpcore.tools.analysis.__main__", "print what a rank of a layout holds"),
    "ledger": ("mpcore.tools.analysis.__main__", "print what a rank of a layout sends in a step"),
    "schedule": ("mpcore.tools.draw", "prove that a pipeline schedule is complete and free of deadlock, and draw it"),
    "checkpoint": ("mpcore.tools.checkpoint", "inspect, verify, compare and convert checkpoints"),
    "convert": ("mpcore.tools.convert", "convert between Hugging Face and checkpoints"),
    "from-config": ("mpcore.tools.from_config", "write a run.toml from the settings of another trainer"),
    "explain": ("mpcore.tools.fault_tolerance.__main__", "say why a run hung, from the logs that its watchdog left"),
    "replay": ("mpcore.tools.simulation.replay", "play a step again, and name the first operator that isn't finite"),
    "coordinate-check": (
        "mpcore.tools.coordinate_check",
        "check that the mean activation does not grow with the width",
    ),
    "replay-workers": ("mpcore.tools.workers.command", "train a run of workers again and compare the bits, or draw it"),
    "documents": ("mpcore.tools.documents", "list the documents behind a step of a run, or behind its spikes"),
    "doctor": ("mpcore.tools.doctor", "check this machine, and print the versions for a bug report"),
}
"""By name: the module whose `main(arguments)` runs it, and what it does. `mpcore.tools.parsers` has its parser."""
TAKES_NAME = ("plan", "memory", "ledger")


def usage() -> str:
    lines = [f"  {name:<18}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: mpcore COMMAND ...", "", *lines, "", "mpcore COMMAND --help lists the flags of one", STATUS]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return 0 for success, 1 if it found a difference or a fault, 2 if it could not run."""
    search_current_folder()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"mpcore {import_module('mpcore').__version__}")
        return 0
    if name not in COMMANDS:
        print(f"mpcore: error: unknown command {name}{did_you_mean(name, COMMANDS)}\n{usage()}", file=sys.stderr)
        return 2
    own = rest[: rest.index("--")] if "--" in rest else rest
    if "-h" in own or "--help" in own:  # torch takes seconds to import
        getattr(parsers, name.replace("-", "_"))().parse_args(own)
    return import_module(COMMANDS[name][0]).main([name, *rest] if name in TAKES_NAME else rest)


if __name__ == "__main__":
    sys.exit(main())
