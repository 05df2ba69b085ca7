"""A guard tells tensors apart by all that a launch was checked for, with Dynamo's guards and without."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from attnloom import append_kv
from attnloom.core import append, looks
from attnloom.core.looks import guard_of, looks_of


@pytest.fixture(params=["dynamo", "python"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(looks, "_Guards", None)
    else:
        assert looks._Guards is not None  # in the releases of torch that are tested


def _rows() -> Tensor:
    return torch.randn(5, 4, 64)


def test_others_of_the_same_looks_pass() -> None:
    q, out = _rows(), torch.empty(5, 4, 256, dtype=torch.bfloat16)[..., :64]
    same = guard_of(q, out)
    assert same(q, out)
    assert same(_rows(), torch.empty(6, 4, 256, dtype=torch.bfloat16)[1:, :, 64:128])
    with torch.no_grad():
        assert same(_rows(), out)


def test_one_tensor_is_one_tensor() -> None:
    q, out = _rows(), _rows()
    same = guard_of(q, out, q)
    assert same(q, out, q) and same(out, q, out)
    assert not same(q, out, out) and not same(q, out, _rows()) and not same(q[:4], out, q[:4])


def test_any_difference_is_seen() -> None:
    q, out = _rows(), _rows()
    same = guard_of(q, out)
    others = {
        "rows": q[:4],
        "heads": torch.randn(5, 5, 64)[:, :4],
        "row stride": torch.randn(5, 5, 64)[:, 1:],
        "dim": torch.randn(5, 4, 128)[..., :64],
        "order": torch.randn(4, 5, 64).transpose(0, 1),
        "dtype": q.half(),
        "device": q.to("meta"),
        "number": 1,
        "none": None,
    }
    for name, other in others.items():
        assert not same(other, out), name
        assert not same(q, other), name


def test_the_negative_bit_is_seen() -> None:
    plain = _rows()
    negated = torch._neg_view(plain)
    assert negated.is_neg()
    assert looks_of(negated) != looks_of(plain)
    assert not guard_of(plain)(negated)


def test_tensors_are_not_kept_alive() -> None:
    q = _rows()
    same = guard_of(q)
    assert same(q)
    gone = weakref.ref(q)
    del q
    gc.collect()
    assert gone() is None


def test_append_looks_again_at_what_it_knows() -> None:
    """The same shapes with a negative bit, or in no memory at all, are refused after a call that was right."""
    cache, slots = torch.zeros(2, 4, 2, 64), torch.tensor([1, 6])
    rows = torch.randn(2, 2, 64)
    append_kv(rows, rows, cache, cache.clone(), slots)
    with torch.inference_mode():  # another kind of tensor, the same memory
        append_kv(rows.clone(), rows, cache, cache.clone(), slots)
    with pytest.raises(ValueError, match=r"k\.is_neg"):
        append_kv(torch._neg_view(rows), rows, cache, cache.clone(), slots)
    with pytest.raises(ValueError, match=r"k\.device=meta"):
        append_kv(rows.to("meta"), rows, cache, cache.clone(), slots)
    freed = rows.bfloat16()  # of another dtype: looked for anew
    freed.untyped_storage().resize_(0)
    for without in (torch._efficientzerotensor(rows.shape), TwoTensor(rows, rows), freed):
        with pytest.raises(ValueError, match="k: expected a tensor with memory"):
            append_kv(without, rows, cache, cache.clone(), slots)
    with pytest.raises(ValueError, match="k: expected a tensor with memory"):
        torch.vmap(lambda k: append_kv(k, rows, cache, cache.clone(), slots))(rows.double()[None])
    with pytest.raises(ValueError, match=r"v\.is_nested=True"):
        append_kv(rows, torch.nested.nested_tensor([*rows]), cache, cache.clone(), slots)
    with pytest.raises(TypeError, match="v: expected a tensor, got NoneType"):
        append_kv(rows, None, cache, cache.clone(), slots)  # type: ignore[arg-type]


def test_a_guard_keeps_the_classes_that_it_knows_by_their_addresses() -> None:
    made = type("Rows", (Tensor,), {})
    same = guard_of(torch.randn(2).as_subclass(made))
    at = weakref.ref(made)
    del made
    gc.collect()
    assert at() is not None and same(torch.randn(2).as_subclass(at()))


@pytest.mark.parametrize("scale", [10**400, 1e300, -1e39, 1e-60])
def test_scales_that_a_float32_does_not_hold_are_refused(scale: float) -> None:
    cache, rows = torch.zeros(2, 4, 2, 64), torch.randn(2, 2, 64)
    with pytest.raises(ValueError, match=r"v_scale=.*: expected a finite number, as a float32 too"):
        append_kv(rows, rows, cache, cache.clone(), torch.tensor([1, 6]), v_scale=scale)


def test_what_was_seen_is_not_kept_without_end() -> None:
    seen = looks.Seen[object](most=3)
    for key in range(10):
        seen.keep(key, object())
        seen.use(seen.made[key])
        assert key in seen.made and len(seen.made) <= 3 and len(seen.recent) <= 4


def test_pools_of_several_shapes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been looked for once is not looked for again while they do."""
    looked_for: list[Tensor] = []
    find = append._find
    monkeypatch.setattr(
        append, "_find", lambda tensors, *scales: looked_for.append(tensors[2]) or find(tensors, *scales)
    )
    pools = [torch.zeros(2, blocks, 4, 2, 64) for blocks in (3, 5, 4)]
    slots = torch.tensor([1, 6])
    for step in range(4):
        for pool in pools:
            k, v = torch.randn(2, 2, 2, 64)
            append_kv(k, v, pool[0], pool[1], slots)
            assert torch.equal(pool.view(2, -1, 2, 64)[:, slots], torch.stack((k, v))), step
    assert len(looked_for) <= len(pools)


def test_append_takes_what_lies_in_memory() -> None:
    cache = torch.zeros(2, 4, 2, 64, dtype=torch.complex64)
    rows = torch.randn(2, 2, 64, dtype=torch.complex64)
    append_kv(rows, rows, cache, cache.clone(), torch.tensor([1, 6]))
    with pytest.raises(ValueError, match=r"k\.is_conj"):
        append_kv(rows.conj(), rows, cache, cache.clone(), torch.tensor([1, 6]))


def test_append_looks_at_scales_before_it_compares_them() -> None:
    cache, slots, rows = torch.zeros(2, 4, 2, 64), torch.tensor([1, 6]), torch.randn(2, 2, 64)
    append_kv(rows, rows, cache, cache.clone(), slots)
    wrong: dict[str, object] = {
        r"k_scale\.device=meta: expected a number, or a tensor on the host": torch.tensor(1.0, device="meta"),
        r"k_scale\.shape=\(2,\): expected one element": torch.tensor([1.0, 2.0]),
        "k_scale=True: expected a number": True,
        r"k_scale=1\.0, v_scale=None: expected None for a torch\.float32 cache": 1.0,
    }
    for match, scale in wrong.items():
        with pytest.raises((TypeError, ValueError), match=match):
            append_kv(rows, rows, cache, cache.clone(), slots, k_scale=scale)  # type: ignore[arg-type]
