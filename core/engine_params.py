"""The parameters of an engine's variant: those given to a call and those that the variant brings along."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnloom.core.packed import PackedParams, Words
from attnloom.core.params import Value, check_captures, ordered, pack
from attnloom.core.variant import Variant


class EngineParams:
    """Checks and packs the parameters of one variant.

    Args:
        variant: which declares them.
        sizes: of the engine: what the symbols of ``Param.shape`` stand for.
        device: where tensors must be. What the variant brings along may lie on the host and is copied, once.

    Raises:
        TypeError, ValueError: what the variant brings along is of another type, shape or range than declared.
    """

    def __init__(self, variant: Variant, sizes: Mapping[str, int], device: torch.device) -> None:
        check_captures(variant.params, variant.captures, sizes)
        self._declared = variant.params
        self._sizes = dict(sizes)
        self._device = device
        self._captures = {
            name: value.to(device) if isinstance(value, Tensor) and device.type == "cuda" else value
            for name, value in variant.captures.items()
        }
        self._packed = PackedParams()

    def values(self, given: Mapping[str, Value] | None, num_requests: int) -> list[Value]:
        """All values in the order of declaration, checked.

        Raises:
            TypeError, ValueError: one is missing, unknown, or of another type or shape.
        """
        sizes = {**self._sizes, "num_requests": num_requests}
        return ordered(self._declared, self._captures, given, sizes, self._device)

    def pack(self, values: list[Value]) -> Words:
        """The words of checked values; what they point to must outlive them."""
        return pack(self._declared, values)

    def words(self, given: Mapping[str, Value] | None, num_requests: int) -> Words:
        """The words of ``given``, checked; kept while the same values come again."""
        return self._packed.get(given, num_requests, lambda: self._values_and_words(given, num_requests))

    def _values_and_words(self, given: Mapping[str, Value] | None, num_requests: int) -> tuple[list[Value], Words]:
        values = self.values(given, num_requests)
        return values, self.pack(values)
