"""A launch gets the struct that its tensors ask for."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest
import torch

from attnloom.core import arena
from attnloom.core.abi import AttentionParams, Divisor
from attnloom.core.direct import DirectPath
from attnloom.core.errors import AttnloomError
from attnloom.core.templates import PLAN_AT, _cache_in_units, words_of
from tests.core.direct.fakes import DEVICE, SCALES, Kernel, launch, plan_of, step


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
    assert (got.tile_q, got.group) == (32, 2)
    assert (got.lockstep, got.line_heads) == (1, 2)
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


def test_workers_in_lockstep_lie_side_by_side_in_the_grid(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    direct, tensors = path(kernel), step()
    for lockstep in (1, 2, 1):
        launch(direct, tensors, plan_of(num_workers=10, lockstep=lockstep))
    found = [(got.num_workers, got.lockstep, got.line_heads) for got in kernel.launched]
    assert found == [(10, 1, 2), (10, 2, 1), (10, 1, 2)]


def test_a_cache_whose_last_token_32_bits_do_not_count_is_refused() -> None:
    # Blocks 2^20 + 8 and slots 8 elements apart: their common divisor is 8.
    room = torch.empty(0, dtype=torch.float16, device="meta").as_strided((2**15, 16, 2, 64), (2**20 + 8, 8, 64, 1))
    assert _cache_in_units(room).units_block == 2**17 + 1
    far = room.as_strided((2**15 + 9, 16, 2, 64), room.stride())
    with pytest.raises(ValueError, match=r"cache\.stride\(\)=.*: expected blocks and slots less than 4294967295 times"):
        _cache_in_units(far)
    one = room.as_strided((1, 1, 2, 64), (2**40 + 8, 2**35 + 8, 64, 1))
    assert (_cache_in_units(one).units_block, _cache_in_units(one).units_slot) == (0, 0)


def test_slots_are_a_stride_apart_where_blocks_are_whole_slices() -> None:
    def slot_bytes(*shape: int, stride: tuple[int, ...] | None = None) -> int:
        cache = torch.empty(0, dtype=torch.float16, device="meta")
        made = cache.new_empty(shape) if stride is None else cache.as_strided(shape, stride)
        return int(_cache_in_units(made).slot_bytes)

    assert slot_bytes(5, 16, 2, 64) == slot_bytes(5, 48, 2, 64) == 2 * 64 * 2
    assert slot_bytes(5, 1, 2, 64) == slot_bytes(5, 8, 2, 64) == slot_bytes(5, 24, 2, 64) == 0
    assert slot_bytes(5, 32, 2, 64, stride=(2 * 32 * 64, 64, 32 * 64, 1)) == 64 * 2  # heads before slots
    far = 2**27 - 8  # elements: 16 slots are just below 2^32 bytes
    assert slot_bytes(1, 16, 2, 64, stride=(1, far, 64, 1)) == 2 * far
    assert slot_bytes(1, 16, 2, 64, stride=(1, far + 8, 64, 1)) == 0


def test_an_error_of_cuda_is_told(path: Callable[[Kernel], DirectPath]) -> None:
    with pytest.raises(AttnloomError, match="kernel: the kernel was not launched: CUDA error 700"):
        launch(path(Kernel(error=700)), step(), plan_of())


def test_the_words_of_a_plan_lie_where_the_kernel_reads_them() -> None:
    assert ctypes.sizeof(AttentionParams) % 8 == 0
    assert PLAN_AT.stop - PLAN_AT.start == len(words_of(plan_of()))
