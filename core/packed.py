"""Packed parameters of a variant, kept while the same values come again: a layer passes the same tensors each step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from attnloom.core.params import Value

Words = ctypes.Array[ctypes.c_uint64]

_MOST = 1024


class _Kept(NamedTuple):
    words: Words
    tensors: tuple[tuple[weakref.ref[Tensor], int], ...]  # with the address that was packed


class PackedParams:
    """Words by the values they were packed from. Holds no tensor: one that is gone is not found."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], _Kept] = {}

    def get(
        self, params: Mapping[str, Value] | None, num_requests: int, make: Callable[[], tuple[list[Value], Words]]
    ) -> Words:
        """The words of ``params``.

        Args:
            params: as they are given; captured values are the same for every call of one engine.
            num_requests: some shapes depend on it.
            make: checks and packs; returns the values in the order of declaration, and the words.
        """
        key: tuple[object, ...] = (num_requests,)
        if params is not None:
            given = [id(value) if isinstance(value, Tensor) else value for value in params.values()]
            key = (num_requests, *params, *given)
        try:
            kept = self._kept.get(key)
        except TypeError:  # something that is no parameter: the checks say what
            return make()[1]
        if kept is not None:
            for ref, address in kept.tensors:
                value = ref()
                if value is None or value.data_ptr() != address:
                    break
            else:
                return kept.words
        values, words = make()
        tensors = tuple((weakref.ref(value), value.data_ptr()) for value in values if isinstance(value, Tensor))
        if len(self._kept) >= _MOST:
            self._kept.clear()
        self._kept[key] = _Kept(words, tensors)
        return words
