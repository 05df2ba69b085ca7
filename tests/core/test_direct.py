"""The direct path's bookkeeping: a launch gets the struct that its tensors ask for. The kernel here is Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnloom import BlockSparseLayout
from attnloom.core import arena, direct
from attnloom.core.abi import AttentionParams
from attnloom.core.direct import DirectPath, plan_words, signature_of
from attnloom.core.errors import AttnloomError
from attnloom.core.tiles import Costs, Tiles

DEVICE = torch.device("cpu", 0)
TILES = Tiles(16, 32, 64, Costs(1, 1, 1), workers_per_sm=2)
SCALES = (0.5, 2.0, 3.0)


class Kernel:
    """Stands for a loaded module: keeps a copy of what it is launched with."""

    def __init__(self, error: int = 0) -> None:
        self.launched: list[AttentionParams] = []
        self.error = error

    def attnloom_run(self, argument: Any) -> int:
        self.launched.append(AttentionParams.from_buffer_copy(argument._obj))
        return self.error


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], DirectPath]:
    monkeypatch.setattr(direct, "current_device", lambda: 0)
    monkeypatch.setattr(direct, "current_stream", lambda index: 77)
    monkeypatch.setattr(arena, "_arenas", {})
    monkeypatch.setattr(arena, "capturing", lambda: False)
    return lambda kernel: DirectPath("kernel", kernel, DEVICE, TILES, 64)  # type: ignore[arg-type]


def step(rows: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(rows, 5, 80)[:, 1:, :64]
    cache = torch.randn(7, 2, 16, 2, 64)
    return q, cache[:, 0], cache[:, 1], torch.empty(rows, 4, 64)


def words(block_kinds: Tensor | None = None, positions: bool = False) -> tuple[memoryview, BlockSparseLayout, Tensor]:
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    layout = BlockSparseLayout.from_page_table(table, torch.tensor([1, 2, 3], dtype=torch.int32), 16)
    plan = torch.zeros(40, dtype=torch.int32)
    where = layout.indices if positions else None
    made = plan_words(plan, layout.starts, layout.lengths, layout.indices, where, 16, block_kinds)
    return made, layout, plan


def launch(path: DirectPath, tensors: tuple[Tensor, Tensor, Tensor, Tensor], plan: memoryview, **extra: Any) -> None:
    signature = signature_of(*tensors, SCALES, (9,))
    template = path.find(signature)
    if template is None:
        template = path.make(signature, tensors, SCALES, False, 9)
    path.launch(template, tensors, extra.get("lse"), plan, extra.get("hooks", 0))


def test_every_field(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    kinds = torch.zeros(3, 5, 6, dtype=torch.uint8)
    plan, layout, buffer = words(kinds, positions=True)
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
    assert got.layout.block_size == 16
    mask = got.block_mask
    assert (mask.kinds, mask.stride_request, mask.q_blocks, mask.kv_blocks) == (kinds.data_ptr(), 30, 5, 6)
    assert got.plan == buffer.data_ptr()
    assert (got.sm_scale, got.k_scale, got.v_scale) == SCALES
    assert (got.unfinished, got.num_workers, got.stream, got.hook_params) == (0, 9, 77, 4096)
    room = arena.stream_arenas(DEVICE).reserve(77, 1, 1)
    assert (got.arena, got.arrivals) == (room.states_at, room.arrivals_at)
    assert room.num_floats >= 2 * 9 * 32 * 65 and room.num_workers >= 9 and not room.arrivals.any()


def test_a_template_serves_other_tensors_of_the_same_shape(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made = path(kernel)
    first, second = step(), step()
    launch(made, first, words(torch.zeros(1, 1, 1, dtype=torch.uint8))[0], lse=torch.empty(3, 4), hooks=8)
    launch(made, second, words()[0])
    assert len(made._templates) == 1
    got = kernel.launched[1]
    assert (got.q.data, got.k.data, got.v.data, got.out.data) == tuple(tensor.data_ptr() for tensor in second)
    # Nothing of the first launch is left.
    assert not got.lse and not got.hook_params and not got.block_mask.kinds and not got.layout.positions


def test_signatures_tell_apart_what_the_checks_depend_on() -> None:
    q, k, v, out = step()
    same = signature_of(q, k, v, out, SCALES, (9,))
    assert signature_of(*step(), SCALES, (9,)) == same
    others = [
        (q.contiguous(), k, v, out),
        (q[:2], k, v, out),
        (q.double(), k, v, out),
        (q, k.contiguous(), v, out),
        (q, k[:3], v, out),
        (q, k, v.half(), out),
        (q, k, v, None),
        (q, k, v, torch.empty(3, 4, 128)[..., :64]),
    ]
    for tensors in others:
        assert signature_of(*tensors, SCALES, (9,)) != same
    assert signature_of(q, k, v, out, (0.5, 2.0, 4.0), (9,)) != same
    assert signature_of(q, k, v, out, SCALES, (8,)) != same


def test_addresses_are_checked_at_every_launch(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made = path(kernel)
    q, k, v, out = step()
    launch(made, (q, k, v, out), words()[0])
    shifted = torch.empty(k.numel() * 2 + 64)[1:].as_strided(k.shape, k.stride())
    with pytest.raises(ValueError, match=r"k_cache\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        launch(made, (q, shifted, v, out), words()[0])
    assert len(kernel.launched) == 1


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
        launch(path(kernel), (rows["q"], k, v, rows["out"]), words()[0])
    assert not kernel.launched


def test_states_are_written_in_longer_vectors(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made = path(kernel)
    q, k, v, _ = step()
    out = rows_at(2, 258, 64)
    launch(made, (q, k, v, out), words()[0])
    with pytest.raises(ValueError, match=r"out\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        made.make((), (q, k, v, out), SCALES, True, 9)
    template = made.make((), (q, k, v, rows_at(0, 256, 64)), SCALES, True, 9)
    with pytest.raises(ValueError, match=r"out\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        made.launch(template, (q, k, v, rows_at(2, 256, 64)), None, words()[0], 0)
    assert len(kernel.launched) == 1


def test_strides_of_dimensions_of_size_one_do_not_count(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    k = torch.empty(8192).as_strided((1, 16, 2, 64), (2**40 + 1, 128, 64, 1))
    q = torch.empty(64).as_strided((1, 1, 64), (3, 5, 1))
    launch(path(kernel), (q, k, k, q), words()[0])
    assert len(kernel.launched) == 1


@pytest.mark.parametrize(("dim", "strides"), [(0, (2**29, 128)), (1, (128, 2**29))])
def test_strides_of_caches_fit_into_32_bits(
    path: Callable[[Kernel], DirectPath], dim: int, strides: tuple[int, int]
) -> None:
    """2**29 float32 are 2**31 bytes; nothing is read here, so nothing need be there."""
    kernel = Kernel()
    q, k, _, out = step()
    far = torch.empty(0, device="meta").as_strided((2, 2, 2, 64), (*strides, 64, 1))
    with pytest.raises(
        ValueError, match=rf"v_cache\.stride\(\)=.* at most {2**31 - 1} bytes, dimension {dim} has {2**31}"
    ):
        launch(path(kernel), (q, k, far, out), words()[0])
    assert not kernel.launched


def test_an_error_of_cuda_is_told(path: Callable[[Kernel], DirectPath]) -> None:
    with pytest.raises(AttnloomError, match="kernel: the kernel was not launched: CUDA error 700"):
        launch(path(Kernel(error=700)), step(), words()[0])


def test_templates_do_not_pile_up(path: Callable[[Kernel], DirectPath], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MOST_TEMPLATES", 4)
    made = path(Kernel())
    for rows in range(1, 20):
        launch(made, step(rows), words()[0])
        assert len(made._templates) <= 4


def test_streams_have_arenas_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_arenas", {})
    monkeypatch.setattr(arena, "capturing", lambda: False)
    arenas = arena.stream_arenas(DEVICE)
    one, other = arenas.reserve(1, 1000, 4), arenas.reserve(2, 1000, 4)
    assert one.states_at != other.states_at and one.arrivals_at != other.arrivals_at
    assert arenas.reserve(1, 900, 4) is one
    grown = arenas.reserve(1, 2000, 2)
    assert grown.num_floats == 2000 and grown.num_workers == 4
    assert arena.stream_arenas(DEVICE) is arenas


def test_the_words_of_a_plan_lie_where_the_kernel_reads_them() -> None:
    assert ctypes.sizeof(AttentionParams) % 8 == 0
    assert direct._PLAN.stop - direct._PLAN.start == len(words()[0])
