"""The registered custom operator: attention as torch.compile sees it.

Compiled graphs hold tensors and numbers only, so the operator takes the plan's buffer and the layout's arrays; the
engine travels as a number.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnloom.core import launch
from attnloom.core.block_mask import BlockMask
from attnloom.core.checks import check_aligned
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.params import Value, pack
from attnloom.core.templates import NO_HOOKS

if TYPE_CHECKING:
    from attnloom.core.attention import Attention
    from attnloom.core.plan import Plan

_library = torch.library.Library("attnloom", "DEF")
_library.define(
    "attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) out, Tensor(b!)? lse, "
    # Lists, since torch takes a fifth of a microsecond for an argument and less for an entry of a list.
    # plan, starts, lengths, indices, positions or None, kinds of a block mask or None, then the tensors of the variant.
    "Tensor?[] tensors, "
    # engine, num_workers, tile_q, lockstep, block_size, index_stride, unfinished, sm_scale, k_scale, v_scale, then the
    # scalars of the variant.
    "Scalar[] numbers) -> ()"
)
_OF_PLAN = 6  # tensors before those of the variant
_OF_ENGINE = 10  # numbers before those of the variant
_engines: dict[int, weakref.ref[Attention]] = {}  # a WeakValueDictionary takes four times as long to ask
_next_handle = 0


def register_engine(engine: Attention) -> int:
    """The number under which the operator finds an engine while it lives."""
    global _next_handle
    _next_handle += 1
    handle = _next_handle
    _engines[handle] = weakref.ref(engine, lambda _: _engines.pop(handle, None))
    return handle


def op_arguments(
    engine: Attention,
    plan: Plan,
    layout: BlockSparseLayout,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    values: Sequence[Value],
    scales: tuple[float, float, float],
    unfinished: bool,
) -> tuple[object, ...]:
    """What the operator is given, from the arguments of the direct path."""
    return (
        *tensors,
        [
            plan.buffer,
            layout.starts,
            layout.lengths,
            layout.indices,
            layout.positions,
            None if plan.block_mask is None else plan.block_mask.kinds,
            # torch does not do that by itself for a list in which there may be None.
            *[value.resolve_neg() for value in values if isinstance(value, Tensor)],
        ],
        [
            engine.handle,
            plan.num_workers,
            plan.key.tile_q,
            plan.lockstep,
            layout.block_size,
            layout.index_stride,
            int(unfinished),
            *scales,
            *[value for value in values if not isinstance(value, Tensor)],
        ],
    )


def _find(handle: int) -> Attention:
    reference = _engines.get(handle)
    found = None if reference is None else reference()
    if found is None:
        raise RuntimeError(f"engine={handle}: expected one that still lives; keep it beside the compiled function")
    return found


def _values(engine: Attention, tensors: list[Tensor], scalars: list[float | int]) -> list[Value]:
    """The variant's parameters in the order of declaration."""
    next_tensor, next_scalar = iter(tensors), iter(scalars)
    return [next(next_scalar) if param.scalar else next(next_tensor) for param in engine.variant.params]


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    tensors: list[Any],
    numbers: list[Any],
) -> None:
    engine, num_workers, _, _, block_size, stride, unfinished, sm_scale, k_scale, v_scale, *hook_scalars = numbers
    plan, starts, lengths, indices, positions, block_kinds, *hook_tensors = tensors
    found = _find(engine)
    # While compiling there were no addresses to check.
    check_aligned("k_cache", k_cache)
    check_aligned("v_cache", v_cache)
    layout = BlockSparseLayout(block_size, starts, lengths, indices, positions, stride)
    launch.check_indices(layout, min(k_cache.shape[0], v_cache.shape[0]))
    words = pack(found.variant.params, _values(found, hook_tensors, hook_scalars))
    launch.run(
        found,
        plan,
        num_workers,
        layout,
        None if block_kinds is None else BlockMask(block_kinds, found.tiles.tile_kv),
        (q, k_cache, v_cache, out, lse),
        words,
        (sm_scale, k_scale, v_scale),
        bool(unfinished),
    )


def _run_cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    tensors: list[Any],
    numbers: list[Any],
) -> None:
    global _last
    call = _last
    if call is None or call.numbers != numbers:
        call = Call(numbers)
        _last = call if all(call.scales) else None  # 0.0 is equal to -0.0
    engine = call.engine()
    if engine is None:
        engine = _find(numbers[0])  # says that it is gone
    direct = engine.direct
    assert direct is not None
    hooks = NO_HOOKS
    if engine.variant.params:
        # Not those of the call before, which were equal: 0.0 is -0.0 as well.
        words = pack(engine.variant.params, _values(engine, tensors[_OF_PLAN:], numbers[_OF_ENGINE:]))
        hooks = ctypes.addressof(words)
    direct.run_op(call, q, k_cache, v_cache, out, lse, tensors[:_OF_PLAN], hooks)


class Call:
    """The numbers of a call, and whose they are: the layers of a step have the same ones."""

    __slots__ = (
        "block_size",
        "engine",
        "index_stride",
        "lockstep",
        "num_workers",
        "numbers",
        "scales",
        "tile_q",
        "unfinished",
    )

    def __init__(self, numbers: list[Any]) -> None:
        self.numbers = list(numbers)
        handle, self.num_workers, self.tile_q, self.lockstep, *rest = numbers
        self.block_size, self.index_stride, unfinished, *rest = rest
        self.unfinished = bool(unfinished)
        self.scales = (float(rest[0]), float(rest[1]), float(rest[2]))
        self.engine = weakref.ref(_find(handle))


_last: Call | None = None


def _fake(*_: object) -> None:
    """Shapes only: the outputs are given, nothing is made."""


_library.impl("attention", _run, "CPU")
_library.impl("attention", _run_cuda, "CUDA")
torch.library.register_fake("attnloom::attention", _fake, lib=_library)
