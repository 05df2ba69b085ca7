"""The oracle itself, against torch's float64 attention where torch has the feature, and against hand-made cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from tests.oracle import Answer, Band, DenseRequest, Hooks, attention, gather, merge


def _request(n: int, length: int, heads: int = 6, kv_heads: int = 2, dim: int = 16, seed: int = 0) -> DenseRequest:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(n, heads, dim, generator=g, dtype=torch.float64)
    k = torch.randn(length, kv_heads, dim, generator=g, dtype=torch.float64)
    v = torch.randn(length, kv_heads, dim, generator=g, dtype=torch.float64)
    return DenseRequest(q, k, v, list(range(length)))


def _torch_answer(r: DenseRequest, mask: torch.Tensor, scale: float | None = None) -> np.ndarray:
    q, k, v = (x.transpose(0, 1) for x in (r.q, r.k, r.v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(0, 1).numpy()


@pytest.mark.parametrize(("n", "length"), [(1, 9), (5, 5), (4, 17)])
@pytest.mark.parametrize("band", [Band(None, None), Band(None, 0), Band(3, 0), Band(2, 2)], ids=str)
def test_agrees_with_torch(n: int, length: int, band: Band) -> None:
    r = _request(n, length)
    distance = torch.arange(length)[None] - (length - n + torch.arange(n))[:, None]
    mask = torch.ones(n, length, dtype=torch.bool)
    if band.left is not None:
        mask &= distance >= -band.left
    if band.right is not None:
        mask &= distance <= band.right
    answer = attention([r], band=band, sm_scale=0.3)
    np.testing.assert_allclose(answer.out, _torch_answer(r, mask, 0.3), rtol=1e-12, atol=1e-13)
    assert answer.visible.tolist() == mask.sum(1).tolist()


def test_lse_of_equal_keys_is_the_logarithm_of_their_number() -> None:
    r = DenseRequest(torch.zeros(1, 1, 4), torch.randn(7, 1, 4), torch.ones(7, 1, 4), list(range(7)))
    answer = attention([r])
    assert answer.lse[0, 0] == pytest.approx(math.log(7))
    np.testing.assert_allclose(answer.out[0, 0], 1.0)


def test_sink_is_a_logit_without_a_value() -> None:
    r = DenseRequest(torch.zeros(1, 1, 4), torch.randn(3, 1, 4), torch.ones(3, 1, 4), list(range(3)))
    answer = attention([r], hooks=Hooks(sink=lambda at: math.log(5.0)))
    assert answer.lse[0, 0] == pytest.approx(math.log(8))
    np.testing.assert_allclose(answer.out[0, 0], 3 / 8)
    np.testing.assert_allclose(answer.state_out[0, 0], 1.0)


def test_rows_that_see_nothing_are_zero_and_minus_infinity() -> None:
    answer = attention([_request(5, 2), _request(3, 0, seed=1)])
    assert answer.visible.tolist() == [0, 0, 0, 1, 2, 0, 0, 0]
    blind = answer.visible == 0
    assert (answer.out[blind] == 0).all() and np.isneginf(answer.lse[blind]).all()
    assert np.isfinite(answer.lse[~blind]).all()


def test_unseen_keys_may_hold_nan() -> None:
    r = _request(2, 40)
    clean = attention([r], band=Band(8, 0))
    r.k[:30] = math.nan
    r.v[:30] = math.inf
    np.testing.assert_array_equal(attention([r], band=Band(8, 0)).out, clean.out)


def test_merge_of_two_halves_is_the_whole() -> None:
    r = _request(3, 20)
    whole = attention([r], band=Band(None, None))
    halves: list[Answer] = [
        attention([DenseRequest(r.q, r.k[a:b], r.v[a:b], r.kv_pos[a:b])], band=Band(None, None))
        for a, b in ((0, 7), (7, 20))
    ]
    out, lse = merge([h.state_out for h in halves], [h.state_lse for h in halves])
    np.testing.assert_allclose(out, whole.out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-12)


def test_gather_follows_the_block_ids() -> None:
    cache = torch.arange(5 * 3, dtype=torch.float64).reshape(5, 3, 1, 1)
    assert gather(cache, [4, 0, 2], 7).flatten().tolist() == [12, 13, 14, 0, 1, 2, 6]
    assert gather(cache, [], 0).shape == (0, 1, 1)
