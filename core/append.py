"""KV append: new keys and values into the pages of a cache."""

from __future__ import annotations

import ctypes
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from attnloom.core.abi import AppendParams
from attnloom.core.checks import check_contiguous_last, check_scale, check_tensor
from attnloom.core.errors import AttnloomError
from attnloom.core.modules import module_for
from attnloom.core.settings import validating
from attnloom.core.streams import capturing, on, stream_of

# csrc/common/params.h: ElementType
_ROWS = {torch.bfloat16: 1, torch.float16: 2}
_CACHES = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}

_MOST_TEMPLATES = 4096
_PARALLEL_BYTES = 1 << 16  # below this one thread is done before others have woken


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots.

    Args:
        k: ``[>= num_tokens, num_kv_heads, head_dim]``, any strides, last dimension contiguous; v likewise.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of the same dtype, any strides, last
            dimension contiguous. On a GPU also float8_e4m3fn or float8_e5m2 for bfloat16 and float16 rows.
        slot_mapping: int64 ``[num_tokens]``: token i goes to slot ``slot_mapping[i] = block * block_size + offset``;
            -1 skips it (padding).
        k_scale, v_scale: of a float8 cache, as :meth:`attnloom.Attention.run` takes them: a row is divided by its
            scale, rounded to nearest even and held inside the format's finite range. None: 1.

    Everything lies on one device, a CPU or a GPU.

    Raises:
        TypeError, ValueError: a tensor of another dtype, shape or device; a slot outside the cache, which on a GPU is
            looked for with ``ATTNLOOM_VALIDATE=1`` only, since it waits for the device.
    """
    signature = _signature(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    template = None if signature is None else _templates.get(signature)
    if template is None:
        _check(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        template = _template(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        if signature is not None:
            if len(_templates) >= _MOST_TEMPLATES:
                _templates.clear()
            _templates[signature] = template
    if template.num_tokens == 0:
        return
    device = slot_mapping.device
    if device.type == "cpu" or (validating() and not capturing()):
        _check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    slot_mapping = slot_mapping.contiguous()
    params = template.params
    params.k = k.data_ptr()
    params.v = v.data_ptr()
    params.k_cache = k_cache.data_ptr()
    params.v_cache = v_cache.data_ptr()
    params.slots = slot_mapping.data_ptr()
    if device.type == "cpu":
        params.num_threads = torch.get_num_threads() if template.num_bytes > _PARALLEL_BYTES else 1
    params.stream = stream_of(device)
    with on(device):
        error = template.module.attnloom_append(template.argument)
    if error:
        raise AttnloomError(f"keys and values were not written: CUDA error {error}")


class _Template(NamedTuple):
    """Arguments that were checked: a struct that lacks addresses only."""

    params: AppendParams
    argument: object
    module: ctypes.CDLL
    num_tokens: int
    num_bytes: int


_templates: dict[tuple[object, ...], _Template] = {}


def _signature(*values: object) -> tuple[object, ...] | None:
    """What checks and struct depend on but for addresses, per thread; None where a value is nothing of the kind."""
    signature: list[object] = [get_ident()]
    for value in values:
        if isinstance(value, Tensor):
            signature += (value.shape, value.stride(), value.dtype, value.device)
        elif value is None or type(value) is float:
            signature.append(value)
        else:
            return None
    return tuple(signature)


def _check(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | None,
    v_scale: float | None,
) -> None:
    check_tensor("slot_mapping", slot_mapping, dtype=torch.int64, ndim=1)
    device = slot_mapping.device
    num_tokens = slot_mapping.shape[0]
    for name, rows, cache_name, cache in (("k", k, "k_cache", k_cache), ("v", v, "v_cache", v_cache)):
        check_tensor(name, rows, ndim=3, device=device)
        check_tensor(cache_name, cache, ndim=4, device=device)
        _check_dtypes(name, rows, cache_name, cache)
        if rows.shape[0] < num_tokens or rows.shape[1:] != cache.shape[2:]:
            raise ValueError(
                f"{name}.shape={tuple(rows.shape)}: expected [>= {num_tokens}, {cache.shape[2]}, {cache.shape[3]}]"
            )
        check_contiguous_last(name, rows)
        check_contiguous_last(cache_name, cache)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"v_cache.shape={tuple(v_cache.shape)}: expected blocks as k_cache, {tuple(k_cache.shape)}")
    if k_cache.dtype != v_cache.dtype or k.dtype != v.dtype:
        raise TypeError(f"v_cache.dtype={v_cache.dtype}, v.dtype={v.dtype}: expected those of k_cache and k")
    if k_cache.dtype == k.dtype and (k_scale is not None or v_scale is not None):
        raise ValueError(f"k_scale={k_scale}, v_scale={v_scale}: expected None for a {k_cache.dtype} cache")


def _template(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | None,
    v_scale: float | None,
) -> _Template:
    num_tokens = slot_mapping.shape[0]
    size, cache_size = k.element_size(), k_cache.element_size()
    row_bytes = (k.shape[2] * size, v.shape[2] * size)
    converted = k_cache.dtype != k.dtype
    params = AppendParams(
        *[None] * 5,
        num_tokens,
        k.shape[1],
        k_cache.shape[1],
        *row_bytes,
        *(stride * size for stride in k.stride()[:2]),
        *(stride * size for stride in v.stride()[:2]),
        *(stride * cache_size for stride in k_cache.stride()[:3]),
        *(stride * cache_size for stride in v_cache.stride()[:3]),
        _ROWS[k.dtype] if converted else 0,
        _CACHES[k_cache.dtype] if converted else 0,
        1.0 if k_scale is None else check_scale("k_scale", k_scale),
        1.0 if v_scale is None else check_scale("v_scale", v_scale),
        1,
    )
    module = module_for(slot_mapping.device)
    return _Template(params, ctypes.byref(params), module, num_tokens, num_tokens * k.shape[1] * sum(row_bytes))


def _check_dtypes(name: str, rows: Tensor, cache_name: str, cache: Tensor) -> None:
    if cache.dtype == rows.dtype:
        return
    if not (rows.is_cuda and cache.dtype in _CACHES):
        others = f" or one of {tuple(_CACHES)}" if rows.is_cuda else ""
        raise TypeError(f"{cache_name}.dtype={cache.dtype}: expected {rows.dtype}, as {name}{others}")
    if rows.dtype not in _ROWS:
        raise TypeError(f"{name}.dtype={rows.dtype}: expected one of {tuple(_ROWS)} for a {cache.dtype} cache")


def _check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    low, high = (int(bound) for bound in torch.aminmax(slot_mapping))
    if low < -1 or high >= num_slots:
        raise ValueError(f"slot_mapping={low if low < -1 else high}: expected -1 to {num_slots - 1}, the cache's slots")
