"""Print the table: each case of the oracle, and how far the example is from it."""

from __future__ import annotations

import torch

from tests.oracles.runs import CASES, compare


def main() -> None:
    """The command."""
    torch.set_num_threads(1)
    columns = ("loss", "norm", "lr", "scale", "validation", "weights")
    print("case".ljust(42), *(name.rjust(10) for name in columns))
    worst = dict.fromkeys(columns, 0.0)
    for name, case in CASES.items():
        errors = compare(case).errors()
        worst = {column: max(worst[column], errors[column]) for column in columns}
        print(name.ljust(42), *(f"{errors[column]:10.1e}" for column in columns), flush=True)
    print(f"{len(CASES)} cases, the worst".ljust(42), *(f"{worst[column]:10.1e}" for column in columns))


if __name__ == "__main__":
    main()
