"""Vector hooks in Python: rotary embeddings inside attention (arXiv 2104.09864), so that the cache holds plain keys.

A vector hook gives one dimension of a row, and may read the others: here the rotary partner.

    python examples/rotary.py
"""

import torch

import attnloom

torch.manual_seed(0)
HEADS, KV_HEADS, DIM, PAGE, CACHED, NEW = 4, 2, 64, 16, 90, 10

# The variant.
frequencies = 10000.0 ** -(torch.arange(DIM) % (DIM // 2) * 2 / DIM)


def rotated(row, dim, position):
    angle = position * frequencies[dim]
    sign = torch.where(dim < DIM // 2, -1.0, 1.0)
    return row[dim] * torch.cos(angle) + sign * row[(dim + DIM // 2) % DIM] * torch.sin(angle)


rotary = attnloom.Variant(
    "rotary",
    query_transform=lambda query, dim, q_pos: rotated(query, dim, q_pos),
    key_transform=lambda key, dim, kv_pos: rotated(key, dim, kv_pos),
)
# Its end.

engine = attnloom.Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=attnloom.variants.Causal() & rotary)
length = CACHED + NEW
pages = torch.randperm(7).to(torch.int32)
layout = attnloom.BlockSparseLayout.from_page_table(pages[None], torch.tensor([length], dtype=torch.int32), PAGE)
k_cache, v_cache = torch.randn(2, 7, PAGE, KV_HEADS, DIM)
q = torch.randn(NEW, HEADS, DIM)  # new tokens, on top of what is cached
plan = engine.plan(torch.tensor([0, NEW], dtype=torch.int32), layout)
out = engine.run(plan, q, k_cache, v_cache)


def reference(rows, first):
    """Rows [tokens, heads, DIM] rotated, as Llama's code does it; the first one is at position `first`."""
    angles = (first + torch.arange(len(rows)))[:, None, None] * frequencies
    halves = torch.cat([-rows[..., DIM // 2 :], rows[..., : DIM // 2]], dim=-1)
    return rows * angles.cos() + halves * angles.sin()


k, v = (cache[pages.long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (reference(k, 0), v))
seen = torch.arange(length) <= torch.arange(CACHED, length)[:, None]
expected = torch.nn.functional.scaled_dot_product_attention(
    reference(q, CACHED).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen
)
torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-4, rtol=1e-4)
print(f"rotary: {NEW} new tokens on {CACHED} cached ones, keys cached unrotated, as torch computes it")
