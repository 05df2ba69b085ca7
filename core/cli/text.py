"""Numbers as people write and read them."""

from __future__ import annotations

import math
import re
import time

from attnloom.core.errors import shown

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size(count: float) -> str:
    """Bytes: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def parse_size(text: str) -> int:
    """The bytes of ``500M`` or ``2GiB``; powers of 1024.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"size {text!r}: expected a number of bytes, or one with K, M, G or T, such as 500M")
    return int(_finite("size", text, float(match[1]) * _UNITS[match[2]]))


def parse_duration(text: str) -> float:
    """The seconds of ``30d``, ``12h`` or ``2w``.

    Raises:
        ValueError: it is no duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise ValueError(f"duration {text!r}: expected a number with s, m, h, d or w, such as 30d")
    return _finite("duration", text, float(match[1]) * _SECONDS[match[2]])


def _finite(kind: str, text: str, value: float) -> float:
    if math.isinf(value):
        raise ValueError(f"{kind} {shown(text)}: expected a number of fewer digits")
    return value


def ago(then: float) -> str:
    """How long ago a time since the epoch is: ``3 days ago``."""
    seconds = max(0.0, time.time() - then)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def count(number: int, noun: str) -> str:
    """``1 module``, ``2 modules``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
