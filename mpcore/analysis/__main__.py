"""`python -m mpcore.analysis {memory,ledger,plan} ...`: one command line for the three."""

import sys

from mpcore.analysis import ledger, memory, plan

COMMANDS = {"memory": memory.main, "ledger": ledger.main, "plan": plan.main}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the first argument names."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in COMMANDS:
        sys.exit(f"usage: python -m mpcore.analysis {{{','.join(COMMANDS)}}} ...")
    COMMANDS[name](rest)


if __name__ == "__main__":
    main()
