"""Which heads, sizes and dtypes an engine may have: each error says what is supported."""

from __future__ import annotations

import torch

from attnloom.core.checks import check_positive
from attnloom.core.tiles import HEAD_DIMS, MAX_GROUP, Family


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    """Every kv head serves as many query heads, at most 128.

    Raises:
        TypeError, ValueError: it does not, or a number of heads is not positive.
    """
    check_positive("num_qo_heads", num_qo_heads)
    check_positive("num_kv_heads", num_kv_heads)
    if num_qo_heads % num_kv_heads or num_qo_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"num_qo_heads={num_qo_heads}: expected a multiple of num_kv_heads={num_kv_heads}, "
            f"at most {MAX_GROUP} times"
        )


def check_head_dims(head_dim: int, head_dim_v: int | None) -> None:
    """There are tiles for heads of this size.

    Raises:
        ValueError: there are none; None stands for a ``head_dim_v`` equal to head_dim.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim={head_dim}: expected one of {HEAD_DIMS}")
    if head_dim_v not in (None, head_dim):
        raise ValueError(f"head_dim_v={head_dim_v}: expected head_dim, {head_dim}")


def check_dtypes(family: Family, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """A family has kernels for q and caches of these dtypes.

    Raises:
        ValueError: it has none; None stands for a ``kv_dtype`` equal to dtype.
    """
    if dtype not in family.dtypes:
        raise ValueError(f"dtype={dtype}: expected one of {family.dtypes} on {device}")
    if kv_dtype not in (None, dtype, *family.kv_dtypes):
        others = f" or one of {family.kv_dtypes}" if family.kv_dtypes else ""
        raise ValueError(f"kv_dtype={kv_dtype}: expected dtype, {dtype},{others} on {device}")
