"""Hypothesis strategies that several test files draw from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st

GROUPS = (1, 2, 3, 4, 7, 8, 12, 128)


def examples(times: float) -> settings:
    """So many times the examples of the profile in use."""
    return settings(max_examples=max(1, round(times * settings.default.max_examples)))


@dataclass(frozen=True)
class PlanCase:
    """Arguments of the planner. left and right as in a variant: None is unlimited.

    lockstep: neighbouring workers that run one stretch, each on another kv head of a group of as many.
    chunk: KV tiles at whole numbers of which items are cut; 0: at any tile.
    """

    qo_lens: list[int]
    kv_lens: list[int]
    group: int
    num_kv_heads: int
    num_workers: int
    left: int | None
    right: int | None
    lockstep: int = 1
    chunk: int = 0

    @property
    def stretches(self) -> int:
        return self.num_workers // self.lockstep


def bands() -> st.SearchStrategy[tuple[int | None, int | None]]:
    """(left, right) of full, causal, causal-window and symmetric-window variants."""
    window = st.integers(0, 200)
    return st.one_of(
        st.just((None, None)),
        st.just((None, 0)),
        window.map(lambda w: (w, 0)),
        window.map(lambda w: (w, w)),
    )


def lengths(longest_qo: int = 60, longest_kv: int = 700) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(qo_len, kv_len) of each request: decode, prefill, append, nothing at all, more queries than keys."""
    kv = st.one_of(st.integers(0, 3), st.integers(0, longest_kv))
    qo = st.one_of(st.integers(0, 1), st.integers(0, longest_qo))
    return st.lists(st.tuples(qo, kv), min_size=0, max_size=9)


@st.composite
def plan_cases(draw: st.DrawFn) -> PlanCase:
    pairs = draw(lengths())
    left, right = draw(bands())
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 8)))
    num_workers = draw(st.sampled_from((1, 2, 3, 7, 16, 132)))
    common = math.gcd(num_kv_heads, num_workers)
    return PlanCase(
        qo_lens=[qo for qo, _ in pairs],
        kv_lens=[kv for _, kv in pairs],
        group=draw(st.sampled_from(GROUPS)),
        num_kv_heads=num_kv_heads,
        num_workers=num_workers,
        left=left,
        right=right,
        lockstep=draw(st.sampled_from([n for n in range(1, common + 1) if common % n == 0])),
        chunk=draw(st.sampled_from((0, 0, 1, 2, 3, 32))),
    )
