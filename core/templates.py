"""Parts of AttentionParams that are filled before a launch: by q and out, by a pair of caches, by a plan."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

from torch import Tensor

from attnloom.core.abi import AttentionParams, CacheTensor, QueryTensor
from attnloom.core.block_mask import mask_struct

if TYPE_CHECKING:
    from attnloom.core.plan import Plan

_OUT_ALIGNMENT = (8, 16)
"""Bytes: a kernel writes four elements at once, of 16 bits, or float32 in a state."""

_NO_WORDS = (ctypes.c_uint64 * 1)()
NO_HOOKS = ctypes.addressof(_NO_WORDS)
"""Address of the packed parameters of a variant that has none."""


def _word(name: str) -> int:
    """Where a field of AttentionParams begins, in words of 64 bits."""
    return int(getattr(AttentionParams, name).offset) // 8


Q_AT, OUT_AT, LSE_AT = (_word(name) for name in ("q", "out", "lse"))
ARENA_AT, ARRIVALS_AT, HOOKS_AT, STREAM_AT = (_word(name) for name in ("arena", "arrivals", "hook_params", "stream"))
CACHES_AT = slice(_word("k"), _word("out"))  # k and v
PLAN_AT = slice(_word("layout"), _word("plan") + 1)  # layout, block_mask and plan lie side by side


# What lies between ``lse`` and ``arena`` in AttentionParams: layout, block_mask, plan. Packed, not built of ctypes
# structs, which takes three times as long.
_PLAN_WORDS = struct.Struct("=QQQQqQqiiQ")


class Caches:
    """A pair of caches that were checked, by their identity; holds neither."""

    __slots__ = ("block_size", "k", "k_at", "v", "v_at", "words")

    def __init__(self, k_cache: Tensor, v_cache: Tensor, block_size: int) -> None:
        self.k = weakref.ref(k_cache)
        self.v = weakref.ref(v_cache)
        self.k_at = k_cache.data_ptr()
        self.v_at = v_cache.data_ptr()
        self.block_size = block_size
        both = (CacheTensor * 2)(
            CacheTensor(self.k_at, *k_cache.stride()[:3]), CacheTensor(self.v_at, *v_cache.stride()[:3])
        )
        self.words = memoryview(bytes(both)).cast("Q")


def _nothing() -> None:
    """A reference to no plan."""


def looks_of(rows: Tensor) -> tuple[object, ...]:
    """What a template depends on of q or out."""
    return (rows.shape, rows.stride(), rows.dtype, rows.get_device())


class Template:
    """A struct for q and out of one shape, and all that its checks depended on.

    It belongs to a thread: another one may launch between the writing of a struct and its use.
    """

    __slots__ = (
        "argument",
        "call",
        "flags",
        "numbers",
        "out",
        "out_alignment",
        "params",
        "plan",
        "q",
        "room",
        "scales",
        "tensors",
        "thread",
        "words",
    )

    def __init__(
        self,
        q: Tensor,
        out: Tensor,
        fresh: bool,
        given: tuple[object, object, object],
        scales: tuple[float, float, float],
        flags: tuple[bool, bool],
        numbers: tuple[int, int, int],
        unfinished: bool,
    ) -> None:
        self.thread = get_ident()
        self.q = (q.shape, q.stride(), q.dtype, q.get_device())
        self.out = None if fresh else (out.shape, out.stride(), out.dtype, out.get_device())
        self.out_alignment = _OUT_ALIGNMENT[unfinished]
        self.scales = given
        self.flags = flags
        self.numbers = numbers  # total_q, num_workers, block_size
        self.plan: Callable[[], Plan | None] = _nothing
        self.words = memoryview(bytearray(ctypes.sizeof(AttentionParams))).cast("Q")
        self.params = params = AttentionParams.from_buffer(self.words)
        params.q = QueryTensor(0, q.stride(0), q.stride(1))
        params.out = QueryTensor(0, out.stride(0), out.stride(1))
        params.sm_scale, params.k_scale, params.v_scale = scales
        params.unfinished = unfinished
        params.num_workers = numbers[1]
        self.argument = ctypes.byref(params)
        self.room: object = None
        # Of the operator: its numbers, and the plan's tensors where there are no others.
        self.call: object = None
        self.tensors: tuple[weakref.ref[Tensor], ...] | None = None


def plan_words(
    plan: Tensor,
    starts: Tensor,
    lengths: Tensor,
    indices: Tensor,
    positions: Tensor | None,
    block_size: int,
    block_kinds: Tensor | None,
) -> memoryview:
    """The words of a launch that follow from its plan."""
    kinds, stride, q_blocks, kv_blocks = 0, 0, 0, 0
    if block_kinds is not None:
        mask = mask_struct(block_kinds)
        kinds, stride, q_blocks, kv_blocks = mask.kinds, mask.stride_request, mask.q_blocks, mask.kv_blocks
    packed = _PLAN_WORDS.pack(
        starts.data_ptr(),
        lengths.data_ptr(),
        indices.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        block_size,
        kinds,
        stride,
        q_blocks,
        kv_blocks,
        plan.data_ptr(),
    )
    return memoryview(packed).cast("Q")


def words_of(plan: Plan) -> memoryview:
    """The words of a plan with a layout; made once."""
    if not plan.kernel_words:
        layout, mask = plan.layout, plan.block_mask
        assert layout is not None
        plan.kernel_words.append(
            plan_words(
                plan.buffer,
                layout.starts,
                layout.lengths,
                layout.indices,
                layout.positions,
                layout.block_size,
                None if mask is None else mask.kinds,
            )
        )
    return plan.kernel_words[0]
