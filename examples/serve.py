"""Serving: what a server reads from serve.toml, on the shapes of one step, checked against torch.

It ends with the command that serves a model this way; integration_tests/vllm_cpu/test_custom_variant.py runs vLLM with
the same file and compares its tokens.

    python examples/serve.py
"""

from pathlib import Path

import torch

import attnloom
from attnloom.core.serving import layer_variant
from attnloom.core.serving_options import choice

FILE = Path(__file__).with_name("serve.toml")
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 32

torch.manual_seed(0)
tables = choice({"variants": str(FILE)}).of("model.layers.0.self_attn.attn")
variant = layer_variant(attnloom.variants.Causal(), None, tables)  # a layer that is causal and nothing else
engine = attnloom.Attention(HEADS, KV_HEADS, DIM, dtype=torch.float32, variant=variant)

queries, lengths = (1, 1, 20), (40, 7, 50)  # two requests decode, the third brings 20 new tokens
table = torch.randperm(6).to(torch.int32).view(3, 2)
layout = attnloom.BlockSparseLayout.from_page_table(table, torch.tensor(lengths, dtype=torch.int32), PAGE)
k_cache, v_cache = torch.randn(2, 6, PAGE, KV_HEADS, DIM)
q = torch.randn(sum(queries), HEADS, DIM)
plan = engine.plan(torch.tensor([0, 1, 2, 22], dtype=torch.int32), layout)
out = engine.run(plan, q, k_cache, v_cache)  # the parameters come from the file

expected = []
for row, (new, length) in enumerate(zip(queries, lengths, strict=True)):
    k, v = (cache[table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[sum(queries[:row]) :][:new], k) * DIM**-0.5
    weights = torch.sigmoid(scores - 2.0) * torch.ones(new, length).tril(length - new)
    expected.append(torch.einsum("hqk,khd->qhd", weights, v))
torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)
print(
    f"{FILE.name}: {variant.name}, {len(lengths)} requests in one step, as torch computes it. To serve a model with it:"
)
print(f"    vllm serve MODEL --attention-backend CUSTOM --additional-config.attnloom.variants {FILE}")
