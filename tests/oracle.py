"""Attention in float64, written to be read: what every kernel is compared with.

It imports nothing of the engine. The caller gives the queries, the KV of each request as a dense tensor (see `gather`,
which looks every block up by hand), the position of each key, the band and one Python callable per hook.
Loops run over requests and query heads; what is left is a dense `[queries, keys]` matrix in numpy.

Hooks are vectorised: each receives its value and an `At` whose index arrays broadcast against that value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class At:
    """Where a hook's value sits. An index that has no meaning for a hook is None."""

    request: int
    q_head: int
    kv_head: int
    q_index: Array | None = None
    q_pos: Array | None = None
    kv_index: Array | None = None
    kv_pos: Array | None = None


Vector = Callable[[Array, At], Array]


@dataclass(frozen=True)
class Hooks:
    """One callable per hook of the variant; None is the identity.

    query_transform: [n, D] -> [n, D];  key_transform: [L, D] -> [L, D];  value_transform: [L, Dv] -> [L, Dv]
    logits_transform: [n, L] -> [n, L], after sm_scale;  logits_mask: At -> bool [n, L], True where the key is seen
    output_transform: [n, Dv] -> [n, Dv], once, on the finished row
    sink: At -> number or [n], one more logit without a value
    """

    query_transform: Vector | None = None
    key_transform: Vector | None = None
    value_transform: Vector | None = None
    logits_transform: Vector | None = None
    logits_mask: Callable[[At], Array] | None = None
    output_transform: Vector | None = None
    sink: Callable[[At], Array | float] | None = None
    use_softmax: bool = True


@dataclass(frozen=True)
class Band:
    """A key at position p is seen from position t when -left <= p - t <= right; None is unlimited."""

    left: int | None = None
    right: int | None = 0


