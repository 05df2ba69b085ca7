"""The structs that cross into a module: csrc/common/params.h and the plan's header, field by field.

A module tells the sizes of its own structs; :func:`checked` compares them, so that a mismatch is an error at load
time and never a wrong read.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import ClassVar

from attnloom.core.errors import LoadFailed


class _Struct(ctypes.Structure):
    """A C struct whose fields are given as ``names: type`` pairs."""


class QueryTensor(_Struct):
    """A ``[rows, num_qo_heads, head_dim]`` tensor, strides in elements; also used for outputs."""

    _fields_: ClassVar = [("data", c_void_p), ("stride_row", c_int64), ("stride_head", c_int64)]


class CacheTensor(_Struct):
    """A ``[num_blocks, block_size, num_kv_heads, head_dim]`` tensor, strides in elements.

    A slot of a block lies ``(block * units_block + slot * units_slot) * unit`` bytes behind the first. ``slot_bytes``:
    from a slot to the next where blocks are whole slices of 16 slots, else 0.
    """

    _fields_: ClassVar = [
        ("data", c_void_p),
        ("stride_block", c_int64),
        ("stride_slot", c_int64),
        ("stride_head", c_int64),
        ("unit", c_uint32),
        ("units_block", c_uint32),
        ("units_slot", c_uint32),
        ("slot_bytes", c_uint32),
    ]


class LayoutTensors(_Struct):
    """The arrays of a BlockSparseLayout."""

    _fields_: ClassVar = [
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("indices", c_void_p),
        ("positions", c_void_p),
        ("block_size", c_int64),
        ("index_stride", c_int64),
    ]


class BlockMaskTensor(_Struct):
    """The kinds of a BlockMask; a null address is none."""

    _fields_: ClassVar = [
        ("kinds", c_void_p),
        ("stride_request", c_int64),
        ("q_blocks", c_int32),
        ("kv_blocks", c_int32),
    ]


class BlockMaskParams(_Struct):
    """One evaluation of a logits_mask at every position of some blocks."""

    _fields_: ClassVar = [
        ("hook_params", c_void_p),
        ("kinds", c_void_p),
        ("num_requests", c_int64),
        ("q_blocks", c_int32),
        ("kv_blocks", c_int32),
        ("q_begin", c_int32),
        ("q_end", c_int32),
        ("kv_end", c_int32),
        ("num_qo_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("length", c_int32),
        ("num_threads", c_int32),
        ("stream", c_void_p),
    ]


class Divisor(_Struct):
    """A number to divide by: ``n // d == n * inverse >> shift`` for 0 <= n < 2^31 (Granlund and Montgomery, 1994)."""

    _fields_: ClassVar = [("inverse", c_uint32), ("shift", c_uint32)]

    @classmethod
    def of(cls, d: int) -> Divisor:
        """For 1 <= d < 2^31."""
        bits = (d - 1).bit_length()
        return cls((1 << (31 + bits)) // d + 1, 31 + bits)


class AttentionParams(_Struct):
    """One launch of an attention kernel."""

    _fields_: ClassVar = [
        ("q", QueryTensor),
        ("k", CacheTensor),
        ("v", CacheTensor),
        ("out", QueryTensor),
        ("lse", c_void_p),
        ("layout", LayoutTensors),
        ("block_mask", BlockMaskTensor),
        ("plan", c_void_p),
        ("arena", c_void_p),
        ("arrivals", c_void_p),
        ("hook_params", c_void_p),
        ("sm_scale", c_float),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("unfinished", c_int32),
        ("num_threads", c_int32),
        ("num_workers", c_int32),
        ("tile_q", c_int32),
        ("by_block_size", Divisor),
        ("by_group", Divisor),
        ("by_line_heads", Divisor),
        ("group", c_int32),
        ("line_heads", c_int32),
        ("lockstep", c_int32),
        ("values_behind_keys", c_int64),
        ("caches_alike", c_int32),
        ("stream", c_void_p),
    ]


class FinishParams(_Struct):
    """One finish of merged states."""

    _fields_: ClassVar = [
        ("state_out", c_void_p),
        ("state_lse", c_void_p),
        ("out", QueryTensor),
        ("lse", c_void_p),
        ("layout", LayoutTensors),
        ("plan", c_void_p),
        ("hook_params", c_void_p),
        ("num_threads", c_int32),
        ("total_q", c_int32),
        ("stream", c_void_p),
    ]


class MergeParams(_Struct):
    """One merge of states."""

    _fields_: ClassVar = [
        ("outs", c_void_p),
        ("lses", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("num_states", c_int64),
        ("rows", c_int64),
        ("head_dim_v", c_int64),
        ("num_threads", c_int32),
        ("stream", c_void_p),
    ]


class AppendParams(_Struct):
    """One append of keys and values, strides in bytes."""

    _fields_: ClassVar = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slots", c_void_p),
        ("num_tokens", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("k_row_bytes", c_int64),
        ("v_row_bytes", c_int64),
        ("k_stride_token", c_int64),
        ("k_stride_head", c_int64),
        ("v_stride_token", c_int64),
        ("v_stride_head", c_int64),
        ("k_cache_stride_block", c_int64),
        ("k_cache_stride_slot", c_int64),
        ("k_cache_stride_head", c_int64),
        ("v_cache_stride_block", c_int64),
        ("v_cache_stride_slot", c_int64),
        ("v_cache_stride_head", c_int64),
        ("from_element", c_int32),
        ("to_element", c_int32),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("num_threads", c_int32),
        ("stream", c_void_p),
    ]


class PlanHeader(_Struct):
    """The head of a plan buffer: csrc/planner/plan.h."""

    _fields_: ClassVar = [
        ("num_requests", c_int32),
        ("num_tiles", c_int32),
        ("num_workers", c_int32),
        ("lockstep", c_int32),
        ("num_qo_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("tile_q_short", c_int32),
        ("tile_q", c_int32),
        ("tile_kv", c_int32),
        ("left", c_int32),
        ("right", c_int32),
        ("trimmed", c_int32),
        ("tile_capacity", c_int32),
        ("chunk", c_int32),
        ("chunk_states", c_int32),
        ("chunk_room", c_int32),
    ]


class PlanParams(_Struct):
    """One call of the planner."""

    _fields_: ClassVar = [
        ("qo_indptr", c_void_p),
        ("kv_lens", c_void_p),
        ("plan", c_void_p),
        ("cost_item", c_int32),
        ("cost_item_row", c_int32),
        ("cost_kv_tile", c_int32),
        ("cost_row", c_int32),
        ("visible", c_void_p),
        ("hook_params", c_void_p),
        ("block_mask", BlockMaskTensor),
        ("prefix", c_void_p),
        ("stream", c_void_p),
    ]


PLAN_HEADER_WORDS = ctypes.sizeof(PlanHeader) // 4

_SIGNATURES: dict[str, tuple[type, list[type]]] = {
    "attnloom_run": (c_int32, [POINTER(AttentionParams)]),
    "attnloom_finish": (c_int32, [POINTER(FinishParams)]),
    "attnloom_block_mask": (c_int32, [POINTER(BlockMaskParams)]),
    "attnloom_merge": (c_int32, [POINTER(MergeParams)]),
    "attnloom_append": (c_int32, [POINTER(AppendParams)]),
    "attnloom_plan_scan": (c_int64, [POINTER(PlanParams), POINTER(PlanHeader)]),
    "attnloom_plan_algorithm1": (c_int64, [POINTER(PlanParams), c_void_p, c_void_p]),
    "attnloom_plan_scan_device": (c_int32, [POINTER(PlanParams), POINTER(PlanHeader)]),
    "attnloom_capture": (c_int64, [c_void_p]),
    "attnloom_prepare": (c_int32, []),
    "attnloom_ctas_per_sm": (c_int32, [c_int32]),
    "attnloom_longest": (c_int64, [c_void_p, c_int64]),
    "attnloom_allocate": (c_void_p, [c_int64]),
    "attnloom_release": (c_int32, [c_void_p]),
    "attnloom_zero": (c_int32, [c_void_p, c_int64, c_void_p]),
    "attnloom_find_bad_index": (c_int32, [POINTER(LayoutTensors), c_int64, c_int64, c_int64, c_void_p]),
}


def checked(library: ctypes.CDLL, functions: list[str], structs: list[type[_Struct]]) -> ctypes.CDLL:
    """Give a loaded module's functions their C types, after comparing the sizes of the structs they take.

    Raises:
        LoadFailed: the module was built from other headers than this file mirrors.
    """
    library.attnloom_params_bytes.restype = c_int64
    library.attnloom_params_bytes.argtypes = []
    found = library.attnloom_params_bytes()
    expected = sum(ctypes.sizeof(struct) for struct in structs)
    if found != expected:
        raise LoadFailed(f"{library._name}: its structs take {found} bytes, expected {expected} (core/abi.py)")
    for name in functions:
        function = getattr(library, name)
        function.restype, function.argtypes = _SIGNATURES[name]
    return library
