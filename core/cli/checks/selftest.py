"""A small random attention through the engine, beside a plain computation in float64 that shares nothing with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attnloom.core.cli.checks.section import Section
from attnloom.core.errors import JitError

if TYPE_CHECKING:
    from torch import Tensor

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
QUERIES, KEYS = (1, 5), (200, 70)
SPLIT_WORKERS = 7
TOLERANCE = 1e-4


def check() -> Section:
    """Two requests, paged, causal: by one worker, and by so many that they share work items."""
    section = Section("self-test")
    try:
        _run(section)
    except JitError as error:
        section.broken(
            f"no kernel: {error}",
            "see the compilers and the cache above; attnloom build fills the cache where there is a compiler",
        )
    return section


def _run(section: Section) -> None:
    import torch

    from attnloom.core.append import append_kv
    from attnloom.core.attention import Attention
    from attnloom.core.launch import run_count
    from attnloom.core.layout import BlockSparseLayout

    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    begin = time.perf_counter()
    engine = Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32)
    section.facts["kernel"] = f"{engine.spec.name}, ready after {time.perf_counter() - begin:.2f} s"

    # A page table whose pages lie in random order in a pool of NaN.
    pages = [-(-keys // BLOCK) for keys in KEYS]
    table = torch.zeros(len(KEYS), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages) + 3, generator=random).int()
    for row, number in enumerate(pages):
        begin_page = sum(pages[:row])
        table[row, :number] = order[begin_page : begin_page + number]
    pool = (len(order), BLOCK, KV_HEADS, DIM)
    k_cache, v_cache = torch.full(pool, float("nan")), torch.full(pool, float("nan"))
    q = normal(sum(QUERIES), HEADS, DIM)
    k, v = normal(sum(KEYS), KV_HEADS, DIM), normal(sum(KEYS), KV_HEADS, DIM)
    slots = [int(table[row, at // BLOCK]) * BLOCK + at % BLOCK for row, keys in enumerate(KEYS) for at in range(keys)]
    append_kv(k, v, k_cache, v_cache, torch.tensor(slots))

    layout = BlockSparseLayout.from_page_table(table, torch.tensor(KEYS, dtype=torch.int32), BLOCK)
    indptr = torch.tensor([0, QUERIES[0], sum(QUERIES)], dtype=torch.int32)
    out, lse = _plain(q, k, v)
    before = run_count()
    for label, workers in (("one worker", 1), ("split plan", SPLIT_WORKERS)):
        plan = engine.plan(indptr, layout, num_workers=workers)
        found, found_lse = engine.run(plan, q, k_cache, v_cache, return_lse=True)
        error = max(_distance(found, out), _distance(found_lse, lse))
        section.facts[label] = f"{plan.num_splits} items split, error {error:.1e}"
        if not error <= TOLERANCE:
            section.broken(
                f"{label}: the result is off by {error:.1e}, expected at most {TOLERANCE:.0e}",
                "attnloom cache prune --all, to compile anew; if it stays, report it with the output of "
                "attnloom doctor --json",
            )
        if workers > 1 and plan.num_splits == 0:
            section.broken(f"{label}: the plan splits nothing", "report it with the output of attnloom doctor --json")
    section.facts["launches"] = run_count() - before


def _plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of each query by itself, in float64: out ``[queries, HEADS, DIM]``, lse ``[queries, HEADS]``."""
    import torch

    out = torch.empty(q.shape, dtype=torch.float64)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    first_query = first_key = 0
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        for index in range(queries):
            seen = slice(first_key, first_key + keys - queries + index + 1)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                logits = k[seen, kv_head].double() @ q[first_query + index, head].double() / DIM**0.5
                out[first_query + index, head] = torch.softmax(logits, 0) @ v[seen, kv_head].double()
                lse[first_query + index, head] = torch.logsumexp(logits, 0)
        first_query += queries
        first_key += keys
    return out, lse


def _distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference; infinite where something is not a number."""
    distance = float((found.double() - expected).abs().max())
    return distance if distance == distance else float("inf")
