"""The direct path of a CUDA engine: from tensors to a launch in a few microseconds of the host's time.

A struct for q and out of some shapes, strides, dtypes and scales is filled and checked once, and so is a pair of
caches; a launch then writes addresses. The words of a plan (its own address, the layout's, the block mask's) are kept
with it.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnloom.core.abi import AttentionParams, CacheTensor, QueryTensor
from attnloom.core.arena import floats, stream_arenas
from attnloom.core.block_mask import mask_struct
from attnloom.core.checks import ALIGNMENT, check_aligned, check_cache_strides
from attnloom.core.errors import AttnloomError
from attnloom.core.streams import capturing, current_device, current_stream
from attnloom.core.tiles import Tiles

if TYPE_CHECKING:
    from attnloom.core.attention import Attention
    from attnloom.core.plan import Plan

_MOST = 4096  # templates, or pairs of caches, that are kept

_OUT_ALIGNMENT = (8, 16)
"""Bytes: a kernel writes four elements at once, of 16 bits, or float32 in a state."""

_NO_WORDS = (ctypes.c_uint64 * 1)()
NO_HOOKS = ctypes.addressof(_NO_WORDS)
"""Address of the packed parameters of a variant that has none."""


def _word(name: str) -> int:
    """Where a field of AttentionParams begins, in words of 64 bits."""
    return int(getattr(AttentionParams, name).offset) // 8


_Q, _OUT, _LSE = (_word(name) for name in ("q", "out", "lse"))
_ARENA, _ARRIVALS, _HOOKS, _STREAM = (_word(name) for name in ("arena", "arrivals", "hook_params", "stream"))
_CACHES = slice(_word("k"), _word("out"))  # k and v
_PLAN = slice(_word("layout"), _word("plan") + 1)  # layout, block_mask and plan lie side by side


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


def _looks(rows: Tensor) -> tuple[object, ...]:
    return (rows.shape, rows.stride(), rows.dtype, rows.get_device())


class Template:
    """A struct for q and out of one shape, and all that its checks depended on.

    It belongs to a thread: another one may launch between the writing of a struct and its use.
    """

    __slots__ = (
        "argument",
        "flags",
        "numbers",
        "out",
        "out_alignment",
        "params",
        "plan",
        "q",
        "room",
        "scales",
        "stream",
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
        self.stream = 0


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
        # Without types of arguments: ctypes looks at them for longer than it calls.
        self._kernel = module["attnloom_run"]
        self._device = device
        self._index = int(device.index)
        self._others = torch.cuda.device_count() > 1
        self._arenas = stream_arenas(device)
        self._rooms = self._arenas.rooms
        self._floats_of_worker = floats(1, tiles.tile_q, head_dim_v)
        self._last: Template | None = None
        self._last_of_op: Template | None = None
        self._templates: dict[tuple[object, ...], Template] = {}
        self._caches: dict[int, Caches] = {}

    def run(
        self,
        engine: Attention,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        given: tuple[object, object, object],
        flags: tuple[bool, bool],
        out: Tensor,
        fresh: bool,
        lse: Tensor | None,
        hooks: int,
    ) -> None:
        """Put the kernel on the current stream; arguments that are new are checked by the engine.

        Args:
            engine: whose kernel it is.
            plan: of the step.
            q, k_cache, v_cache: as the engine got them.
            given: scales as the engine got them.
            flags: return_lse, return_state.
            out: given, or new where ``fresh``.
            fresh: whether out is the engine's own, of the right shape.
            lse: contiguous, or None.
            hooks: address of the variant's packed parameters, on the host.
        """
        # Written out, not called: this is what a layer costs.
        template = self._last
        if template is None or not (
            template.thread == get_ident()
            and (template.plan() is plan or self._follow(engine, template, plan))
            and (q.shape, q.stride(), q.dtype, q.get_device()) == template.q
            and (
                template.out is None
                if fresh
                else (out.shape, out.stride(), out.dtype, out.get_device()) == template.out
            )
            and flags == template.flags
            and given == template.scales
        ):
            template = self._find(engine, plan, q, k_cache, v_cache, given, flags, out, fresh)
        caches = self._caches.get(id(k_cache))
        if (
            caches is None
            or caches.k() is not k_cache
            or caches.v() is not v_cache
            or caches.k_at != k_cache.data_ptr()
            or caches.v_at != v_cache.data_ptr()
            or caches.block_size != template.numbers[2]
        ):
            engine.check_run(plan, q, k_cache, v_cache, given, None if fresh else out, flags)
            caches = self._keep(k_cache, v_cache, template.numbers[2])
        self._launch(template, caches, q, out, lse, hooks)

    def run_op(
        self,
        of_plan: memoryview,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scales: tuple[float, float, float],
        unfinished: bool,
        out: Tensor,
        lse: Tensor | None,
        hooks: int,
        num_workers: int,
        block_size: int,
    ) -> None:
        """The same for the operator, whose arguments were checked when the call was traced.

        Args:
            of_plan: see :func:`plan_words`.
        """
        numbers = (-1, num_workers, block_size)
        flags = (unfinished, unfinished)
        template = self._last_of_op
        if template is None or not (
            template.thread == get_ident()
            and (q.shape, q.stride(), q.dtype, q.get_device()) == template.q
            and (out.shape, out.stride(), out.dtype, out.get_device()) == template.out
            and (flags, scales, numbers) == (template.flags, template.scales, template.numbers)
        ):
            key = (get_ident(), _looks(q), _looks(out), flags, scales, numbers)
            template = self._templates.get(key)
            if template is None:
                template = self._make(key, q, out, False, scales, scales, flags, numbers)
            self._last_of_op = template
        caches = self._caches.get(id(k_cache))
        if (
            caches is None
            or caches.k() is not k_cache
            or caches.v() is not v_cache
            or caches.k_at != k_cache.data_ptr()
            or caches.v_at != v_cache.data_ptr()
        ):
            caches = self._keep(k_cache, v_cache, block_size)
        template.words[_PLAN] = of_plan
        self._launch(template, caches, q, out, lse, hooks)

    def _launch(
        self, template: Template, caches: Caches, q: Tensor, out: Tensor, lse: Tensor | None, hooks: int
    ) -> None:
        if self._others and current_device() != self._index:
            with torch.cuda.device(self._device):
                return self._launch(template, caches, q, out, lse, hooks)
        q_at, out_at = q.data_ptr(), out.data_ptr()
        if q_at % ALIGNMENT or out_at % template.out_alignment:
            check_aligned("q", q)
            check_aligned("out", out, template.out_alignment)
        stream = current_stream(self._index)
        words = template.words
        room = None if capturing() else self._rooms.get(stream)
        if room is None or room is not template.room:
            workers = template.numbers[1]
            room = self._arenas.reserve(stream, workers * self._floats_of_worker, workers)
            words[_ARENA] = room.states_at
            words[_ARRIVALS] = room.arrivals_at
            words[_STREAM] = stream
            # A room that a capture was given is its own, and ends here.
            template.room = room if room.kept is None else None
        words[_Q] = q_at
        words[_CACHES] = caches.words
        words[_OUT] = out_at
        words[_LSE] = 0 if lse is None else lse.data_ptr()
        words[_HOOKS] = hooks
        error = self._kernel(template.argument)
        if error:
            raise AttnloomError(f"{self._name}: the kernel was not launched: CUDA error {error}")

    def _follow(self, engine: Attention, template: Template, plan: Plan) -> bool:
        """Whether a template serves another plan; if so, it is that plan's from now on."""
        layout = plan.layout
        if layout is None or (plan.total_q, plan.num_workers, layout.block_size) != template.numbers:
            return False
        engine.check_plan(plan)
        template.words[_PLAN] = words_of(plan)
        template.plan = weakref.ref(plan)
        return True

    def _find(
        self,
        engine: Attention,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        given: tuple[object, object, object],
        flags: tuple[bool, bool],
        out: Tensor,
        fresh: bool,
    ) -> Template:
        """The template for such arguments, which are checked if there was none."""
        engine.check_plan(plan)
        layout = plan.layout
        if layout is None:
            raise ValueError("plan.layout=None: expected a plan made with a layout")
        numbers = (plan.total_q, plan.num_workers, layout.block_size)
        if any(isinstance(scale, Tensor) and scale.is_cuda for scale in given):
            engine.check_run(plan, q, k_cache, v_cache, given, None if fresh else out, flags)  # says which
        scales = engine.scales(*given)
        key = (get_ident(), _looks(q), None if fresh else _looks(out), flags, scales, numbers)
        template = self._templates.get(key)
        if template is None:
            engine.check_run(plan, q, k_cache, v_cache, given, None if fresh else out, flags)
            template = self._make(key, q, out, fresh, given, scales, flags, numbers)
        # As the caller writes them, if that is what they are: a tensor may hold another number the next time.
        template.scales = scales if any(isinstance(scale, Tensor) for scale in given) else given
        self._follow(engine, template, plan)
        self._last = template
        return template

    def _make(
        self,
        key: tuple[object, ...],
        q: Tensor,
        out: Tensor,
        fresh: bool,
        given: tuple[object, object, object],
        scales: tuple[float, float, float],
        flags: tuple[bool, bool],
        numbers: tuple[int, int, int],
    ) -> Template:
        template = Template(q, out, fresh, given, scales, flags, numbers, flags[1])
        check_aligned("q", q)
        check_aligned("out", out, template.out_alignment)
        if len(self._templates) >= _MOST:
            self._templates.clear()
        self._templates[key] = template
        return template

    def _keep(self, k_cache: Tensor, v_cache: Tensor, block_size: int) -> Caches:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_aligned(name, cache)
            check_cache_strides(name, cache)
        if len(self._caches) >= _MOST:
            self._caches.clear()
        caches = self._caches[id(k_cache)] = Caches(k_cache, v_cache, block_size)
        return caches
