"""Each hook alone, all of them together, and the catalogue, where items are split among workers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from integration_tests.gpu.batch import make_batch
from integration_tests.gpu.cases import Case, draw
from integration_tests.gpu.kernels import ALL, ALONE, NAMED, Kernel, engine_of
from integration_tests.gpu.oracle import Hooks, Scales, attention
from integration_tests.gpu.running import check_case, plan_of
from integration_tests.gpu.tolerance import bounds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mixed(kernel: Kernel, num_workers: int, mode: str) -> Case:
    """Decode, verify, append and prefill, in lengths that 19 workers and as many as a GPU holds split."""
    band = kernel.case.band or (None, 0)
    return dataclasses.replace(
        draw(kernel, 0),
        num_kv_heads=2,
        group=4,
        block_size=16,
        storage="hnd",
        table="page_table",
        qo_lens=[1, 4, 140, 300],
        kv_lens=[1500, 700, 640, 300],
        planned=[1500, 700, 640, 300],
        left=band[0],
        right=band[1],
        positions=False,
        trees=None,
        num_workers=num_workers,
        planner="host",
        block_mask=False,
        mode=mode,
        sm_scale=None,
    )


@pytest.mark.parametrize("num_workers", [1, 19, 264, 700])
@pytest.mark.parametrize("kernel", [*ALONE, *ALL, *NAMED], ids=str)
def test_split_items(kernel: Kernel, num_workers: int) -> None:
    case = mixed(kernel, num_workers, "lse")
    engine = engine_of(kernel, case.num_qo_heads, case.num_kv_heads, case.left, case.right)
    splits = plan_of(engine, case, make_batch(kernel, case)).host().num_splits
    assert splits > 0 or num_workers == 1, "the plan splits nothing: the test would not see a merge"
    check_case(kernel, case)
    check_case(kernel, dataclasses.replace(case, mode="state"))


@pytest.mark.parametrize("kernel", [*ALONE, *ALL, *NAMED], ids=str)
def test_the_hooks_matter(kernel: Kernel) -> None:
    """Without them the result would be another: the tests can fail."""
    case = mixed(kernel, 1, "out")
    batch = make_batch(kernel, case)
    hooks, scales = kernel.case.hooks(batch.shape, batch.params), Scales(kernel.head_dim**-0.5, case.k_scale, 1.0)
    band = (case.left, case.right)
    answer, plain = (attention(3, batch.requests[3], band, each, scales) for each in (hooks, Hooks()))
    distance = (answer.out - plain.out).norm(dim=2)
    assert bool((distance > 3 * bounds(answer, hooks, kernel.dtype).out).any())
