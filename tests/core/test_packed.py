"""Packed parameters are made anew exactly when a value is another."""

from __future__ import annotations

import ctypes
import gc

import torch

from attnloom.core import packed
from attnloom.core.packed import PackedParams, Words
from attnloom.core.params import Value


class Packer:
    """Counts how often it packs."""

    def __init__(self) -> None:
        self.kept, self.count = PackedParams(), 0

    def get(self, params: dict[str, Value], num_requests: int = 1) -> list[int]:
        def make() -> tuple[list[Value], Words]:
            self.count += 1
            values = list(params.values())
            words = [value.data_ptr() if isinstance(value, torch.Tensor) else int(value) for value in values]
            return values, (ctypes.c_uint64 * max(len(words), 1))(*words)

        return list(self.kept.get(params, num_requests, make))


def test_the_same_values_are_packed_once() -> None:
    packer, sinks = Packer(), torch.zeros(8)
    for _ in range(3):
        assert packer.get({"sinks": sinks, "cap": 5}) == [sinks.data_ptr(), 5]
    assert packer.count == 1


def test_other_values_are_packed_anew() -> None:
    packer, sinks = Packer(), torch.zeros(8)
    packer.get({"sinks": sinks, "cap": 5})
    assert packer.get({"sinks": sinks, "cap": 6})[1] == 6
    other = torch.zeros(8)
    assert packer.get({"sinks": other, "cap": 5})[0] == other.data_ptr()
    packer.get({"sinks": sinks, "cap": 5}, num_requests=2)
    packer.get({"slopes": sinks, "cap": 5})
    assert packer.count == 5


def test_a_tensor_with_other_storage_is_packed_anew() -> None:
    packer, sinks, other = Packer(), torch.zeros(8), torch.ones(8)
    packer.get({"sinks": sinks})
    sinks.data = other
    assert packer.get({"sinks": sinks}) == [other.data_ptr()]


def test_tensors_are_not_kept_alive_nor_confused() -> None:
    packer = Packer()
    kept = []
    for _ in range(50):
        sinks = torch.zeros(8)
        assert packer.get({"sinks": sinks}) == [sinks.data_ptr()]
        kept.append(torch.zeros(8))  # takes the storage that the next one would have got
        del sinks
        gc.collect()


def test_they_do_not_pile_up() -> None:
    packer = Packer()
    for cap in range(3 * packed._MOST):
        packer.get({"cap": cap})
    assert len(packer.kept._kept) <= packed._MOST
