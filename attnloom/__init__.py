"""attnloom: an attention engine for LLM serving, and the backends that bring it to vLLM and SGLang.

The public names are found on first use, so that importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name -> module that defines it; None where the name is the module itself.
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "Attention": ("attnloom.core.attention", "Attention"),
    "AttnloomError": ("attnloom.core.errors", "AttnloomError"),
    "BlockSparseLayout": ("attnloom.core.layout", "BlockSparseLayout"),
    "CacheUnusable": ("attnloom.core.errors", "CacheUnusable"),
    "CompileFailed": ("attnloom.core.errors", "CompileFailed"),
    "CompileTimedOut": ("attnloom.core.errors", "CompileTimedOut"),
    "CompositionError": ("attnloom.core.compose", "CompositionError"),
    "CompilerNotFound": ("attnloom.core.errors", "CompilerNotFound"),
    "JitDisabled": ("attnloom.core.errors", "JitDisabled"),
    "JitError": ("attnloom.core.errors", "JitError"),
    "LoadFailed": ("attnloom.core.errors", "LoadFailed"),
    "Param": ("attnloom.core.variant", "Param"),
    "Plan": ("attnloom.core.plan", "Plan"),
    "TraceError": ("attnloom.core.trace.errors", "TraceError"),
    "Variant": ("attnloom.core.variant", "Variant"),
    "append_kv": ("attnloom.core.append", "append_kv"),
    "finish_state": ("attnloom.core.state", "finish_state"),
    "mask_mod": ("attnloom.core.trace.flex", "mask_mod"),
    "merge_states": ("attnloom.core.state", "merge_states"),
    "plan_algorithm1": ("attnloom.core.planner", "plan_algorithm1"),
    "plan_scan": ("attnloom.core.planner", "plan_scan"),
    "score_mod": ("attnloom.core.trace.flex", "score_mod"),
    "variants": ("attnloom.core.variants", None),
}

if TYPE_CHECKING:
    from attnloom.core import variants
    from attnloom.core.append import append_kv
    from attnloom.core.attention import Attention
    from attnloom.core.compose import CompositionError
    from attnloom.core.errors import (
        AttnloomError,
        CacheUnusable,
        CompileFailed,
        CompilerNotFound,
        CompileTimedOut,
        JitDisabled,
        JitError,
        LoadFailed,
    )
    from attnloom.core.layout import BlockSparseLayout
    from attnloom.core.plan import Plan
    from attnloom.core.planner import plan_algorithm1, plan_scan
    from attnloom.core.state import finish_state, merge_states
    from attnloom.core.trace.errors import TraceError
    from attnloom.core.trace.flex import mask_mod, score_mod
    from attnloom.core.variant import Param, Variant

__all__ = [
    "Attention",
    "AttnloomError",
    "BlockSparseLayout",
    "CacheUnusable",
    "CompileFailed",
    "CompileTimedOut",
    "CompilerNotFound",
    "CompositionError",
    "JitDisabled",
    "JitError",
    "LoadFailed",
    "Param",
    "Plan",
    "TraceError",
    "Variant",
    "__version__",
    "append_kv",
    "finish_state",
    "mask_mod",
    "merge_states",
    "plan_algorithm1",
    "plan_scan",
    "score_mod",
    "variants",
]


def __getattr__(name: str) -> object:
    try:
        module, attribute = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    found = importlib.import_module(module)
    value: object = found if attribute is None else getattr(found, attribute)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
