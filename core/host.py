"""The host module: the planner, KV append and state merging for tensors on a CPU; one library for all dtypes."""

from __future__ import annotations

import ctypes
import functools

from attnloom.core.abi import AppendParams, LayoutTensors, MergeParams, PlanHeader, PlanParams, checked
from attnloom.core.jit.module import load
from attnloom.core.jit.spec import ModuleSpec, Source
from attnloom.core.jit.template import CSRC

_SOURCES = ("planner/planner.cpp", "cpu/append.cpp", "cpu/merge.cpp")
_FUNCTIONS = [
    "attnloom_plan_scan",
    "attnloom_plan_algorithm1",
    "attnloom_longest",
    "attnloom_find_bad_index",
    "attnloom_append",
    "attnloom_merge",
]


@functools.cache
def host_spec() -> ModuleSpec:
    """What the host module is built from."""
    sources = (CSRC / name for name in _SOURCES)
    return ModuleSpec("host", tuple(Source(path.name, path.read_text()) for path in sources))


@functools.cache
def host_module() -> ctypes.CDLL:
    """The host module, built if need be."""
    return checked(load(host_spec()), _FUNCTIONS, [PlanHeader, PlanParams, LayoutTensors, MergeParams, AppendParams])
