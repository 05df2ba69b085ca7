"""The errors attnloom raises on its own account.

Bad arguments are plain ``ValueError`` and ``TypeError``; the classes here are for what the caller's
machine lacks: a compiler, a usable cache, permission to build. Each message says what was tried and what to do.
"""

from __future__ import annotations

from pathlib import Path


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it: a long one is cut."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


class AttnloomError(Exception):
    """Base of every error that attnloom defines."""


class JitError(AttnloomError, RuntimeError):
    """A kernel module could not be provided. Base of the errors below."""


class CompilerNotFound(JitError):
    """No compiler, or no ninja, where they were looked for."""


class CompileFailed(JitError):
    """A compiler ran and refused the source.

    Attributes:
        command: the command line that failed, as text.
        diagnostic: the first error line that it printed.
        log: the file with everything that it printed; the source lies beside it.
    """

    def __init__(self, message: str, *, command: str = "", diagnostic: str = "", log: Path | None = None) -> None:
        super().__init__(message)
        self.command = command
        self.diagnostic = diagnostic
        self.log = log


class CompileTimedOut(CompileFailed):
    """A compiler did not end within a quarter of an hour and was ended. Its fields are those of CompileFailed."""


class CacheUnusable(JitError):
    """The cache folder cannot be trusted, or a miss cannot be written into it.

    Attributes:
        folder: the folder (or the file inside it) that was refused.
    """

    def __init__(self, message: str, *, folder: Path | None = None) -> None:
        super().__init__(message)
        self.folder = folder


class JitDisabled(JitError):
    """``ATTNLOOM_JIT=off`` and the cache does not hold the module.

    Attributes:
        module: name of the missing module.
        key: the cache key that was looked for.
    """

    def __init__(self, message: str, *, module: str = "", key: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.key = key


class LoadFailed(JitError):
    """A module file exists but cannot be used: damaged, or refused by the dynamic linker.

    Attributes:
        file: the shared library.
    """

    def __init__(self, message: str, *, file: Path | None = None) -> None:
        super().__init__(message)
        self.file = file


class BundleRefused(JitError):
    """An archive of modules is none, is damaged, or holds what it may not."""
