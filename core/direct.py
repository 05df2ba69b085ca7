"""The direct path of a CUDA engine: from tensors to a launch in a few microseconds of the host's time.

A struct for tensors of some shapes, strides and dtypes, and for some scales, is filled and checked once; a launch then
writes addresses. The words of a plan (its own address, the layout's, the block mask's) are kept with it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnloom.core.arena import floats_on_gpu, stream_arenas
from attnloom.core.checks import ALIGNMENT, check_aligned, check_on_host, check_stored, check_strides
from attnloom.core.errors import AttnloomError
from attnloom.core.launch import runs
from attnloom.core.looks import Seen, guard_of, looks_of, same_number
from attnloom.core.run_checks import check_layout, check_plan, check_run, check_scales
from attnloom.core.streams import capturing, current_device, current_stream
from attnloom.core.templates import (
    ARENA_AT,
    ARRIVALS_AT,
    HOOKS_AT,
    K_AT,
    LSE_AT,
    OUT_AT,
    PLAN_AT,
    Q_AT,
    STREAM_AT,
    V_AT,
    Template,
    plan_words,
    words_of,
)

if TYPE_CHECKING:
    from attnloom.core.attention import Attention
    from attnloom.core.layout import BlockSparseLayout
    from attnloom.core.op import Call
    from attnloom.core.plan import Plan

_SCALES = ("sm_scale", "k_scale", "v_scale")
_TENSORS = ("q", "k_cache", "v_cache", "out")


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
        self._seen = Seen[Template]()
        self._seen_of_op = Seen[Template]()

    def run(
        self,
        engine: Attention,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scales: tuple[object, object, object],
        flags: tuple[bool, bool],
        out: Tensor,
        lse: Tensor | None,
        hooks: int,
    ) -> None:
        """Put the kernel on the current stream; arguments that are new are checked by the engine.

        Args:
            engine: whose kernel it is.
            plan: of the step.
            q, k_cache, v_cache: as the engine got them.
            scales: likewise.
            flags: return_lse, return_state.
            out: given, or new.
            lse: contiguous, or None.
            hooks: address of the variant's packed parameters, on the host.
        """
        sm_scale, k_scale, v_scale = scales
        try:
            # Written out, not called: this is what a layer costs.
            for template in self._seen.recent:
                if (
                    flags == template.flags
                    and (sm_scale is template.sm_scale or same_number(sm_scale, template.sm_scale))
                    and (k_scale is template.k_scale or same_number(k_scale, template.k_scale))
                    and (v_scale is template.v_scale or same_number(v_scale, template.v_scale))
                    and (plan.kernel_words is template.plan or self._follow(engine, template, plan))
                    and not (q.is_nested or k_cache.is_nested or v_cache.is_nested or out.is_nested)
                    and template.same(q, k_cache, v_cache, out)
                ):
                    break
            else:
                template = self._find(engine, plan, (q, k_cache, v_cache, out), scales, flags)
        except AttributeError:
            check_run(engine, plan, q, k_cache, v_cache, scales, out, flags)  # says what is no tensor
            raise
        self._launch(template, q, k_cache, v_cache, out, lse, hooks)

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
        for template in self._seen_of_op.recent:
            if template.call is call and template.same(q, k_cache, v_cache, out):
                break
        else:
            template = self._find_of_op(call, (q, k_cache, v_cache, out))
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
        self._launch(template, q, k_cache, v_cache, out, lse, hooks)

    def _launch(
        self,
        template: Template,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        hooks: int,
    ) -> None:
        if self._others and current_device() != self._index:
            with torch.cuda.device(self._device):
                return self._launch(template, q, k_cache, v_cache, out, lse, hooks)
        q_at, k_at, v_at, out_at = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
        if (q_at | k_at | v_at) % ALIGNMENT or out_at % template.out_alignment:
            self._check_aligned(template, (q, k_cache, v_cache, out))
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
        words[K_AT] = k_at
        words[V_AT] = v_at
        words[OUT_AT] = out_at
        lse_at = 0 if lse is None else lse.data_ptr()
        if lse_at != template.lse_at:
            words[LSE_AT] = template.lse_at = lse_at
        if hooks != template.hooks:
            words[HOOKS_AT] = template.hooks = hooks
        error = self._kernel(template.argument)
        if error:
            raise AttnloomError(f"{self._name}: the kernel was not launched: CUDA error {error}")
        runs[0] += 1

    def _follow(self, engine: Attention, template: Template, plan: Plan) -> bool:
        """Whether a template serves another plan; if so, it is that plan's from now on."""
        layout = plan.layout
        if layout is None or _numbers_of(plan, layout) != template.numbers:
            return False
        check_plan(engine, plan)
        template.words[PLAN_AT] = words_of(plan)
        template.plan = plan.kernel_words
        return True

    def _find(
        self,
        engine: Attention,
        plan: Plan,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        given: tuple[object, object, object],
        flags: tuple[bool, bool],
    ) -> Template:
        """The template for such arguments, which are checked if there was none."""
        check_plan(engine, plan)
        numbers = _numbers_of(plan, check_layout(plan))
        for name, scale in zip(_SCALES, given, strict=True):
            check_on_host(name, scale)
        scales = check_scales(engine, given)
        for name, tensor in zip(_TENSORS, tensors, strict=True):
            check_stored(name, tensor)
        key = (*map(looks_of, tensors), flags, repr(scales), numbers)  # 0.0 is equal to -0.0
        template = self._seen.made.get(key)
        if template is None:
            check_run(engine, plan, *tensors[:3], given, tensors[3], flags)
            template = self._make(tensors, scales, flags, numbers)
            self._seen.keep(key, template)
        else:
            template.same = guard_of(*tensors)
        self._follow(engine, template, plan)
        # A tensor may hold another number the next time.
        if not any(isinstance(scale, Tensor) for scale in given):
            template.sm_scale, template.k_scale, template.v_scale = given
            self._seen.use(template)
        return template

    def _find_of_op(self, call: Call, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Template:
        numbers = (-1, call.num_workers, call.block_size, call.tile_q, call.lockstep)
        flags = (call.unfinished, call.unfinished)
        # The stride lies in the words of a plan, which a template keeps while the plan's tensors are the same.
        key = (*map(looks_of, tensors), flags, repr(call.scales), numbers, call.index_stride)
        template = self._seen_of_op.made.get(key)
        if template is None:
            template = self._make(tensors, call.scales, flags, numbers)
            self._seen_of_op.keep(key, template)
        else:
            template.same = guard_of(*tensors)
        template.call = call
        self._seen_of_op.use(template)
        return template

    def _make(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        scales: tuple[float, float, float],
        flags: tuple[bool, bool],
        numbers: tuple[int, int, int, int, int],
    ) -> Template:
        template = Template(*tensors, scales, flags, numbers, self._heads)
        self._check_aligned(template, tensors)
        for name, tensor in zip(_TENSORS[:3], tensors[:3], strict=True):
            check_strides(name, tensor)
        return template

    def _check_aligned(self, template: Template, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        for name, tensor in zip(_TENSORS, tensors, strict=True):
            check_aligned(name, tensor, template.out_alignment if name == "out" else ALIGNMENT)
