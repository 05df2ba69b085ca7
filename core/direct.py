"""The direct path of a CUDA engine: from tensors to a launch in a few microseconds of the host's time.

A struct for q and out of some shapes, strides, dtypes and scales is filled and checked once, and so is a pair of
caches; a launch then writes addresses. The words of a plan (its own address, the layout's, the block mask's) are kept
with it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnloom.core.arena import floats_on_gpu, stream_arenas
from attnloom.core.checks import ALIGNMENT, check_aligned, check_on_host, check_stored, check_strides
from attnloom.core.errors import AttnloomError
from attnloom.core.launch import count_run
from attnloom.core.looks import looks_of
from attnloom.core.run_checks import check_plan, check_run, check_scales
from attnloom.core.streams import capturing, current_device, current_stream
from attnloom.core.templates import (
    ARENA_AT,
    ARRIVALS_AT,
    CACHES_AT,
    HOOKS_AT,
    LSE_AT,
    OUT_AT,
    PLAN_AT,
    Q_AT,
    STREAM_AT,
    Caches,
    Template,
    plan_words,
    words_of,
)

if TYPE_CHECKING:
    from attnloom.core.attention import Attention
    from attnloom.core.layout import BlockSparseLayout
    from attnloom.core.op import Call
    from attnloom.core.plan import Plan

_MOST = 4096  # templates, or pairs of caches, that are kept


def _numbers_of(plan: Plan, layout: BlockSparseLayout) -> tuple[int, int, int, int, int]:
    """What a template depends on of a plan: Template.numbers."""
    return (plan.total_q, plan.num_workers, layout.block_size, plan.key.tile_q, plan.lockstep)


class DirectPath:
    """The launches of one engine.

    Args:
        name: of the kernel, for errors.
        module: the kernel.
        device: a CUDA device with its index.
        head_dim_v: of the kernel.
        heads: query heads and kv heads.
        batch_invariant: whether the kernel is one of that mode.
    """

    def __init__(
        self,
        name: str,
        module: ctypes.CDLL,
        device: torch.device,
        head_dim_v: int,
        heads: tuple[int, int],
        batch_invariant: bool = False,
    ) -> None:
        self._name = name
        # Without types of arguments: ctypes looks at them for longer than it calls.
        self._kernel = module["attnloom_run"]
        self._device = device
        self._index = int(device.index)
        self._others = torch.cuda.device_count() > 1
        self._arenas = stream_arenas(device)
        self._rooms = self._arenas.rooms
        self._heads = heads
        self._head_dim_v = head_dim_v
        self._batch_invariant = batch_invariant
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
        try:
            # Written out, not called: this is what a layer costs.
            template = self._last
            if template is None or not (
                template.thread == get_ident()
                and ((template.plan() is plan and plan is not None) or self._follow(engine, template, plan))
                and fresh == template.fresh
                and not (q.is_nested or out.is_nested)
                and (template.looks_same(q) if fresh else template.looks_same(q, out))
                and flags == template.flags
                and (
                    (given[0] is template.sm_scale and given[1] is template.k_scale and given[2] is template.v_scale)
                    or template.same_scales(given)
                )
            ):
                template = self._find(engine, plan, q, k_cache, v_cache, given, flags, out, fresh)
            caches = self._caches.get(id(k_cache))
            if (
                caches is None
                or caches.k_at != k_cache.data_ptr()
                or caches.v_at != v_cache.data_ptr()
                or not caches.look_same(k_cache, v_cache)
                or caches.block_size != template.numbers[2]
            ):
                check_run(engine, plan, q, k_cache, v_cache, given, None if fresh else out, flags)
                caches = self._keep(k_cache, v_cache, template.numbers[2])
        except AttributeError:
            check_run(engine, plan, q, k_cache, v_cache, given, None if fresh else out, flags)  # says what is no tensor
            raise
        self._launch(template, caches, q, out, lse, hooks)

    def run_op(
        self,
        call: Call,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        plan: Sequence[Any],
        hooks: int,
    ) -> None:
        """The same for the operator, whose arguments were checked when the call was traced.

        Args:
            call: its numbers.
            plan: the plan's buffer, the layout's arrays and the block mask's kinds, of which the last two may be None.
        """
        template = self._last_of_op
        if template is None or not (
            template.call is call and template.thread == get_ident() and template.looks_same(q, out)
        ):
            template = self._find_of_op(call, q, out)
        caches = self._caches.get(id(k_cache))
        if (
            caches is None
            or caches.k_at != k_cache.data_ptr()
            or caches.v_at != v_cache.data_ptr()
            or not caches.look_same(k_cache, v_cache)
        ):
            caches = self._keep(k_cache, v_cache, call.block_size)
        buffer, starts, lengths, indices, positions, kinds = plan
        known = template.tensors
        if (
            known is None
            or known[0]() is not buffer
            or known[1]() is not starts
            or known[2]() is not lengths
            or known[3]() is not indices
            or positions is not None
            or kinds is not None
        ):
            template.words[PLAN_AT] = plan_words(
                buffer, starts, lengths, indices, positions, call.block_size, call.index_stride, kinds
            )
            bare = positions is None and kinds is None
            template.tensors = tuple(weakref.ref(each) for each in (buffer, starts, lengths, indices)) if bare else None
        self._launch(template, caches, q, out, lse, hooks)

    def _find_of_op(self, call: Call, q: Tensor, out: Tensor) -> Template:
        numbers = (-1, call.num_workers, call.block_size, call.tile_q, call.lockstep)
        flags = (call.unfinished, call.unfinished)
        # The stride lies in the words of a plan, which a template keeps while the plan's tensors are the same.
        key = (get_ident(), looks_of(q), looks_of(out), flags, call.scales, numbers, call.index_stride)
        template = self._templates.get(key)
        if template is None:
            template = self._make(key, q, out, False, call.scales, call.scales, flags, numbers)
        elif not template.looks_same(q, out):
            template.look_at(q, out)
        template.call = call
        self._last_of_op = template
        return template

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
        # The legacy default stream cannot be captured.
        room = None if stream and capturing() else self._rooms.get(stream)
        if room is None or room is not template.room:
            _, workers, _, tile_q, _ = template.numbers
            needed = floats_on_gpu(workers, tile_q, self._head_dim_v, self._batch_invariant)
            room = self._arenas.reserve(stream, needed, workers)
            words[ARENA_AT] = room.states_at
            words[ARRIVALS_AT] = room.arrivals_at
            words[STREAM_AT] = stream
            # A room that a capture was given is its own, and ends here.
            template.room = room if room.kept is None else None
        words[Q_AT] = q_at
        words[CACHES_AT] = caches.words
        words[OUT_AT] = out_at
        words[LSE_AT] = 0 if lse is None else lse.data_ptr()
        words[HOOKS_AT] = hooks
        error = self._kernel(template.argument)
        if error:
            raise AttnloomError(f"{self._name}: the kernel was not launched: CUDA error {error}")
        count_run()

    def _follow(self, engine: Attention, template: Template, plan: Plan) -> bool:
        """Whether a template serves another plan; if so, it is that plan's from now on."""
        layout = plan.layout
        if layout is None or _numbers_of(plan, layout) != template.numbers:
            return False
        check_plan(engine, plan)
        template.words[PLAN_AT] = words_of(plan)
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
        check_plan(engine, plan)
        layout = plan.layout
        if layout is None:
            raise ValueError("plan.layout=None: expected a plan made with a layout")
        numbers = _numbers_of(plan, layout)
        for name, scale in zip(("sm_scale", "k_scale", "v_scale"), given, strict=True):
            check_on_host(name, scale)
        scales = check_scales(engine, given)
        check_stored("q", q)
        check_stored("out", out)
        key = (get_ident(), looks_of(q), None if fresh else looks_of(out), flags, scales, numbers)
        template = self._templates.get(key)
        if template is None:
            check_run(engine, plan, q, k_cache, v_cache, given, None if fresh else out, flags)
            template = self._make(key, q, out, fresh, given, scales, flags, numbers)
        elif not (template.looks_same(q) if fresh else template.looks_same(q, out)):
            template.look_at(q, out)
        # As the caller writes them, if that is what they are: a tensor may hold another number the next time.
        template.keep_scales(given)
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
        numbers: tuple[int, int, int, int, int],
    ) -> Template:
        template = Template(q, out, fresh, given, scales, flags, numbers, flags[1], self._heads)
        check_aligned("q", q)
        check_strides("q", q)
        check_aligned("out", out, template.out_alignment)
        if len(self._templates) >= _MOST:
            self._templates.clear()
        self._templates[key] = template
        return template

    def _keep(self, k_cache: Tensor, v_cache: Tensor, block_size: int) -> Caches:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_aligned(name, cache)
            check_strides(name, cache)
        if len(self._caches) >= _MOST:
            self._caches.clear()
        caches = self._caches[id(k_cache)] = Caches(k_cache, v_cache, block_size)
        return caches
