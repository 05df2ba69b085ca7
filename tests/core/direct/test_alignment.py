"""Addresses and strides that the kernels' vectors and 32 bits reach; others are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnloom.core.direct import DirectPath
from tests.core.direct.fakes import Kernel, launch, plan_of, step


def test_addresses_of_rows_are_checked_at_every_launch(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made = path(kernel)
    q, k, v, out = step()
    launch(made, (q, k, v, out), plan_of())
    for name, rows in (("q", q), ("out", out)):
        shifted = torch.empty(rows.shape[0] * rows.stride(0) + 64)[1:].as_strided(rows.shape, rows.stride())
        tensors = {"q": q, "out": out, name: shifted}
        with pytest.raises(ValueError, match=rf"{name}\.data_ptr\(\)=.*: expected a multiple of (16|8) bytes"):
            launch(made, (tensors["q"], k, v, tensors["out"]), plan_of())
    assert len(kernel.launched) == 1


def test_addresses_of_caches_are_checked(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    q, k, _, out = step()
    shifted = torch.empty(k.numel() * 2 + 64)[1:].as_strided(k.shape, k.stride())
    with pytest.raises(ValueError, match=r"v_cache\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        launch(path(kernel), (q, k, shifted, out), plan_of())
    assert not kernel.launched


def rows_at(offset: int, pitch: int, head: int) -> Tensor:
    """Rows of 4 heads of 64 float32 from `offset` on, strides in elements."""
    return torch.empty(3 * pitch + 4 * head + offset)[offset:].as_strided((3, 4, 64), (pitch, head, 1))


BAD_ROWS = {
    r"q\.data_ptr\(\)=.*: expected a multiple of 16 bytes": {"q": rows_at(2, 256, 64)},
    r"q\.stride\(\)=\(258, 64, 1\): expected strides of a multiple of 16 bytes, dimension 0 has 1032": {
        "q": rows_at(0, 258, 64)
    },
    r"q\.stride\(\)=.* of 16 bytes, dimension 1 has 264": {"q": rows_at(0, 264, 66)},
    r"out\.data_ptr\(\)=.*: expected a multiple of 8 bytes": {"out": rows_at(1, 256, 64)},
    r"out\.stride\(\)=.* of 8 bytes, dimension 0 has 1036": {"out": rows_at(0, 259, 64)},
    r"out\.stride\(\)=.* of 8 bytes, dimension 1 has 260": {"out": rows_at(0, 260, 65)},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_rows_that_no_vector_reaches_are_refused(path: Callable[[Kernel], DirectPath], message: str) -> None:
    kernel = Kernel()
    q, k, v, out = step()
    rows = {"q": q, "out": out, **BAD_ROWS[message]}
    with pytest.raises(ValueError, match=message):
        launch(path(kernel), (rows["q"], k, v, rows["out"]), plan_of())
    assert not kernel.launched


def test_states_are_written_in_longer_vectors(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    made = path(kernel)
    q, k, v, _ = step()
    out = rows_at(2, 258, 64)
    launch(made, (q, k, v, out), plan_of())
    with pytest.raises(ValueError, match=r"out\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        launch(made, (q, k, v, out), plan_of(), flags=(False, True))
    launch(made, (q, k, v, rows_at(0, 256, 64)), plan_of(), flags=(False, True))
    with pytest.raises(ValueError, match=r"out\.data_ptr\(\)=.*: expected a multiple of 16 bytes"):
        launch(made, (q, k, v, rows_at(2, 256, 64)), plan_of(), flags=(False, True))
    assert len(kernel.launched) == 2


def test_strides_of_dimensions_of_size_one_do_not_count(path: Callable[[Kernel], DirectPath]) -> None:
    kernel = Kernel()
    k = torch.empty(8192).as_strided((1, 16, 2, 64), (2**40 + 1, 128, 64, 1))
    q = torch.empty(64).as_strided((1, 1, 64), (3, 5, 1))
    launch(path(kernel), (q, k, k, q), plan_of(rows=1))
    assert len(kernel.launched) == 1


@pytest.mark.parametrize("dim", range(3))
def test_strides_of_caches_fit_into_32_bits(path: Callable[[Kernel], DirectPath], dim: int) -> None:
    """2**29 float32 are 2**31 bytes; nothing is read here, so nothing need be there."""
    kernel = Kernel()
    q, k, _, out = step()
    strides = [2**29 if each == dim else 64 for each in range(3)]
    far = torch.empty(0, device="meta").as_strided((2, 2, 2, 64), (*strides, 1))
    with pytest.raises(
        ValueError, match=rf"v_cache\.stride\(\)=.* at most {2**31 - 1} bytes, dimension {dim} has {2**31}"
    ):
        launch(path(kernel), (q, k, far, out), plan_of())
    assert not kernel.launched


@pytest.mark.parametrize("dim", range(2))
def test_strides_of_queries_fit_into_32_bits(path: Callable[[Kernel], DirectPath], dim: int) -> None:
    kernel = Kernel()
    _, k, v, out = step()
    strides = [2**29 if each == dim else 64 for each in range(2)]
    far = torch.empty(0, device="meta").as_strided((3, 4, 64), (*strides, 1))
    with pytest.raises(ValueError, match=rf"q\.stride\(\)=.* at most {2**31 - 1} bytes, dimension {dim} has {2**31}"):
        launch(path(kernel), (far, k, v, out), plan_of())
    assert not kernel.launched
