"""The direct path's bookkeeping: a launch gets the struct that its tensors ask for. The kernel here is Python."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from attnloom import BlockSparseLayout
from attnloom.core import arena, direct, op
from attnloom.core.abi import AttentionParams, CacheTensor, Divisor
from attnloom.core.block_mask import BlockMask
from attnloom.core.direct import DirectPath
from attnloom.core.errors import AttnloomError
from attnloom.core.plan import Plan, PlanKey
from attnloom.core.templates import CACHES_AT, PLAN_AT, _cache_in_units, words_of
from attnloom.core.tiles import Costs

DEVICE = torch.device("cpu", 0)
SCALES = (0.5, 2.0, 3.0)


class Kernel:
    """Stands for a loaded module: keeps a copy of what it is launched with."""

    def __init__(self, error: int = 0) -> None:
        self.launched: list[AttentionParams] = []
        self.error = error

    def __getitem__(self, name: str) -> Callable[[Any], int]:
        assert name == "attnloom_run"
        return self.run

    def run(self, argument: Any) -> int:
        self.launched.append(AttentionParams.from_buffer_copy(argument._obj))
        return self.error


class Engine:
    """Stands for an engine: counts how often it is asked to check."""

    def __init__(self) -> None:
        self.checks = 0

    def check_run(self) -> None:
        self.checks += 1

    def check_plan(self, plan: Plan) -> None:
        assert isinstance(plan, Plan)

    def scales(self, *given: Any) -> tuple[float, ...]:
        return tuple(1.0 if scale is None else float(scale) for scale in given)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], DirectPath]:
    monkeypatch.setattr(direct, "current_device", lambda: 0)
    monkeypatch.setattr(direct, "current_stream", lambda index: 77)
    monkeypatch.setattr(direct, "capturing", lambda: False)
    monkeypatch.setattr(direct, "check_plan", lambda engine, plan: engine.check_plan(plan))
    monkeypatch.setattr(direct, "check_run", lambda engine, *_: engine.check_run())
    monkeypatch.setattr(direct, "check_scales", lambda engine, given: engine.scales(*given))
    monkeypatch.setattr(arena, "capturing", lambda: False)
    monkeypatch.setattr(arena, "_arenas", {})
    monkeypatch.setattr(arena, "device_module", lambda device: Memory())
    return lambda kernel: DirectPath("kernel", kernel, DEVICE, 64, 2)  # type: ignore[arg-type]


class Memory:
    """Stands for the device module: memory of the host."""

    blocks: ClassVar[dict[int, Any]] = {}

    def attnloom_allocate(self, num_bytes: int) -> int:
        block = (ctypes.c_char * num_bytes)(*[1] * min(num_bytes, 64))
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def attnloom_release(self, address: int) -> int:
        del self.blocks[address]
        return 0

    def attnloom_zero(self, address: int, num_bytes: int, stream: int) -> int:
        ctypes.memset(address, 0, num_bytes)
        return 0

    def attnloom_capture(self, stream: int) -> int:
        return 1


def step(rows: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(rows, 5, 80)[:, 1:, :64]
    cache = torch.randn(7, 2, 16, 2, 64)
    return q, cache[:, 0], cache[:, 1], torch.empty(rows, 4, 64)


def plan_of(rows: int = 3, *, block_kinds: Tensor | None = None, positions: bool = False, num_workers: int = 9) -> Plan:
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    layout = BlockSparseLayout.from_page_table(table, torch.tensor([1, 2, 3], dtype=torch.int32), 16)
    if positions:
        layout = replace(layout, positions=layout.indices, index_stride=3)
    key = PlanKey(4, 2, 16, 32, 64, None, 0, DEVICE)
    mask = None if block_kinds is None else BlockMask(block_kinds, 64)
    buffer = torch.zeros(40, dtype=torch.int32)
    return Plan(key, 3, 3, num_workers, 1, rows, 3, Costs(1, 1, 1), buffer, layout, mask)


def launch(
    path: DirectPath,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: Plan,
    engine: Engine | None = None,
    *,
    given: tuple[object, object, object] = SCALES,
    flags: tuple[bool, bool] = (False, False),
    fresh: bool = False,
    lse: Tensor | None = None,
    hooks: int = 0,
) -> None:
    q, k, v, out = tensors
    path.run(engine or Engine(), plan, q, k, v, given, flags, out, fresh, lse, hooks)  # type: ignore[arg-type]


def test_every_field(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    kinds = torch.zeros(3, 5, 6, dtype=torch.uint8)
    plan = plan_of(block_kinds=kinds, positions=True)
    layout = plan.layout
    assert layout is not None
    q, k, v, out = tensors = step()
    lse = torch.empty(3, 4)
    launch(path(kernel), tensors, plan, lse=lse, hooks=4096)
    (got,) = kernel.launched
    assert (got.q.data, got.q.stride_row, got.q.stride_head) == (q.data_ptr(), 400, 80)
    assert (got.k.data, got.k.stride_block, got.k.stride_slot, got.k.stride_head) == (k.data_ptr(), 4096, 128, 64)
    assert (got.v.data, got.v.stride_block) == (v.data_ptr(), 4096)
    assert (got.out.data, got.out.stride_row, got.out.stride_head) == (out.data_ptr(), 256, 64)
    assert got.lse == lse.data_ptr()
    assert (got.layout.starts, got.layout.lengths) == (layout.starts.data_ptr(), layout.lengths.data_ptr())
    assert got.layout.indices == got.layout.positions == layout.indices.data_ptr()
    assert (got.layout.block_size, got.layout.index_stride) == (16, 3)
    mask = got.block_mask
    assert (mask.kinds, mask.stride_request, mask.q_blocks, mask.kv_blocks) == (kinds.data_ptr(), 30, 5, 6)
    assert got.plan == plan.buffer.data_ptr()
    assert (got.sm_scale, got.k_scale, got.v_scale) == SCALES
    assert (got.unfinished, got.num_workers, got.stream, got.hook_params) == (0, 9, 77, 4096)
    assert (got.tile_q, got.group, got.group_inverse) == (32, 2, 32768)
    for cache, tensor in ((got.k, k), (got.v, v)):
        assert (cache.unit, cache.units_block, cache.units_slot) == (128 * tensor.element_size(), 32, 1)
    room = arena.stream_arenas(DEVICE).reserve(77, 1, 1)
    assert (got.arena, got.arrivals) == (room.states_at, room.arrivals_at)
    assert room.num_floats >= 2 * 9 * 32 * 65 and room.num_workers >= 9
    assert ctypes.string_at(room.arrivals_at, 36) == bytes(36)


@pytest.mark.parametrize("d", [1, 2, 3, 16, 24, 1000, 4097, 2**30, 2**31 - 1])
def test_divisors(d: int) -> None:
    divisor = Divisor.of(d)
    draw = random.Random(d)
    near = [n for k in (1, 2, 7, (2**31 - 1) // d) for n in (k * d - 1, k * d, k * d + 1)]
    for n in [0, 1, 2**31 - 1, *near, *(draw.randrange(2**31) for _ in range(2000))]:
        if 0 <= n < 2**31:
            assert n * divisor.inverse >> divisor.shift == n // d


def test_a_cache_whose_last_token_32_bits_do_not_count_is_refused() -> None:
    # Blocks 2^20 + 8 and slots 8 elements apart: their common divisor is 8.
    room = torch.empty(0, dtype=torch.float16, device="meta").as_strided((2**15, 16, 2, 64), (2**20 + 8, 8, 64, 1))
    assert _cache_in_units(room).units_block == 2**17 + 1
    far = room.as_strided((2**15 + 9, 16, 2, 64), room.stride())
    with pytest.raises(ValueError, match=r"cache\.stride\(\)=.*: expected blocks and slots less than 4294967295 times"):
        _cache_in_units(far)
    one = room.as_strided((1, 1, 2, 64), (2**40 + 8, 2**35 + 8, 64, 1))
    assert (_cache_in_units(one).units_block, _cache_in_units(one).units_slot) == (0, 0)


def test_a_template_serves_other_tensors_of_the_same_shape(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made = path(kernel)
    first, second = step(), step()
    masked = plan_of(block_kinds=torch.zeros(1, 1, 1, dtype=torch.uint8), positions=True)
    launch(made, first, masked, engine, lse=torch.empty(3, 4), hooks=8)
    plan = plan_of()
    launch(made, second, plan, engine)
    assert len(made._templates) == 1
    got = kernel.launched[1]
    assert (got.q.data, got.k.data, got.v.data, got.out.data) == tuple(tensor.data_ptr() for tensor in second)
    assert got.plan == plan.buffer.data_ptr()
    # Nothing of the first launch is left.
    assert not got.lse and not got.hook_params and not got.block_mask.kinds and not got.layout.positions


def test_what_was_checked_is_not_checked_again(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made = path(kernel)
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of(), engine)
    checked = engine.checks
    assert checked
    for _ in range(3):
        launch(made, (step()[0], k, v, torch.empty_like(out)), plan_of(), engine)
    assert engine.checks == checked
    k_other, v_other = step()[1:3]
    launch(made, (q, k_other, v_other, out), plan_of(), engine)
    assert engine.checks == checked + 1
    # Layers take turns with their caches.
    for caches in ((k, v), (k_other, v_other)) * 3:
        launch(made, (q, *caches, out), plan_of(), engine)
        assert kernel.launched[-1].k.data == caches[0].data_ptr()
    assert engine.checks == checked + 1


def test_all_that_checks_depend_on_is_checked_anew(path: Callable[[Kernel], DirectPath]) -> None:
    made, engine = path(Kernel()), Engine()
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of(), engine)
    others: list[Callable[[], None]] = [
        lambda: launch(made, (q.contiguous(), k, v, out), plan_of(), engine),
        lambda: launch(made, (q[:2], k, v, out), plan_of(), engine),
        lambda: launch(made, (q.double(), k, v, out), plan_of(), engine),
        lambda: launch(made, (q, k.contiguous(), v, out), plan_of(), engine),
        lambda: launch(made, (q, k[:3], v, out), plan_of(), engine),
        lambda: launch(made, (q, k, v.half(), out), plan_of(), engine),
        lambda: launch(made, (q, k, v, torch.empty(3, 4, 128)[..., :64]), plan_of(), engine),
        lambda: launch(made, (q, k, v, out), plan_of(), engine, fresh=True),
        lambda: launch(made, (q, k, v, out), plan_of(), engine, given=(0.5, 2.0, 4.0)),
        lambda: launch(made, (q, k, v, out), plan_of(), engine, flags=(True, False)),
        lambda: launch(made, (q, k, v, out), plan_of(), engine, flags=(False, True)),
        lambda: launch(made, (q, k, v, out), plan_of(rows=2), engine),
        lambda: launch(made, (q, k, v, out), plan_of(num_workers=3), engine),
    ]
    for other in others:
        before = engine.checks
        other()
        assert engine.checks > before
        other()


def test_numbers_in_tensors_are_read_each_time(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made, scale, tensors, plan = path(kernel), torch.tensor(0.25), step(), plan_of()
    launch(made, tensors, plan, given=(scale, None, None))
    scale.fill_(0.75)
    launch(made, tensors, plan, given=(scale, None, None))
    assert [params.sm_scale for params in kernel.launched] == [0.25, 0.75]


def test_caches_are_known_by_where_they_lie(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made = path(kernel)
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of(), engine)
    before = engine.checks
    k.data = torch.randn(k.shape)
    launch(made, (q, k, v, out), plan_of(), engine)
    assert engine.checks == before + 1
    assert kernel.launched[1].k.data == k.data_ptr() and kernel.launched[1].k.stride_block == 2048


def test_no_plan_is_not_the_plan_that_is_gone(path: Callable[[Kernel], DirectPath]) -> None:
    kernel, engine = Kernel(), Engine()
    made, tensors = path(kernel), step()
    launch(made, tensors, plan_of(), engine)
    gc.collect()
    before = engine.checks
    with pytest.raises(AttributeError):
        launch(made, tensors, None, engine)  # type: ignore[arg-type]
    assert engine.checks == before + 1 and len(kernel.launched) == 1  # a real engine's check says more


def test_plans_and_caches_are_not_kept_alive(path: Callable[[Kernel], DirectPath]) -> None:
    made, tensors, plan = path(Kernel()), step(), plan_of()
    launch(made, tensors, plan)
    gone = [weakref.ref(each) for each in (plan, *tensors)]
    del tensors, plan
    gc.collect()
    assert [each() for each in gone] == [None] * 5


def test_addresses_of_rows_are_checked_at_every_launch(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made = path(kernel)
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of())
    for name, rows in (("q", q), ("out", out)):
        shifted = torch.empty(rows.shape[0] * rows.stride(0) + 64)[1:].as_strided(rows.shape, rows.stride())
        tensors = {"q": q, "out": out, name: shifted}
        with pytest.raises(ValueError, match=rf"{name}\.data_ptr\(\)=.*: expected a multiple of (16|8) bytes"):
            launch(made, (tensors["q"], k, v, tensors["out"]), plan_of())
    assert len(kernel.launched) == 1


def test_addresses_of_caches_are_checked(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    q, k, _, out = step()
    shifted = torch.empty(k.numel() * 2 + 64)[1:].as_strided(k.shape, k.stride())
    with pytest.raises(ValueError, match=r"v_cache\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        launch(path(kernel), (q, k, shifted, out), plan_of())
    assert not kernel.launched


def test_the_operators_launches(path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, engine = Kernel(), Engine()
    monkeypatch.setattr(op, "_engines", {7: weakref.ref(engine)})
    made, plan = path(kernel), plan_of()
    layout = plan.layout
    assert layout is not None
    of_plan = (plan.buffer, layout.starts, layout.lengths, layout.indices, None, None)
    calls = {unfinished: op.Call([7, 9, 32, 16, 1, int(unfinished), *SCALES]) for unfinished in (False, True)}
    for unfinished in (False, True, False, False):
        q, k, v, out = step()
        made.run_op(calls[unfinished], q, k, v, out, None, of_plan, 8)
        got = kernel.launched[-1]
        assert (got.q.data, got.k.data, got.v.data, got.out.data) == tuple(each.data_ptr() for each in (q, k, v, out))
        assert (got.plan, got.unfinished, got.num_workers) == (plan.buffer.data_ptr(), unfinished, 9)
        assert (got.layout.indices, got.layout.block_size) == (layout.indices.data_ptr(), 16)
        assert (got.sm_scale, got.k_scale, got.v_scale) == SCALES
    assert len(made._templates) == 2
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
    apart = op.Call([7, 9, 32, 16, 4, 0, *SCALES])
    for call, stride in ((calls[False], 1), (apart, 4), (apart, 4), (calls[False], 1)):
        made.run_op(call, q, k, v, out, None, of_plan, 8)
        assert (kernel.launched[-1].layout.index_stride, kernel.launched[-1].plan) == (stride, plan.buffer.data_ptr())


def rows_at(offset: int, pitch: int, head: int) -> Tensor:
    """Rows of 4 heads of 64 float32 from `offset` on, strides in elements."""
    return torch.empty(3 * pitch + 4 * head + offset)[offset:].as_strided((3, 4, 64), (pitch, head, 1))


BAD_ROWS = {
    r"q\.data_ptr\(\)=.*: expected a multiple of 16 bytes": {"q": rows_at(2, 256, 64)},
    r"q\.stride\(\)=\(258, 64, 1\): expected strides of a multiple of 16 bytes, dimension 0 has 1032": {
        "q": rows_at(0, 258, 64)
    },
    r"q\.stride\(\)=.* of 16 bytes, dimension 1 has 264": {"q": rows_at(0, 264, 66)},
    r"out\.data_ptr\(\)=.*: expected a multiple of 8 bytes": {"out": rows_at(1, 256, 64)},
    r"out\.stride\(\)=.* of 8 bytes, dimension 0 has 1036": {"out": rows_at(0, 259, 64)},
    r"out\.stride\(\)=.* of 8 bytes, dimension 1 has 260": {"out": rows_at(0, 260, 65)},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_rows_that_no_vector_reaches_are_refused(path: Callable[[Kernel], DirectPath], message: str) -> None:
    kernel = Kernel()
    q, k, v, out = step()
    rows = {"q": q, "out": out, **BAD_ROWS[message]}
    with pytest.raises(ValueError, match=message):
        launch(path(kernel), (rows["q"], k, v, rows["out"]), plan_of())
    assert not kernel.launched


def test_states_are_written_in_longer_vectors(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made = path(kernel)
    q, k, v, _ = step()
    out = rows_at(2, 258, 64)
    launch(made, (q, k, v, out), plan_of())
    with pytest.raises(ValueError, match=r"out\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        launch(made, (q, k, v, out), plan_of(), flags=(False, True))
    launch(made, (q, k, v, rows_at(0, 256, 64)), plan_of(), flags=(False, True))
    with pytest.raises(ValueError, match=r"out\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        launch(made, (q, k, v, rows_at(2, 256, 64)), plan_of(), flags=(False, True))
    assert len(kernel.launched) == 2


def test_strides_of_dimensions_of_size_one_do_not_count(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    k = torch.empty(8192).as_strided((1, 16, 2, 64), (2**40 + 1, 128, 64, 1))
    q = torch.empty(64).as_strided((1, 1, 64), (3, 5, 1))
    launch(path(kernel), (q, k, k, q), plan_of(rows=1))
    assert len(kernel.launched) == 1


@pytest.mark.parametrize("dim", range(3))
def test_strides_of_caches_fit_into_32_bits(path: Callable[[Kernel], DirectPath], dim: int) -> None:
    """2**29 float32 are 2**31 bytes; nothing is read here, so nothing need be there."""
    kernel = Kernel()
    q, k, _, out = step()
    strides = [2**29 if each == dim else 64 for each in range(3)]
    far = torch.empty(0, device="meta").as_strided((2, 2, 2, 64), (*strides, 1))
    with pytest.raises(
        ValueError, match=rf"v_cache\.stride\(\)=.* at most {2**31 - 1} bytes, dimension {dim} has {2**31}"
    ):
        launch(path(kernel), (q, k, far, out), plan_of())
    assert not kernel.launched


@pytest.mark.parametrize("dim", range(2))
def test_strides_of_queries_fit_into_32_bits(path: Callable[[Kernel], DirectPath], dim: int) -> None:
    kernel = Kernel()
    _, k, v, out = step()
    strides = [2**29 if each == dim else 64 for each in range(2)]
    far = torch.empty(0, device="meta").as_strided((3, 4, 64), (*strides, 1))
    with pytest.raises(ValueError, match=rf"q\.stride\(\)=.* at most {2**31 - 1} bytes, dimension {dim} has {2**31}"):
        launch(path(kernel), (far, k, v, out), plan_of())
    assert not kernel.launched


def test_an_error_of_cuda_is_told(path: Callable[[Kernel], DirectPath]) -> None:
    with pytest.raises(AttnloomError, match="kernel: the kernel was not launched: CUDA error 700"):
        launch(path(Kernel(error=700)), step(), plan_of())


def test_nothing_piles_up(path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MOST", 4)
    made = path(Kernel())
    kept = []
    for rows in range(1, 20):
        kept.append(step(rows))
        launch(made, kept[-1], plan_of(rows))
        assert len(made._templates) <= 4 and len(made._caches) <= 4


def test_streams_have_arenas_of_their_own(path: Callable[[Kernel], DirectPath]) -> None:
    arenas = arena.stream_arenas(DEVICE)
    one, other = arenas.reserve(1, 1000, 4), arenas.reserve(2, 1000, 4)
    assert one.states_at != other.states_at and one.arrivals_at != other.arrivals_at
    assert arenas.reserve(1, 900, 4) is one
    grown = arenas.reserve(1, 2000, 2)
    assert grown.num_floats == 2000 and grown.num_workers == 4
    assert one.states_at not in Memory.blocks and grown.states_at in Memory.blocks
    assert arena.stream_arenas(DEVICE) is arenas


def test_a_launch_follows_the_stream_and_its_room(
    path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    made, tensors = path(kernel), step()
    arenas = arena.stream_arenas(DEVICE)
    for stream in (5, 6, 5):
        monkeypatch.setattr(direct, "current_stream", lambda index, stream=stream: stream)
        launch(made, tensors, plan_of())
        got = kernel.launched[-1]
        assert got.stream == stream and got.arena == arenas.rooms[stream].states_at
    arenas.reserve(5, 10**6, 20)
    launch(made, tensors, plan_of())
    assert kernel.launched[-1].arena == arenas.rooms[5].states_at


def test_a_capture_has_room_of_its_own(path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    made, tensors = path(kernel), step()
    launch(made, tensors, plan_of())
    with monkeypatch.context() as patch:
        patch.setattr(direct, "capturing", lambda: True)
        patch.setattr(arena, "capturing", lambda: True)
        launch(made, tensors, plan_of())
        launch(made, tensors, plan_of())
    launch(made, tensors, plan_of())
    before, first, second, after = kernel.launched
    assert before.arena == after.arena and before.arrivals == after.arrivals
    assert first.arrivals == second.arrivals != before.arrivals
    assert before.arena not in (first.arena, second.arena)


def test_the_words_of_a_plan_lie_where_the_kernel_reads_them() -> None:
    assert ctypes.sizeof(AttentionParams) % 8 == 0
    assert PLAN_AT.stop - PLAN_AT.start == len(words_of(plan_of()))
    assert CACHES_AT.stop - CACHES_AT.start == 2 * ctypes.sizeof(CacheTensor) // 8
