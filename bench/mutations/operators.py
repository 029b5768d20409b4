"""Change one expression or statement of a source text, and nothing else of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
           "in": "not in", "not in": "in", "is": "is not", "is not": "is"}  # fmt: skip
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<",
              "&": "|", "|": "&", "^": "&"}  # fmt: skip
SPELLED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in",
           ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*",
           ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>",
           ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.And: "and", ast.Or: "or"}  # fmt: skip
# Text for people, types, and calls in which an order of arguments means nothing or raises at once.
TEXT_FUNCTIONS = {"__repr__", "__str__", "extra_repr"}
TEXT_CALLS = {"print", "warn", "warning", "info", "debug", "cast", "TypeVar", "isinstance", "issubclass"}
NO_MEANING = {"strict", "stacklevel", "non_blocking"}  # arguments without which a right program is the same
ANY_ORDER = {"max", "min", "maximum", "minimum", "hasattr", "getattr", "setattr", "equal", "gcd", "promote_types",
             "suppress", "zip"}  # fmt: skip


class Mutant(NamedTuple):
    """One change: where it is, and what replaces the bytes from `start` to `end` of the UTF-8 source."""

    definition: str
    operator: str
    line: int
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """The whole source with this change."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def shown(self, source: str) -> tuple[str, str]:
        """The lines that change, before and after, on one line each."""
        data, new = source.encode(), self.applied(source).encode()
        first = data.rfind(b"\n", 0, self.start) + 1
        last = data.find(b"\n", self.end)
        last = len(data) if last < 0 else last
        texts = data[first:last], new[first : last + len(new) - len(data)]
        before, after = (" ".join(text.decode().split()) for text in texts)
        return before, after

    def key(self, module: str, source: str) -> str:
        """Its name in records, which no change of another definition alters."""
        return "{}:{}: {}: {} -> {}".format(module, self.definition, self.operator, *self.shown(source))


def changes_something(source: str, mutant: Mutant) -> bool:
    """Whether the changed source is Python, and another program."""
    try:
        return ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def candidates(source: str, kernels: bool = False) -> list[Mutant]:
    """Every change that the operators can make, in the order of the source.

    Args:
        source: a module's text.
        kernels: change the bodies of Triton's kernels too.
    """
    finder = _Finder(source, kernels)
    finder.statements(ast.parse(source).body)
    return sorted(set(finder.found), key=lambda m: (m.start, m.end, m.operator, m.text))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _called(node: ast.expr) -> str:
    """The last name of what is called: `sum` of `x.sum(0)`."""
    target = node.func if isinstance(node, ast.Call) else node
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


