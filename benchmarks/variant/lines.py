"""Lines of code that users write for a variant, counted in the examples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from report import ROOT, Row, Target

TEN_LINES = Target("ours", 10, "lines")
BEGIN, END = "# The variant.", "# Its end."


def example_lines(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Lines of code that define the variant of each example: in Python between two comments, or a TOML file."""
    for file in sorted((ROOT / "examples").glob("*.*")):
        name = f"lines of the variant, {file.name}"
        text = file.read_text()
        if not wanted.search(name):
            continue
        if file.suffix == ".toml":
            count = sum(bool(line.partition("#")[0].strip()) for line in text.splitlines())
            yield Row(name, count, "lines", target=TEN_LINES)
        elif BEGIN in text:
            lines = text.splitlines()
            begin, end = lines.index(BEGIN) + 1, lines.index(END) + 1
            module = ast.parse(text)
            inside = {name: statement for name, statement in named(module).items() if begin < statement.lineno < end}
            makers = [statement for statement in inside.values() if makes_variant(statement)]
            if not makers:
                raise SystemExit(f"{file.name}: expected a variant between {BEGIN!r} and {END!r}")
            yield Row(name, lines_of(inside), "lines", target=TEN_LINES, detail={"defines": list(inside)})


def named(module: ast.Module) -> dict[str, ast.stmt]:
    """The top-level statements but imports, by what they are called."""
    found: dict[str, ast.stmt] = {}
    for statement in module.body:
        name = getattr(statement, "name", None) or ast.unparse(statement).partition(" = ")[0]
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            found[name] = statement
    return found


def makes_variant(statement: ast.stmt) -> bool:
    """Whether it calls Variant, score_mod, mask_mod, or an entry of the catalogue."""
    return any(
        re.fullmatch(r"(\w+\.)*(Variant|score_mod|mask_mod)|(\w+\.)*variants\.\w+", ast.unparse(node.func))
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    )


def lines_of(statements: dict[str, ast.stmt]) -> int:
    """Lines that hold code: docstrings, comments and empty lines do not count."""
    lines: set[int] = set()
    for statement in statements.values():
        documentation: set[int] = set()
        for node in ast.walk(statement):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and _is_text(body[0].value):
                documentation |= set(range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1))
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt | ast.expr):
                lines |= {node.lineno, node.end_lineno or node.lineno} - documentation
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) - documentation
    return len(lines)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
