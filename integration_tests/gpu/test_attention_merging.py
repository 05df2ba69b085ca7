"""States over parts of the keys, merged and finished, are attention over all of them."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from attnloom import BlockSparseLayout, finish_state, merge_states
from integration_tests.gpu.batch import make_batch
from integration_tests.gpu.cases import draw
from integration_tests.gpu.kernels import BF16, E4M3, F16, KERNELS, Kernel, engine_of
from integration_tests.gpu.oracle import Answer, Scales, attention
from integration_tests.gpu.running import plan_of
from integration_tests.gpu.tolerance import Bounds, bounds, check_lse, check_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Those whose states do not depend on positions: parts of a row count theirs from 0.
MERGED = (
    Kernel(BF16, BF16, 128),
    Kernel(BF16, E4M3, 128),
    Kernel(F16, F16, 192),
    *(kernel for kernel in KERNELS if kernel.name in ("sink", "output", "no softmax")),
)
CASES = 25


def parts_of(layout: BlockSparseLayout, count: int, rng: random.Random) -> list[BlockSparseLayout]:
    """The rows cut at blocks, some parts empty."""
    size, lengths = layout.block_size, layout.lengths.tolist()
    cuts = [
        [0, *sorted(rng.randint(0, length // size) for _ in range(count - 1)), -(-length // size)] for length in lengths
    ]
    made = []
    for part in range(count):
        begin = torch.tensor([row[part] for row in cuts], device=layout.device)
        end = torch.tensor([row[part + 1] for row in cuts], device=layout.device) * size
        kept = (torch.minimum(end, layout.lengths) - begin * size).to(torch.int32)
        starts = layout.starts + begin * layout.index_stride
        made.append(BlockSparseLayout(size, starts, kept, layout.indices, index_stride=layout.index_stride))
    return made


@pytest.mark.parametrize("kernel", MERGED, ids=str)
def test_parts_merge_to_the_whole(kernel: Kernel) -> None:
    for index in range(CASES):
        rng = random.Random(index)
        case = draw(kernel, index)
        case = dataclasses.replace(case, left=None, right=None, positions=False, planner="host", planned=case.kv_lens)
        batch = make_batch(kernel, case)
        engine = engine_of(kernel, case.num_qo_heads, case.num_kv_heads, None, None)
        params = batch.params or None
        values = {"sm_scale": case.sm_scale, "k_scale": case.k_scale, "v_scale": case.v_scale}
        outs: list[Tensor] = []
        lses: list[Tensor | None] = []
        for layout in parts_of(batch.layout, rng.randint(1, 4), rng):
            plan = engine.plan(
                batch.indptr(), layout, kv_lens=layout.lengths.cpu(), num_workers=case.num_workers, params=params
            )
            out, lse = engine.run(
                plan, batch.q, batch.k_cache, batch.v_cache, params=params, return_state=True, **values
            )
            outs.append(out)
            lses.append(lse)
        softmax = engine.variant.use_softmax
        merged, merged_lse = merge_states(
            torch.stack(outs), torch.stack([lse for lse in lses if lse is not None]) if softmax else None
        )
        whole = plan_of(engine, case, batch)
        done = finish_state(engine, whole, merged, merged_lse, params=params, return_lse=softmax)

        hooks = kernel.case.hooks(batch.shape, batch.params)
        scale = kernel.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
        scales = Scales(scale, case.k_scale, case.v_scale)
        answers = [attention(r, request, (None, None), hooks, scales) for r, request in enumerate(batch.requests)]
        answer, limit = Answer.joined(answers), Bounds.joined([bounds(a, hooks, kernel.dtype) for a in answers])
        check_rows(f"{kernel}, {case}: merged", merged, answer.state, limit.state, answer)
        check_rows(f"{kernel}, {case}: out", done[0] if softmax else done, answer.out, limit.out, answer)
        if softmax:
            check_lse(f"{kernel}, {case}: lse", done[1], answer.lse, limit.lse)
