"""A score_mod in Python: a learned bias for every distance between query and key (T5, arXiv 1910.10683).

Written as for FlexAttention. The table that the function captures becomes a parameter of the kernel.

    python examples/relative_bias.py
"""

import torch

import attnloom

torch.manual_seed(0)
HEADS, DIM, LENGTH, PAGE = 4, 64, 100, 16

# The variant.
table = torch.randn(HEADS, 32)


def relative_bias(score, b, h, q_idx, kv_idx):
    distance = torch.clamp(q_idx - kv_idx, max=31)
    return score + table[h, distance]


variant = attnloom.variants.Causal() & attnloom.score_mod(relative_bias)
# Its end.

engine = attnloom.Attention(HEADS, HEADS, DIM, dtype=torch.float32, variant=variant)
pages = torch.randperm(7).to(torch.int32)  # the sequence lies in 7 pages, in any order
layout = attnloom.BlockSparseLayout.from_page_table(pages[None], torch.tensor([LENGTH], dtype=torch.int32), PAGE)
k_cache, v_cache = torch.randn(2, 7, PAGE, HEADS, DIM)
q = torch.randn(LENGTH, HEADS, DIM)
plan = engine.plan(torch.tensor([0, LENGTH], dtype=torch.int32), layout)
out = engine.run(plan, q, k_cache, v_cache)

k, v = (cache[pages.long()].flatten(0, 1)[:LENGTH] for cache in (k_cache, v_cache))
scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
scores = scores + table[:, distance.clamp(0, 31)]
weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", weights, v), atol=1e-5, rtol=1e-5)
print(f"relative bias: {LENGTH} queries on {LENGTH} keys in {len(pages)} pages, as torch computes it")