class _Finder(ast.NodeVisitor):
    """Walks a module and lists the changes; annotations, decorators, messages and asserts are left out."""

    def __init__(self, source: str, kernels: bool) -> None:
        self.data = source.encode()
        self.starts = [0, *accumulate(len(line) + 1 for line in self.data.split(b"\n"))]
        self.kernels = kernels
        self.place: list[str] = []
        self.follows = False  # whether statements of this function follow the one that is visited
        self.constant = "constant"
        self.found: list[Mutant] = []

    # --- places in the text -------------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
                self.starts[node.end_lineno - 1] + node.end_col_offset)  # type: ignore[attr-defined]  # fmt: skip

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def add(self, operator: str, start: int, end: int, text: str) -> None:
        line = self.data.count(b"\n", 0, start) + 1
        self.found.append(Mutant(".".join(self.place), operator, line, start, end, text))

    def replace(self, operator: str, node: ast.AST, text: str) -> None:
        self.add(operator, *self.span(node), text)

    def swap_between(self, operator: str, left: int, right: int, spelled: str, other: str) -> None:
        """Replace an operator, which has no position of its own, between the ends of its operands."""
        pattern = rb"#[^\n]*|(" + rb"\s+".join(re.escape(word).encode() for word in spelled.split()) + rb")"
        for match in re.finditer(pattern, self.data[left:right]):
            if match[1]:
                self.add(operator, left + match.start(), left + match.end(), other)
                return

    # --- statements ---------------------------------------------------------------------------------------------------

    def statements(self, body: Iterable[ast.stmt]) -> None:
        body, outside = list(body), self.follows
        for i, node in enumerate(body):
            self.follows = outside or i + 1 < len(body)
            self.visit(node)
        self.follows = outside

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = {_called(decorator) for decorator in node.decorator_list}
        if node.name in TEXT_FUNCTIONS or "overload" in decorators:
            return
        if not self.kernels and any("jit" in name for name in decorators):
            return
        self.place.append(node.name)
        self.constant, before = "default", self.constant
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant | ast.UnaryOp):
                self.visit(default)
        self.constant, follows, self.follows = "constant", self.follows, False
        self.statements(node.body[_is_docstring(node.body[0]) :])
        self.constant, self.follows = before, follows
        self.place.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.place.append(node.name)
        self.constant, before = "default", self.constant
        self.statements(node.body)
        self.constant = before
        self.place.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets):
            return
        if all(isinstance(target, ast.Subscript) for target in node.targets):
            self.replace("dropped statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("dropped statement", node, "pass")
        spelled = SPELLED.get(type(node.op), "")
        if spelled in ARITHMETIC and not _is_text(node.value):
            ends = self.span(node.target)[1], self.span(node.value)[0]
            self.swap_between("arithmetic", *ends, f"{spelled}=", f"{ARITHMETIC[spelled]}=")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _called(node.value) not in TEXT_CALLS:
            self.replace("dropped statement", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if self.follows:
            self.replace("early return removed", node, "pass")
        if node.value is not None:
            self.visit(node.value)

    def condition(self, test: ast.expr, refuses: bool = False) -> None:
        if refuses:
            self.replace("refusal dropped", test, "False")
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.replace("negated condition", test, f"({self.text(test.operand)})")
        else:
            self.replace("negated condition", test, f"(not ({self.text(test)}))")
        self.visit(test)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self.text(node.test):
            self.condition(node.test, refuses=isinstance(node.body[-1], ast.Raise))
            self.statements(node.body)
        self.statements(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self.condition(node.test)
        self.loop(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.loop(node)

    def loop(self, node: ast.For | ast.While) -> None:
        follows, self.follows = self.follows, True
        self.statements(node.body)
        self.follows = follows
        self.statements(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
        self.statements(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        for body in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
            self.statements(body)

    # --- expressions --------------------------------------------------------------------------------------------------

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for test in node.ifs:
            self.condition(test)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            spelled = SPELLED[type(op)]
            self.swap_between("compare", self.span(left)[1], self.span(right)[0], spelled, COMPARE[spelled])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        spelled = SPELLED.get(type(node.op), "")
        if spelled in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            ends = self.span(node.left)[1], self.span(node.right)[0]
            self.swap_between("arithmetic", *ends, spelled, ARITHMETIC[spelled])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        spelled = SPELLED[type(node.op)]
        for left, right in zip(node.values, node.values[1:], strict=False):
            ends = self.span(left)[1], self.span(right)[0]
            self.swap_between("boolean", *ends, spelled, "or" if spelled == "and" else "and")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if isinstance(node.op, ast.USub) and type(value) is int:
            self.replace(self.constant, node, "-2" if value == 1 else str(1 - value))
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if type(value) is bool:
            self.replace(self.constant, node, str(not value))
        elif type(value) is int:
            self.replace(self.constant, node, str(1 - value if value in (0, 1) else value + 1))
        elif type(value) is float:
            self.replace(self.constant, node, str(1 - value) if value in (0, 1) else f"(2 * {self.text(node)})")

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if name in TEXT_CALLS:
            return
        if name not in ANY_ORDER:
            for one, two in zip(node.args, node.args[1:], strict=False):
                self.swap_arguments(one, two)
        for keyword in node.keywords:
            self.keyword(node, keyword)
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)

    def swap_arguments(self, one: ast.expr, two: ast.expr) -> None:
        if type(one) is not type(two) or isinstance(one, ast.Starred) or self.text(one) == self.text(two):
            return  # of two kinds: it would raise at once
        (start, left), (right, end) = self.span(one), self.span(two)
        self.add("swapped arguments", start, end, self.text(two) + self.data[left:right].decode() + self.text(one))

    def keyword(self, call: ast.Call, keyword: ast.keyword) -> None:
        if keyword.arg in NO_MEANING:
            return
        if keyword.arg is None:
            self.visit(keyword.value)
            return
        start, end = self.span(keyword)
        others = sorted(self.span(other) for other in (*call.args, *call.keywords))
        before = [stop for _, stop in others if stop <= start]
        if before:
            comma = self.data.rfind(b",", before[-1], start)
            self.add("dropped argument", comma, end, "")
        else:
            after = [begin for begin, _ in others if begin > start]
            self.add("dropped argument", start, after[0] if after else end, "")
        dim = _integer(keyword.value)
        if keyword.arg.endswith("dim") and dim is not None:
            self.replace("dim", keyword.value, str({0: 1, -1: -2, -2: -1}.get(dim, dim - 1)))
        else:
            self.visit(keyword.value)


def _integer(node: ast.expr) -> int | None:
    """The value of an integer that is written out."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    return sign * node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
