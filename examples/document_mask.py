"""A mask_mod in Python: documents packed into one sequence do not see each other, and its block mask skips tiles.

python examples/document_mask.py
"""

import torch

import attnloom

torch.manual_seed(0)
HEADS, DIM, PAGE = 4, 64, 16
LENGTHS = (700, 40, 300, 1008)
TOTAL = sum(LENGTHS)

# The variant.
document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def same_document(b, h, q_idx, kv_idx):
    return document[q_idx] == document[kv_idx]


variant = attnloom.variants.Causal() & attnloom.mask_mod(same_document)
# Its end.

engine = attnloom.Attention(HEADS, HEADS, DIM, dtype=torch.float32, variant=variant)
pages = torch.randperm(TOTAL // PAGE).to(torch.int32)
layout = attnloom.BlockSparseLayout.from_page_table(pages[None], torch.tensor([TOTAL], dtype=torch.int32), PAGE)
k_cache, v_cache = torch.randn(2, TOTAL // PAGE, PAGE, HEADS, DIM)
q = torch.randn(TOTAL, HEADS, DIM)
indptr = torch.tensor([0, TOTAL], dtype=torch.int32)
block_mask = engine.block_mask(TOTAL)  # the mask, evaluated once; hidden tiles are not computed
plan = engine.plan(indptr, layout, block_mask=block_mask)
out = engine.run(plan, q, k_cache, v_cache)

k, v = (cache[pages.long()].flatten(0, 1) for cache in (k_cache, v_cache))
seen = (document[:, None] == document) & torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril()
expected = torch.nn.functional.scaled_dot_product_attention(
    q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=seen
)
torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
tiles, without = (int(made.worker_tiles().sum()) for made in (plan, engine.plan(indptr, layout)))
assert tiles < without
print(f"document mask: {len(LENGTHS)} documents, {tiles} KV tiles computed instead of {without}, as torch computes it")
