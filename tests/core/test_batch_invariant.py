"""The batch_invariant mode: a request's rows have the same bits whatever else is computed, and in what parts.

Alone and in any batch, on any number of workers, and whether its queries come at once, in parts or one by one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnloom import variants
from attnloom.core.arena import arena
from attnloom.core.attention import Attention
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.masks import pack_masks
from attnloom.core.plan import Plan
from attnloom.core.planner import plan_scan
from attnloom.core.tiles import CHUNK_TOKENS
from attnloom.core.variant import Variant
from tests.core import kernels
from tests.core.planning import indptr
from tests.core.problem import Problem, make_problem
from tests.core.running import bits, check
from tests.core.strategies import bands, examples
from tests.core.variant_cases import CHUNKED, HOOKS, INVARIANT, INVARIANT_PARAMS, LOCAL_AND_FIRST
from tests.oracle import Band
from tests.tolerance import assert_lse, assert_out

F32 = kernels.Plain(torch.float32, 64)
Part = tuple[int, int, int]
"""Queries [begin, end) of request r, whose last sits at the last of the first `end` keys: (r, begin, end)."""


class Served:
    """Requests whose every token is a query, served in whatever parts and batches."""

    def __init__(self, engine: Attention, lengths: list[int], params: Mapping[str, Any] | None = None) -> None:
        self.engine = engine
        self.params = params
        self.problem = make_problem(
            lengths,
            lengths,
            num_qo_heads=engine.num_qo_heads,
            num_kv_heads=engine.num_kv_heads,
            head_dim=engine.head_dim,
            dtype=engine.dtype,
            block_size=5,
        )
        self.first = indptr(lengths).tolist()

    def run(self, parts: list[Part], num_workers: int, upper: int = 0) -> list[tuple[Tensor, Tensor | None]]:
        """(out, lse) of each part, out of one batch of them in this order. upper: what the planner believes beyond."""
        layout = self.problem.layout
        lengths = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
        batch = BlockSparseLayout(
            layout.block_size, layout.starts[[r for r, _, _ in parts]].contiguous(), lengths, layout.indices
        )
        counts = [end - begin for _, begin, end in parts]
        q = torch.cat([self.problem.q[self.first[r] + begin : self.first[r] + end] for r, begin, end in parts])
        plan = self.engine.plan(
            indptr(counts), batch, kv_lens=lengths + upper, num_workers=num_workers, params=self.params
        )
        caches = (self.problem.k_cache, self.problem.v_cache)
        out, lse = self.engine.run(plan, q, *caches, params=self.params, return_state=True)
        if lse is not None or self.engine.variant.use_softmax:
            finished, lse = self.engine.run(plan, q, *caches, params=self.params, return_lse=True)
        else:
            finished = self.engine.run(plan, q, *caches, params=self.params)
        assert isinstance(finished, Tensor)
        rows = torch.cat([out, finished.float()], 2).split(counts)
        return list(zip(rows, lse.split(counts) if lse is not None else [None] * len(rows), strict=True))


def same(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> bool:
    """Bitwise."""
    if not torch.equal(bits(one[0]), bits(other[0])):
        return False
    return one[1] is None or (other[1] is not None and torch.equal(bits(one[1]), bits(other[1])))


def assert_invariant(served: Served, lengths: list[int], rng: random.Random) -> None:
    """All three senses, against each request alone on one worker with all its queries at once."""
    alone = [served.run([(r, 0, n)], 1)[0] for r, n in enumerate(lengths)]

    def check_parts(parts: list[Part], num_workers: int, upper: int = 0) -> None:
        for (r, begin, end), (rows, lse) in zip(parts, served.run(parts, num_workers, upper), strict=True):
            whole, whole_lse = alone[r]
            expected = (whole[begin:end], None if whole_lse is None else whole_lse[begin:end])
            assert same((rows, lse), expected), f"queries {begin} to {end} of request {r}, {num_workers} workers"

    together = [(r, 0, n) for r, n in enumerate(lengths)]
    for num_workers in (1, 2, 3, 4, 40):
        rng.shuffle(together)
        check_parts(together, num_workers)
    for _ in range(3):  # chunked prefill, each chunk of a request in a batch of others, planned by upper bounds
        cuts = {r: sorted({0, n, *(rng.randrange(n + 1) for _ in range(3))}) for r, n in enumerate(lengths)}
        parts = [(r, a, b) for r, ends in cuts.items() for a, b in pairwise(ends)]
        rng.shuffle(parts)
        for num_workers in (1, rng.choice((2, 3, 4)), 40):
            check_parts(parts, num_workers, rng.choice((0, 0, 1, 300)))
    decodes = [(r, i, i + 1) for r, n in enumerate(lengths) for i in {*rng.sample(range(n), min(n, 8)), n - 1} if n]
    for num_workers in (1, 2, 40):
        check_parts(decodes, num_workers)
        check_parts([rng.choice(decodes)], num_workers)


lengths_of_requests = st.lists(
    st.one_of(st.integers(1, 400), st.sampled_from((1, 63, 64, 65, 128, 129, 256, 320))), min_size=1, max_size=4
)


@examples(0.4)
@given(
    kernel=st.sampled_from(kernels.INVARIANT_PLAIN),
    lengths=lengths_of_requests,
    heads=st.sampled_from(((1, 1), (4, 2), (6, 2), (9, 1), (12, 1))),
    left=st.one_of(st.none(), st.integers(0, 200)),
    chunk=st.sampled_from((1, 2, 3)),
    seed=st.integers(0, 2**31 - 1),
)
def test_bits_do_not_depend_on_the_batch(
    kernel: kernels.Plain,
    lengths: list[int],
    heads: tuple[int, int],
    left: int | None,
    chunk: int,
    seed: int,
) -> None:
    variant = Variant("banded", left=left, right=0)  # queries that come one by one see no keys after them
    served = Served(kernels.invariant_engine(kernel, *heads, variant, chunk), lengths)
    assert_invariant(served, lengths, random.Random(seed))


@pytest.mark.parametrize("name", INVARIANT)
def test_bits_with_each_hook(name: str) -> None:
    served = Served(
        kernels.invariant_engine(F32, 6, 2, INVARIANT[name], 2), [330, 1, 129, 64], INVARIANT_PARAMS.get(name)
    )
    assert_invariant(served, [330, 1, 129, 64], random.Random(5))


def test_bits_with_declared_ranges() -> None:
    """Of a chunked mask: whole tiles need no mask for some batches and not for others."""
    served = Served(kernels.invariant_engine(F32, 6, 2, CHUNKED, 2), [600, 77, 150], {})
    assert_invariant(served, [600, 77, 150], random.Random(6))


def test_every_number_of_rows_gives_the_same_bits() -> None:
    """Each tile height takes the same sums: the blocks of the products, and what is left over beside them."""
    for kernel in kernels.INVARIANT_PLAIN:
        engine = kernels.invariant_engine(kernel, 1, 1, Variant("full"), 2)
        problem = make_problem(
            [100], [200], num_qo_heads=1, num_kv_heads=1, head_dim=kernel.head_dim, dtype=kernel.dtype
        )

        def rows(count: int, engine: Attention = engine, problem: Problem = problem) -> Tensor:
            layout = problem.layout
            plan = engine.plan(indptr([count]), layout, num_workers=1)
            # Behind the row that is compared lie others; every query sees every key.
            return engine.run(plan, problem.q[:count].contiguous(), problem.k_cache, problem.v_cache)

        whole = rows(100)
        for count in range(1, 100):
            assert torch.equal(bits(rows(count)), bits(whole[:count])), f"{kernel}: {count} rows"


def test_the_mode_is_what_makes_them_equal() -> None:
    """The test can fail: without the mode the same requests differ in some bits."""
    engine = kernels.plain_engine(F32, 6, 2)
    lengths = [330, 1, 129, 64]
    with pytest.raises(AssertionError, match="of request"):
        assert_invariant(Served(engine, lengths), lengths, random.Random(5))


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_a_tree_of_drafts(num_workers: int) -> None:
    """A packed mask is over indices: the senses left are the batch and the workers."""
    kv_lens, qo_lens = [300, 90, 200], [9, 5, 12]
    gen = torch.Generator().manual_seed(3)
    masks = [torch.rand(n, n, generator=gen) < 0.6 for n in qo_lens]
    engine = kernels.invariant_engine(F32, 6, 2, variants.PackedMask(), 1)
    problem = make_problem(qo_lens, kv_lens, num_qo_heads=6, num_kv_heads=2)

    def run(requests: list[int], workers: int) -> list[Tensor]:
        layout = problem.layout
        batch = BlockSparseLayout(layout.block_size, layout.starts[requests], layout.lengths[requests], layout.indices)
        params = pack_masks([masks[r] for r in requests], [kv_lens[r] - qo_lens[r] for r in requests])
        first = problem.qo_indptr.tolist()
        q = torch.cat([problem.q[first[r] : first[r + 1]] for r in requests])
        counts = [qo_lens[r] for r in requests]
        plan = engine.plan(indptr(counts), batch, num_workers=workers)
        out = engine.run(plan, q, problem.k_cache, problem.v_cache, params=params)
        return list(out.split(counts))

    alone = [run([r], 1)[0] for r in range(3)]
    for order in ([0, 1, 2], [2, 0], [1, 2, 0]):
        for r, rows in zip(order, run(order, num_workers), strict=True):
            assert torch.equal(bits(rows), bits(alone[r])), f"request {r} of {order}"


@examples(1)
@given(
    kernel=st.sampled_from(kernels.INVARIANT_PLAIN),
    batch=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 500)), min_size=1, max_size=5),
    heads=st.sampled_from(((1, 1), (4, 2), (9, 1))),
    band=bands(),
    chunk=st.sampled_from((1, 2, 3)),
    num_workers=st.sampled_from((1, 2, 3, 4, 40)),
    seed=st.integers(0, 2**31 - 1),
)
def test_it_is_right(
    kernel: kernels.Plain,
    batch: list[tuple[int, int]],
    heads: tuple[int, int],
    band: tuple[int | None, int | None],
    chunk: int,
    num_workers: int,
    seed: int,
) -> None:
    left, right = band
    problem = make_problem(
        [qo for qo, _ in batch],
        [kv for _, kv in batch],
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=kernel.head_dim,
        dtype=kernel.dtype,
        readable=Band(left, right),
        seed=seed,
    )
    engine = kernels.invariant_engine(kernel, *heads, Variant("banded", left=left, right=right), chunk)
    check(engine, problem, problem.answer(Band(left, right)), num_workers=num_workers)
    upper = [kv + extra for (_, kv), extra in zip(batch, (0, 1, 64, 200, 400), strict=False)]
    check(engine, problem, problem.answer(Band(left, right)), num_workers=num_workers, upper_bounds=upper)
    assert (arena.arrivals == 0).all()


@pytest.mark.parametrize("num_workers", [2, 3, 7, 40])
@pytest.mark.parametrize("left", [None, 150])
def test_it_is_right_for_lengths_beyond_the_planned(num_workers: int, left: int | None) -> None:
    """More chunks than the plan left room for: they share a state, and nothing outside the arena is written."""
    problem = make_problem([1, 1, 5, 12], [900, 1, 300, 700], readable=Band(left, 0))
    engine = kernels.invariant_engine(F32, 4, 2, Variant("banded", left=left, right=0), 1)
    check(engine, problem, problem.answer(Band(left, 0)), num_workers=num_workers, upper_bounds=[130, 0, 299, 70])


@pytest.mark.parametrize(("num_workers", "lockstep"), [(2, 2), (4, 4), (8, 2), (28, 4)])
def test_workers_in_lockstep(num_workers: int, lockstep: int) -> None:
    """Neighbouring workers run one stretch on neighbouring kv heads: their chunks meet in the same folds."""
    problem = make_problem([1, 40, 1, 2], [777, 90, 0, 500], num_qo_heads=8, num_kv_heads=4)
    engine = kernels.invariant_engine(F32, 8, 4, variants.Causal(), 2)
    alone = engine.plan(problem.qo_indptr, problem.layout, num_workers=1)
    plan = plan_scan(
        problem.qo_indptr,
        problem.layout.lengths,
        engine.plan_key,
        num_workers=num_workers,
        lockstep=lockstep,
        costs=engine.tiles.costs,
        layout=problem.layout,
    )
    assert num_workers == lockstep or plan.num_splits > 0
    caches = (problem.k_cache, problem.v_cache)
    expected = engine.run(alone, problem.q, *caches)
    for _ in range(3):
        assert torch.equal(bits(engine.run(plan, problem.q, *caches)), bits(expected))


def test_a_block_mask_changes_no_bit() -> None:
    """One that hides most tiles: chunks lie where they lie without it."""
    engine = kernels.invariant_engine(F32, 6, 2, LOCAL_AND_FIRST, 1)
    problem = make_problem([600, 1], [1900, 1500], num_qo_heads=6, num_kv_heads=2)
    mask = engine.block_mask(1900)
    assert mask.density < 0.2
    results = []
    for num_workers in (1, 3, 40):
        for block_mask in (None, mask):
            plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=num_workers, block_mask=block_mask)
            results.append(engine.run(plan, problem.q, problem.k_cache, problem.v_cache))
            assert torch.equal(bits(results[0]), bits(results[-1])), f"{num_workers} workers"


def test_real_chunks_split_a_long_request() -> None:
    """Chunks of 2048 tokens, as the engine has them: one request on several workers, right and the same bits."""
    engine = kernels.invariant_engine(F32, 2, 1, variants.Causal())
    length = 2 * CHUNK_TOKENS + 100
    problem = make_problem([3], [length], num_qo_heads=2, num_kv_heads=1)

    def run(num_workers: int) -> tuple[Plan, Tensor, Tensor]:
        plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=num_workers)
        out, lse = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, return_lse=True)
        return plan, out, lse

    _, out, lse = run(1)
    answer = problem.answer()
    assert_out(out, answer, 64, torch.float32)
    assert_lse(lse, answer, 64)
    for num_workers in (2, 3, 16):
        plan, again, lse_again = run(num_workers)
        tiles = CHUNK_TOKENS // 64
        assert plan.num_splits == 1 and all(piece.kv_begin % tiles == 0 for piece in plan.pieces())
        assert torch.equal(bits(out), bits(again)) and torch.equal(bits(lse), bits(lse_again))


@pytest.mark.parametrize("name", ["sink", "sigmoid"])
def test_merged_states_are_finished_as_ever(name: str) -> None:
    """The hooks of the catalogue's cases against the oracle, by a plan that splits."""
    case = HOOKS[name]
    engine = Attention(6, 2, 64, dtype=torch.float32, variant=case.variant, batch_invariant=True)
    engine.plan_key = engine.plan_key._replace(chunk=1)
    problem = make_problem([1, 12, 40, 2], [300, 12, 170, 64], num_qo_heads=6, num_kv_heads=2, block_size=16)
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=7)
    assert plan.num_splits > 0
    out = engine.run(plan, problem.q, problem.k_cache, problem.v_cache, params=case.params)
    assert isinstance(out, Tensor)
    assert_out(out, problem.answer(case.band, case.hooks), 64, torch.float32, slope=case.slope)


def test_plans_of_the_modes_do_not_mix() -> None:
    invariant, ordinary = (Attention(4, 2, 64, dtype=torch.float32, batch_invariant=mode) for mode in (True, False))
    assert invariant.plan_key != ordinary.plan_key
    assert invariant.plan_key._replace(chunk=0) == ordinary.plan_key
    problem = make_problem([1], [10])
    plan = invariant.plan(problem.qo_indptr, problem.layout)
    with pytest.raises(ValueError, match=r"plan\.key"):
        ordinary.run(plan, problem.q, problem.k_cache, problem.v_cache)
    assert "batch_invariant=True" in repr(invariant) and "batch_invariant" not in repr(ordinary)


def test_under_torch_compile() -> None:
    """The operator finds the room that the chunks need in the plan it is given."""
    engine = kernels.invariant_engine(F32, 4, 2, variants.Causal(), 1)
    problem = make_problem([1, 5], [700, 90])
    plan = engine.plan(problem.qo_indptr, problem.layout, num_workers=3)
    args = (problem.q[: problem.total_q], problem.k_cache, problem.v_cache)

    def layer(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return engine.run(plan, q, k_cache, v_cache)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(*args), layer(*args))
