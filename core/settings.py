"""Settings from the environment: the only place that reads ``ATTNLOOM_*``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FAMILIES = ("cpu", "sm80", "sm90", "sm100")

MOST_WORKERS = 1 << 20
"""Of a plan: far more than any device runs, and few enough for the tables that have an entry for each."""

_VALIDATE = os.environ.encodekey("ATTNLOOM_VALIDATE")  # as os.environ keeps it
_SWITCH = {"on": True, "1": True, "off": False, "0": False}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; every field has a default.

    Attributes:
        cache_dir: where built modules are kept (``ATTNLOOM_CACHE_DIR``, default ``~/.cache/attnloom``).
        jit: whether a missing module may be built (``ATTNLOOM_JIT``, on or off, default on).
        validate: whether checks that cost a device sync run (``ATTNLOOM_VALIDATE``, default off).
        family: kernel family to use instead of the device's own (``ATTNLOOM_FAMILY``), or None.
        compose: whether shared prefixes are looked for (``ATTNLOOM_COMPOSE``, default on).
        workers: workers per plan (``ATTNLOOM_WORKERS``), or None for the device's own number.
    """

    cache_dir: Path
    jit: bool = True
    validate: bool = False
    family: str | None = None
    compose: bool = True
    workers: int | None = None


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check the settings; reads the environment anew at each call.

    Args:
        environ: variables to read, default ``os.environ``. An empty value counts as unset.

    Raises:
        ValueError: a variable holds something else than it may; the message names it, its value and what was expected.
    """
    env = os.environ if environ is None else environ
    return Settings(
        cache_dir=_cache_dir(env),
        jit=_switch(env, "ATTNLOOM_JIT", default=True),
        validate=_switch(env, "ATTNLOOM_VALIDATE", default=False),
        family=_family(env),
        compose=_switch(env, "ATTNLOOM_COMPOSE", default=True),
        workers=_workers(env),
    )


def validating() -> bool:
    """Whether checks that cost a device sync run; for callers who ask at every call."""
    # os.environ raises and catches two exceptions for a variable that is not set; the dict that it wraps does not.
    if _VALIDATE not in getattr(os.environ, "_data", (_VALIDATE,)):
        return False
    return _switch(os.environ, "ATTNLOOM_VALIDATE", default=False)


def asked_workers() -> int | None:
    """``ATTNLOOM_WORKERS`` alone; for callers who ask at every step."""
    return _workers(os.environ)


def _cache_dir(env: Mapping[str, str]) -> Path:
    value = env.get("ATTNLOOM_CACHE_DIR", "")
    if not value:
        return Path("~/.cache/attnloom").expanduser()
    path = Path(value).expanduser()
    if not path.is_absolute():
        # A relative folder would be another cache in every working directory, and one that others may prepare.
        raise ValueError(f"ATTNLOOM_CACHE_DIR={value!r}: expected an absolute path")
    return path


def _switch(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = env.get(name, "")
    if not value:
        return default
    try:
        return _SWITCH[value.lower()]
    except KeyError:
        raise ValueError(f"{name}={value!r}: expected on or off (1 or 0)") from None


def _family(env: Mapping[str, str]) -> str | None:
    value = env.get("ATTNLOOM_FAMILY", "")
    if not value:
        return None
    if value not in FAMILIES:
        raise ValueError(f"ATTNLOOM_FAMILY={value!r}: expected one of {', '.join(FAMILIES)}")
    return value


def _workers(env: Mapping[str, str]) -> int | None:
    value = env.get("ATTNLOOM_WORKERS", "")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 20 and 1 <= int(value) <= MOST_WORKERS):
        raise ValueError(f"ATTNLOOM_WORKERS={value!r}: expected an integer of at least 1 and at most {MOST_WORKERS}")
    return int(value)