@dataclass(frozen=True)
class DenseRequest:
    """One request: q [n, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv], kv_pos int64 [L] (position of each key)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_pos: list[int]


@dataclass(frozen=True)
class Answer:
    """The result, rows of all requests one after the other, and what an error bound needs.

    out, state_out [T, Hq, Dv]; lse, state_lse [T, Hq]. A state is the row before the sink and output_transform.
    magnitude [T, Hq, Dv] is sum_j |w_j v_j| over the weights w: rounding errors of P V are relative to it.
    spread [T, Hq, Dv] is what an error of one unit in every logit, relative to 1 + its size, does to the output; size
    is sum_d |q_d k_d| * scale, or |logit| where that is larger. With softmax a logit's error is a relative error of its
    weight: sum_j w_j |v_j| * (1 + largest size). Without, it is an absolute one, and errors of different keys are
    independent: the root of the sum of squares.
    logit_size [T, Hq] is the largest size of a visible key.
    visible [T] is the number of keys that the row's first head sees.
    """

    out: Array
    lse: Array
    state_out: Array
    state_lse: Array
    magnitude: Array
    spread: Array
    logit_size: Array
    visible: Array


def gather(cache: torch.Tensor, block_ids: Sequence[int], length: int) -> torch.Tensor:
    """The first `length` tokens of the blocks `block_ids`: [blocks, block_size, H, D] to [length, H, D]."""
    block_size = cache.shape[1]
    parts = [cache.new_zeros((0, *cache.shape[2:]))]
    for first in range(0, length, block_size):
        block = block_ids[first // block_size]
        parts.append(cache[block, : min(block_size, length - first)])
    return torch.cat(parts)


def attention(
    requests: Sequence[DenseRequest],
    *,
    band: Band = Band(),
    hooks: Hooks = Hooks(),
    sm_scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Answer:
    """Attention of every request. Query i of n stands at position end - n + i, end = one past the last key."""
    parts = [_one_request(i, r, band, hooks, sm_scale, k_scale, v_scale) for i, r in enumerate(requests)]
    names = Answer.__dataclass_fields__
    return Answer(**{name: np.concatenate([part[name] for part in parts]) for name in names})


def _one_request(
    index: int, r: DenseRequest, band: Band, hooks: Hooks, sm_scale: float | None, k_scale: float, v_scale: float
) -> dict[str, Array]:
    n, num_qo_heads, dim = r.q.shape
    length, num_kv_heads, dim_v = r.v.shape
    group = num_qo_heads // num_kv_heads
    scale = dim**-0.5 if sm_scale is None else sm_scale
    kv_pos = np.array(r.kv_pos, dtype=np.int64).reshape(length)
    end = int(kv_pos[-1]) + 1 if length else 0
    q_pos = np.array([end - n + i for i in range(n)], dtype=np.int64).reshape(n)

    result = {
        "out": np.zeros((n, num_qo_heads, dim_v)),
        "lse": np.full((n, num_qo_heads), -np.inf),
        "state_out": np.zeros((n, num_qo_heads, dim_v)),
        "state_lse": np.full((n, num_qo_heads), -np.inf),
        "magnitude": np.zeros((n, num_qo_heads, dim_v)),
        "spread": np.zeros((n, num_qo_heads, dim_v)),
        "logit_size": np.zeros((n, num_qo_heads)),
        "visible": np.zeros(n, dtype=np.int64),
    }
    queries = r.q.double().numpy()
    keys_of_all = r.k.double().numpy() * k_scale
    values_of_all = r.v.double().numpy() * v_scale
    rows, slots = np.arange(n), np.arange(length)
    in_band = np.ones((n, length), dtype=bool)
    distance = kv_pos[None, :] - q_pos[:, None]
    if band.left is not None:
        in_band &= distance >= -band.left
    if band.right is not None:
        in_band &= distance <= band.right

    for head in range(num_qo_heads):
        kv_head = head // group
        query, key, value = queries[:, head], keys_of_all[:, kv_head].copy(), values_of_all[:, kv_head].copy()
        plane = At(index, head, kv_head, rows[:, None], q_pos[:, None], slots[None, :], kv_pos[None, :])
        by_query = At(index, head, kv_head, q_index=rows[:, None], q_pos=q_pos[:, None])
        by_key = At(index, head, kv_head, kv_index=slots[:, None], kv_pos=kv_pos[:, None])
        seen = in_band
        if hooks.logits_mask is not None:
            seen = in_band & hooks.logits_mask(plane)

        # A key that no query sees may hold anything, NaN included: it is not read.
        unseen = ~seen.any(axis=0)
        key[unseen] = 0.0
        value[unseen] = 0.0
        if hooks.query_transform is not None:
            query = hooks.query_transform(query, by_query)
        if hooks.key_transform is not None:
            key = hooks.key_transform(key, by_key)
        if hooks.value_transform is not None:
            value = hooks.value_transform(value, by_key)

        logits = query @ key.T * scale
        size = np.abs(query) @ np.abs(key).T * abs(scale)
        if hooks.logits_transform is not None:
            logits = hooks.logits_transform(logits, plane)
        size = np.where(seen, np.maximum(size, np.abs(logits)), 0.0)

        state, state_lse, out, lse, weight = _weigh(logits, seen, value, hooks, plane)
        if hooks.output_transform is not None:
            out = hooks.output_transform(out, by_query)
        result["state_out"][:, head] = state
        result["state_lse"][:, head] = state_lse
        result["out"][:, head] = out
        result["lse"][:, head] = lse
        result["magnitude"][:, head] = np.abs(weight) @ np.abs(value)
        largest = size.max(axis=1, initial=0.0)
        result["logit_size"][:, head] = largest
        if hooks.use_softmax:
            result["spread"][:, head] = result["magnitude"][:, head] * (1.0 + largest[:, None])
        else:
            result["spread"][:, head] = np.sqrt(np.where(seen, (1.0 + size) ** 2, 0.0) @ value**2)
        if head == 0:
            result["visible"][:] = seen.sum(axis=1)
    return result


def _weigh(logits: Array, seen: Array, value: Array, hooks: Hooks, at: At) -> tuple[Array, Array, Array, Array, Array]:
    """The unfinished row and its LSE, the finished row and its LSE, and the weights of the unfinished row."""
    n = logits.shape[0]
    if not hooks.use_softmax:
        weight = np.where(seen, logits, 0.0)
        summed = weight @ value
        nothing = np.full(n, -np.inf)
        return summed, nothing, summed, nothing, weight
    masked = np.where(seen, logits, -np.inf)
    top = masked.max(axis=1, initial=-np.inf)
    safe_top = np.where(np.isfinite(top), top, 0.0)
    exps = np.exp(masked - safe_top[:, None])
    total = exps.sum(axis=1)
    some = total > 0
    weight = exps / np.where(some, total, 1.0)[:, None]
    state = weight @ value
    state_lse = np.where(some, safe_top + np.log(np.where(some, total, 1.0)), -np.inf)
    if hooks.sink is None:
        return state, state_lse, state, state_lse, weight
    sink = np.broadcast_to(np.asarray(hooks.sink(at), dtype=np.float64).reshape(-1), n)
    lse = np.logaddexp(state_lse, sink)
    share = np.where(some, np.exp(state_lse - lse), 0.0)
    return state, state_lse, state * share[:, None], lse, weight


def merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """States of the same rows over disjoint keys, merged one after the other: outs [T, H, Dv], lses [T, H] each."""
    out, lse = np.zeros_like(outs[0], dtype=np.float64), np.full(lses[0].shape, -np.inf)
    for other_out, other_lse in zip(outs, lses, strict=True):
        both = np.logaddexp(lse, other_lse)
        anchor = np.where(np.isfinite(both), both, 0.0)
        mine = np.where(np.isfinite(lse), np.exp(lse - anchor), 0.0)
        theirs = np.where(np.isfinite(other_lse), np.exp(other_lse - anchor), 0.0)
        out = out * mine[..., None] + np.where(theirs[..., None] > 0, other_out, 0.0) * theirs[..., None]
        lse = both
    return out, lse
