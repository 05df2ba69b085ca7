"""Variants and dtypes by the names that the command line knows."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from attnloom.core.variant import Variant


@dataclass(frozen=True)
class Dtype:
    """An element type. Its torch.dtype is looked up late: the command line starts without torch.

    Attributes:
        name: torch's name of it.
        itemsize: bytes.
    """

    name: str
    itemsize: int

    def torch(self) -> torch.dtype:
        """As torch has it."""
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found


DTYPES = {
    "bf16": Dtype("bfloat16", 2),
    "fp16": Dtype("float16", 2),
    "fp32": Dtype("float32", 4),
}


def dtype_named(text: str) -> Dtype:
    """A dtype by the short name or by torch's.

    Raises:
        ValueError: there is none of that name.
    """
    for short, dtype in DTYPES.items():
        if text.removeprefix("torch.") in (short, dtype.name):
            return dtype
    raise ValueError(f"dtype {text!r}: expected one of {', '.join(DTYPES)}")


def catalogue() -> dict[str, Callable[..., Variant]]:
    """The catalogue's functions, by name: ``soft_cap`` for SoftCap."""
    from attnloom.core import variants

    found = inspect.getmembers(variants, inspect.isfunction)
    own = {name: made for name, made in found if made.__module__ == variants.__name__ and not name.startswith("_")}
    return {_snake(name): made for name, made in own.items()}


def parse_variant(text: str) -> Variant:
    """A variant as it is written in Python: ``causal & soft_cap``, ``sliding_window(4096)``.

    Names are the catalogue's, with or without underscores and capitals; arguments are literals.

    Raises:
        ValueError: a name, an argument or the whole cannot be read; the message says what was expected.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"variant {text!r}: {error.msg}: expected names joined by &") from None
    return _evaluate(text, tree.body)


def _evaluate(text: str, node: ast.expr) -> Variant:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _evaluate(text, left) & _evaluate(text, right)
        case ast.Name(id=name):
            return _make(text, name, [], {})
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            named = {keyword.arg: _literal(text, keyword.value) for keyword in keywords if keyword.arg is not None}
            return _make(text, name, [_literal(text, arg) for arg in args], named)
    raise ValueError(f"variant {text!r}: expected names of the catalogue joined by &, with literal arguments if any")


def _literal(text: str, node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"variant {text!r}: argument {ast.unparse(node)!r}: expected a literal") from None


def _make(text: str, name: str, args: list[object], named: dict[str, object]) -> Variant:
    known = catalogue()
    wanted = name.replace("_", "").lower()
    made = next((function for key, function in known.items() if key.replace("_", "") == wanted), None)
    if made is None:
        raise ValueError(f"variant {text!r}: no {name!r} in the catalogue, which has {', '.join(known)}")
    try:
        return made(*args, **named)
    except TypeError as error:
        raise ValueError(
            f"variant {text!r}: {error}: expected {_snake(made.__name__)}{inspect.signature(made)}"
        ) from None


def _snake(name: str) -> str:
    """``soft_cap`` for SoftCap, ``alibi`` for ALiBi."""
    if name == "ALiBi":
        return "alibi"
    parts = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return parts.lstrip("_")
