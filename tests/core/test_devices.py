"""Which family serves a device, and for which architecture it is compiled; no GPU is needed to know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnloom import Attention, Variant, variants
from attnloom.core import devices
from attnloom.core.devices import has_little_shared, indexed, target_of, workers_of
from attnloom.core.tiles import CPU, SM80, family_for, is_slim

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with two GPUs, as torch would tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.delenv("ATTNLOOM_FAMILY", raising=False)
    devices.capability.cache_clear()
    yield monkeypatch
    devices.capability.cache_clear()


def with_capability(patch: pytest.MonkeyPatch, *found: int) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda device: found)


@pytest.mark.parametrize(
    ("found", "target"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100"), ((12, 0), "120")],
)
def test_targets(gpu: pytest.MonkeyPatch, found: tuple[int, int], target: str) -> None:
    with_capability(gpu, *found)
    assert family_for(CUDA) is SM80
    assert target_of(CUDA) == target


def test_a_cpu_has_no_target() -> None:
    assert target_of(torch.device("cpu")) == ""


def test_older_gpus_are_refused(gpu: pytest.MonkeyPatch) -> None:
    with_capability(gpu, 7, 5)
    with pytest.raises(ValueError, match=r"device=cuda:0: expected compute capability 8\.0 .* some GPU has 7\.5"):
        family_for(CUDA)


def test_without_an_index_the_current_device(gpu: pytest.MonkeyPatch) -> None:
    assert indexed(torch.device("cuda")) == torch.device("cuda", 1)


def test_an_index_that_is_not_there(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device=cuda:2: expected an index below 2"):
        indexed(torch.device("cuda", 2))


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device=cuda: expected a device that torch sees"):
        Attention(4, 2, 64, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("family", ["cpu", "sm90", "sm100"])
def test_a_family_that_is_none_of_the_device(gpu: pytest.MonkeyPatch, family: str) -> None:
    with_capability(gpu, 9, 0)
    gpu.setenv("ATTNLOOM_FAMILY", family)
    with pytest.raises(ValueError, match=f"ATTNLOOM_FAMILY='{family}': expected sm80 for device=cuda:0"):
        family_for(CUDA)


def test_the_family_of_the_device_may_be_named(gpu: pytest.MonkeyPatch) -> None:
    with_capability(gpu, 8, 0)
    gpu.setenv("ATTNLOOM_FAMILY", "sm80")
    assert family_for(CUDA) is SM80


def test_other_devices() -> None:
    with pytest.raises(ValueError, match="device=meta: expected cpu or cuda"):
        family_for(torch.device("meta"))


def test_wide_heads_have_tiles_of_their_own() -> None:
    assert SM80.tiles_for(128) is SM80.tiles
    assert SM80.tiles_for(192).tile_q < SM80.tiles_for(128).tile_q


def test_caches_of_8_bits_have_longer_tiles_where_no_hook_needs_others() -> None:
    bits, plain = torch.float8_e4m3fn, variants.Causal()
    assert is_slim(128, bits, plain) and is_slim(64, torch.float8_e5m2, variants.SlidingWindow(9))
    assert not is_slim(192, bits, plain) and not is_slim(64, torch.bfloat16, plain)
    for hooks in ({"logits_mask": "return kv_pos % 3 != 1;"}, {"key_transform": "return 2.0f * k[dim];"}):
        assert not is_slim(128, bits, Variant("hooked", **hooks))
    assert is_slim(128, bits, Variant("scored", logits_transform="return 2.0f * logits;"))
    short, long = SM80.tiles_for(128), SM80.tiles_for(128, slim=True)
    assert (long.tile_kv, long.tile_q, long.costs) == (2 * short.tile_kv, short.tile_q, short.costs)
    assert CPU.tiles_for(128, slim=True) is CPU.tiles


def test_little_shared_memory_takes_the_tiles_of_wide_heads() -> None:
    assert [
        target for target in ("80", "86", "87", "89", "90a", "100", "120", "121a") if has_little_shared(target)
    ] == [
        "86",
        "89",
        "120",
        "121a",
    ]
    assert SM80.tiles_for(64, "89") is SM80.wide and SM80.tiles_for(64, "90a") is SM80.tiles


def test_workers_fill_whole_groups_of_heads_where_few_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    device = torch.device("cuda", 0)
    assert [workers_of(device, ctas, heads) for ctas, heads in ((2, 8), (3, 8), (3, 5), (1, 100))] == [
        264,
        392,
        395,
        132,
    ]
