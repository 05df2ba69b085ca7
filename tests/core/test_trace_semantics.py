"""What a traced expression computes in a kernel is what torch computes when it runs the same function on tensors.

Keys and values are unit vectors and there is no softmax, so that element (q, k) of the output is the hook there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from attnloom.core.attention import Attention
from attnloom.core.jit import build
from attnloom.core.kernels import attention_spec
from attnloom.core.layout import BlockSparseLayout
from attnloom.core.variant import Variant
from tests.core.planning import indptr

QUERIES, KEYS, HEADS = 100, 64, 2
WHICH = torch.zeros((), dtype=torch.int64)

_RANDOM = torch.Generator().manual_seed(3)
GAINS = torch.randn(HEADS, generator=_RANDOM)
TABLE = torch.randn(HEADS, 2 * QUERIES, generator=_RANDOM).t()
WIDE = torch.randint(-(2**62), 2**62, (KEYS,), generator=_RANDOM)
NARROW = torch.randint(-(2**31), 2**31 - 1, (KEYS,), generator=_RANDOM, dtype=torch.int32)
BYTES = torch.randint(0, 255, (KEYS + 1,), generator=_RANDOM, dtype=torch.uint8)[1:]
FLAGS = torch.rand(3, KEYS, generator=_RANDOM)[1:] < 0.5
HALVES = torch.randn(KEYS, generator=_RANDOM).half()
SMALL = torch.randint(-100, 100, (KEYS,), generator=_RANDOM, dtype=torch.int8)
TINY = torch.randint(-128, 128, (KEYS,), generator=_RANDOM, dtype=torch.int8)
SHORTS = torch.randint(-(2**15), 2**15, (KEYS,), generator=_RANDOM, dtype=torch.int16)
TINY[0], SHORTS[0] = -128, -(2**15)
FACTOR, OFFSET, TRUTH = torch.tensor(1.5), torch.tensor(-3), torch.tensor(True)

Expression = Callable[[Any, Any, Any, Any], Any]
FLOATS: dict[str, Expression] = {
    "exp": lambda x, h, q, k: torch.exp(x * 4),
    "exp2": lambda x, h, q, k: torch.exp2(x * 8),
    "expm1": lambda x, h, q, k: torch.expm1(x * 1e-3) * 1e3,
    "log": lambda x, h, q, k: torch.log(x.abs() * 1e3 + 1e-30),
    "log2 of tiny": lambda x, h, q, k: (x.abs() * 1e-39).log2(),
    "log1p": lambda x, h, q, k: torch.log1p(x * 1e-4) * 1e4 + torch.log1p(x.abs() * 1e6),
    "log10": lambda x, h, q, k: torch.log10(torch.abs(x) + 1e-3),
    "sqrt": lambda x, h, q, k: torch.sqrt(x.abs()) + torch.rsqrt(x.abs() + 0.1),
    "sin": lambda x, h, q, k: torch.sin(x * 500),
    "cos of a position": lambda x, h, q, k: torch.cos(q * 1000 + k),
    "tan": lambda x, h, q, k: torch.tan(x * 0.3),
    "tanh": lambda x, h, q, k: x.tanh() + torch.tanh(x * 1e-4) * 1e4,
    "sigmoid": lambda x, h, q, k: torch.sigmoid(x * 9) + torch.special.expit(x),
    "erf": lambda x, h, q, k: torch.erf(x),
    "silu": lambda x, h, q, k: torch.nn.functional.silu(x),
    "relu": lambda x, h, q, k: torch.relu(x) + torch.nn.functional.relu(-x),
    "pow": lambda x, h, q, k: x.abs() ** 1.7 + torch.pow(x.abs() + 0.5, x) + x**2 - x**3,
    "pow of a negative": lambda x, h, q, k: torch.pow(x - 5, k % 5 - 2.0),
    "powers of a number": lambda x, h, q, k: 2**x + 0.5**x + 3.0 ** (k % 4),
    "reciprocal": lambda x, h, q, k: torch.reciprocal(x.abs() + 1) + 1 / (2 + x.abs()) + (x.abs() + 1) ** -1,
    "rounding": lambda x, h, q, k: (
        torch.floor(x * 3) + 10 * torch.ceil(x) + 100 * torch.trunc(x) + 1000 * torch.round(x * 2)
    ),
    "halves to even": lambda x, h, q, k: torch.round(k / 2 - 7),
    "sign": lambda x, h, q, k: torch.sign(x) + 3 * torch.sgn(q - k),
    "extremes": lambda x, h, q, k: (
        torch.minimum(x, 0.3 * x**2) + torch.maximum(x, torch.zeros_like(x)) + torch.max(x, GAINS[h])
    ),
    "clamp": lambda x, h, q, k: x.clamp(-0.5, 0.5) + torch.clamp(x, min=0.1) + torch.clip(x, max=GAINS[h]),
    "NaN spreads": lambda x, h, q, k: torch.where(torch.minimum(x, torch.log(x)) > -9, 1.0, 2.0),
    "float division": lambda x, h, q, k: x / 3 + torch.div(q, k + 1) + q / 7 + torch.true_divide(k, 9),
    "float floor division": lambda x, h, q, k: (x * 50) // 7 + torch.floor_divide(x * 50, -3.5),
    "float remainder": lambda x, h, q, k: (x * 50) % 7 + torch.remainder(x, -0.3) + torch.fmod(x * 20, 3),
    "softplus": lambda x, h, q, k: torch.nn.functional.softplus(x * 4) + 0 * x,
    "alpha": lambda x, h, q, k: torch.add(x, k, alpha=2) - torch.sub(x, q, alpha=0.5) + torch.rsub(x, 1),
}
INTEGERS: dict[str, Expression] = {
    "floor division": lambda x, h, q, k: q // 7 + 1000 * ((q - k) // 16) + (k - 40) // -3,
    "remainder": lambda x, h, q, k: q % 7 + 100 * ((q - k) % 16) + 10000 * ((k - 40) % -3),
    "division by a value": lambda x, h, q, k: q // (k + 1) + 100 * (q % (k + 1)) + (q - k) // (-1 - k),
    "truncation": lambda x, h, q, k: torch.div(q - k, 5, rounding_mode="trunc") + 100 * torch.fmod(q - k, 5),
    "of captured wide ones": lambda x, h, q, k: (WIDE[k] // 1000003) % 9973 + (WIDE[k] % -77) - WIDE[k] // 2**55,
    "wide by value": lambda x, h, q, k: WIDE[k] // (q * 2**40 + 2**46) + WIDE[k] % (k + 3),
    "32 bits wrap": lambda x, h, q, k: (NARROW[k] * NARROW[q]) % 1009,
    "32 bits promote": lambda x, h, q, k: (NARROW[k] * q + k) % 1009,
    "bytes wrap": lambda x, h, q, k: BYTES[k] * 3 + BYTES[q] - 7,
    "8 bits wrap": lambda x, h, q, k: TINY[k] * 3 + TINY[q] - 7 + (TINY[k] << 3) + abs(TINY[k]) - (-TINY[q]) + ~TINY[q],
    "8 bits divide": lambda x, h, q, k: TINY[k] // -1 + 300 * (TINY[k].to(torch.int32) // -1) + TINY[k] % 7,
    "8 bits promote": lambda x, h, q, k: TINY[k] * BYTES[k] * 5 + TINY[k] + 100000 * (TINY[q] * q),
    "16 bits wrap": lambda x, h, q, k: SHORTS[k] * TINY[q] + SHORTS[q] ** 2 + SHORTS[k] * BYTES[q] - 5 * SHORTS[q],
    "constants of few bits": lambda x, h, q, k: (
        TINY[k] + torch.tensor(100, dtype=torch.int8) + 1000 * (BYTES[k] + torch.tensor(99, dtype=torch.uint8)).int()
    ),
    "to few bits": lambda x, h, q, k: (
        (k * 3).to(torch.int8) + 1000 * (q * 12345 * k).to(torch.int16).int() + (q * 2**40 + k * 3).type(torch.int8)
    ),
    "bytes promote": lambda x, h, q, k: BYTES[k] - q,
    "hash": lambda x, h, q, k: (q * 2654435761 + k * 40503 + h) % 1000,
    "bits": lambda x, h, q, k: (q & 12) + (k | 5) * 100 + (q ^ k) * 10000,
    "not": lambda x, h, q, k: ~q + (~k & 7),
    "shifts": lambda x, h, q, k: (q << 3) + (k >> 2) + ((1 << (k % 20)) % 1009) + (q >> 1),
    "power of two": lambda x, h, q, k: 2 ** (k % 20) % 1009 + (q**3) % 101,
    "abs and sign": lambda x, h, q, k: torch.abs(q - k) * torch.sign(k - 30) - abs(-q),
    "extremes": lambda x, h, q, k: torch.minimum(q, k) + 100 * torch.maximum(q, k - 20) + q.clamp(-3, 30),
    "mixed widths": lambda x, h, q, k: torch.where(q > k, q * 2**33, k) // 2**20 + torch.minimum(WIDE[k], q) // 2**50,
    "to int": lambda x, h, q, k: (x * 100).to(torch.int32) + (x * 1e7).long() // 1000 + (x * 30).int() // 7,
    "to byte": lambda x, h, q, k: (q * 3).to(torch.uint8) + 0 * k,
    "number of a bool": lambda x, h, q, k: (q > k) + (q >= 3) * 2 + (k < 5).int() * 10 + True * q,
}
BOOLS: dict[str, Expression] = {
    "comparisons": lambda x, h, q, k: (q < k) ^ (q <= 9) ^ (k > 9) ^ (q >= 20) ^ (k == 33) ^ (q != 4),
    "float comparisons": lambda x, h, q, k: (x < 0.1) ^ (q > 3.5) ^ torch.ge(x, GAINS[h]) ^ torch.eq(k, 4.0),
    "parity": lambda x, h, q, k: ((q % 2 == 0) & (k % 2 != 0)) | (((q - k) % 2 == 1) & (k & 1 != 1)) | ((k & 1) == 0),
    "logic": lambda x, h, q, k: torch.logical_and(q > 3, k) | torch.logical_xor(x > 0, k > 9) & torch.logical_not(q),
    "of constants": lambda x, h, q, k: ((q > k) & True) | (k > 50) | (False & (q > 0)) ^ ~TRUTH,
    "truth of a number": lambda x, h, q, k: k.bool() & (q & 4).bool() | x.floor().to(torch.bool),
    "a bool table": lambda x, h, q, k: FLAGS[h, k] & ~FLAGS[1 - h, k],
    "a chosen bool": lambda x, h, q, k: torch.where(q > k, FLAGS[h, k], k > 5),
    "ones": lambda x, h, q, k: q.new_ones((), dtype=torch.bool) & (k > 4) & ~torch.zeros_like(q, dtype=torch.bool),
    "not a number": lambda x, h, q, k: torch.isnan(torch.log(x)) | torch.isnan(x),
}
LOADS: dict[str, Expression] = {
    "by head": lambda x, h, q, k: x * GAINS[h],
    "two dimensions, strided": lambda x, h, q, k: TABLE[q - k + QUERIES, h] + TABLE[k, h],
    "negative from the end": lambda x, h, q, k: TABLE[q - k, 0] + TABLE[-1, h] + TABLE[-1 - k, -1],
    "an index that is loaded": lambda x, h, q, k: TABLE[(WIDE[k] % 50).long(), NARROW[k] % 2],
    "half precision": lambda x, h, q, k: HALVES[k].float() * 2 + x,
    "small integers": lambda x, h, q, k: SMALL[k] / 4 + BYTES[k] / 2,
    "numbers": lambda x, h, q, k: x * FACTOR + (7 - OFFSET * 2) + torch.where(TRUTH, OFFSET, k),
    "made inside": lambda x, h, q, k: (
        x + torch.tensor(2.5) * k - torch.full((), 3) + torch.tensor([1.0, 4.0])[h] + (GAINS * 2)[h]
    ),
    "arithmetic with tensors first": lambda x, h, q, k: (
        FACTOR * x + FACTOR - k + OFFSET // (k + 1) + OFFSET % (k + 2) + 2 ** OFFSET.float()
    ),
    "masked_fill": lambda x, h, q, k: x.masked_fill(q < k, -7).where(k > 3, FACTOR),
    "pi": lambda x, h, q, k: x * math.pi + torch.finfo(x.dtype).eps + torch.full_like(x, 2) + x.new_tensor(0.25),
}
GROUPS = {"floats": FLOATS, "integers": INTEGERS, "bools": BOOLS, "loads": LOADS}


def _chosen(expressions: dict[str, Expression]) -> Callable[..., Any]:
    """One hook for all expressions of a group: the captured number WHICH says which one at each run."""

    def hook(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        result = score
        for number, expression in enumerate(expressions.values()):
            result = torch.where(torch.eq(WHICH, number), expression(score, h, q, k).to(torch.float32), result)
        return result

    return hook


@cache
def _engines() -> dict[str, Attention]:
    variants = {
        group: Variant(f"test_{group}", logits_transform=_chosen(expressions), use_softmax=False)
        for group, expressions in GROUPS.items()
    }
    build([attention_spec("cpu", torch.float32, KEYS, KEYS, variant) for variant in variants.values()])
    return {
        group: Attention(HEADS, 1, KEYS, dtype=torch.float32, variant=variant) for group, variant in variants.items()
    }


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(QUERIES, HEADS, KEYS, generator=torch.Generator().manual_seed(1))
    head = torch.arange(HEADS)[None, :, None].expand_as(x)
    q_pos = (torch.arange(QUERIES) + KEYS - QUERIES)[:, None, None].expand_as(x)
    kv_pos = torch.arange(KEYS)[None, None, :].expand_as(x)
    return x, head, q_pos, kv_pos


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in GROUPS.items() for name in names])
def test_expression(group: str, name: str) -> None:
    expression = GROUPS[group][name]
    engine = _engines()[group]
    layout = BlockSparseLayout.from_csr(
        indptr([1]), torch.zeros(1, dtype=torch.int32), torch.full((1,), KEYS, dtype=torch.int32), KEYS
    )
    # The first queries stand before position 0: integers there are negative.
    unit = torch.eye(KEYS).view(1, KEYS, 1, KEYS)
    plan = engine.plan(indptr([QUERIES]), layout, num_workers=1)
    WHICH.fill_(list(GROUPS[group]).index(name))
    out = engine.run(plan, _inputs()[0], unit, unit, sm_scale=1.0)
    wanted = expression(*_inputs()).float()
    assert torch.isfinite(wanted).all(), "the comparison needs finite numbers: infinities spread over a row"
    assert wanted.std() > 1e-3, "the expression is constant"
    if group in ("floats", "loads"):
        torch.testing.assert_close(out, wanted, rtol=3e-6, atol=3e-6)
    else:
        assert torch.equal(out, wanted)


SHORT, INTEGERS_OF_20, FLAGS_OF_20 = torch.arange(20.0) + 1, torch.arange(20) + 1, torch.ones(20, dtype=torch.bool)


def _reach(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    value = SHORT[k - 10]
    missing = torch.isnan(value)
    return torch.where(missing, 1000.0, value) + 100 * INTEGERS_OF_20[k - 10] + 10000 * FLAGS_OF_20[k - 10]


def test_indices_outside_a_tensor_read_nothing() -> None:
    """torch raises IndexError; a kernel reads NaN, 0 or false and no memory that is not the tensor's."""
    engine = Attention(
        1, 1, KEYS, dtype=torch.float32, variant=Variant("test_reach", logits_transform=_reach, use_softmax=False)
    )
    layout = BlockSparseLayout.from_csr(
        indptr([1]), torch.zeros(1, dtype=torch.int32), torch.full((1,), KEYS, dtype=torch.int32), KEYS
    )
    unit = torch.eye(KEYS).view(1, KEYS, 1, KEYS)
    plan = engine.plan(indptr([1]), layout, num_workers=1)
    negative = [SHORT[i - 10] + 100 * (SHORT[i - 10]) + 10000 for i in range(10)]
    inside = [SHORT[i - 10] + 100 * SHORT[i - 10] + 10000 for i in range(10, 30)]
    wanted = torch.stack([*negative, *inside, *[torch.tensor(1000.0)] * (KEYS - 30)])
    out = engine.run(plan, torch.zeros(1, 1, KEYS), unit, unit)
    assert torch.equal(out.view(-1), wanted)
    nothing = {"SHORT": SHORT[:0], "INTEGERS_OF_20": INTEGERS_OF_20[:0], "FLAGS_OF_20": FLAGS_OF_20[:0]}
    out = engine.run(plan, torch.zeros(1, 1, KEYS), unit, unit, params=nothing)
    assert torch.equal(out.view(-1), torch.full((KEYS,), 1000.0))
    odd = torch.ones(23, dtype=torch.bool)[3:]  # not at the beginning of a word
    again = engine.run(plan, torch.zeros(1, 1, KEYS), unit, unit, params={"FLAGS_OF_20": odd})
    assert torch.equal(again.view(-1), wanted)


