"""Loads modules: from this process's memory, from the cache, or from the compiler."""

from __future__ import annotations

import ctypes

from attnloom.core.errors import LoadFailed
from attnloom.core.jit.build import build, locate
from attnloom.core.jit.cache import mark_used
from attnloom.core.jit.spec import ModuleSpec

_loaded: dict[ModuleSpec, ctypes.CDLL] = {}


def load(spec: ModuleSpec) -> ctypes.CDLL:
    """The module's shared library, built if need be. Its functions are C functions: set their argtypes.

    The same spec gives the same object within a process. OpenMP resolves to the libgomp that torch has loaded, so a
    module runs on torch's threads; import torch first.

    Raises:
        CompilerNotFound, CompileFailed, CacheUnusable, JitDisabled: see :func:`attnloom.core.jit.build`.
        LoadFailed: the library is damaged, or the dynamic linker refuses it.
    """
    library = _loaded.get(spec)
    if library is None:
        path = locate(spec) or build([spec])[0]
        mark_used(path)
        if not path.exists():
            path = build([spec])[0]  # `attnloom cache prune` has just removed it
        try:
            # Two threads that come here together get one handle from the linker; setdefault makes it one object.
            library = _loaded.setdefault(spec, ctypes.CDLL(str(path)))
        except OSError as error:
            raise LoadFailed(
                f"cannot load {path}: {error}. Remove the folder {path.parent} to have it built anew; if its file "
                "system is mounted noexec, set ATTNLOOM_CACHE_DIR to one that is not.",
                file=path,
            ) from error
    return library
