"""A hook in C++: sigmoid attention, whose weights need not sum to 1 (arXiv 2409.04431).

The text compiles for every kernel family. `bias` is an argument of the kernel: changing it compiles nothing.

    python examples/sigmoid.py
"""

import torch

import attnloom

# The variant.
sigmoid = attnloom.Variant(
    "sigmoid",
    params=(attnloom.Param("bias"),),
    logits_transform="return sigmoid(logits + params.bias);",
    use_softmax=False,
)
# Its end.


def main() -> None:
    """Check it: 3 requests that decode, with histories of their own, against torch."""
    torch.manual_seed(0)
    heads, kv_heads, dim, page, lengths = 8, 2, 64, 16, (5, 33, 70)
    variant = attnloom.variants.Causal() & sigmoid
    engine = attnloom.Attention(heads, kv_heads, dim, dtype=torch.float32, variant=variant)
    table = torch.randperm(15).to(torch.int32).view(3, 5)
    layout = attnloom.BlockSparseLayout.from_page_table(table, torch.tensor(lengths, dtype=torch.int32), page)
    k_cache, v_cache = torch.randn(2, 15, page, kv_heads, dim)
    q = torch.randn(3, heads, dim)
    plan = engine.plan(torch.arange(4, dtype=torch.int32), layout)
    for bias in (0.0, -3.0):
        out = engine.run(plan, q, k_cache, v_cache, params={"bias": bias})
        for row, length in enumerate(lengths):
            k, v = (cache[table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
            weights = torch.sigmoid(torch.einsum("hd,khd->hk", q[row], k) * dim**-0.5 + bias)
            torch.testing.assert_close(out[row], torch.einsum("hk,khd->hd", weights, v), atol=1e-5, rtol=1e-5)
    print(f"sigmoid: {len(lengths)} requests of {lengths} tokens, two biases, one kernel, as torch computes it")


if __name__ == "__main__":
    main()
