"""The batch shapes that vLLM holds its attention backends to, sized for a CPU.

The shapes follow the batch specifications of vLLM's backend suite (tests/v1/attention): from two short decodes to
8 x 4096 with 32 queries each, in bf16, head size 128, block 16, block ids permuted with block 0 as the null block, and
atol = rtol = 1e-2. Tensor parallelism shows as fewer heads: 8/2 is a quarter of Llama 3 8B, 4/1 an eighth.
"""

from __future__ import annotations

import pytest
import torch

from tests.core import kernels
from tests.core.problem import make_problem
from tests.core.running import run
from tests.oracle import Band

# name: (kv_lens, qo_lens)
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "small_decode": ([32, 40], [1, 1]),
    "small_prefill": ([32, 40], [8, 8]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": ([128, 256, 512, 1024] * 2, [1] * 8),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "mixed_medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": ([2048] * 32, [1] * 32),
    "large_prefill": ([4096] * 8, [32] * 8),
    "mixed_large": ([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
    "spec_decode": ([128, 256, 512, 1024], [4] * 4),
    "fresh_prefill": ([40, 100, 257], [40, 100, 257]),
}
HEADS = {"tp4": (8, 2), "tp8": (4, 1)}


@pytest.mark.parametrize("heads", sorted(HEADS))
@pytest.mark.parametrize("batch", list(BATCHES))
def test_batch(batch: str, heads: str) -> None:
    kv_lens, qo_lens = BATCHES[batch]
    num_qo_heads, num_kv_heads = HEADS[heads]
    problem = make_problem(
        qo_lens,
        kv_lens,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        dtype=torch.bfloat16,
        block_size=16,
        storage="kv_in_block",
        seed=len(batch),
    )
    engine = kernels.plain_engine(kernels.Plain(torch.bfloat16, 128), num_qo_heads, num_kv_heads, None, 0)
    out, lse = run(engine, problem)
    answer = problem.answer()
    torch.testing.assert_close(out.double(), torch.from_numpy(answer.out), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), torch.from_numpy(answer.lse), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("batch", ["small_decode", "mixed_small", "mixed_medium", "spec_decode"])
def test_batch_under_a_sliding_window(batch: str) -> None:
    kv_lens, qo_lens = BATCHES[batch]
    problem = make_problem(
        qo_lens, kv_lens, num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, storage="kv_in_block"
    )
    engine = kernels.plain_engine(kernels.Plain(torch.bfloat16, 128), 8, 2, 127, 0)
    out, _ = run(engine, problem)
    answer = problem.answer(Band(127, 0))
    torch.testing.assert_close(out.double(), torch.from_numpy(answer.out), atol=1e-2, rtol=1e-2)
