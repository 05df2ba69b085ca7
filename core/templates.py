"""Parts of AttentionParams that are filled before a launch: by tensors, by a plan."""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from attnloom.core.abi import AttentionParams, CacheTensor, Divisor
from attnloom.core.block_mask import mask_struct
from attnloom.core.launch import rows_tensor
from attnloom.core.looks import guard_of

if TYPE_CHECKING:
    from attnloom.core.plan import Plan

_OUT_ALIGNMENT = (8, 16)
"""Bytes: a kernel writes four elements at once, of 16 bits, or float32 in a state."""

_NOWHERE = 2**32 - 1
"""The offset that csrc/sm80/ptx.h reads nothing at."""

_SLICE = 16
"""Tokens that a warp loads at once (csrc/sm80/shape.h)."""

_NO_WORDS = (ctypes.c_uint64 * 1)()
NO_HOOKS = ctypes.addressof(_NO_WORDS)
"""Address of the packed parameters of a variant that has none."""


def _word(name: str) -> int:
    """Where a field of AttentionParams begins, in words of 64 bits."""
    return int(getattr(AttentionParams, name).offset) // 8


Q_AT, K_AT, V_AT, OUT_AT, LSE_AT = (_word(name) for name in ("q", "k", "v", "out", "lse"))
ARENA_AT, ARRIVALS_AT, HOOKS_AT, STREAM_AT = (_word(name) for name in ("arena", "arrivals", "hook_params", "stream"))
PLAN_AT = slice(_word("layout"), _word("plan") + 1)  # layout, block_mask and plan lie side by side


# What lies between ``lse`` and ``arena`` in AttentionParams: layout, block_mask, plan. Packed, not built of ctypes
# structs, which takes three times as long.
_PLAN_WORDS = struct.Struct("=QQQQqqQqiiQ")


def _cache_in_units(cache: Tensor) -> CacheTensor:
    """The struct of a cache as a GPU reads it.

    Raises:
        ValueError: blocks and slots are so many units apart that 32 bits do not count them.
    """
    strides = [stride if size > 1 else 0 for stride, size in zip(cache.stride()[:2], cache.shape[:2], strict=True)]
    unit = math.gcd(*strides) or 1
    block, slot = (stride // unit for stride in strides)
    last = (cache.shape[0] - 1) * block + (cache.shape[1] - 1) * slot
    if last >= _NOWHERE:
        raise ValueError(
            f"cache.stride()={cache.stride()} of shape {tuple(cache.shape)}: expected blocks and slots less than "
            f"{_NOWHERE} times their strides' common divisor apart, {unit} elements; the last is {last}"
        )
    size = cache.element_size()
    slot_bytes = 0 if cache.shape[1] % _SLICE else strides[1] * size
    if slot_bytes * _SLICE > _NOWHERE:
        slot_bytes = 0
    return CacheTensor(cache.data_ptr(), *cache.stride()[:3], unit * size, block, slot, slot_bytes)


class Template:
    """A struct for tensors of one look, and all that its checks depended on."""

    __slots__ = (
        "argument",
        "call",
        "flags",
        "hooks",
        "k_scale",
        "lse_at",
        "numbers",
        "out_alignment",
        "params",
        "plan",
        "room",
        "same",
        "sm_scale",
        "tensors",
        "v_scale",
        "words",
    )

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        scales: tuple[float, float, float],
        flags: tuple[bool, bool],
        numbers: tuple[int, int, int, int, int],
        heads: tuple[int, int],
    ) -> None:
        self.same = guard_of(q, k_cache, v_cache, out)
        # As the caller wrote them last.
        self.sm_scale: object
        self.k_scale: object
        self.v_scale: object
        self.sm_scale, self.k_scale, self.v_scale = scales
        self.flags = flags
        self.numbers = numbers  # total_q, num_workers, block_size, tile_q, lockstep
        self.plan: list[memoryview] | None = None  # the words of the plan it is filled with: Plan.kernel_words
        unfinished = flags[1]
        self.out_alignment = _OUT_ALIGNMENT[unfinished]
        self.words = memoryview(bytearray(ctypes.sizeof(AttentionParams))).cast("Q")
        self.params = params = AttentionParams.from_buffer(self.words)
        params.q, params.out = rows_tensor(q), rows_tensor(out)
        params.k, params.v = _cache_in_units(k_cache), _cache_in_units(v_cache)
        params.sm_scale, params.k_scale, params.v_scale = scales
        params.unfinished = unfinished
        params.num_workers = numbers[1]
        params.tile_q = numbers[3]
        num_qo_heads, num_kv_heads = heads
        params.group = num_qo_heads // num_kv_heads
        params.line_heads = num_kv_heads // numbers[4]
        params.lockstep = numbers[4]
        params.by_block_size = Divisor.of(numbers[2])
        params.by_group = Divisor.of(params.group)
        params.by_line_heads = Divisor.of(params.line_heads)
        self.argument = ctypes.byref(params)
        self.room: object = None
        self.lse_at = self.hooks = 0
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
    index_stride: int,
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
        index_stride,
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
                layout.index_stride,
                None if mask is None else mask.kinds,
            )
        )
    return plan.kernel_words[0]
