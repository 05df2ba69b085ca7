"""Attention in float64 on any device, written to be read: what a GPU's kernels are compared with.

It imports nothing of the engine. A request is dense here: its keys are gathered, and the position of each is given.
Heads come first: `[heads, queries, keys]`. Hooks receive such tensors and an `At` whose index tensors broadcast with
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class At:
    """Where a hook's values sit. What has no meaning for a hook is empty."""

    request: int
    q_head: Tensor
    kv_head: Tensor
    q_index: Tensor
    q_pos: Tensor
    kv_index: Tensor
    kv_pos: Tensor


Vector = Callable[[Tensor, At], Tensor]


@dataclass(frozen=True)
class Hooks:
    """One callable per hook of a variant; None is the identity.

    query, output: `[Hq, n, D]` to the same; key, value: `[Hkv, L, D]`; logits: `[Hq, n, L]`, after the scale; mask: to
    bool, True where the key is seen; sink: to a logit, `[Hq, n, 1]` or what broadcasts to it.
    logits_slope, output_slope: by how much the hook may magnify an error of its argument.
    """

    query: Vector | None = None
    key: Vector | None = None
    value: Vector | None = None
    logits: Vector | None = None
    mask: Callable[[At], Tensor] | None = None
    output: Vector | None = None
    sink: Callable[[At], Tensor] | None = None
    softmax: bool = True
    logits_slope: float = 1.0
    output_slope: float = 1.0


@dataclass(frozen=True)
class Request:
    """q [n, Hq, D], k and v [L, Hkv, D], positions int64 [L]."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Answer:
    """Of one request: out and state [n, Hq, D], lse and state_lse [n, Hq]; a state is before sink and output hook.

    What an error bound needs, each [n, Hq]: `rounded`, the root of the sum of squares of w_j v_j over all j and dims;
    `magnitude`, the norm of sum_j |w_j v_j|; `leverage`, what independent errors of the logits do to the row: the norm
    of the row and `rounded` with softmax, else that of the root of sum_j v_j^2; `size`, the largest sum_d |q_d k_d| *
    scale of a key that is seen, and `spread`, the largest root of the sum of their squares.
    """

    out: Tensor
    lse: Tensor
    state: Tensor
    state_lse: Tensor
    rounded: Tensor
    magnitude: Tensor
    leverage: Tensor
    size: Tensor
    spread: Tensor

    @classmethod
    def joined(cls, answers: Sequence[Answer]) -> Answer:
        """Of requests whose rows lie one after the other."""
        return cls(*(torch.cat([getattr(answer, name) for answer in answers]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Scales:
    """Of q . k, of the keys, of the values."""

    sm: float
    k: float = 1.0
    v: float = 1.0


def attention(index: int, r: Request, band: tuple[int | None, int | None], hooks: Hooks, scales: Scales) -> Answer:
    """Attention of request `index`.

    Query i of n stands at position end - n + i, end being one past the last key's. `band` is (left, right): it sees
    keys at most so far before and after itself; None is any distance.
    """
    n, heads, _ = r.q.shape
    length, kv_heads, _ = r.v.shape
    group = heads // kv_heads
    device = r.q.device
    end = int(r.positions[-1]) + 1 if length else 0

    none = torch.empty(0, device=device)
    q_head = torch.arange(heads, device=device)[:, None, None]
    kv_head = torch.arange(kv_heads, device=device)[:, None, None]
    q_index = torch.arange(n, device=device)[None, :, None]
    q_pos = q_index + end - n
    kv_index = torch.arange(length, device=device)
    plane = At(index, q_head, q_head // group, q_index, q_pos, kv_index[None, None], r.positions[None, None])
    of_queries = At(index, q_head, q_head // group, q_index, q_pos, none, none)
    of_keys = At(index, none, kv_head, none, none, kv_index[None, :, None], r.positions[None, :, None])

    distance = plane.kv_pos - q_pos
    seen = torch.ones((1, n, length), dtype=torch.bool, device=device)
    if band[0] is not None:
        seen = seen & (distance >= -band[0])
    if band[1] is not None:
        seen = seen & (distance <= band[1])
    if hooks.mask is not None:
        seen = seen & hooks.mask(plane)
    seen = seen.expand(heads, n, length)

    # A key that no query sees may hold anything: it is not read.
    used = seen.any(0).any(0)[:, None, None]
    query = _double(r.q).transpose(0, 1)
    key = torch.where(used, _double(r.k) * scales.k, 0.0).transpose(0, 1)
    value = torch.where(used, _double(r.v) * scales.v, 0.0).transpose(0, 1)
    if hooks.query is not None:
        query = hooks.query(query, of_queries)
    if hooks.key is not None:
        key = hooks.key(key, of_keys)
    if hooks.value is not None:
        value = hooks.value(value, of_keys)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)

    logits = query @ key.transpose(1, 2) * scales.sm
    size = _largest(query.abs() @ key.abs().transpose(1, 2) * abs(scales.sm), seen)
    spread = _largest((query.square() @ key.square().transpose(1, 2)).sqrt() * abs(scales.sm), seen)
    if hooks.logits is not None:
        logits = hooks.logits(logits, plane)

    if hooks.softmax:
        masked = torch.where(seen, logits, -math.inf)
        state_lse = torch.logsumexp(masked, 2) if length else masked.new_full((heads, n), -math.inf)
        weight = torch.exp(masked - state_lse.nan_to_num(neginf=0.0)[..., None])
    else:
        state_lse = logits.new_full((heads, n), -math.inf)
        weight = torch.where(seen, logits, 0.0)
    state = weight @ value
    out, lse = state, state_lse
    if hooks.sink is not None:
        sink = torch.broadcast_to(hooks.sink(plane), (heads, n, 1))[..., 0].double()
        lse = torch.logaddexp(state_lse, sink)
        out = state * torch.exp(state_lse - lse)[..., None]
    if hooks.output is not None:
        out = hooks.output(out, of_queries)

    rounded = (weight.square() @ value.square()).sum(2).sqrt()
    alike = (seen.double() @ value.square()).sum(2).sqrt()
    leverage = rounded + state.norm(dim=2) if hooks.softmax else alike
    magnitude = (weight.abs() @ value.abs()).norm(dim=2)
    parts = (out, lse, state, state_lse, rounded, magnitude, leverage, size, spread)
    return Answer(*(part.transpose(0, 1) for part in parts))


def _double(rows: Tensor) -> Tensor:
    return rows.float().double()


def _largest(sizes: Tensor, seen: Tensor) -> Tensor:
    if sizes.shape[2] == 0:
        return sizes.new_zeros(sizes.shape[:2])
    return torch.where(seen, sizes, 0.0).amax(2)
