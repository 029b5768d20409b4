"""Find a place in the library by the name of its definition and the shape of its syntax tree, and change it.

A pattern is Python. It is compared as a tree, so spaces, line breaks and quotes don't matter, and no file is named.
`ANY`, `ANY_1`, `ANY_2` stand for an expression, the same one wherever the same name stands; the replacement may use
them. `...` as the last member of a list (of arguments, of statements) stands for the rest of it.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from tests.mutations.choice import Project
from tests.mutations.operators import Mutant

HOLE = "ANY"


class Hand(NamedTuple):
    """A mutation written by hand.

    Attributes:
        area: what it concerns.
        what: what is wrong then, in a few words.
        definition: the dotted end of a definition's name (`Shard.replicated`, `_ROUNDS`), anywhere in the library; or
            packages (`mpcore examples.gpt`), for a pattern that is there once whichever module it is in.
        pattern: the expression or statement in it that changes; it must be there once.
        replacement: what stands there then.
        silent: why nobody would notice without a test.
        tests: what to run first: parts of names of tests; a number is a pitfall.
    """

    area: str
    what: str
    definition: str
    pattern: str
    replacement: str
    silent: str
    tests: str


class StaleError(ValueError):
    """The place of a hand-written mutation is gone, or there are several."""


def locate(project: Project, hand: Hand) -> tuple[str, Mutant]:
    """The module of a hand-written mutation, and the change.

    Raises:
        StaleError: if the definition is gone, or the pattern is not in it exactly once.
    """
    places = list(_definitions(project, hand.definition))
    if not places:
        raise StaleError(f"no definition ends with {hand.definition}")
    pattern, statements = _parsed(hand)
    found = [
        (module, node, holes) for module, definition in places for node, holes in _matches(pattern, definition)
    ]  # fmt: skip
    if len(found) != 1:
        raise StaleError(f"the pattern is in {hand.definition} {len(found)} times")
    ((module, node, holes),) = found
    return module, _change(project.texts[module], hand, node, holes, statements)


def _definitions(project: Project, name: str) -> Iterator[tuple[str, ast.AST]]:
    """The definitions and assignments whose dotted name ends with `name`; or the modules below packages."""
    modules = project.library(*name.split())
    if modules:
        yield from ((module, project.trees[module]) for module in modules)
        return
    for dotted, module, node in project.named.get(name.rpartition(".")[2], ()):
        if f".{dotted}".endswith(f".{name}"):
            yield module, node


def _parsed(hand: Hand) -> tuple[ast.AST, bool]:
    """The pattern's tree, and whether statements replace a statement."""
    (statement,) = ast.parse(textwrap.dedent(hand.pattern)).body
    try:
        ast.parse(hand.replacement, mode="eval")
    except SyntaxError:
        return statement, True
    return (statement.value, False) if isinstance(statement, ast.Expr) else (statement, True)


def _matches(pattern: ast.AST, root: ast.AST) -> Iterator[tuple[ast.AST, dict[str, ast.AST]]]:
    for node in ast.walk(root):
        holes: dict[str, ast.AST] = {}
        if hasattr(node, "lineno") and _same(pattern, node, holes):
            yield node, holes


def _same(pattern: object, node: object, holes: dict[str, ast.AST]) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.startswith(HOLE) and isinstance(node, ast.expr):
        if pattern.id == HOLE:
            return True
        before = holes.setdefault(pattern.id, node)
        return ast.dump(before) == ast.dump(node)
    if isinstance(pattern, list):
        if not isinstance(node, list):
            return False
        if pattern and _is_rest(pattern[-1]):
            pattern, node = pattern[:-1], node[: len(pattern) - 1]
        return len(pattern) == len(node) and all(_same(p, n, holes) for p, n in zip(pattern, node, strict=True))
    if not isinstance(pattern, ast.AST):
        return pattern == node
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and pattern.args and _is_rest(pattern.args[-1]):
        return _same_call(pattern, node, holes)  # type: ignore[arg-type]
    fields = [field for field in pattern._fields if field not in ("ctx", "kind", "type_comment")]
    return all(_same(getattr(pattern, field), getattr(node, field), holes) for field in fields)


def _same_call(pattern: ast.Call, node: ast.Call, holes: dict[str, ast.AST]) -> bool:
    """`f(x, ..., a=1)`: f's first argument is x, it has a=1, and others."""
    values = {keyword.arg: keyword.value for keyword in node.keywords}
    return (
        _same(pattern.func, node.func, holes)
        and _same(pattern.args, node.args, holes)
        and all(k.arg in values and _same(k.value, values[k.arg], holes) for k in pattern.keywords)
    )


def _is_rest(node: object) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _change(source: str, hand: Hand, node: ast.AST, holes: dict[str, ast.AST], statements: bool) -> Mutant:
    class Fill(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            return holes.get(name.id, name)

    replacement = Fill().visit(ast.parse(textwrap.dedent(hand.replacement)))
    text = ast.unparse(replacement)
    lines = source.encode().split(b"\n")
    begin = [0]
    for line in lines:
        begin.append(begin[-1] + len(line) + 1)
    start = begin[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    end = begin[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
    if statements:
        text = text.replace("\n", "\n" + " " * node.col_offset)  # type: ignore[attr-defined]
    elif len(text) > 1:
        text = f"({text})"
    return Mutant(hand.definition, hand.what, node.lineno, start, end, text)  # type: ignore[attr-defined]
