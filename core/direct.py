"""The direct path of a CUDA engine: from tensors to a launch in a few microseconds of the host's time.

A struct per combination of shapes, strides, dtypes and scales is filled and checked once; a launch then writes the
addresses into it. The words of a plan (its own address, the layout's, the block mask's) are kept with the plan.
"""

from __future__ import annotations

import ctypes
import struct
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnloom.core.abi import AttentionParams, CacheTensor, QueryTensor
from attnloom.core.arena import floats, stream_arenas
from attnloom.core.block_mask import mask_struct
from attnloom.core.checks import ALIGNMENT, check_aligned, check_cache_strides
from attnloom.core.errors import AttnloomError
from attnloom.core.streams import current_device, current_stream
from attnloom.core.tiles import Tiles

if TYPE_CHECKING:
    from attnloom.core.plan import Plan

_MOST_TEMPLATES = 4096

_OUT_ALIGNMENT = (8, 16)
"""Bytes: a kernel writes four elements at once, of 16 bits, or float32 in a state."""

NO_WORDS = (ctypes.c_uint64 * 1)()
"""The packed parameters of a variant that has none."""


def _word(name: str) -> int:
    """Where a field of AttentionParams begins, in words of 64 bits."""
    return int(getattr(AttentionParams, name).offset) // 8


_Q, _K, _V, _OUT, _LSE = (_word(name) for name in ("q", "k", "v", "out", "lse"))
_ARENA, _ARRIVALS, _HOOKS, _STREAM = (_word(name) for name in ("arena", "arrivals", "hook_params", "stream"))
_PLAN = slice(_word("layout"), _word("plan") + 1)  # layout, block_mask and plan lie side by side


# What lies between ``lse`` and ``arena`` in AttentionParams: layout, block_mask, plan. Packed, not built of ctypes
# structs, which takes three times as long.
_PLAN_WORDS = struct.Struct("=QQQQqQqiiQ")


class Template(NamedTuple):
    """A struct that lacks addresses only, as its words, and the argument by which a module takes it."""

    words: memoryview
    argument: object
    num_workers: int
    out_alignment: int


def check_memory(tensors: tuple[Tensor, Tensor, Tensor, Tensor], out_alignment: int) -> None:
    """Where q, k_cache, v_cache and out lie, a kernel's vector loads and stores reach them.

    Raises:
        ValueError: a base or stride that is no multiple of a vector, or a stride of a cache that is too long.
    """
    q, k_cache, v_cache, out = tensors
    check_aligned("q", q)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_aligned(name, cache)
        check_cache_strides(name, cache)
    check_aligned("out", out, out_alignment)


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


class DirectPath:
    """The launches of one engine.

    Args:
        name: of the kernel, for errors.
        module: the kernel.
        device: a CUDA device with its index.
        tiles: of the kernel.
        head_dim_v: of the kernel.
    """

    def __init__(self, name: str, module: ctypes.CDLL, device: torch.device, tiles: Tiles, head_dim_v: int) -> None:
        self._name = name
        self._kernel = module.attnloom_run
        self._device = device
        self._index = int(device.index)
        self._arenas = stream_arenas(device)
        self._floats_of_worker = floats(1, tiles.tile_q, head_dim_v)
        self._templates: dict[tuple[object, ...], Template] = {}

    def find(self, signature: tuple[object, ...]) -> Template | None:
        """The struct for such arguments, if there were any before."""
        return self._templates.get(signature)

    def make(
        self,
        signature: tuple[object, ...],
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        scales: tuple[float, float, float],
        unfinished: bool,
        num_workers: int,
    ) -> Template:
        """The struct for checked arguments: q, k_cache, v_cache, out.

        Raises:
            ValueError: see :func:`check_memory`.
        """
        q, k_cache, v_cache, out = tensors
        out_alignment = _OUT_ALIGNMENT[unfinished]
        check_memory(tensors, out_alignment)
        words = memoryview(bytearray(ctypes.sizeof(AttentionParams))).cast("Q")
        params = AttentionParams.from_buffer(words)
        params.q = QueryTensor(0, q.stride(0), q.stride(1))
        params.k = CacheTensor(0, *k_cache.stride()[:3])
        params.v = CacheTensor(0, *v_cache.stride()[:3])
        params.out = QueryTensor(0, out.stride(0), out.stride(1))
        params.sm_scale, params.k_scale, params.v_scale = scales
        params.unfinished = unfinished
        params.num_workers = num_workers
        template = Template(words, ctypes.byref(params), num_workers, out_alignment)
        if len(self._templates) >= _MOST_TEMPLATES:
            self._templates.clear()
        self._templates[signature] = template
        return template

    def launch(
        self,
        template: Template,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor | None,
        plan: memoryview,
        hooks: int,
    ) -> None:
        """Put the kernel on the current stream.

        Args:
            template: made for these tensors.
            tensors: q, k_cache, v_cache, out.
            lse: contiguous, or None.
            plan: see :func:`words_of`.
            hooks: address of the variant's packed parameters, on the host.
        """
        if current_device() != self._index:
            with torch.cuda.device(self._device):
                return self.launch(template, tensors, lse, plan, hooks)
        q, k_cache, v_cache, out = tensors
        q_at, k_at, v_at, out_at = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
        if (q_at | k_at | v_at) % ALIGNMENT or out_at % template.out_alignment:
            check_memory(tensors, template.out_alignment)
        stream = current_stream(self._index)
        workers = template.num_workers
        room = self._arenas.reserve(stream, workers * self._floats_of_worker, workers)
        words = template.words
        words[_Q] = q_at
        words[_K] = k_at
        words[_V] = v_at
        words[_OUT] = out_at
        words[_LSE] = 0 if lse is None else lse.data_ptr()
        words[_PLAN] = plan
        words[_ARENA] = room.states_at
        words[_ARRIVALS] = room.arrivals_at
        words[_HOOKS] = hooks
        words[_STREAM] = stream
        error = self._kernel(template.argument)
        if error:
            raise AttnloomError(f"{self._name}: the kernel was not launched: CUDA error {error}")


def signature_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor | None,
    scales: tuple[object, object, object],
    flags: tuple[object, ...],
) -> tuple[object, ...]:
    """What a template and the checks of its arguments depend on.

    The thread is part of it: another one may launch between the writing of a struct and its use.
    """
    return (
        get_ident(),
        q.shape,
        q.stride(),
        q.dtype,
        q.get_device(),
        k_cache.shape,
        k_cache.stride(),
        k_cache.dtype,
        k_cache.get_device(),
        v_cache.shape,
        v_cache.stride(),
        v_cache.dtype,
        v_cache.get_device(),
        None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
        scales,
        flags,
    )
