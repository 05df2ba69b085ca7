"""What goes far: offsets past 2^31, strides up to there, twenty thousand requests, and what plans take as they grow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from attnloom import Attention, BlockSparseLayout
from attnloom.core.block_mask import BlockMask
from integration_tests.gpu.kernels import BF16, E4M3, KERNELS, Kernel, engine_of
from integration_tests.gpu.oracle import Hooks, Request, Scales, attention
from integration_tests.gpu.storage import DEVICE, poisoned
from integration_tests.gpu.tolerance import bounds, check_lse, check_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PAGE, HEADS, DIM, GROUP = 16, 8, 128, 4
FAR = (Kernel(BF16, BF16, DIM), Kernel(BF16, E4M3, DIM))


def check_pages(kernel: Kernel, k_cache: Tensor, v_cache: Tensor, pages: Sequence[int]) -> None:
    """Two requests over these pages, which alone are written: decode, and an append that fills tall tiles."""
    torch.manual_seed(len(pages))
    qo_lens, length = [1, 70], len(pages) * PAGE - 5
    table = torch.tensor([pages, pages[::-1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([length, length], dtype=torch.int32)
    layout = BlockSparseLayout.from_page_table(table, lengths.to(DEVICE), PAGE)
    shape = (2, len(pages), PAGE, HEADS, DIM)
    k, v = torch.randn(shape, device=DEVICE).to(kernel.kv_dtype)
    for nth, page in enumerate(pages):
        k_cache[page].copy_(k[nth])
        v_cache[page].copy_(v[nth])
    q = torch.randn(sum(qo_lens), HEADS * GROUP, DIM, device=DEVICE).to(kernel.dtype)
    engine = engine_of(kernel, HEADS * GROUP, HEADS)
    plan = engine.plan(torch.tensor([0, 1, 71], dtype=torch.int32), layout, kv_lens=lengths)
    out, lse = engine.run(plan, q, k_cache, v_cache, return_lse=True)
    orders = (torch.arange(len(pages)), torch.arange(len(pages)).flip(0))
    for r, rows in enumerate((slice(0, 1), slice(1, 71))):
        dense = [part.float()[orders[r]].flatten(0, 1)[:length].to(kernel.kv_dtype) for part in (k, v)]
        request = Request(q[rows], dense[0], dense[1], torch.arange(length, device=DEVICE))
        answer = attention(r, request, (None, 0), Hooks(), Scales(DIM**-0.5))
        limit = bounds(answer, Hooks(), kernel.dtype)
        check_rows("out", out[rows], answer.out, limit.out, answer)
        check_lse("lse", lse[rows], answer.lse, limit.lse)


@pytest.mark.parametrize("queries", [1, 4, 40])
@pytest.mark.parametrize("kernel", [Kernel(BF16, BF16, 64), *FAR, Kernel(BF16, BF16, 256)], ids=str)
def test_an_item_in_more_pieces_than_a_stage_holds_weights_of(kernel: Kernel, queries: int) -> None:
    """csrc/sm80/merge.h: kKnown, at most 504."""
    workers, length, dim = 700, 700 * 64, kernel.head_dim
    layout = BlockSparseLayout.from_page_table(
        torch.randperm(length // PAGE, device=DEVICE).to(torch.int32)[None],
        torch.tensor([length], dtype=torch.int32, device=DEVICE),
        PAGE,
    )
    k, v = (torch.randn(length // PAGE, PAGE, 1, dim, device=DEVICE).to(kernel.kv_dtype) for _ in range(2))
    q = torch.randn(queries, GROUP, dim, device=DEVICE).to(kernel.dtype)
    engine = engine_of(kernel, GROUP, 1)
    indptr, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, queries], [length]))
    plan = engine.plan(indptr, layout, kv_lens=lengths, num_workers=workers)
    assert plan.host().num_splits
    out, lse = engine.run(plan, q, k, v, return_lse=True)
    dense = [cache.float()[layout.indices.long()].flatten(0, 1).to(kernel.kv_dtype) for cache in (k, v)]
    request = Request(q, dense[0], dense[1], torch.arange(length, device=DEVICE))
    answer = attention(0, request, (None, 0), Hooks(), Scales(dim**-0.5))
    limit = bounds(answer, Hooks(), kernel.dtype)
    check_rows("out", out, answer.out, limit.out, answer)
    check_lse("lse", lse, answer.lse, limit.lse)


@pytest.mark.parametrize("kernel", FAR, ids=str)
def test_pages_past_two_to_the_31_elements(kernel: Kernel) -> None:
    """K and V side by side in one cache, of which a handful of pages is written."""
    blocks = 2**31 // (2 * PAGE * HEADS * DIM) + 40
    both = torch.empty(blocks, PAGE, HEADS, 2 * DIM, dtype=kernel.kv_dtype, device=DEVICE)
    pages = [blocks - 1, 0, *range(blocks - 30, blocks - 20), 1, blocks // 2, blocks - 2]
    assert (blocks - 1) * both.stride(0) > 2**31
    check_pages(kernel, both[..., :DIM], both[..., DIM:], pages)


@pytest.mark.parametrize("kernel", FAR, ids=str)
@pytest.mark.parametrize("dim", range(3))
def test_strides_up_to_two_gib(kernel: Kernel, dim: int) -> None:
    """Blocks, slots or heads almost 2 GiB apart."""
    strides = [PAGE * HEADS * DIM, HEADS * DIM, DIM, 1]
    strides[dim] = (2**31 - 16) // kernel.kv_dtype.itemsize
    count = 6
    shape = (count, PAGE, HEADS, DIM)
    needed = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    k = torch.empty(needed, dtype=kernel.kv_dtype, device=DEVICE).as_strided(shape, strides)
    v = poisoned(*shape, dtype=kernel.kv_dtype)
    check_pages(kernel, k, v, [3, 0, 5, 4])


def test_longer_strides_and_masks_without_a_use_are_refused() -> None:
    engine = engine_of(FAR[0], HEADS * GROUP, HEADS)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.ones(1, dtype=torch.int32)
    layout = BlockSparseLayout.from_page_table(table, lengths.to(DEVICE), PAGE)
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    plan = engine.plan(indptr, layout, kv_lens=lengths)
    q = torch.zeros(1, HEADS * GROUP, DIM, dtype=BF16, device=DEVICE)
    room = torch.empty(2**30 + 2**16, dtype=BF16, device=DEVICE)
    k = room.as_strided((2, PAGE, HEADS, DIM), (2**30, HEADS * DIM, DIM, 1))
    with pytest.raises(ValueError, match=rf"k_cache\.stride\(\)=.* at most {2**31 - 1} bytes, dimension 0 has {2**31}"):
        engine.run(plan, q, k, k)
    mask = BlockMask(torch.full((1, 1, 1), 2, dtype=torch.uint8, device=DEVICE), 64)
    with pytest.raises(ValueError, match="block_mask: expected None for plain"):
        engine.plan(indptr, layout, kv_lens=lengths, block_mask=mask)


def test_an_empty_parameter_is_read_on_the_gpu() -> None:
    """No document anywhere: nothing is visible, and `at` reads no memory of the host."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "documents")
    engine = engine_of(kernel, 8, 2, None, None)
    table = torch.zeros(2, 9, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([140, 3], dtype=torch.int32)
    layout = BlockSparseLayout.from_page_table(table, lengths.to(DEVICE), PAGE)
    empty = torch.empty(2, 0, dtype=torch.int32, device=DEVICE)
    params = {"document_begin": empty, "document_end": empty}
    plan = engine.plan(torch.tensor([0, 40, 41], dtype=torch.int32), layout, kv_lens=lengths, params=params)
    cache = torch.zeros(1, PAGE, 2, kernel.head_dim, dtype=BF16, device=DEVICE)
    q = torch.randn(41, 8, kernel.head_dim, device=DEVICE).to(BF16)
    out, lse = engine.run(plan, q, cache, cache, params=params, return_lse=True)
    assert not bool(out.any()) and bool((lse == -torch.inf).all())


def decode(requests: int) -> tuple[Attention, Tensor, Tensor, BlockSparseLayout]:
    """Offsets, lengths and layout of a decode batch; lengths vary, pages are shared."""
    engine = engine_of(Kernel(BF16, BF16, 64), 8, 2)
    lengths = (torch.arange(requests, dtype=torch.int32) * 37) % 49
    generator = torch.Generator().manual_seed(requests)
    table = torch.randint(0, 500, (requests, 3), generator=generator, dtype=torch.int32)
    indptr = torch.arange(requests + 1, dtype=torch.int32)
    return engine, indptr, lengths, BlockSparseLayout.from_page_table(table.to(DEVICE), lengths.to(DEVICE), PAGE)


@pytest.mark.parametrize("planner", ["host", "device"])
def test_twenty_thousand_requests(planner: str) -> None:
    requests = 20_000
    engine, indptr, lengths, layout = decode(requests)
    k, v = torch.randn(2, 500, PAGE, 2, 64, device=DEVICE).to(BF16)
    q = torch.randn(requests, 8, 64, device=DEVICE).to(BF16)
    if planner == "host":
        plan = engine.plan(indptr, layout, kv_lens=lengths)
    else:
        plan = engine.plan(indptr.to(DEVICE), layout, total_q=requests)
    out, lse = engine.run(plan, q, k, v, return_lse=True)

    pages = layout.indices.view(requests, 3).long()
    for begin in range(0, requests, 2000):
        rows = slice(begin, begin + 2000)
        keys, values = (cache[pages[rows]].flatten(1, 2).double().repeat_interleave(4, 2) for cache in (k, v))
        scores = torch.einsum("rhd,rkhd->rhk", q[rows].double(), keys) / 8
        seen = torch.arange(48, device=DEVICE) < layout.lengths[rows][:, None]
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        expected_lse = torch.logsumexp(scores, 2)
        expected = torch.einsum("rhk,rkhd->rhd", scores.softmax(2).nan_to_num(), values)
        error = (out[rows].double() - expected).norm(dim=2)
        assert bool((error <= 1e-2 * expected.norm(dim=2)).all())
        check_lse("lse", lse[rows], expected_lse, 1e-4 * (1 + expected_lse.nan_to_num(neginf=0.0).abs()))


def median_seconds(function: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def test_plans_grow_linearly(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of the buffer, time of the host planner with its copy, time of the device planner."""
    lines, grown = [], []
    for requests in (1000, 5000, 20_000):
        engine, indptr, lengths, layout = decode(requests)
        on_device = indptr.to(DEVICE)
        before = torch.cuda.memory_allocated()
        plan = engine.plan(on_device, layout, total_q=requests)
        taken, read = torch.cuda.memory_allocated() - before, plan.buffer.numel() * 4
        del plan
        host = median_seconds(lambda e=engine, i=indptr, n=lengths, at=layout: e.plan(i, at, kv_lens=n))
        device = median_seconds(lambda e=engine, i=on_device, r=requests, at=layout: e.plan(i, at, total_q=r))
        grown.append((taken, host, device))
        lines.append(
            f"{requests:6d} requests: plan {taken} bytes on the GPU, kernels read {read}; "
            f"host planner {host * 1e6:.0f} us with its copy, device planner {device * 1e6:.0f} us"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    few, some, many = grown
    assert many[0] - few[0] <= 1.05 * (some[0] - few[0]) * 19 / 4
    for before_, after in zip(some[1:], many[1:], strict=True):
        assert after <= 1.5 * 4 * before_
