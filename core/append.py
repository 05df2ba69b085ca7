"""KV append: new keys and values into the pages of a cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from attnloom.core.abi import AppendParams
from attnloom.core.checks import check_contiguous_last, check_on_host, check_scale, check_tensor
from attnloom.core.errors import AttnloomError
from attnloom.core.looks import Seen, guard_of, looks_of, same_number
from attnloom.core.modules import module_for
from attnloom.core.settings import validating
from attnloom.core.streams import capturing, current_device, current_stream

# csrc/common/params.h: ElementType
_ROWS = {torch.bfloat16: 1, torch.float16: 2}
_CACHES = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}

_PARALLEL_BYTES = 1 << 16  # below this one thread is done before others have woken
_STREAM_AT = AppendParams.stream.offset // 8  # in words of 64 bits; addresses of tensors are the first ones

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""k, v, k_cache, v_cache, slot_mapping."""


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
    try:
        # Written out, not called, as in direct.py.
        for template in _seen.recent:
            if (
                (k_scale is template.k_scale or same_number(k_scale, template.k_scale))
                and (v_scale is template.v_scale or same_number(v_scale, template.v_scale))
                and not (k.is_nested or v.is_nested or k_cache.is_nested or v_cache.is_nested or slot_mapping.is_nested)
                and template.same(k, v, k_cache, v_cache, slot_mapping)
            ):
                break
        else:
            template = _find((k, v, k_cache, v_cache, slot_mapping), k_scale, v_scale)
    except AttributeError:
        _check_tensors((k, v, k_cache, v_cache, slot_mapping))  # says what is no tensor
        raise
    if template.num_tokens == 0:
        return
    index = template.device_index
    if index is None or (validating() and not capturing()):
        _check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    if template.slot_stride != 1:
        slot_mapping = slot_mapping.contiguous()
    words = template.words
    words[0] = k.data_ptr()
    words[1] = v.data_ptr()
    words[2] = k_cache.data_ptr()
    words[3] = v_cache.data_ptr()
    words[4] = slot_mapping.data_ptr()
    if index is None:
        template.params.num_threads = torch.get_num_threads() if template.num_bytes > _PARALLEL_BYTES else 1
        error = template.append(template.argument)
    else:
        words[_STREAM_AT] = current_stream(index)
        if template.others and current_device() != index:
            with torch.cuda.device(index):
                error = template.append(template.argument)
        else:
            error = template.append(template.argument)
    if error:
        raise AttnloomError(f"keys and values were not written: CUDA error {error}")


class _Template:
    """Arguments that were checked: a struct that lacks addresses only."""

    __slots__ = (
        "append",
        "argument",
        "device_index",
        "k_scale",
        "num_bytes",
        "num_tokens",
        "others",
        "params",
        "same",
        "slot_stride",
        "v_scale",
        "words",
    )

    def __init__(self, tensors: _Tensors, k_scale: float | None, v_scale: float | None) -> None:
        k, v, k_cache, v_cache, slot_mapping = tensors
        self.same = guard_of(*tensors)
        self.k_scale, self.v_scale = k_scale, v_scale
        size, cache_size = k.element_size(), k_cache.element_size()
        row_bytes = (k.shape[2] * size, v.shape[2] * size)
        converted = k_cache.dtype != k.dtype
        self.num_tokens = slot_mapping.shape[0]
        self.num_bytes = self.num_tokens * k.shape[1] * sum(row_bytes)
        self.slot_stride = slot_mapping.stride(0)
        params = AppendParams(
            *[None] * 5,
            self.num_tokens,
            k.shape[1],
            k_cache.shape[1],
            *row_bytes,
            *(stride * size for stride in k.stride()[:2]),
            *(stride * size for stride in v.stride()[:2]),
            *(stride * cache_size for stride in k_cache.stride()[:3]),
            *(stride * cache_size for stride in v_cache.stride()[:3]),
            _ROWS[k.dtype] if converted else 0,
            _CACHES[k_cache.dtype] if converted else 0,
            1.0 if k_scale is None else k_scale,
            1.0 if v_scale is None else v_scale,
            1,
        )
        self.words = memoryview(bytearray(params)).cast("Q")
        self.params = AppendParams.from_buffer(self.words)
        self.argument = ctypes.byref(self.params)
        device = slot_mapping.device
        self.append: Callable[[object], int] = module_for(device)["attnloom_append"]
        self.device_index = device.index if device.type == "cuda" else None
        self.others = device.type == "cuda" and torch.cuda.device_count() > 1


_seen = Seen[_Template]()


def _find(tensors: _Tensors, k_scale: object, v_scale: object) -> _Template:
    """The template for such arguments, which are checked if there was none."""
    check_on_host("k_scale", k_scale)
    check_on_host("v_scale", v_scale)
    # By value: a tensor may hold another number the next time.
    scales = (
        None if k_scale is None else check_scale("k_scale", k_scale),
        None if v_scale is None else check_scale("v_scale", v_scale),
    )
    _check_tensors(tensors)
    key = (repr(scales), *map(looks_of, tensors))  # 0.0 is equal to -0.0
    template = _seen.made.get(key)
    if template is None:
        _check(*tensors, *scales)
        template = _Template(tensors, *scales)
        _seen.keep(key, template)
    else:
        template.same = guard_of(*tensors)
    _seen.use(template)
    return template


def _check_tensors(tensors: _Tensors) -> None:
    for name, tensor in zip(("k", "v", "k_cache", "v_cache", "slot_mapping"), tensors, strict=True):
        check_tensor(name, tensor)


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
