"""The batch_invariant mode on a GPU: a request's rows have the same bits whatever else is computed, and in what parts.

Alone and in any batch, on any number of workers, planned by the host or the device, and whether its queries come at
once, in parts or one by one; and they are right.
"""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from integration_tests.gpu.cases import draw
from integration_tests.gpu.kernels import BF16, INVARIANT, Kernel, engine_of
from integration_tests.gpu.problem import NUM_KV_HEADS, NUM_QO_HEADS, Problem
from integration_tests.gpu.running import check_case
from integration_tests.gpu.served import Made, Served
from integration_tests.gpu.storage import DEVICE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLAIN = INVARIANT[0]
HEADS = ((4, 2), (32, 1), (1, 1), (8, 8), (9, 3), (64, 4))
SHAPES = [
    (kernel, HEADS[(i + 2 * j) % len(HEADS)], (16, 1)[(i + j) % 2], (None, 100, None)[j])
    for i, kernel in enumerate(INVARIANT)
    for j in range(3)
]
LENGTHS = [700, 1, 129, 64, 333]
WORKERS = (1, 2, 3, 7, 40, None)
CASES = 15


@pytest.mark.parametrize(("kernel", "heads", "page", "left"), SHAPES, ids=str)
def test_bits_do_not_depend_on_the_batch(kernel: Kernel, heads: tuple[int, int], page: int, left: int | None) -> None:
    served = Served(kernel, heads, LENGTHS, page, left)
    rng = random.Random(f"{kernel} {heads}")
    alone = served.alone()
    masked = (False, served.mask is not None)

    def made(num_workers: int | None, uppers: tuple[int, ...] = (0, 0, 1, 300)) -> Made:
        on_device = DEVICE.type == "cuda" and rng.random() < 0.5
        return Made(num_workers, on_device, rng.choice(uppers), rng.choice(masked))

    whole = [(r, 0, length) for r, length in enumerate(LENGTHS)]
    for num_workers in WORKERS:
        rng.shuffle(whole)
        served.check(alone, whole, made(num_workers))
    for num_workers in (1, 5, None):
        parts = served.cuts(rng, 4)
        served.check(alone, parts, made(num_workers))
        served.check(alone, [part for part in parts if part[2] - part[1] < 40] or parts[:1], made(num_workers))
    for num_workers in (2, 40, None):
        decodes = served.decodes(rng, 6)
        served.check(alone, decodes, made(num_workers))
        served.check(alone, [rng.choice(decodes)], made(num_workers))


def test_real_chunks() -> None:
    """2048 tokens: long requests on one worker, on a few and on all of them, and whole prefills."""
    served = Served(Kernel(BF16, BF16, 128, chunk=32), (NUM_QO_HEADS, NUM_KV_HEADS), [9000, 4196], 16, None)
    alone = served.alone()
    ends = [[(0, 8999, 9000)], [(1, 4195, 4196), (0, 2048, 2049)], [(0, 8990, 9000), (1, 4000, 4196)]]
    for parts in (*ends, [(1, 0, 4196), (0, 0, 9000)], [(0, 4096, 6000), (1, 2047, 2049)]):
        for num_workers in (1, 4, 6, 24, None):
            for on_device in (False, True):
                served.check(alone, parts, Made(num_workers, on_device))


def test_more_chunks_than_a_worker_may_leave() -> None:
    """Cuts move to where the states of the chunks behind them have room."""
    served = Served(Kernel(BF16, BF16, 128, chunk=1), (8, 1), [9000], 16, None)
    alone = served.alone()
    for parts in ([(0, 8999, 9000)], [(0, 8990, 9000)], [(0, 8700, 9000)]):
        for num_workers in (1, 2, 3, 5, 16, None):
            served.check(alone, parts, Made(num_workers, on_device=num_workers != 2))


def test_the_mode_is_what_makes_them_equal() -> None:
    """The test can fail: other kernels give the same requests other bits."""
    served = Served(Kernel(BF16, BF16, 128), (4, 2), LENGTHS, 16, None)
    with pytest.raises(AssertionError, match="have other bits"):
        served.check(served.alone(), served.decodes(random.Random(1), 8), Made())


@pytest.mark.parametrize("kernel", INVARIANT, ids=str)
def test_random_batches_are_right(kernel: Kernel) -> None:
    """Through every axis of test_attention.py, against float64."""
    for index in range(CASES):
        check_case(kernel, draw(kernel, index))


def test_replays_of_a_graph() -> None:
    """Captured once, replayed with lengths at and below the planned ones: the bits of eager steps alone."""
    engine = engine_of(PLAIN, NUM_QO_HEADS, NUM_KV_HEADS)
    problem = Problem([1] * 4, [3000] * 4, longest=3000)
    bounds = torch.full_like(problem.lengths, 3000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for planned, out in ((problem.lengths, problem.out), (bounds, above := torch.empty_like(problem.out))):
            plan = engine.plan(problem.indptr, problem.layout, kv_lens=planned, total_q=4)
            problem.run(engine, plan, out)
    for kv_lens in ([3000, 1, 700, 129], [1, 1, 1, 1], [0, 2999, 64, 128], [3000] * 4):
        problem.set([1] * 4, kv_lens)
        graph.replay()
        problem.check()
        assert torch.equal(problem.out, above)
        eager = torch.empty_like(problem.out)
        for r, length in enumerate(kv_lens):  # alone: the others have no queries
            qo_lens = [int(other == r) for other in range(4)]
            indptr = torch.tensor([0, *accumulate(qo_lens)], dtype=torch.int32)
            lengths = torch.tensor([length if other == r else 0 for other in range(4)], dtype=torch.int32)
            plan = engine.plan(indptr, problem.layout, kv_lens=lengths, num_workers=2)
            engine.run(plan, problem.q[r : r + 1], problem.k, problem.v, out=eager[r : r + 1])
        assert torch.equal(problem.out, eager), f"lengths {kv_lens}"


def test_under_torch_compile() -> None:
    engine = engine_of(PLAIN, NUM_QO_HEADS, NUM_KV_HEADS)
    problem = Problem([1, 200, 1], [3000, 1000, 1])
    plan = problem.host_plan(engine)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return engine.run(plan, q, k, v)

    torch._dynamo.reset()
    arguments = (problem.q, problem.k, problem.v)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(*arguments), layer(*arguments))
