"""What the tracer says when it cannot translate a line, and where that line is."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import torch

from attnloom.core.errors import AttnloomError

# Compared with names in code objects, which are not resolved either: core/ may be reached through a symlink.
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)

_BRANCH_REMEDIES = (
    (r"\bnot\b", "`~x` instead of `not x`"),
    (r"\band\b", "`(a) & (b)` instead of `a and b`"),
    (r"\bor\b", "`(a) | (b)` instead of `a or b`"),
    (r"(?<![.\w])(?:min|max)\(", "`torch.minimum(a, b)` or `torch.maximum(a, b)` instead of `min` and `max`"),
    (r"\bin\b", "`(x == a) | (x == b)` instead of `x in (a, b)`"),
    (r"<=?[^<>=&|]+<=?|>=?[^<>=&|]+>=?", "`(a < b) & (b < c)` instead of `a < b < c`"),
    (r"\b(?:if|while|elif)\b", "`torch.where(condition, a, b)` instead of a branch"),
)


class TraceError(AttnloomError, TypeError):
    """A hook written in Python does something that has no translation.

    Attributes:
        file: of the user's function.
        line: number in that file, 0 where it is unknown.
        source: that line, stripped; empty where the file cannot be read.
    """

    def __init__(self, message: str, *, file: str = "", line: int = 0, source: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.source = source


def untranslatable(reason: str, remedy: str) -> TraceError:
    """The error for the line of the user's code that runs right now.

    Args:
        reason: what is wrong, about the value, without a full stop.
        remedy: what to write instead.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return _located(reason, remedy, frame.f_code.co_filename, frame.f_lineno)


def failed_in_torch(error: Exception, is_traced: Callable[[object], bool]) -> TraceError | None:
    """The error for a function of torch's that failed because it was given a traced value; None: that is not why.

    Args:
        error: what it raised.
        is_traced: whether something in a frame is, or holds, a traced value.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = max((i for i, (frame, _) in enumerate(frames) if not _is_inside(frame.f_code.co_filename)), default=None)
    if own is None:
        return None
    inner = [frame for frame, _ in frames[own + 1 :] if frame.f_code.co_filename.startswith(_TORCH)]
    if not any(is_traced(value) for frame in inner for value in list(frame.f_locals.values())):
        return None
    frame, line = frames[own]
    said = str(error).strip().split("\n")[0].rstrip(".")
    return _located(
        f"torch cannot do this with a traced value ({type(error).__name__}: {said})",
        "torch.where(condition, a, b) instead of torch.cond, and torch's functions of single numbers",
        frame.f_code.co_filename,
        line,
    )


def untranslatable_function(reason: str, remedy: str, function: object) -> TraceError:
    """The error for a function as a whole: its arguments, or what it returns."""
    import inspect

    inner = inspect.unwrap(function, stop=lambda f: hasattr(f, "__code__")) if callable(function) else function
    for owner in (inner, type(inner).__dict__.get("__call__")):
        code = getattr(owner, "__code__", None)
        if isinstance(code, CodeType):
            return _located(reason, remedy, code.co_filename, code.co_firstlineno)
    return _located(reason, remedy, repr(function), 0)


def branched() -> TraceError:
    """The error for a value whose truth Python asks for; the remedy follows from the line that asks."""
    found = untranslatable("the truth of a traced value is known only in the kernel", "")
    remedies = [remedy for pattern, remedy in _BRANCH_REMEDIES if re.search(pattern, found.source)]
    remedy = "; ".join(remedies) or "torch.where(condition, a, b), and & | ~ on conditions"
    return _located("the truth of a traced value is known only in the kernel", remedy, found.file, found.line)


def _is_inside(file: str) -> bool:
    return file.startswith((_HERE, _TORCH))


def _located(reason: str, remedy: str, file: str, line: int) -> TraceError:
    import linecache

    source = linecache.getline(file, line).strip()
    quoted = f"\n    {source}" if source else ""
    place = f"{file}:{line}" if line else file
    return TraceError(f"{place}: {reason}.{quoted}\n  Write {remedy}.", file=file, line=line, source=source)
