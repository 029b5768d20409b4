"""The parser of all command lines. It rejects abbreviated flags, and suggests the nearest flag for a typo."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn, ParamSpec

P = ParamSpec("P")
STATUS = "exit status: 0 all is well, 1 a difference or a fault was found, 2 it could not run"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean ..?"` with the nearest of the known words, or "" if none is near.

    A candidate with different numbers, such as another model size, is not suggested.
    """
    numbers = set(re.findall(r"\d+", word))
    alike = {other.lstrip("-"): other for other in known if numbers <= set(re.findall(r"\d+", other))}
    near = difflib.get_close_matches(word.lstrip("-"), alike, 1)
    return f"; did you mean {alike[near[0]]}?" if near else ""


def reports_errors(prog: str, *errors: type[Exception]) -> Callable[[Callable[P, int | None]], Callable[P, int]]:
    """Decorate a command to print its errors in one line and return status 2."""

    def decorate(run: Callable[P, int | None]) -> Callable[P, int]:
        @functools.wraps(run)
        def reported(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                status = run(*args, **kwargs) or 0
                sys.stdout.flush()
                return status
            except BrokenPipeError:  # the reader (`mpcore .. | head`) has stopped reading: drop the buffered output
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 2
            except (ValueError, OSError, *errors) as error:
                print(f"{prog}: error: {error}", file=sys.stderr)
                return 2

        return reported

    return decorate


def search_current_folder() -> None:
    """Let imports find the modules of the current folder, as `python -m` does and a console script does not."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def find_object(name: str) -> Any:
    """Import the object that a command line gives as `package.module:name`. The current folder is searched first."""
    module_name, _, attribute = name.partition(":")
    search_current_folder()
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as problem:
        here = "; run the command in the folder of the clone" if module_name.startswith("examples.") else ""
        raise ValueError(f"{module_name or repr(name)} can't be imported: {problem}{here}") from problem
    if attribute not in vars(module):
        public = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        raise ValueError(
            f"{module_name} has no {attribute or 'name after the colon'}: write package.module:name"
            f"{did_you_mean(attribute, public)}"
        )
    return vars(module)[attribute]


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` without abbreviations; it prints errors in one line, without the usage."""

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        shown = ["examples:", *(f"  {line}" for line in examples)] if examples else []
        shown += ["", STATUS] if examples and str(options.get("prog")).startswith("mpcore ") else []
        epilog = "\n".join(shown) or None
        super().__init__(
            **{"allow_abbrev": False, "epilog": epilog, "formatter_class": _Help, **options}  # type: ignore[arg-type]
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse the command line; exit with an error for unknown arguments."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = re.findall(r"--[\w-]+", self.format_usage())
            self.error(f"unknown {rest[0]}{did_you_mean(rest[0].partition('=')[0], flags)}")
        return found

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} ({self.prog} --help lists the flags)", file=sys.stderr)
        sys.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(known)}{did_you_mean(str(value), known)}"
            )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples, and makes the column wide enough for the flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