def test_any_name_of_a_captured_tensor_compiles() -> None:
    """Keywords of C++, macros, and what a kernel calls its own things."""
    names = [
        *("thread_local", "class", "HookParams", "Variant", "uint64_t", "int32_t", "float", "words", "attnloom", "std"),
        *("NULL", "INFINITY", "M_PI", "kInf", "params", "request", "at", "größe", "__x", "0"),
    ]
    tensors = {name: torch.full((1,), 2.0**i) for i, name in enumerate(names)}

    def hook(score: Any, b: Any, h: Any, q: Any, k: Any, **held: Any) -> Any:
        return sum((held[name][h] for name in names), torch.zeros_like(score))

    variant = Variant("test_names", logits_transform=partial(hook, **tensors), use_softmax=False)
    assert len({param.name for param in variant.params}) == len(names)
    assert {"thread_local_", "HookParams_", "uint64_t_", "words"} <= {param.name for param in variant.params}
    engine = Attention(1, 1, KEYS, dtype=torch.float32, variant=variant)
    layout = BlockSparseLayout.from_csr(
        indptr([1]), torch.zeros(1, dtype=torch.int32), torch.full((1,), KEYS, dtype=torch.int32), KEYS
    )
    unit = torch.eye(KEYS).view(1, KEYS, 1, KEYS)
    out = engine.run(engine.plan(indptr([1]), layout, num_workers=1), torch.zeros(1, 1, KEYS), unit, unit)
    assert torch.equal(out.view(-1), torch.full((KEYS,), 2.0 ** len(names) - 1))
