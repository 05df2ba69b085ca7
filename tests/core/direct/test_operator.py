"""Launches of the registered operator."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from attnloom.core import op
from attnloom.core.direct import DirectPath
from attnloom.core.variant import Param
from tests.core.direct.fakes import SCALES, Engine, Kernel, plan_of, step


def test_the_operators_launches(path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, engine = Kernel(), Engine()
    monkeypatch.setattr(op, "_engines", {7: weakref.ref(engine)})
    made, plan = path(kernel), plan_of()
    layout = plan.layout
    assert layout is not None
    of_plan = (plan.buffer, layout.starts, layout.lengths, layout.indices, None, None)
    calls = {unfinished: op.Call([7, 9, 32, 1, 16, 1, int(unfinished), *SCALES]) for unfinished in (False, True)}
    for unfinished in (False, True, False, False):
        q, k, v, out = step()
        made.run_op(calls[unfinished], q, k, v, out, None, of_plan, 8)
        got = kernel.launched[-1]
        assert (got.q.data, got.k.data, got.v.data, got.out.data) == tuple(each.data_ptr() for each in (q, k, v, out))
        assert (got.plan, got.unfinished, got.num_workers) == (plan.buffer.data_ptr(), unfinished, 9)
        assert (got.layout.indices, got.layout.block_size) == (layout.indices.data_ptr(), 16)
        assert (got.sm_scale, got.k_scale, got.v_scale) == SCALES
    assert len(made._seen_of_op.made) == 2
    # Another plan, another layout, a mask: each is seen.
    kinds = torch.zeros(1, 2, 2, dtype=torch.uint8)
    other = torch.zeros(40, dtype=torch.int32)
    for index, tensor in ((0, other), (2, layout.lengths.clone()), (3, layout.indices.clone()), (5, kinds), (5, None)):
        changed = [*of_plan]
        changed[index] = tensor
        made.run_op(calls[False], q, k, v, out, None, tuple(changed), 8)  # type: ignore[arg-type]
        got = kernel.launched[-1]
        seen = (got.plan, got.layout.starts, got.layout.lengths, got.layout.indices, None, got.block_mask.kinds)
        assert seen == tuple(None if each is None else each.data_ptr() for each in changed)
    # The same tensors with another stride, there and back.
    apart = op.Call([7, 9, 32, 1, 16, 4, 0, *SCALES])
    for call, stride in ((calls[False], 1), (apart, 4), (apart, 4), (calls[False], 1)):
        made.run_op(call, q, k, v, out, None, of_plan, 8)
        assert (kernel.launched[-1].layout.index_stride, kernel.launched[-1].plan) == (stride, plan.buffer.data_ptr())


def test_numbers_of_a_variant_are_this_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.0 and -0.0 are equal, and the numbers of a call are known by being equal to those of the call before."""
    packed: list[float] = []

    class Ran:
        variant = SimpleNamespace(params=[Param("x")])
        direct = SimpleNamespace(run_op=lambda *_: None)

    engine = Ran()
    monkeypatch.setattr(op, "_engines", {7: weakref.ref(engine)})
    monkeypatch.setattr(op, "_last", None)
    monkeypatch.setattr(op, "pack", lambda _, values: packed.append(values[0]) or (ctypes.c_uint64 * 1)())
    empty = torch.empty(0)
    for x in (0.0, -0.0, 0.0):
        op._run_cuda(empty, empty, empty, empty, None, [empty] * 6, [7, 9, 32, 1, 16, 1, 0, *SCALES, x])
    assert [math.copysign(1.0, x) for x in packed] == [1.0, -1.0, 1.0]
