"""Variants by name: the catalogue's, those that installed packages offer, and objects in modules and files.

What is named here is imported and compiled, so names come from programs and their configuration, never from a request.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnloom.core.variant import Variant

GROUP = "attnloom.variants"
"""Entry points of this group are names of variants: ``name = "package.module:object"``."""

_OBJECT = re.compile(r"(?P<module>[A-Za-z_][\w.]*|[^:]+\.py):(?P<path>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


def catalogue() -> dict[str, Callable[..., Variant]]:
    """The catalogue's functions, by name: ``soft_cap`` for SoftCap."""
    from attnloom.core import variants

    found = inspect.getmembers(variants, inspect.isfunction)
    own = {name: made for name, made in found if made.__module__.startswith(variants.__name__) and name[0].isupper()}
    return {_snake(name): made for name, made in own.items()}


def offered() -> dict[str, EntryPoint]:
    """The entry points of the group ``attnloom.variants``, by name. Nothing of them is imported."""
    return {found.name: found for found in entry_points(group=GROUP)}


def parse_variant(text: str, folder: Path | None = None) -> Variant:
    """A variant as a command line or a configuration names it.

    Args:
        text: names joined by ``&``, with literal arguments if any: ``causal & soft_cap``, ``sliding_window(4096)``; the
            catalogue's, with or without underscores and capitals, or entry points of ``attnloom.variants``. Or one
            object, ``package.module:object`` or ``file.py:object``: a Variant, or a function that returns one.
        folder: what file names are relative to; None: the working directory.

    Raises:
        ValueError: it cannot be read, found, imported or made; the message says what was expected.
    """
    if match := _OBJECT.fullmatch(text.strip()):
        return _made(text, _imported(text, match["module"], match["path"], folder), [], {})
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _evaluate(text, tree.body)
    except SyntaxError as error:
        raise ValueError(f"variant {text!r}: {error.msg}: expected names joined by &, or module:object") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"variant {text[:60]!r}...: nested too deeply: expected a few names joined by &") from None


def _evaluate(text: str, node: ast.expr) -> Variant:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _evaluate(text, left) & _evaluate(text, right)
        case ast.Name(id=name):
            return _made(text, _found(text, name), [], {})
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(each.arg for each in keywords):
            named = {str(keyword.arg): _literal(text, keyword.value) for keyword in keywords}
            return _made(text, _found(text, name), [_literal(text, arg) for arg in args], named)
    raise ValueError(f"variant {text!r}: expected names joined by &, with literal arguments if any, or module:object")


def _literal(text: str, node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):  # a TypeError: what cannot be a key of a dict or a member of a set
        raise ValueError(f"variant {text!r}: argument {ast.unparse(node)!r}: expected a literal") from None


def _found(text: str, name: str) -> object:
    """What a name stands for. The catalogue comes first: installing a package changes no name that was known."""
    known = catalogue()
    wanted = name.replace("_", "").lower()
    for key, function in known.items():
        if key.replace("_", "") == wanted:
            return function
    others = offered()
    if name not in others:
        raise ValueError(
            f"variant {text!r}: no {name!r} in the catalogue, which has {', '.join(known)}, "
            f"or among the entry points of {GROUP}: {', '.join(others) or 'none'}"
        )
    with _running(text, f"importing {others[name].value}"):
        found: object = others[name].load()
    return found


def _imported(text: str, module: str, path: str, folder: Path | None) -> object:
    with _running(text, f"importing {module}"):
        found: object = (
            _from_file(str((folder or Path()).joinpath(Path(module).expanduser()).resolve()))
            if module.endswith(".py")
            else importlib.import_module(module)
        )
    for name in path.split("."):
        try:
            with _running(text, f"{module}:{path}", passes=AttributeError):
                found = getattr(found, name)
        except AttributeError:
            raise ValueError(f"variant {text!r}: {module} has no {path!r}") from None
    return found


@functools.cache
def _from_file(file: str) -> ModuleType:
    """A file as a module, run once a process: tensors that its hooks capture are then the same for every layer."""
    digest = hashlib.sha256(file.encode()).hexdigest()[:8]
    name = f"attnloom_user_{re.sub(r'[^A-Za-z0-9_]', '_', Path(file).stem)}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _running(text: str, what: str, passes: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Whatever the code that is named raises while it runs is a ValueError that says where, but for ``passes``.

    So is sys.exit(): it would end a server, or a build, with any status and without a word.
    """
    try:
        yield
    except passes:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"variant {text!r}: {what}: {type(error).__name__}: {error}") from error


def _made(text: str, found: object, args: list[object], named: dict[str, object]) -> Variant:
    from attnloom.core.variant import Variant

    made = found
    if not isinstance(found, Variant) and callable(found):
        try:
            inspect.signature(found).bind(*args, **named)
        except TypeError as error:
            name = getattr(found, "__name__", "")
            raise ValueError(f"variant {text!r}: {error}: expected {_snake(name)}{inspect.signature(found)}") from None
        except ValueError:
            pass  # a built-in function without a signature: the call says what it lacks
        with _running(text, f"calling {getattr(found, '__name__', repr(found))}"):
            made = found(*args, **named)
    elif args or named:
        raise ValueError(f"variant {text!r}: arguments, but {found!r} takes none")
    if not isinstance(made, Variant):
        raise ValueError(f"variant {text!r}: expected a Variant or a function that returns one, got {made!r}")
    return made


def _snake(name: str) -> str:
    """``soft_cap`` for SoftCap, ``prefix_lm`` for PrefixLM, ``alibi`` for ALiBi."""
    plain = name.replace("ALiBi", "Alibi").replace("RoPE", "Rope")
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", plain).lower()
